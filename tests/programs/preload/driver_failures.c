/* Driver failures: a load under which any driver call may fail. Each of the program's own calls succeeds, or
 * fails with the status that the driver is told to give or with out of memory; memory keeps what was written
 * to its ends; and once all is freed, all of it is there again.
 *
 *     driver_failures STATUS
 */
#include "map.h"

enum { BLOCKS = 10, ROUNDS = 6, TRIES = 3 };

static int expected, wrong;

/* Whether a call succeeded; a failure that cannot be is told. */
static int did(const char *call, int status) {
    if (status != 0 && status != expected && status != 2) {
        printf("%s: %d\n", call, status);
        wrong++;
    }
    return status == 0;
}

/* One call in a program fails, so another try succeeds. */
#define MUST(call)                                                                                 \
    do {                                                                                           \
        int tries = 0;                                                                             \
        while (!did(#call, call))                                                                  \
            if (++tries == TRIES) {                                                                \
                printf("%s: never\n", #call);                                                      \
                exit(1);                                                                           \
            }                                                                                      \
    } while (0)
#define TRY(call) did(#call, call)

struct block {
    unsigned char *address;
    size_t size;
    unsigned char value;
    int ordered;
};

static struct block blocks[BLOCKS];
static handle stream;

static void check(struct block *block) {
    unsigned char ends[2];
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaMemcpy(&ends[0], block->address, 1, DEVICE_TO_HOST));
    MUST(cudaMemcpy(&ends[1], block->address + block->size - 1, 1, DEVICE_TO_HOST));
    if (ends[0] != block->value || ends[1] != block->value) {
        printf("%zu bytes hold %d and %d instead of %d\n", block->size, ends[0], ends[1], block->value);
        wrong++;
    }
}

static void take(struct block *block, size_t size, int ordered, unsigned char value) {
    void *address = NULL;
    int taken = ordered ? TRY(cudaMallocAsync(&address, size, stream)) : TRY(cudaMalloc(&address, size));
    if (!taken)
        return;
    *block = (struct block){address, size, value, ordered};
    MUST(cudaMemsetAsync(address, value, 1, stream));
    MUST(cudaMemsetAsync((char *)address + size - 1, value, 1, stream));
}

static void give_back(struct block *block) {
    if (block->address == NULL)
        return;
    check(block);
    if (block->ordered)
        MUST(cudaFreeAsync(block->address, stream));
    else
        MUST(cudaFree(block->address));
    block->address = NULL;
}

/* Memory that the program maps itself, and maps once more. */
static void map(size_t size, unsigned char value) {
    static const struct properties properties = {PINNED, 0, {ON_DEVICE, 0}, NULL, {0}};
    static const struct access access = {{ON_DEVICE, 0}, READ_AND_WRITE};
    device_address address;
    uint64_t chunk;
    MUST(cuMemCreate(&chunk, size, &properties, 0));
    MUST(cuMemAddressReserve(&address, size, 0, 0, 0));
    for (int turn = 0; turn < 2; turn++) {
        MUST(cuMemMap(address, size, 0, chunk, 0));
        MUST(cuMemSetAccess(address, size, &access, 1));
        if (turn == 0) {
            MUST(cuMemsetD8_v2(address, value, 1));
            MUST(cuMemsetD8_v2(address + size - 1, value, 1));
        }
        check(&(struct block){(unsigned char *)address, size, value, 0});
        MUST(cuMemUnmap(address, size));
    }
    MUST(cuMemRelease(chunk));
    MUST(cuMemAddressFree(address, size));
}

int main(int count, char **arguments) {
    static const size_t sizes[] = {1, 3000, MIB, 5 * MIB, 12 * MIB, 20 * MIB};
    size_t before, after, total;
    expected = count == 2 ? atoi(arguments[1]) : 0;
    MUST(cudaFree(NULL));
    MUST(cudaMemGetInfo(&before, &total));
    MUST(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < BLOCKS; i++)
            if (blocks[i].address == NULL)
                take(&blocks[i], sizes[(i * 5 + round) % 6], (i + round) % 3 == 0, round * BLOCKS + i);
        /* Every second one, so that what is free lies apart. */
        for (int i = round % 2; i < BLOCKS; i += 2)
            give_back(&blocks[i]);
        struct block large = {0};
        take(&large, 40 * MIB, 0, round);
        give_back(&large);
        map((round % 2 + 1) * 2 * MIB, round);
    }
    for (int i = 0; i < BLOCKS; i++)
        give_back(&blocks[i]);
    MUST(cudaStreamDestroy(stream));
    MUST(cudaDeviceReset());
    MUST(cudaFree(NULL));
    MUST(cudaMemGetInfo(&after, &total));
    printf("%d wrong, %s\n", wrong, after == before ? "all there" : "some lost");
    return 0;
}
