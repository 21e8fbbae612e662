/* Memory that the program maps, manages or pins itself, beside memory of the pool: each is told apart.
 *
 * Run: own
 */
#include "show.h"

/* `CUmemAllocationProp` and `CUmemAccessDesc`. */
struct location {
    int type, device;
};
struct properties {
    int type, handles;
    struct location location;
    void *unused;
    unsigned char flags[8];
};
struct access {
    struct location location;
    int flags;
};
enum { PINNED = 1, ON_DEVICE = 1, READ_AND_WRITE = 3, MINIMUM = 0 };

extern int cuMemGetAllocationGranularity(size_t *, const struct properties *, int);
extern int cuMemAddressReserve(device_address *, size_t, size_t, device_address, uint64_t);
extern int cuMemAddressFree(device_address, size_t);
extern int cuMemCreate(uint64_t *, size_t, const struct properties *, uint64_t), cuMemRelease(uint64_t);
extern int cuMemMap(device_address, size_t, size_t, uint64_t, uint64_t), cuMemUnmap(device_address, size_t);
extern int cuMemSetAccess(device_address, size_t, const struct access *, size_t);
extern int cuMemRetainAllocationHandle(uint64_t *, void *);

int main(void) {
    struct properties properties = {PINNED, 0, {ON_DEVICE, 0}, NULL, {0}};
    struct access access = {{ON_DEVICE, 0}, READ_AND_WRITE};
    device_address mapped, start;
    uint64_t chunk, again = 0;
    size_t step, size, before, now, total;
    void *pooled, *managed, *host;

    SHOW(cudaMalloc(&pooled, 3 * MIB));
    SHOW(cudaMemGetInfo(&before, &total));
    SHOW(cuMemGetAllocationGranularity(&step, &properties, MINIMUM));
    SHOW(cuMemAddressReserve(&mapped, 4 * step, 0, 0, 0));
    SHOW(cuMemCreate(&chunk, step, &properties, 0));
    SHOW(cuMemMap(mapped, step, 0, chunk, 0));
    SHOW(cuMemSetAccess(mapped, step, &access, 1));
    SHOW(cudaMemGetInfo(&now, &total));
    printf("taken: %d\n", before - now == step);
    show_data("mapped", (void *)mapped, step, 7);
    show_data("of the pool", pooled, 3 * MIB, 8);

    /* A chunk of the program's own can be had from its address; the pool's blocks have none. */
    SHOW(cuMemRetainAllocationHandle(&again, (void *)mapped));
    printf("the same chunk: %d\n", again == chunk);
    SHOW(cuMemRelease(again));
    SHOW(cuMemRetainAllocationHandle(&again, pooled));
    SHOW(cuMemGetAddressRange_v2(&start, &size, mapped));
    printf("its range: %d, %d\n", start == mapped, size == step);

    /* Only who mapped it can take it back. */
    SHOW(cudaFree((void *)mapped));
    SHOW(cudaGetLastError());
    SHOW(cuMemUnmap(mapped, step));
    SHOW(cuMemRelease(chunk));
    SHOW(cuMemAddressFree(mapped, 4 * step));
    SHOW(cudaMemGetInfo(&now, &total));
    printf("given back: %d\n", before == now);

    SHOW(cudaMallocManaged(&managed, MIB, 1));
    SHOW(cudaMallocHost(&host, MIB));
    show_data("managed", managed, MIB, 9);
    for (int i = 0; i < 3; i++) {
        struct pointer_attributes attributes = {.type = -1};
        SHOW(cudaPointerGetAttributes(&attributes, i == 0 ? pooled : i == 1 ? managed : host));
        printf("type %d\n", attributes.type);
    }
    SHOW(cudaFree(managed));
    SHOW(cudaFreeHost(host));
    SHOW(cudaFree(pooled));
    SHOW(cudaGetLastError());
    return 0;
}
