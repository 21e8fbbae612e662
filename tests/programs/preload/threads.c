/* Threads: eight threads allocate and free, each its own memory.
 *
 * Run: threads
 */
#include "show.h"

enum { THREADS = 8, ROUNDS = 200, BLOCKS = 10 };
static int wrong;

static void *work(void *argument) {
    int number = (int)(intptr_t)argument;
    unsigned char copy[4096], *blocks[BLOCKS] = {0};
    int errors = 0;
    for (int round = 0; round < ROUNDS; round++) {
        int at = (round * 7 + number) % BLOCKS;
        if (blocks[at]) {
            memset(copy, 0, sizeof copy);
            errors += cudaMemcpy(copy, blocks[at], sizeof copy, DEVICE_TO_HOST) != 0;
            for (size_t i = 0; i < sizeof copy; i++)
                errors += copy[i] != (unsigned char)(number * 16 + at);
            errors += cudaFree(blocks[at]) != 0;
        }
        errors += cudaMalloc((void **)&blocks[at], 4096 << (round % 6)) != 0;
        errors += cudaMemset(blocks[at], number * 16 + at, 4096) != 0;
    }
    for (int at = 0; at < BLOCKS; at++)
        errors += cudaFree(blocks[at]) != 0;
    __atomic_fetch_add(&wrong, errors, __ATOMIC_RELAXED);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    printf("%d wrong\n", wrong);
    return 0;
}
