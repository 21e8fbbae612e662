/* A load that changes from round to round, for as long as is wanted: memory holds what was written to it,
 * and what the process keeps does not grow.
 *
 *     soak load|storm AMOUNT      AMOUNT is a number of rounds, or of seconds: 60s
 *
 * `load` takes small and large memory in every way, on several streams and in several threads; `storm`
 * takes all the memory that there is, again and again. */
#include "show.h"
#include <dirent.h>
#include <time.h>

enum { BLOCKS = 64, STREAMS = 4, THREADS = 4, MOST = 4096, KEPT = 6 };

struct block {
    unsigned char *address;
    size_t size;
    unsigned char value;
    int stream;
};

static handle streams[STREAMS];
static size_t scale;
static int wrong;

#define WRONG(...)                                                                                 \
    do {                                                                                           \
        if (__atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED) <= 10)                                 \
            printf(__VA_ARGS__);                                                                   \
    } while (0)
#define MUST(call)                                                                                 \
    do {                                                                                           \
        int status_ = (call);                                                                      \
        if (status_ != 0)                                                                          \
            WRONG("%s: %d\n", #call, status_);                                                     \
    } while (0)

static uint32_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Allocations of cudaMalloc have no stream: -1. */
static int take(struct block *block, size_t size, int stream, unsigned char value) {
    void *address = NULL;
    int status = stream < 0 ? cudaMalloc(&address, size) : cudaMallocAsync(&address, size, streams[stream]);
    if (status != 0)
        return status;
    handle on = streams[stream < 0 ? 0 : stream];
    *block = (struct block){address, size, value, stream};
    MUST(cudaMemsetAsync(address, value, 1, on));
    MUST(cudaMemsetAsync((char *)address + size - 1, value, 1, on));
    return 0;
}

static void give_back(struct block *block, uint64_t *state) {
    handle on = streams[block->stream < 0 ? 0 : block->stream];
    unsigned char ends[2] = {0};
    MUST(cudaMemcpyAsync(&ends[0], block->address, 1, DEVICE_TO_HOST, on));
    MUST(cudaMemcpyAsync(&ends[1], block->address + block->size - 1, 1, DEVICE_TO_HOST, on));
    MUST(cudaStreamSynchronize(on));
    if (ends[0] != block->value || ends[1] != block->value)
        WRONG("%zu bytes hold %d and %d instead of %d\n", block->size, ends[0], ends[1], block->value);
    /* All its work is done, so any stream may free it. */
    if (block->stream < 0)
        MUST(cudaFree(block->address));
    else
        MUST(cudaFreeAsync(block->address, streams[next(state) % 3 ? block->stream : 1]));
    block->address = NULL;
}

/* A way of taking and giving back: how large, and in which order. */
static void load(uint64_t seed) {
    struct block blocks[BLOCKS] = {{0}};
    uint64_t state = seed;
    size_t most = scale >> next(&state) % 8;
    unsigned ordered = next(&state) % 5;
    for (int step = 0; step < 400; step++) {
        struct block *block = &blocks[next(&state) % BLOCKS];
        if (block->address) {
            give_back(block, &state);
            continue;
        }
        size_t size = 1 + next(&state) % most;
        int stream = next(&state) % 4 < ordered ? (int)(next(&state) % STREAMS) : -1;
        int status = take(block, size, stream, next(&state));
        if (status != 0)
            WRONG("%zu bytes on %d: %d\n", size, stream, status);
    }
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].address)
            give_back(&blocks[i], &state);
}

static void *load_thread(void *seed) {
    load((uint64_t)(uintptr_t)seed);
    return NULL;
}

static void load_round(uint64_t round) {
    pthread_t threads[THREADS];
    load(round * 977);
    for (uint64_t i = 0; i < THREADS; i++)
        MUST(pthread_create(&threads[i], NULL, load_thread, (void *)(uintptr_t)(round * 977 + 1 + i)));
    for (int i = 0; i < THREADS; i++)
        MUST(pthread_join(threads[i], NULL));
}

static void storm_round(uint64_t round) {
    static struct block blocks[MOST];
    uint64_t state = round * 31;
    int count = 0, status = 0;
    while (count < MOST && status == 0) {
        int stream = next(&state) % 3 == 0 ? (int)(next(&state) % STREAMS) : -1;
        status = take(&blocks[count], scale / 2 + next(&state) % scale, stream, count);
        count += status == 0;
    }
    if (status != 2 || count == 0)
        WRONG("the storm ends with status %d after %d blocks\n", status, count);
    if (cudaGetLastError() != status || cudaGetLastError() != 0)
        WRONG("the error is not told once\n");
    /* Half of it in disorder, so that a block larger than any free one finds room again. */
    for (int i = 0; i < count; i += 2)
        give_back(&blocks[i], &state);
    struct block large;
    if (count >= 8 && take(&large, scale, -1, 77) == 0)
        give_back(&large, &state);
    else if (count >= 8)
        WRONG("no room for one block after half of %d were freed\n", count);
    (void)cudaGetLastError();
    for (int i = 1; i < count; i += 2)
        give_back(&blocks[i], &state);
}

