/* Pointer attributes: what can be asked about an address, be it a block's first byte or one in the middle.
 *
 *     pointer_attributes SMALL      SMALL is the size of the second block
 *
 * Run: pointer_attributes 1024
 */
#include "show.h"

static void show(const char *what, char *block, size_t offset) {
    char *address = block + offset;
    struct pointer_attributes all;
    memset(&all, 0, sizeof all);
    int status = cudaPointerGetAttributes(&all, address);
    printf("%s: %d, type %d, device %d, itself %d, host %d, last error %d\n", what, status, all.type,
           all.device, all.device_pointer == address, all.host_pointer != NULL, cudaGetLastError());
    device_address start = 0;
    size_t size = 0;
    status = cuMemGetAddressRange_v2(&start, &size, (device_address)address);
    printf("range: %d, start %ld, size %zu\n", status, start ? (long)(start - (device_address)block) : -1,
           size);
    handle context = NULL, current = NULL;
    cuCtxGetCurrent(&current);
    status = cuPointerGetAttribute(&context, 1, (device_address)address);
    printf("context: %d, current %d\n", status, context == current);
    static const int numbers[] = {2, 8, 9, 13, 16};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        unsigned value = 77;
        status = cuPointerGetAttribute(&value, numbers[i], (device_address)address);
        printf("attribute %d: %d, %u\n", numbers[i], status, value);
    }
    /* Whether it can be shared, and how, and whether network cards reach it; each in its own width. */
    for (int number = 10; number <= 15; number += number == 10 ? 4 : 1) {
        uint64_t value = 0;
        status = cuPointerGetAttribute(&value, number, (device_address)address);
        printf("attribute %d: %d, %ld\n", number, status, (long)value);
    }
    start = 0;
    status = cuPointerGetAttribute(&start, 11, (device_address)address);
    printf("range start: %d, %ld\n", status, start ? (long)(start - (device_address)block) : -1);
    status = cuPointerGetAttribute(&size, 12, (device_address)address);
    printf("range size: %d, %zu\n", status, size);
    uint64_t allocation = 0;
    int (*retain)(uint64_t *, void *) =
        (int (*)(uint64_t *, void *))dlsym(RTLD_DEFAULT, "cuMemRetainAllocationHandle");
    printf("handle: %d\n", retain ? retain(&allocation, address) : -1);
}

static uint64_t buffer(void *address) {
    uint64_t id = 0;
    SHOW(cuPointerGetAttribute(&id, 7, (device_address)address));
    return id;
}

int main(int count, char **arguments) {
    size_t size = count == 2 ? strtoul(arguments[1], NULL, 10) : 0;
    if (size == 0)
        return 2;
    char *one, *two;
    SHOW(cudaMalloc((void **)&one, 3 * MIB));
    SHOW(cudaMalloc((void **)&two, size));
    show("large", one, 0);
    show("inside large", one, 2 * MIB + 3);
    show("small", two, 0);
    show("inside small", two, size - 1);
    uint64_t first = buffer(one), again = buffer(one + MIB), other = buffer(two);
    printf("a block's number is its own: %d %d\n", first == again, first != other);
    SHOW(cudaFree(two));
    SHOW(cudaFree(one));
    SHOW(cudaMalloc((void **)&two, 3 * MIB));
    printf("and nobody else's: %d\n", buffer(two) != first);
    SHOW(cudaFree(two));
    return 0;
}
