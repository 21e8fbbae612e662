/* Threads and streams: six threads with a stream each, one stream for all, and memory of every kind, freed in
 * every way. Blocks keep what is written to them.
 *
 * Run: threads_and_streams
 */
#include "show.h"

enum { THREADS = 6, ROUNDS = 400, BLOCKS = 12, EDGE = 64 };

static handle streams[THREADS + 1];
static int errors;

struct block {
    unsigned char *address;
    size_t size;
    unsigned char value;
    int ordered;
};

static unsigned next(unsigned *state) {
    *state = *state * 1664525 + 1013904223;
    return *state >> 8;
}

/* Whether both ends of a block hold what it was filled with. */
static int holds(struct block *block, handle stream, unsigned char *copy) {
    size_t edge = block->size < EDGE ? block->size : EDGE;
    int wrong = cudaMemcpyAsync(copy, block->address, edge, DEVICE_TO_HOST, stream) != 0;
    wrong |= cudaMemcpyAsync(copy + EDGE, block->address + block->size - edge, edge, DEVICE_TO_HOST,
                             stream) != 0;
    wrong |= cudaStreamSynchronize(stream) != 0;
    for (size_t i = 0; i < edge; i++)
        wrong |= copy[i] != block->value || copy[EDGE + i] != block->value;
    return !wrong;
}

static void *work(void *argument) {
    int number = (int)(intptr_t)argument, wrong = 0;
    handle stream = streams[number], other = streams[THREADS];
    unsigned state = number * 77 + 1;
    struct block blocks[BLOCKS] = {{0}};
    unsigned char *copy;
    wrong += cudaMallocHost((void **)&copy, 2 * EDGE) != 0;
    for (int round = 0; round < ROUNDS; round++) {
        struct block *block = &blocks[next(&state) % BLOCKS];
        if (block->address) {
            unsigned way = next(&state) % 3;
            /* cudaFree waits for the stream's work, unless the memory is a stream's own. */
            if (way > 0 || block->ordered)
                wrong += !holds(block, stream, copy);
            if (way < 2 && block->ordered)
                wrong += cudaFreeAsync(block->address, way == 0 ? stream : other) != 0;
            else
                wrong += cudaFree(block->address) != 0 || cudaStreamQuery(stream) != 0;
            block->address = NULL;
            continue;
        }
        block->size = 1 + next(&state) % (3 * MIB);
        block->value = next(&state);
        block->ordered = next(&state) % 2;
        if (!block->ordered)
            wrong += cudaMalloc((void **)&block->address, block->size) != 0;
        else
            wrong += cudaMallocAsync((void **)&block->address, block->size, stream) != 0;
        wrong += cudaMemsetAsync(block->address, block->value, block->size, stream) != 0;
    }
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].address) {
            wrong += !holds(&blocks[i], stream, copy);
            wrong += cudaFree(blocks[i].address) != 0;
        }
    wrong += cudaFreeHost(copy) != 0;
    __atomic_fetch_add(&errors, wrong, __ATOMIC_RELAXED);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    for (int i = 0; i <= THREADS; i++)
        SHOW(cudaStreamCreateWithFlags(&streams[i], NON_BLOCKING));
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    SHOW(cudaDeviceSynchronize());
    printf("%d wrong\n", errors);
    return 0;
}