/* What a process keeps once all is freed, by name, and by how much that may vary. */
static const struct {
    const char *name;
    uint64_t slack;
} kinds[KEPT] = {
    {"bytes in use on the device", 64 * MIB},
    {"bytes held by the pool", 32 * MIB},
    {"chunks held by the pool", 64},
    {"file descriptors", 8},
    {"mappings of the process", 256},
    {"bytes of the process's memory", 64 * MIB},
};

static uint64_t count_lines(const char *path) {
    FILE *file = fopen(path, "r");
    uint64_t lines = 0;
    for (int c; file && (c = fgetc(file)) != EOF;)
        lines += c == '\n';
    if (file)
        fclose(file);
    return lines;
}

static uint64_t count_descriptors(void) {
    DIR *directory = opendir("/proc/self/fd");
    uint64_t count = 0;
    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    return count;
}

/* The simulated GPU's memory is the process's own. */
static uint64_t resident(void) {
    unsigned long all = 0, pages = 0;
    FILE *file = getenv("STANDIN_MEMORY_MB") ? NULL : fopen("/proc/self/statm", "r");
    if (file) {
        if (fscanf(file, "%lu %lu", &all, &pages) != 2)
            pages = 0;
        fclose(file);
    }
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* A figure of the library's, where there is one. */
static uint64_t figure(const char *text, const char *name) {
    const char *found = text ? strstr(text, name) : NULL;
    return found ? strtoull(found + strlen(name), NULL, 10) : 0;
}

static void look(uint64_t kept[KEPT]) {
    size_t free_bytes, total;
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemGetInfo(&free_bytes, &total));
    size_t (*stats)(char *, size_t) = (size_t (*)(char *, size_t))dlsym(RTLD_DEFAULT, "concertina_stats_json");
    size_t length = stats ? stats(NULL, 0) + 4096 : 1;
    char *text = calloc(1, length);
    if (stats)
        stats(text, length);
    uint64_t now[KEPT] = {
        total - free_bytes,
        figure(text, "\"reserved_bytes.all.current\":"),
        figure(text, "\"segment.all.current\":"),
        count_descriptors(),
        count_lines("/proc/self/maps"),
        resident(),
    };
    free(text);
    for (int i = 0; i < KEPT; i++)
        if (now[i] > kept[i])
            kept[i] = now[i];
}

int main(int count, char **arguments) {
    struct timespec start, now;
    size_t free_bytes, total;
    int storm = count == 3 && strcmp(arguments[1], "storm") == 0;
    char *unit = NULL;
    long amount = count == 3 ? strtol(arguments[2], &unit, 10) : 0;
    if (amount < 1 || (!storm && strcmp(arguments[1], "load") != 0) || (*unit != 0 && *unit != 's')) {
        fprintf(stderr, "soak: load or storm is wanted, and a number of rounds or seconds, as 60s\n");
        return 2;
    }
    MUST(cudaFree(NULL));
    MUST(cudaMemGetInfo(&free_bytes, &total));
    /* The load stays well below the device's memory, or the storm beyond it in some dozens of steps. */
    scale = storm ? free_bytes / 48 : free_bytes / (BLOCKS * (THREADS + 1) * 2);
    for (int i = 0; i < STREAMS; i++)
        MUST(cudaStreamCreateWithFlags(&streams[i], NON_BLOCKING));
    clock_gettime(CLOCK_MONOTONIC, &start);
    /* Of the first and of the second half, once all has been there. */
    uint64_t kept[2][KEPT] = {{0}};
    enum { WARM = 2 };
    long rounds = 0, done = 0;
    for (; done < amount; rounds++) {
        storm ? storm_round(rounds) : load_round(rounds);
        if (rounds < WARM)
            clock_gettime(CLOCK_MONOTONIC, &start);
        clock_gettime(CLOCK_MONOTONIC, &now);
        done = *unit ? now.tv_sec - start.tv_sec : rounds + 1 - WARM;
        if (rounds >= WARM)
            look(kept[done * 2 > amount]);
    }
    for (int i = 0; i < KEPT; i++)
        if (kept[1][i] > kept[0][i] + kept[0][i] / 4 + kinds[i].slack)
            WRONG("%s: %lu in the first half, %lu in the second\n", kinds[i].name, kept[0][i], kept[1][i]);
    printf("%d wrong\n", wrong);
    fprintf(stderr, "%ld rounds; kept:", rounds);
    for (int i = 0; i < KEPT; i++)
        fprintf(stderr, " %s %lu,", kinds[i].name, kept[1][i]);
    fprintf(stderr, "\n");
    return wrong != 0;
}
