/* The default pool, and a program's own.
 *
 * Run: pools
 */
#include "show.h"

/* `cudaMemPoolProps`: pinned memory of a device, with no handle to export. */
struct pool_properties {
    int kind, handle_types, location_kind, location;
    unsigned char rest[256];
};

static void use(const char *what) {
    void *block;
    printf("%s\n", what);
    SHOW(cudaMallocAsync(&block, MIB, NULL));
    SHOW(cudaMemsetAsync(block, 7, MIB, NULL));
    SHOW(cudaFreeAsync(block, NULL));
}

static void use_from(const char *what, handle pool) {
    void *block;
    printf("%s\n", what);
    SHOW(cudaMallocFromPoolAsync(&block, MIB, pool, NULL));
    SHOW(cudaMemsetAsync(block, 8, MIB, NULL));
    SHOW(cudaFreeAsync(block, NULL));
}

int main(void) {
    handle standard, own;
    struct pool_properties properties;
    memset(&properties, 0, sizeof properties);
    properties.kind = properties.location_kind = 1;
    SHOW(cudaDeviceGetDefaultMemPool(&standard, 0));
    SHOW(cudaMemPoolCreate(&own, &properties));
    /* From the pool: two. */
    use("the default pool");
    use_from("the default pool by name", standard);
    /* Not from it: three. */
    use_from("a pool of the program's", own);
    SHOW(cudaDeviceSetMemPool(0, own));
    use("a pool of the program's for all");
    use("and once more");
    /* From it: one. */
    SHOW(cudaDeviceSetMemPool(0, standard));
    use("the default pool again");
    SHOW(cudaDeviceSynchronize());
    SHOW(cudaMemPoolDestroy(own));
    SHOW(cudaGetLastError());
    return 0;
}
