/* Several GPUs: allocations on each, and on one by its number.
 *
 * Run: several_gpus
 */
#include "show.h"

int main(void) {
    int count = 0, here = -1;
    SHOW(cudaGetDeviceCount(&count));
    int last = count - 1;
    void *first, *second, *third;
    SHOW(cudaMalloc(&first, 4 * MIB));
    SHOW(cudaMemset(first, 21, 4 * MIB));
    SHOW(cudaSetDevice(last));
    SHOW(cudaMalloc(&second, 4 * MIB));
    SHOW(cudaMalloc(&third, MIB));
    SHOW(cudaMemcpyPeer(second, last, first, 0, 4 * MIB));
    struct pointer_attributes all;
    SHOW(cudaPointerGetAttributes(&all, first));
    printf("on the first: %d\n", all.device == 0);
    SHOW(cudaPointerGetAttributes(&all, second));
    printf("on the last: %d\n", all.device == last);
    unsigned char *copy = calloc(4, MIB);
    SHOW(cudaMemcpy(copy, second, 4 * MIB, DEVICE_TO_HOST));
    printf("copied: %d\n", copy[4 * MIB - 1]);
    /* What is another device's can be freed here. */
    SHOW(cudaFree(first));
    SHOW(cudaFree(first));
    SHOW(cudaSetDevice(0));
    SHOW(cudaFree(third));
    SHOW(cudaFree(second));
    SHOW(cudaGetDevice(&here));
    printf("device %d\n", here);
    return 0;
}
