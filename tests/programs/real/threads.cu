/* Eight threads, each with a stream that waits for no other, each taking and giving back memory in its
 * loop.
 *
 *     threads malloc|async
 */
#include "kernels.h"
#include "real.h"
#include <pthread.h>
#include <string.h>

enum { THREADS = 8, ROUNDS = 150 };

static int ordered;
static cudaStream_t streams[THREADS];
static unsigned long long sums[THREADS];

static void *take(size_t bytes, cudaStream_t stream) {
    void *address;
    CHECK(ordered ? cudaMallocAsync(&address, bytes, stream) : cudaMalloc(&address, bytes));
    return address;
}

static void give_back(void *address, cudaStream_t stream) {
    CHECK(ordered ? cudaFreeAsync(address, stream) : cudaFree(address));
}

static void *work(void *argument) {
    size_t number = (size_t)argument;
    cudaStream_t stream = streams[number];
    for (unsigned round = 0; round < ROUNDS; round++) {
        size_t count = 1000 + ((size_t)1024 << (round + number) % 10) * scale;
        unsigned long long *total = (unsigned long long *)take(sizeof *total, stream), result;
        unsigned *x = (unsigned *)take(count * sizeof *x, stream);
        CHECK(cudaMemsetAsync(total, 0, sizeof *total, stream));
        fill<<<32, 128, 0, stream>>>(x, count, round * THREADS + (unsigned)number);
        sum<<<16, 128, 0, stream>>>(x, count, total);
        give_back(x, stream);
        CHECK(cudaMemcpyAsync(&result, total, sizeof result, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        give_back(total, stream);
        sums[number] += result;
    }
    return NULL;
}

static void loop(void) {
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)i));
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL));
}

int main(int count, char **arguments) {
    ordered = count == 2 && strcmp(arguments[1], "async") == 0;
    if (!ordered && !(count == 2 && strcmp(arguments[1], "malloc") == 0)) {
        fprintf(stderr, "threads: one of malloc and async is wanted\n");
        return 2;
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    time_loop(loop);
    CHECK(cudaGetLastError());
    for (int i = 0; i < THREADS; i++)
        printf("sum %d: %llu\n", i, sums[i]);
    return 0;
}
