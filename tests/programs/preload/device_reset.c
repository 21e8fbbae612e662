/* cudaDeviceReset frees all memory.
 *
 * Run: device_reset
 */
#include "show.h"

int main(void) {
    size_t before, now, total;
    void *one, *two;
    SHOW(cudaFree(NULL));
    for (int round = 0; round < 3; round++) {
        SHOW(cudaMemGetInfo(&before, &total));
        SHOW(cudaMalloc(&one, 64 * MIB));
        SHOW(cudaMalloc(&two, MIB));
        show_data("before", two, MIB, round);
        SHOW(cudaFree(two));
        SHOW(cudaDeviceReset());
        SHOW(cudaMemGetInfo(&now, &total));
        printf("as before: %d\n", now == before);
        SHOW(cudaFree(one));
        SHOW(cudaGetLastError());
    }
    SHOW(cudaMalloc(&one, 64 * MIB));
    show_data("after", one, 64 * MIB, 5);
    SHOW(cudaFree(one));
    return 0;
}
