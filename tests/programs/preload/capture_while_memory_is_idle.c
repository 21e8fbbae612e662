/* Captures: free memory is old enough to be purged while a capture goes on.
 *
 * Run: capture_while_memory_is_idle
 */
#include "show.h"

#include <unistd.h>

int main(void) {
    handle stream, graph = NULL;
    void *block;
    int capturing = -1;
    SHOW(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    SHOW(cudaMallocAsync(&block, 20 * MIB, stream));
    SHOW(cudaFreeAsync(block, stream));
    SHOW(cudaStreamBeginCapture(stream, 0));
    usleep(300000);
    SHOW(cudaStreamIsCapturing(stream, &capturing));
    printf("capturing %d\n", capturing);
    SHOW(cudaStreamEndCapture(stream, &graph));
    return 0;
}
