/* Out of memory: allocations fail, and succeed again after frees.
 *
 * Run: out_of_memory
 */
#include "show.h"

enum { MOST = 4096 };

int main(void) {
    static void *blocks[MOST];
    size_t free, total;
    SHOW(cudaFree(NULL));
    SHOW(cudaMemGetInfo(&free, &total));
    size_t size = total / 50 / (2 * MIB) * (2 * MIB);
    for (int round = 0; round < 3; round++) {
        int count = 0, status = 0;
        while (count < MOST && (status = cudaMalloc(&blocks[count], size)) == 0)
            count++;
        /* One or two may be lost to what else there is. */
        printf("all of it: %d, then %d\n", count + 2 >= (int)(free / size), status);
        SHOW(cudaGetLastError());
        SHOW(cudaGetLastError());
        for (int i = 0; i < count; i++)
            status |= cudaFree(blocks[i]);
        printf("freed: %d\n", status);
        SHOW(cudaMalloc(&blocks[0], 30 * size));
        SHOW(cudaFree(blocks[0]));
    }
    return 0;
}
