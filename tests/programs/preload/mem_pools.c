/* Memory pools: the default cudaMemPool, and a program's own.
 *
 * Run: mem_pools
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

static void show_use(handle pool) {
    uint64_t used = 0, highest = 0;
    SHOW(cudaMemPoolGetAttribute(pool, 7, &used));
    SHOW(cudaMemPoolGetAttribute(pool, 8, &highest));
    printf("in use: %lu, at most %lu\n", (unsigned long)used, (unsigned long)highest);
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
    /* What is in use of it: two more, and what was cudaMalloc's is none of it. */
    uint64_t zero = 0;
    void *block, *other;
    SHOW(cudaMemPoolSetAttribute(standard, 8, &zero));
    SHOW(cudaMallocAsync(&block, 3 * MIB, NULL));
    SHOW(cudaMalloc(&other, MIB));
    show_use(standard);
    SHOW(cudaFreeAsync(block, NULL));
    SHOW(cudaFree(other));
    SHOW(cudaDeviceSynchronize());
    show_use(standard);
    SHOW(cudaMemPoolSetAttribute(standard, 8, &zero));
    show_use(standard);
    SHOW(cudaMemPoolDestroy(own));
    SHOW(cudaGetLastError());
    return 0;
}
