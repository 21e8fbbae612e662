/* What a pair of allocation and free costs, in nanoseconds: the median of many rounds. Its figures are
 * for reading, not for comparing. */
#include "show.h"
#include <time.h>

enum { ROUNDS = 15, WARM_UP = 50000000 };

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

struct way {
    const char *name;
    pair *run;
};

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

/* The same on a stream of the thread's own. */
static _Thread_local handle own;
static int own_pair(size_t size) {
    if (own == NULL && cudaStreamCreateWithFlags(&own, NON_BLOCKING) != 0)
        return 1;
    void *address;
    int status = cudaMallocAsync(&address, size, own);
    return status ? status : cudaFreeAsync(address, own);
}

/* The same by the driver's functions. */
extern int cuMemAllocAsync(device_address *, size_t, handle), cuMemFreeAsync(device_address, handle);
static int own_driver_pair(size_t size) {
    if (own == NULL && cudaStreamCreateWithFlags(&own, NON_BLOCKING) != 0)
        return 1;
    device_address address;
    int status = cuMemAllocAsync(&address, size, own);
    return status ? status : cuMemFreeAsync(address, own);
}

/* What the runtime costs itself in two calls: as a library it takes a lock of the process in each. */
static int runtime_itself(size_t size) {
    (void)size;
    int device;
    int status = cudaGetDevice(&device);
    return status ? status : cudaGetDevice(&device);
}

static int synchronize(size_t size) {
    (void)size;
    return cudaDeviceSynchronize();
}

static double measure(pair *run, size_t size, int pairs) {
    double rounds[ROUNDS];
    /* A processor that was idle takes some time to get as fast as it can. */
    for (double start = now(); now() - start < WARM_UP;)
        if (run(size) != 0)
            return -1;
    for (int round = 0; round < ROUNDS; round++) {
        double start = now();
        for (int i = 0; i < pairs; i++)
            if (run(size) != 0)
                return -1;
        rounds[round] = (now() - start) / pairs;
    }
    qsort(rounds, ROUNDS, sizeof *rounds, compare);
    return rounds[ROUNDS / 2];
}

/* What a pair cannot do without: strict frees wait, and allocations tell whether work has failed. */
extern int cuStreamQuery(handle);
static int wait_for_all(size_t size) {
    (void)size;
    return cuCtxSynchronize();
}

static int ask(size_t size) {
    (void)size;
    return cuStreamQuery(NULL);
}

enum { THREADS = 8 };
static pthread_barrier_t barrier;

struct thread {
    pthread_t id;
    pair *run;
    double result;
};

static void *thread(void *argument) {
    struct thread *mine = argument;
    cudaFree(NULL);
    pthread_barrier_wait(&barrier);
    mine->result = measure(mine->run, 65536, 300);
    return NULL;
}

static double measure_threads(pair *run) {
    struct thread threads[THREADS];
    double results[THREADS];
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) {
        threads[i].run = run;
        pthread_create(&threads[i].id, NULL, thread, &threads[i]);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i].id, NULL);
        results[i] = threads[i].result;
    }
    qsort(results, THREADS, sizeof *results, compare);
    return results[THREADS / 2];
}

int main(void) {
    struct way ways[] = {{"cudaMalloc + cudaFree", runtime_pair},
                         {"cuMemAlloc + cuMemFree", driver_pair},
                         {"cudaMallocAsync + cudaFreeAsync", ordered_pair},
                         {"cudaMallocAsync + cudaFreeAsync on a stream of its own", own_pair},
                         {"cudaDeviceSynchronize", synchronize}};
    static const size_t sizes[] = {512, 64 << 10, 8 << 20};
    double start = now();
    cudaFree(NULL);
    printf("start: %.0f ms\n", (now() - start) / 1e6);
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++)
        for (size_t i = 0; i < 3; i++)
            printf("%s, %zu bytes: %.0f ns\n", ways[way].name, sizes[i],
                   measure(ways[way].run, sizes[i], 300));
    printf("cuCtxSynchronize: %.0f ns\n", measure(wait_for_all, 0, 300));
    printf("cuStreamQuery of the default stream: %.0f ns\n", measure(ask, 0, 300));
    printf("cudaGetDevice twice: %.0f ns\n", measure(runtime_itself, 0, 300));
    struct way threaded[] = {{"cudaMalloc + cudaFree, 65536 bytes", runtime_pair},
                             {"cuMemAlloc + cuMemFree, 65536 bytes", driver_pair},
                             {"cudaMallocAsync + cudaFreeAsync, 65536 bytes, a stream each", own_pair},
                             {"cuMemAllocAsync + cuMemFreeAsync, 65536 bytes, a stream each", own_driver_pair},
                             {"cuCtxSynchronize", wait_for_all},
                             {"cudaGetDevice twice", runtime_itself}};
    for (size_t way = 0; way < sizeof threaded / sizeof *threaded; way++)
        printf("8 threads, %s: %.0f ns\n", threaded[way].name, measure_threads(threaded[way].run));
    return 0;
}
