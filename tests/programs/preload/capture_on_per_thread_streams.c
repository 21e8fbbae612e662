/* Captures on per-thread default streams, which have one handle: two threads capture, and the end of one's
 * capture does not end the other's.
 *
 * Run: capture_on_per_thread_streams
 */
#include "show.h"

/* `cudaStreamPerThread`. */
#define OWN ((handle)2)

extern int cudaThreadExchangeStreamCaptureMode(int *);

static pthread_barrier_t together;

static void *second(void *unused) {
    (void)unused;
    handle graph = NULL;
    cudaFree(NULL);
    int began = cudaStreamBeginCapture(OWN, 1);
    pthread_barrier_wait(&together);
    int ended = cudaStreamEndCapture(OWN, &graph);
    printf("the second thread: began %d, ended %d\n", began, ended);
    pthread_barrier_wait(&together);
    return NULL;
}

int main(void) {
    enum { BLOCKS = 64 };
    handle streams[2], graph = NULL;
    void *memory, *blocks[BLOCKS];
    pthread_t thread;
    int failed = 0, relaxed = 2;
    pthread_barrier_init(&together, NULL, 2);
    cudaMalloc(&memory, MIB);
    for (int i = 0; i < 2; i++)
        cudaStreamCreateWithFlags(&streams[i], NON_BLOCKING);
    for (int i = 0; i < BLOCKS; i++)
        cudaMallocAsync(&blocks[i], 4 * MIB, streams[i % 2]);
    pthread_create(&thread, NULL, second, NULL);
    /* The capture's own thread may not allocate beside it otherwise. */
    cudaThreadExchangeStreamCaptureMode(&relaxed);
    SHOW(cudaStreamBeginCapture(OWN, 2));
    pthread_barrier_wait(&together);
    pthread_barrier_wait(&together);
    pthread_join(thread, NULL);
    SHOW(cudaMemsetAsync(memory, 1, 1024, OWN));
    for (int i = 0; i < BLOCKS; i++)
        cudaFreeAsync(blocks[i], streams[i % 2]);
    for (int i = 0; i < BLOCKS; i++)
        failed += cudaMallocAsync(&blocks[i], (i + 1) * MIB, streams[(i + 1) % 2]) != 0;
    printf("%d failed\n", failed);
    SHOW(cudaStreamEndCapture(OWN, &graph));
    return 0;
}
