/* VMM: random calls that create, map and unmap memory, wrong ones among them, and what each of them returns:
 * vmm_random_calls SEED CALLS. For the simulated GPU: a real one may end a process for less.
 */
#include "map.h"

extern int cuMemExportToShareableHandle(void *, uint64_t, int, uint64_t);
enum { FILE_DESCRIPTOR = 1, READ_ONLY = 1, COUNT = 6 };

struct handle_of {
    uint64_t handle;
    int holds, device;
    size_t size;
} handles[COUNT];

struct range {
    device_address address;
    size_t size;
    int accessible;
} ranges[COUNT];

static const size_t step = 2 * MIB;
static uint64_t state;
static int devices = 1;
static size_t before;

static unsigned any(unsigned below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % below;
}

static void show_free(void) {
    size_t now = 0, total;
    cudaMemGetInfo(&now, &total);
    printf("taken %ld ", (long)(before - now));
}

static void show_memory(device_address address, unsigned char value) {
    unsigned char read = 0;
    int status = any(4) ? cuMemsetD8_v2(address + step - 1, value, 1) : 0;
    int copied = cuMemcpyDtoH_v2(&read, address + step - 1, 1);
    printf("memory %d %d %d ", status, copied, status == 0 && copied == 0 && read == value);
}

/* As programs do: all up, and all down again. */
static int cycle(unsigned char value) {
    struct properties properties = {PINNED, FILE_DESCRIPTOR, {ON_DEVICE, 0}, NULL, {0}};
    struct access access = {{ON_DEVICE, 0}, READ_AND_WRITE};
    size_t size = step * (1 + any(3));
    device_address address;
    uint64_t handle;
    int status = cuMemCreate(&handle, size, &properties, 0);
    if (status)
        return status;
    status = cuMemAddressReserve(&address, size, 0, 0, 0) | cuMemMap(address, size, 0, handle, 0) |
             cuMemSetAccess(address, size, &access, 1);
    printf("up %d ", status);
    cuMemsetD8_v2(address + size - 1, value, 1);
    status = cuMemUnmap(address, size) | cuMemRelease(handle);
    if (any(3) == 0)
        show_free();
    return status | cuMemAddressFree(address, size);
}

static int one(struct handle_of *of, struct range *range, int what, int number) {
    struct properties properties = {PINNED, FILE_DESCRIPTOR, {ON_DEVICE, 0}, NULL, {0}};
    struct access access[] = {{{ON_DEVICE, 0}, any(6) ? READ_AND_WRITE : READ_ONLY},
                              {{ON_DEVICE, devices - 1}, READ_AND_WRITE}};
    /* Never beyond the range: what lies there is another's, and not the same one in two runs. */
    size_t offset = any(4) == 0 && range->size > step ? step : 0, size = of->holds && any(2) ? of->size : range->size;
    int fits = range->size > 0 && offset + size <= range->size, status = -1;
    device_address at = range->address + offset, start = 0;
    uint64_t again = 0;
    switch (what) {
    case 0:
        if (of->holds)
            break;
        of->size = step * (1 + any(3));
        properties.location.device = any(3) ? 0 : any(devices);
        status = cuMemCreate(&of->handle, of->size, &properties, 0);
        of->holds = status == 0;
        break;
    case 1:
        if (range->size)
            break;
        size = step * (1 + any(3));
        status = cuMemAddressReserve(&range->address, size, any(2) ? step : 0, 0, 0);
        range->size = status == 0 ? size : 0;
        range->accessible = 0;
        break;
    case 2:
    case 3:
        if (of->holds && offset + of->size <= range->size)
            status = cuMemMap(at, of->size, 0, of->handle, 0);
        break;
    case 4:
    case 5:
        if (!fits)
            break;
        status = cuMemSetAccess(at, size, access, 1 + (devices > 1 && any(3) == 0));
        range->accessible |= status == 0 && size == range->size && access[0].flags == READ_AND_WRITE;
        break;
    case 6:
        if (!fits)
            break;
        status = cuMemUnmap(at, size);
        range->accessible &= status != 0;
        break;
    case 7:
        if (!of->holds)
            break;
        status = cuMemRelease(of->handle);
        of->holds -= status == 0;
        if (of->holds == 0 && any(8) == 0)
            printf("again %d ", cuMemRelease(of->handle));
        break;
    case 8:
        if (range->size == 0)
            break;
        status = cuMemAddressFree(range->address, any(8) ? range->size : step);
        range->size = status == 0 ? 0 : range->size;
        break;
    case 9:
        if (range->size == 0)
            break;
        status = cuMemRetainAllocationHandle(&again, (void *)at);
        for (int i = 0; status == 0 && again && i < COUNT; i++)
            if (handles[i].holds && handles[i].handle == again) {
                handles[i].holds++;
                again = 0;
            }
        if (status == 0 && again)
            cuMemRelease(again);
        break;
    case 10:
        if (range->size)
            status = cuMemGetAddressRange_v2(&start, &size, at);
        if (status == 0)
            printf("range %ld %zu ", (long)(start - range->address), size);
        break;
    case 11:
        if (range->size && range->accessible)
            show_memory(range->address, number);
        break;
    case 12:
        show_free();
        break;
    case 13: {
        long file = -1;
        if (of->holds && any(4) == 0)
            status = cuMemExportToShareableHandle(&file, of->handle, FILE_DESCRIPTOR, 0);
        if (status == 0)
            close((int)file);
        break;
    }
    default:
        status = cycle(number);
    }
    return status;
}

int main(int count, char **arguments) {
    size_t total;
    void *pooled = NULL;
    if (count != 3)
        return 2;
    state = strtoull(arguments[1], NULL, 10) * 2 + 1;
    SHOW(cudaGetDeviceCount(&devices));
    SHOW(cudaSetDevice(0));
    if (any(2))
        SHOW(cudaMalloc(&pooled, MIB));
    SHOW(cudaMemGetInfo(&before, &total));
    int calls = atoi(arguments[2]);
    for (int i = 0; i < calls; i++) {
        int what = any(17);
        struct handle_of *of = &handles[any(COUNT)];
        struct range *range = &ranges[any(COUNT)];
        printf("%d: %d of %d %d ", i, what, (int)(of - handles), (int)(range - ranges));
        printf("is %d\n", one(of, range, what, i));
    }
    show_free();
    return 0;
}
