/* Contexts: the last release of a device's primary context frees its memory.
 *
 * Run: primary_context_release
 */
#include "show.h"

int main(void) {
    handle context;
    SHOW(cuInit(0));
    for (int round = 0; round < 3; round++) {
        device_address one, two;
        size_t free, total;
        SHOW(cuDevicePrimaryCtxRetain(&context, 0));
        SHOW(cuDevicePrimaryCtxRetain(&context, 0));
        SHOW(cuCtxSetCurrent(context));
        SHOW(cuMemGetInfo_v2(&free, &total));
        static size_t first;
        first = first ? first : free;
        printf("as at first: %d\n", free == first);
        SHOW(cuMemAlloc_v2(&one, 32 * MIB));
        SHOW(cuDevicePrimaryCtxRelease_v2(0));
        SHOW(cuMemAlloc_v2(&two, MIB));
        unsigned char byte = 0;
        SHOW(cuMemsetD8_v2(two, 42, MIB));
        SHOW(cuMemcpyDtoH_v2(&byte, two, 1));
        printf("byte %d\n", byte);
        SHOW(cuCtxSetCurrent(NULL));
        SHOW(cuDevicePrimaryCtxRelease_v2(0));
    }
    return 0;
}
