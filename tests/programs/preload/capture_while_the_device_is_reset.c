/* Captures: the device is reset while a stream is captured; after that memory is as it was at the start.
 *
 * Run: capture_while_the_device_is_reset
 */
#include "show.h"

int main(void) {
    enum { BLOCKS = 64 };
    handle stream;
    void *block;
    int failed = 0;
    SHOW(cudaMalloc(&block, MIB));
    SHOW(cudaFree(block));
    SHOW(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    SHOW(cudaStreamBeginCapture(stream, 2));
    SHOW(cudaDeviceReset());
    for (int i = 0; i < BLOCKS; i++) {
        failed += cudaMalloc(&block, (i % 8 + 1) * MIB) != 0;
        failed += cudaFree(block) != 0;
    }
    printf("%d failed\n", failed);
    return 0;
}
