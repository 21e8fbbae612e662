/* What the programs here share: how they time their loop and what they say of it. */
#pragma once
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Many: a machine that others use as well is slow for moments. */
enum { REPEATS = 25 };

static inline double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Ends the program at a call that fails. */
#define CHECK(call)                                                                                \
    do {                                                                                           \
        int status_ = (int)(call);                                                                 \
        if (status_ != 0) {                                                                        \
            printf("%s, line %d: %s: status %d\n", __FILE__, __LINE__, #call, status_);            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static inline int compare_times(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Runs the loop once to warm up, and then for the median of its times. */
static inline void time_loop(void (*loop)(void)) {
    double times[REPEATS];
    loop();
    for (int i = 0; i < REPEATS; i++) {
        double start = seconds();
        loop();
        times[i] = seconds() - start;
    }
    qsort(times, REPEATS, sizeof *times, compare_times);
    printf("loop: %.9f\n", times[REPEATS / 2]);
}
