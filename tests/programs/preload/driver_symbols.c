/* Hooks: the driver's functions, linked by symbol.
 *
 * Run: driver_symbols
 */
#include "show.h"

int main(void) {
    int device;
    handle context;
    SHOW(cuInit(0));
    SHOW(cuDeviceGet(&device, 0));
    SHOW(cuDevicePrimaryCtxRetain(&context, device));
    device_address nothing;
    SHOW(cuMemAlloc_v2(&nothing, MIB));
    SHOW(cuCtxSetCurrent(context));
    for (int round = 0; round < 3; round++) {
        device_address one, rows;
        size_t pitch;
        SHOW(cuMemAlloc_v2(&one, 3 * MIB));
        SHOW(cuMemAllocPitch_v2(&rows, &pitch, 500, 100, 4));
        printf("pitch %zu\n", pitch);
        unsigned char byte = 0;
        SHOW(cuMemsetD8_v2(one, 42, 3 * MIB));
        SHOW(cuMemcpyDtoH_v2(&byte, one + 3 * MIB - 1, 1));
        printf("byte %d\n", byte);
        SHOW(cuMemFree_v2(one));
        SHOW(cuMemFree_v2(rows));
    }
    SHOW(cuDevicePrimaryCtxRelease_v2(device));
    return 0;
}
