/* cudaMalloc: sizes, alignments and errors.
 *
 * Run: cuda_malloc_sizes
 */
#include "show.h"

static void try(size_t size) {
    void *address = (void *)0x1234;
    printf("%zu bytes: %d, ", size, cudaMalloc(&address, size));
    printf("aligned %d, null %d, ", (uintptr_t)address % 256 == 0, address == NULL);
    printf("last error %d, then %d\n", cudaGetLastError(), cudaGetLastError());
    if (address != (void *)0x1234 && address != NULL)
        SHOW(cudaFree(address));
}

int main(void) {
    static const size_t sizes[] = {0, 1, 255, 256, 511, 513, 4097, 2 * MIB - 1, 2 * MIB, 33 * MIB + 7};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        try(sizes[i]);
    try((size_t)1 << 45);
    try(SIZE_MAX);
    SHOW(cudaMalloc(NULL, MIB));
    SHOW(cudaGetLastError());
    SHOW(cudaFree(NULL));
    device_address zero = 7;
    SHOW(cuMemAlloc_v2(&zero, 0));
    printf("unchanged %d\n", zero == 7);
    SHOW(cuMemAlloc_v2(NULL, MIB));
    SHOW(cuMemFree_v2(0));
    size_t pitch = 7;
    SHOW(cuMemAllocPitch_v2(&zero, &pitch, 100, 0, 4));
    SHOW(cuMemAllocPitch_v2(&zero, &pitch, 0, 100, 4));
    return 0;
}
