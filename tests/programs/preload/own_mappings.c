/* Pointer attributes: memory that the program maps, manages or pins itself, beside memory of the pool.
 *
 * Run: own_mappings
 */
#include "map.h"

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
