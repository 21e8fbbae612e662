/* A limit of 64 MiB: limited. */
#include "show.h"

int main(void) {
    void *one, *two;
    size_t free, total;
    SHOW(cudaMalloc(&one, 40 * MIB));
    SHOW(cudaMemGetInfo(&free, &total));
    printf("%zu of %zu MiB\n", free / MIB, total / MIB);
    SHOW(cudaMalloc(&two, 40 * MIB));
    SHOW(cudaGetLastError());
    SHOW(cudaMalloc(&two, 24 * MIB));
    SHOW(cudaMallocAsync(&one, 8 * MIB, NULL));
    SHOW(cudaFree(two));
    SHOW(cudaMallocAsync(&one, 8 * MIB, NULL));
    return 0;
}
