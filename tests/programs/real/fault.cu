/* Work that fails, and what each call says of it then.
 *
 *     fault asked|unasked|freed
 *
 * `asked` waits for the failure before anything else; `unasked` allocates first; `freed` frees first. */
#include "real.h"
#include <string.h>
#include <unistd.h>

static __global__ void write(int *where) { *where = 1; }

#define SHOW(call) printf("%s: %d\n", #call, (int)(call))

int main(int count, char **arguments) {
    void *plain, *ordered, *more = NULL;
    size_t free_bytes, total;
    if (count != 2) {
        fprintf(stderr, "fault: one of asked, unasked and freed is wanted\n");
        return 2;
    }
    CHECK(cudaMalloc(&plain, 1 << 20));
    CHECK(cudaMallocAsync(&ordered, 1 << 20, 0));
    CHECK(cudaDeviceSynchronize());
    write<<<1, 1>>>((int *)64);
    usleep(200000);
    if (strcmp(arguments[1], "asked") == 0)
        SHOW(cudaDeviceSynchronize());
    if (strcmp(arguments[1], "freed") == 0)
        SHOW(cudaFree(plain));
    SHOW(cudaMalloc(&more, 1 << 20));
    SHOW(cudaPeekAtLastError());
    SHOW(cudaGetLastError());
    SHOW(cudaMallocAsync(&more, 1 << 20, 0));
    SHOW(cudaFreeAsync(ordered, 0));
    SHOW(cudaFree(plain));
    SHOW(cudaMemGetInfo(&free_bytes, &total));
    SHOW(cudaDeviceSynchronize());
    SHOW(cudaGetLastError());
    SHOW(cudaGetLastError());
    SHOW(cudaDeviceReset());
    SHOW(cudaMalloc(&more, 1 << 20));
    SHOW(cudaMemset(more, 1, 1 << 20));
    SHOW(cudaFree(more));
    SHOW(cudaGetLastError());
    return 0;
}
