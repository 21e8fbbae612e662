/* What the programs here share: how they time their loop, or run it for long, and what they say of it. */
#pragma once
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* So many that a program's time from its start to its end shows its loop. */
enum { REPEATS = 25 };

/* In a long run the sizes in use change from round to round: a loop takes so many times the memory. */
enum { SCALES = 4 };
static size_t scale = 1;

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

/* Runs the loop for many rounds, and makes the file PROGRAM_WARM once each scale has been there. */
static inline void run_long(void (*loop)(void), long rounds) {
    const char *path = getenv("PROGRAM_WARM");
    for (long round = 0; round < rounds; round++) {
        scale = 1 + (size_t)round % SCALES;
        loop();
        FILE *file = round == SCALES && path ? fopen(path, "w") : NULL;
        if (file)
            fclose(file);
    }
}

/* Runs the loop for each line of input, and prints the time. */
static inline void take_turns(void (*loop)(void)) {
    char line[8];
    printf("turns\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        double start = seconds();
        loop();
        printf("turn: %.9f\n", seconds() - start);
        fflush(stdout);
    }
}

/* Runs the loop once to warm up, and then REPEATS times. Where PROGRAM_ROUNDS says how many rounds, it is a long
 * run; where there is PROGRAM_TURNS, somebody says when, and is told the times. */
static inline void time_loop(void (*loop)(void)) {
    const char *rounds = getenv("PROGRAM_ROUNDS");
    if (rounds) {
        run_long(loop, atol(rounds));
        return;
    }
    loop();
    if (getenv("PROGRAM_TURNS")) {
        take_turns(loop);
        return;
    }
    for (int i = 0; i < REPEATS; i++)
        loop();
}
