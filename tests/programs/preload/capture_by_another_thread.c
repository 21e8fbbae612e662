/* Captures by another thread: one thread captures, again and again, in the mode that is asked for (0 global,
 * 1 thread-local, 2 relaxed), while two others allocate and free: on streams of their own, or by cudaMalloc
 * and cudaFree. No capture is broken that is not broken without the library.
 *
 * Run: capture_by_another_thread order 300 0
 * Run: capture_by_another_thread order 300 1
 * Run: capture_by_another_thread order 300 2
 * Run: capture_by_another_thread free 3000 1
 * Run: capture_by_another_thread free 300 2
 * Run: capture_by_another_thread blocking 300 2
 */
#include "show.h"

extern int cudaThreadExchangeStreamCaptureMode(int *);

static volatile int over;
static int in_order;

static void *allocate(void *seed) {
    unsigned random = 12345 + (unsigned)(uintptr_t)seed;
    handle streams[3];
    long failed = 0;
    int relaxed = 2;
    /* What a careful library does: bare, a thread in global mode may not ask while another captures so. */
    cudaThreadExchangeStreamCaptureMode(&relaxed);
    for (int i = 0; i < 3; i++)
        cudaStreamCreateWithFlags(&streams[i], NON_BLOCKING);
    while (!over) {
        random = random * 1664525u + 1013904223u;
        handle stream = streams[(random >> 8) % 3];
        size_t size = ((random >> 12) % 64 + 1) * 65536;
        void *block = NULL;
        int status = in_order ? cudaMallocAsync(&block, size, stream) : cudaMalloc(&block, size);
        if (status == 0 && in_order)
            cudaMemsetAsync(block, 1, 256, stream);
        if (status == 0)
            status = in_order ? cudaFreeAsync(block, stream) : cudaFree(block);
        if (status != 0) {
            failed++;
            cudaGetLastError();
        }
    }
    return (void *)failed;
}

int main(int count, char **arguments) {
    const char *way = count > 1 ? arguments[1] : "order";
    int rounds = count > 2 ? atoi(arguments[2]) : 300, mode = count > 3 ? atoi(arguments[3]) : 1;
    in_order = strcmp(way, "free") != 0;
    /* A stream that synchronizes with the legacy one, on which the main thread has left memory. */
    int blocking = strcmp(way, "blocking") == 0;
    handle stream, graph;
    void *memory, *left[16];
    pthread_t threads[2];
    long failed = 0, broken = 0;
    cudaMalloc(&memory, MIB);
    cudaStreamCreateWithFlags(&stream, blocking ? 0 : NON_BLOCKING);
    for (int i = 0; i < 16; i++)
        cudaMallocAsync(&left[i], (i + 1) * MIB, NULL);
    for (int i = 0; i < 16; i++)
        cudaFreeAsync(left[i], NULL);
    for (long i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, allocate, (void *)i);
    for (int round = 0; round < rounds; round++) {
        graph = NULL;
        usleep(20);
        int began = cudaStreamBeginCapture(stream, mode);
        int worked = cudaMemsetAsync(memory, round, 1024, stream);
        int ended = cudaStreamEndCapture(stream, &graph);
        if (began || worked || ended) {
            if (broken++ == 0)
                printf("round %d: began %d, worked %d, ended %d\n", round, began, worked, ended);
            cudaGetLastError();
        }
    }
    over = 1;
    for (int i = 0; i < 2; i++) {
        void *result;
        pthread_join(threads[i], &result);
        failed += (long)result;
    }
    printf("%d captures, %ld broken, %ld calls failed\n", rounds, broken, failed);
    return 0;
}
