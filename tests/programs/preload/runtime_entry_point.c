/* Hooks: the driver's functions, found by cudaGetDriverEntryPoint.
 *
 * Run: runtime_entry_point
 */
#include "show.h"

int main(void) {
    int (*allocate)(device_address *, size_t) = NULL;
    int (*release)(device_address) = NULL;
    int found = -1;
    SHOW(cudaFree(NULL));
    SHOW(cudaGetDriverEntryPointByVersion("cuMemAlloc", (void **)&allocate, 12000, 0, &found));
    printf("found %d\n", found);
    SHOW(cudaGetDriverEntryPointByVersion("cuMemFree", (void **)&release, 12000, 0, &found));
    printf("found %d\n", found);
    void *none = &none;
    SHOW(cudaGetDriverEntryPointByVersion("cuNoSuchThing", &none, 12000, 0, &found));
    printf("found %d, %s\n", found, none ? "something" : "nothing");
    if (!allocate || !release)
        return 1;
    for (int round = 0; round < 3; round++) {
        device_address one;
        SHOW(allocate(&one, 7 * MIB));
        SHOW(release(one));
    }
    return 0;
}
