/* What a pair of allocation and free costs, in nanoseconds: the median of many rounds. Its figures are
 * for reading, not for comparing. */
#include "show.h"
#include <time.h>

enum { ROUNDS = 15 };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef int pair(size_t size);

static int runtime_pair(size_t size) {
    void *address;
    int status = cudaMalloc(&address, size);
    return status ? status : cudaFree(address);
}

static int driver_pair(size_t size) {
    device_address address;
    int status = cuMemAlloc_v2(&address, size);
    return status ? status : cuMemFree_v2(address);
}

static int ordered_pair(size_t size) {
    void *address;
    int status = cudaMallocAsync(&address, size, NULL);
    return status ? status : cudaFreeAsync(address, NULL);
}

static int synchronize(size_t size) {
    (void)size;
    return cudaDeviceSynchronize();
}

static double measure(pair *run, size_t size, int pairs) {
    double rounds[ROUNDS];
    for (int round = -2; round < ROUNDS; round++) {
        double start = now();
        for (int i = 0; i < pairs; i++)
            if (run(size) != 0)
                return -1;
        if (round >= 0)
            rounds[round] = (now() - start) / pairs;
    }
    qsort(rounds, ROUNDS, sizeof *rounds, compare);
    return rounds[ROUNDS / 2];
}

static pthread_barrier_t barrier;
static void *thread(void *result) {
    cudaFree(NULL);
    pthread_barrier_wait(&barrier);
    *(double *)result = measure(runtime_pair, 65536, 300);
    return NULL;
}

int main(void) {
    struct {
        const char *name;
        pair *run;
    } ways[] = {{"cudaMalloc + cudaFree", runtime_pair},
                {"cuMemAlloc + cuMemFree", driver_pair},
                {"cudaMallocAsync + cudaFreeAsync", ordered_pair},
                {"cudaDeviceSynchronize", synchronize}};
    static const size_t sizes[] = {512, 64 << 10, 8 << 20};
    double start = now();
    cudaFree(NULL);
    printf("start: %.0f ms\n", (now() - start) / 1e6);
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++)
        for (size_t i = 0; i < 3; i++)
            printf("%s, %zu bytes: %.0f ns\n", ways[way].name, sizes[i],
                   measure(ways[way].run, sizes[i], 300));
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    double results[THREADS];
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, thread, &results[i]);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    qsort(results, THREADS, sizeof *results, compare);
    printf("cudaMalloc + cudaFree, 65536 bytes, 8 threads: %.0f ns\n", results[THREADS / 2]);
    return 0;
}
