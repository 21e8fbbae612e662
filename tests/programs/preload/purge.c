/* Purge: memory stays free long enough to be purged, and is used again.
 *
 * Run: purge
 */
#include "show.h"

int main(void) {
    void *block;
    SHOW(cudaMalloc(&block, 64 * MIB));
    SHOW(cudaFree(block));
    usleep(200000);
    SHOW(cudaMalloc(&block, 3 * MIB));
    show_data("again", block, 3 * MIB, 5);
    SHOW(cudaFree(block));
    return 0;
}
