/* Captures: allocations and frees while a stream is captured.
 *
 * Run: capture
 */
#include "show.h"

int main(void) {
    handle stream, graph = NULL;
    void *before, *inside = NULL, *after;
    int capturing = -1;
    SHOW(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    SHOW(cudaMalloc(&before, MIB));
    for (int round = 0; round < 2; round++) {
        SHOW(cudaStreamBeginCapture(stream, 0));
        SHOW(cudaMallocAsync(&inside, MIB, stream));
        SHOW(cudaFreeAsync(inside, stream));
        SHOW(cudaStreamIsCapturing(stream, &capturing));
        printf("capturing %d\n", capturing);
        SHOW(cudaStreamEndCapture(stream, &graph));
        printf("a graph: %d\n", graph != NULL);
    }
    /* What must not be done in a capture: both end it, as without the library. */
    SHOW(cudaStreamBeginCapture(stream, 0));
    SHOW(cudaMalloc(&inside, MIB));
    cudaStreamEndCapture(stream, &graph);
    SHOW(cudaGetLastError() != 0);
    SHOW(cudaStreamBeginCapture(stream, 0));
    SHOW(cudaFree(before));
    cudaStreamEndCapture(stream, &graph);
    SHOW(cudaGetLastError() != 0);
    SHOW(cudaFree(before));
    /* After it everything is as before. */
    SHOW(cudaMalloc(&after, MIB));
    SHOW(cudaMemset(after, 3, MIB));
    SHOW(cudaFree(after));
    /* A stream that is destroyed takes its capture along. */
    SHOW(cudaStreamBeginCapture(stream, 0));
    SHOW(cudaStreamDestroy(stream));
    SHOW(cudaMalloc(&after, MIB));
    SHOW(cudaFree(after));
    return 0;
}
