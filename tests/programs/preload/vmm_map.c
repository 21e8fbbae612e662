/* VMM: memory that the program creates and maps itself, again and again, in the usual order and in others; with
 * a number only: once, with that many MiB of the pool after it; with 0 it stays for a while then. With
 * `asleep` it ends with memory released and the addresses reserved, and with `wanted` it asks for addresses
 * that it has freed, which the driver may or may not give it.
 *
 * Run: vmm_map
 * Run: vmm_map 400
 */
#include "map.h"

extern int cuMemExportToShareableHandle(void *, uint64_t, int, uint64_t);
extern int cuMemImportFromShareableHandle(uint64_t *, void *, int);
enum { FILE_DESCRIPTOR = 1 };

static struct properties properties = {PINNED, FILE_DESCRIPTOR, {ON_DEVICE, 0}, NULL, {0}};
static struct access both = {{ON_DEVICE, 0}, READ_AND_WRITE};
static size_t step;

struct piece {
    device_address address;
    uint64_t handle;
    size_t size;
};

/* As XLA does for each array. */
static int put_up(struct piece *piece, size_t size) {
    piece->size = size;
    int status = cuMemCreate(&piece->handle, size, &properties, 0);
    if (status)
        return status;
    return cuMemAddressReserve(&piece->address, size, step, 0, 0) |
           cuMemMap(piece->address, size, 0, piece->handle, 0) |
           cuMemSetAccess(piece->address, size, &both, 1);
}

static int take_down(struct piece *piece) {
    return cuMemUnmap(piece->address, piece->size) | cuMemRelease(piece->handle) |
           cuMemAddressFree(piece->address, piece->size);
}

/* Whether the ends of some memory hold this byte, after it was filled with it. */
static int holds(device_address address, size_t size, unsigned char value, int fill) {
    enum { END = 4096 };
    unsigned char ends[2 * END];
    int status = fill ? cuMemsetD8_v2(address, value, size) : 0;
    status |= cuMemcpyDtoH_v2(ends, address, END);
    status |= cuMemcpyDtoH_v2(ends + END, address + size - END, END);
    size_t same = 0;
    while (status == 0 && same < sizeof ends && ends[same] == value)
        same++;
    return same == sizeof ends;
}

static size_t free_bytes(void) {
    size_t now = 0, total;
    cudaMemGetInfo(&now, &total);
    return now;
}

/* Several live at a time, each with its own bytes. */
static void *rounds(void *wrong) {
    struct piece pieces[6];
    cudaSetDevice(0);
    for (int round = 0; round < 30; round++)
        for (int i = 0; i < 6; i++) {
            if (round > 0) {
                *(int *)wrong += !holds(pieces[i].address, pieces[i].size, 10 * i + (round - 1) % 10, 0);
                *(int *)wrong += take_down(&pieces[i]) != 0;
            }
            *(int *)wrong += put_up(&pieces[i], (1 + (i + round) % 3) * step) != 0;
            *(int *)wrong += !holds(pieces[i].address, pieces[i].size, 10 * i + round % 10, 1);
        }
    for (int i = 0; i < 6; i++)
        *(int *)wrong += take_down(&pieces[i]) != 0;
    return NULL;
}

static void show_attribute(const char *what, device_address address) {
    unsigned type = 77;
    device_address start = 0;
    size_t size = 0;
    int status = cuPointerGetAttribute(&type, 2, address);
    printf("%s: attribute %d, %u; ", what, status, type);
    status = cuMemGetAddressRange_v2(&start, &size, address);
    printf("range %d, %zu\n", status, size);
}

/* Much of it, taken down again; then memory of the pool's, and more of it. */
static int crowded(size_t mib) {
    struct piece pieces[40], more;
    void *pooled = NULL;
    SHOW(cuMemGetAllocationGranularity(&step, &properties, MINIMUM));
    int status = 0;
    for (int i = 0; i < 40; i++)
        status |= put_up(&pieces[i], 2 * step);
    for (int i = 0; i < 40; i++)
        status |= take_down(&pieces[i]);
    printf("status %d\n", status);
    SHOW(cudaMalloc(&pooled, mib * MIB));
    SHOW(cudaFree(pooled));
    SHOW(put_up(&more, mib * MIB + (mib == 0) * step));
    SHOW(take_down(&more));
    if (mib == 0)
        usleep(300000);
    return 0;
}

