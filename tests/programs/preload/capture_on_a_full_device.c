/* Captures: memory is freed while a stream is captured and the device is full.
 *
 * Run: capture_on_a_full_device
 */
#include "show.h"

extern int cudaThreadExchangeStreamCaptureMode(int *);

int main(void) {
    handle stream, graph = NULL;
    void *blocks[4096];
    int count = 0, relaxed = 2;
    SHOW(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    while (count < 4096 && cudaMalloc(&blocks[count], 2 * MIB) == 0)
        count++;
    printf("full: %d\n", count > 8);
    SHOW(cudaThreadExchangeStreamCaptureMode(&relaxed));
    SHOW(cudaStreamBeginCapture(stream, 2));
    SHOW(cudaFree(blocks[0]));
    SHOW(cudaStreamEndCapture(stream, &graph));
    SHOW(cudaMalloc(&blocks[0], 2 * MIB));
    return 0;
}
