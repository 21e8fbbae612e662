/* What one allocation and its release cost through concertina's C functions: nanoseconds a pair,
 * the median of several rounds, one JSON line a measurement.
 *
 *   cc -O2 -pthread tests/bench/pair.c -o pair -ldl && ./pair target/release/libconcertina.so
 *
 * With a CUDA driver the threads have streams of their own; without one set
 * CONCERTINA_CONF=driver:sim, and the streams are one.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef void *(*alloc_fn)(size_t, int, void *);
typedef void (*free_fn)(void *, size_t, int, void *);
static alloc_fn take;
static free_fn give;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n) {
    qsort(v, n, sizeof *v, ascending);
    return v[n / 2];
}

struct job { void *stream; size_t size; long n; };

static void *pairs(void *argument) {
    struct job *job = argument;
    for (long i = 0; i < job->n; i++) give(take(job->size, 0, job->stream), job->size, 0, job->stream);
    return NULL;
}

/* `live` blocks of random sizes, replaced at random. */
static double mixed(long live, long n) {
    size_t *sizes = malloc(4096 * sizeof *sizes);
    void **blocks = malloc(live * sizeof *blocks);
    uint64_t x = 88172645463325252ull;
    for (int i = 0; i < 4096; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        /* Many blocks of the larger sizes fit into no device. */
        sizes[i] = 512ull << (x % (live > 100000 ? 7 : live > 2000 ? 10 : 15));
        sizes[i] += (x >> 32) % sizes[i];
    }
    size_t k = 0;
    for (long i = 0; i < live; i++) blocks[i] = take(sizes[k++ & 4095], 0, NULL);
    double start = now();
    for (long i = 0; i < n; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        long at = x % live;
        give(blocks[at], 0, 0, NULL);
        blocks[at] = take(sizes[k++ & 4095], 0, NULL);
    }
    double ns = (now() - start) / n;
    for (long i = 0; i < live; i++) give(blocks[i], 0, 0, NULL);
    free(sizes), free(blocks);
    return ns;
}

int main(int argc, char **argv) {
    void *library = dlopen(argc > 1 ? argv[1] : "target/release/libconcertina.so", RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    take = (alloc_fn)dlsym(library, "concertina_malloc");
    give = (free_fn)dlsym(library, "concertina_free");
    if (!take(512, 0, NULL)) return 1;
    void *streams[8] = {0};
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (cuda) {
        int (*retain)(void **, int) = (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
        int (*set)(void *) = (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
        int (*create)(void **, unsigned) = (int (*)(void **, unsigned))dlsym(cuda, "cuStreamCreate");
        int (*id)(void *, uint64_t *) = (int (*)(void *, uint64_t *))dlsym(cuda, "cuStreamGetId");
        void *context;
        retain(&context, 0), set(context);
        for (int i = 0; i < 8; i++) create(&streams[i], 1);
        uint64_t which;
        double start = now();
        for (int i = 0; i < 1000000; i++) id(streams[0], &which);
        printf("{\"bench\":\"cuStreamGetId\",\"ns\":%.1f}\n", (now() - start) / 1e6);
    }
    double v[15];
    static const size_t sizes[] = {512, 65536, 1 << 20, 8 << 20, 64 << 20};
    for (int s = 0; s < 5; s++)
        for (int own = 0; own < 2; own++) {
            struct job job = {own ? streams[0] : NULL, sizes[s], 200000};
            pairs(&job);
            for (int r = 0; r < 15; r++) {
                double start = now();
                pairs(&job);
                v[r] = (now() - start) / job.n;
            }
            printf("{\"bench\":\"pair\",\"size\":%zu,\"stream\":\"%s\",\"ns\":%.1f}\n", sizes[s],
                   own ? "created" : "default", median(v, 15));
        }
    for (long live = 100; live <= 1000000; live *= 10) {
        for (int r = 0; r < 7; r++) v[r] = mixed(live, 200000);
        printf("{\"bench\":\"mixed\",\"live\":%ld,\"ns\":%.1f}\n", live, median(v, 7));
        if (live == 1000) {
            for (int r = 0; r < 7; r++) v[r] = mixed(2000, 200000);
            printf("{\"bench\":\"mixed\",\"live\":2000,\"ns\":%.1f}\n", median(v, 7));
        }
    }
    for (int same = 0; same < 2; same++)
        for (int threads = 1; threads <= 8; threads *= 2) {
            for (int r = 0; r < 7; r++) {
                pthread_t ids[8];
                struct job jobs[8];
                double start = now();
                for (int t = 0; t < threads; t++) {
                    jobs[t] = (struct job){same ? NULL : streams[t], 65536, 200000};
                    pthread_create(&ids[t], NULL, pairs, &jobs[t]);
                }
                for (int t = 0; t < threads; t++) pthread_join(ids[t], NULL);
                v[r] = (now() - start) / (200000.0 * threads);
            }
            printf("{\"bench\":\"threads\",\"threads\":%d,\"streams\":%d,\"ns\":%.1f}\n", threads,
                   same ? 1 : threads, median(v, 7));
        }
    return 0;
}
