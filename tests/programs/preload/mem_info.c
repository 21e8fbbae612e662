/* cudaMemGetInfo: what counts as free.
 *
 * Run: mem_info
 */
#include "show.h"

static size_t before;

static void show(const char *what) {
    size_t free, total, again, whole;
    SHOW(cudaMemGetInfo(&free, &total));
    if (before == 0)
        before = free;
    SHOW(cuMemGetInfo_v2(&again, &whole));
    printf("%s: %ld MiB less, %s\n", what, (long)(before - free) / (long)MIB,
           again == free && whole == total && free <= total ? "as the driver says" : "OTHERWISE");
}

int main(void) {
    void *blocks[8];
    SHOW(cudaFree(NULL));
    show("at first");
    for (int i = 0; i < 8; i++)
        SHOW(cudaMalloc(&blocks[i], (i + 1) * 16 * MIB));
    show("eight blocks");
    for (int i = 0; i < 8; i += 2)
        SHOW(cudaFree(blocks[i]));
    show("four of them");
    for (int i = 1; i < 8; i += 2)
        SHOW(cudaFree(blocks[i]));
    show("none");
    /* All that is said to be free can be had. */
    size_t free, total;
    SHOW(cudaMemGetInfo(&free, &total));
    SHOW(cudaMalloc(&blocks[0], free - 512 * MIB));
    SHOW(cudaFree(blocks[0]));
    show("at last");
    return 0;
}