/* Released with the addresses kept, and nothing else done. */
static int asleep(void) {
    struct piece piece;
    SHOW(cuMemGetAllocationGranularity(&step, &properties, MINIMUM));
    SHOW(put_up(&piece, 8 * step));
    SHOW(cuMemUnmap(piece.address, piece.size));
    SHOW(cuMemRelease(piece.handle));
    return 0;
}

/* The second time, as by then the program is known to give addresses back. */
static int wanted(void) {
    struct piece piece;
    device_address again = 0;
    SHOW(cuMemGetAllocationGranularity(&step, &properties, MINIMUM));
    for (int round = 0; round < 2; round++) {
        SHOW(put_up(&piece, step));
        SHOW(take_down(&piece));
    }
    SHOW(cuMemAddressReserve(&again, step, 0, piece.address, 0));
    printf("there %d\n", again == piece.address);
    SHOW(cuMemAddressFree(again, step));
    return 0;
}

int main(int count, char **arguments) {
    struct piece piece, other;
    pthread_t threads[4];
    int wrong = 0, wrongs[4] = {0};
    uint64_t again = 0;
    void *pooled;

    SHOW(cudaSetDevice(0));
    if (count == 2 && strcmp(arguments[1], "asleep") == 0)
        return asleep();
    if (count == 2 && strcmp(arguments[1], "wanted") == 0)
        return wanted();
    if (count == 2)
        return crowded(strtoul(arguments[1], NULL, 10));
    SHOW(cudaMalloc(&pooled, 3 * MIB));
    SHOW(cuMemGetAllocationGranularity(&step, &properties, MINIMUM));
    size_t before = free_bytes();

    rounds(&wrong);
    printf("rounds: %d wrong, given back %d\n", wrong, free_bytes() == before);
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, rounds, &wrongs[i]);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        printf("thread: %d wrong\n", wrongs[i]);
    }
    printf("given back %d\n", free_bytes() == before);

    /* Unmapped, it is not there, and comes back with what was written. */
    SHOW(put_up(&piece, step));
    printf("written %d\n", holds(piece.address, step, 5, 1));
    show_attribute("mapped", piece.address);
    SHOW(cuMemUnmap(piece.address, step));
    show_attribute("unmapped", piece.address);
    SHOW(cuMemMap(piece.address, step, 0, piece.handle, 0));
    SHOW(cuMemSetAccess(piece.address, step, &both, 1));
    printf("kept %d\n", holds(piece.address, step, 5, 0));
    SHOW(cuMemUnmap(piece.address, step));
    SHOW(cuMemMap(piece.address, step, 0, piece.handle, 0));
    SHOW(cuMemSetAccess(piece.address, step, &both, 1));
    printf("kept %d, taken %d\n", holds(piece.address, step, 5, 0), before - free_bytes() == step);

    /* Released with the addresses kept, as by programs that sleep: the memory is free. */
    SHOW(cuMemUnmap(piece.address, step));
    SHOW(cuMemRelease(piece.handle));
    printf("given back %d\n", free_bytes() == before);
    show_attribute("released", piece.address);
    SHOW(cuMemCreate(&piece.handle, step, &properties, 0));
    SHOW(cuMemMap(piece.address, step, 0, piece.handle, 0));
    SHOW(cuMemSetAccess(piece.address, step, &both, 1));
    printf("written %d, taken %d\n", holds(piece.address, step, 6, 1), before - free_bytes() == step);
    SHOW(take_down(&piece));

    /* The handle is mapped elsewhere than where it comes with, in another order, and twice. */
    SHOW(put_up(&piece, step));
    SHOW(take_down(&piece));
    SHOW(cuMemAddressReserve(&piece.address, 3 * step, 0, 0, 0));
    SHOW(cuMemCreate(&piece.handle, step, &properties, 0));
    SHOW(cuMemMap(piece.address, step, 0, piece.handle, 0));
    SHOW(cuMemMap(piece.address + 2 * step, step, 0, piece.handle, 0));
    SHOW(cuMemSetAccess(piece.address, step, &both, 1));
    SHOW(cuMemSetAccess(piece.address + 2 * step, step, &both, 1));
    printf("written %d\n", holds(piece.address, step, 7, 1));
    printf("the same memory %d\n", holds(piece.address + 2 * step, step, 7, 0));
    SHOW(cuMemUnmap(piece.address, step));
    SHOW(cuMemUnmap(piece.address + 2 * step, step));
    SHOW(cuMemRelease(piece.handle));
    SHOW(cuMemAddressFree(piece.address, 3 * step));
    SHOW(put_up(&piece, 2 * step));
    SHOW(take_down(&piece));
    SHOW(put_up(&piece, 2 * step));
    SHOW(put_up(&other, 2 * step));
    SHOW(cuMemUnmap(piece.address, 2 * step));
    SHOW(cuMemUnmap(other.address, 2 * step));
    SHOW(cuMemMap(piece.address, 2 * step, 0, other.handle, 0));
    SHOW(cuMemMap(other.address, 2 * step, 0, piece.handle, 0));
    SHOW(cuMemSetAccess(piece.address, 2 * step, &both, 1));
    SHOW(cuMemSetAccess(other.address, 2 * step, &both, 1));
    printf("apart %d", holds(piece.address, 2 * step, 1, 1) && holds(other.address, 2 * step, 2, 1));
    printf(" %d\n", holds(piece.address, 2 * step, 1, 0));
    again = piece.handle, piece.handle = other.handle, other.handle = again;
    SHOW(take_down(&piece));
    SHOW(take_down(&other));
    printf("given back %d\n", free_bytes() == before);

    /* Held by one more: there until that one lets go, too. */
    SHOW(put_up(&piece, step));
    SHOW(cuMemRetainAllocationHandle(&again, (void *)piece.address));
    printf("the same handle %d\n", again == piece.handle);
    printf("written %d\n", holds(piece.address, step, 8, 1));
    SHOW(cuMemRelease(again));
    SHOW(take_down(&piece));
    printf("given back %d\n", free_bytes() == before);
    SHOW(put_up(&piece, step));
    SHOW(cuMemRetainAllocationHandle(&again, (void *)piece.address));
    SHOW(take_down(&piece));
    printf("held %d\n", before - free_bytes() == step);
    SHOW(cuMemRelease(again));
    printf("given back %d\n", free_bytes() == before);

    /* Released while it is mapped: the mapping holds it. */
    SHOW(put_up(&piece, step));
    SHOW(cuMemRelease(piece.handle));
    printf("written %d, taken %d\n", holds(piece.address, step, 9, 1), before - free_bytes() == step);
    SHOW(cuMemUnmap(piece.address, step));
    SHOW(cuMemAddressFree(piece.address, step));
    printf("given back %d\n", free_bytes() == before);

    /* A handle that is never mapped, and one that others get: what they have stays as it was. */
    SHOW(put_up(&piece, step));
    SHOW(take_down(&piece));
    SHOW(cuMemCreate(&again, step, &properties, 0));
    SHOW(cuMemRelease(again));
    long file = -1;
    SHOW(put_up(&piece, step));
    printf("written %d\n", holds(piece.address, step, 3, 1));
    SHOW(cuMemExportToShareableHandle(&file, piece.handle, FILE_DESCRIPTOR, 0));
    SHOW(take_down(&piece));
    SHOW(put_up(&other, step));
    printf("written %d\n", holds(other.address, step, 4, 1));
    SHOW(cuMemImportFromShareableHandle(&again, (void *)file, FILE_DESCRIPTOR));
    SHOW(cuMemAddressReserve(&piece.address, step, 0, 0, 0));
    SHOW(cuMemMap(piece.address, step, 0, again, 0));
    SHOW(cuMemSetAccess(piece.address, step, &both, 1));
    printf("as it was %d\n", holds(piece.address, step, 3, 0));
    piece.handle = again;
    SHOW(take_down(&piece));
    SHOW(take_down(&other));
    close((int)file);
    printf("given back %d\n", free_bytes() == before);

    show_data("of the pool", pooled, 3 * MIB, 8);
    SHOW(cudaFree(pooled));
    SHOW(cudaGetLastError());
    return 0;
}
