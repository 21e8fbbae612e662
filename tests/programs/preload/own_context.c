/* Contexts: a context that the program created itself owns its memory, which ends with it.
 *
 * Run: own_context
 */
#include "show.h"

int main(void) {
    handle primary, own, current, owner;
    device_address one, two, three;
    size_t before, now, total;
    SHOW(cuInit(0));
    SHOW(cuDevicePrimaryCtxRetain(&primary, 0));
    SHOW(cuCtxSetCurrent(primary));
    SHOW(cuMemAlloc_v2(&one, 4 * MIB));
    SHOW(cuCtxCreate_v2(&own, 0, 0));
    SHOW(cuMemGetInfo_v2(&before, &total));
    SHOW(cuCtxGetCurrent(&current));
    printf("its own: %d\n", current == own && own != primary);
    SHOW(cuMemAlloc_v2(&two, 64 * MIB));
    SHOW(cuMemAlloc_v2(&three, 4 * MIB));
    SHOW(cuPointerGetAttribute(&owner, 1, two));
    printf("belongs to it: %d\n", owner == own);
    SHOW(cuPointerGetAttribute(&owner, 1, one));
    printf("belongs to the primary one: %d\n", owner == primary);
    SHOW(cuMemFree_v2(three));
    SHOW(cuMemFree_v2(one));
    SHOW(cuMemFree_v2(one));
    SHOW(cuCtxDestroy_v2(own));
    SHOW(cuCtxSetCurrent(primary));
    SHOW(cuMemGetInfo_v2(&now, &total));
    printf("all of it is free again: %d\n", now >= before);
    SHOW(cuMemFree_v2(two));
    SHOW(cuMemAlloc_v2(&one, 4 * MIB));
    SHOW(cuMemFree_v2(one));
    SHOW(cuDevicePrimaryCtxRelease_v2(0));
    return 0;
}
