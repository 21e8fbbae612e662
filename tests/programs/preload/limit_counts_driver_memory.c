/* Limits: memory that the driver allocates itself counts to a limit of 64 MiB: limit_counts_driver_memory. */
#include "show.h"

static void show_free(void) {
    size_t free, total;
    SHOW(cudaMemGetInfo(&free, &total));
    printf("%zu of %zu MiB\n", free / MIB, total / MIB);
}

int main(void) {
    enum { RELAXED = 2 };
    handle stream, graph;
    void *one, *two, *three;
    SHOW(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    SHOW(cudaMalloc(&one, 8 * MIB));
    SHOW(cudaStreamBeginCapture(stream, RELAXED));
    SHOW(cudaMalloc(&two, 40 * MIB));
    show_free();
    SHOW(cudaMalloc(&three, 40 * MIB));
    SHOW(cudaStreamEndCapture(stream, &graph));
    SHOW(cudaFree(one));
    SHOW(cudaFree(two));
    show_free();
    SHOW(cudaMalloc(&one, 64 * MIB));
    SHOW(cudaFree(one));
    SHOW(cudaStreamBeginCapture(stream, RELAXED));
    SHOW(cudaMalloc(&two, MIB));
    SHOW(cudaStreamEndCapture(stream, &graph));
    SHOW(cudaMalloc(&two, 40 * MIB));
    SHOW(cudaDeviceReset());
    SHOW(cudaMalloc(&two, MIB));
    show_free();
    return 0;
}
