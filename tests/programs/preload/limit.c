/* Limits: a limit of 64 MiB: limit. */
#include "show.h"

/* What was freed makes room for other sizes, too. */
static void many_sizes(void) {
    int failed = 0;
    for (size_t size = 1; size <= 60; size++) {
        void *block;
        failed += cudaMalloc(&block, size * MIB) != 0;
        failed += cudaFree(block) != 0;
        failed += cudaFree(block) == 0;
        cudaGetLastError();
    }
    printf("%d failed\n", failed);
}

int main(void) {
    void *one, *two;
    size_t free, total, pitch;
    device_address address;
    SHOW(cudaMemGetInfo(&free, &total));
    printf("%zu of %zu MiB\n", free / MIB, total / MIB);
    SHOW(cudaMallocPitch(&one, &pitch, MIB, 65));
    SHOW(cudaMallocPitch(&one, &pitch, 2 * MIB, 30));
    SHOW(cudaMemGetInfo(&free, &total));
    printf("%zu of %zu MiB\n", free / MIB, total / MIB);
    SHOW(cudaFree(one));
    many_sizes();
    SHOW(cudaMalloc(&one, 40 * MIB));
    SHOW(cudaMemGetInfo(&free, &total));
    printf("%zu of %zu MiB\n", free / MIB, total / MIB);
    SHOW(cudaMalloc(&two, 40 * MIB));
    SHOW(cudaGetLastError());
    SHOW(cudaMalloc(&two, 24 * MIB));
    SHOW(cudaMallocAsync(&one, 8 * MIB, NULL));
    SHOW(cudaFree(two));
    SHOW(cudaMallocAsync(&one, 8 * MIB, NULL));
    SHOW(cudaGetLastError());
    SHOW(cuMemAlloc_v2(&address, 17 * MIB));
    SHOW(cuMemAlloc_v2(&address, 16 * MIB));
    return 0;
}
