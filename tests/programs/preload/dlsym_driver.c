/* dlsym: the driver's functions found as a statically linked runtime finds them: `dlopen`, `dlsym`, and from
 * there on `cuGetProcAddress`, in its old form (v1) or its new one (v2), or without it (symbols).
 *
 * Run: dlsym_driver symbols
 * Run: dlsym_driver v1
 * Run: dlsym_driver v2
 */
#include "show.h"

static void *library;
static const char *way;

static void *find(const char *name, const char *symbol, int version) {
    void *found = NULL;
    int status = 0;
    if (!strcmp(way, "symbols"))
        return dlsym(library, symbol);
    if (!strcmp(way, "v1")) {
        int (*look)(const char *, void **, int, uint64_t) =
            (int (*)(const char *, void **, int, uint64_t))dlsym(library, "cuGetProcAddress");
        status = look ? look(name, &found, version, 0) : -1;
    } else {
        int (*look)(const char *, void **, int, uint64_t, int *) =
            (int (*)(const char *, void **, int, uint64_t, int *))dlsym(library,
                                                                        "cuGetProcAddress_v2");
        int result = -1;
        /* The function itself, found by itself. */
        status = look ? look("cuGetProcAddress", (void **)&look, 12000, 0, &result) : -1;
        status |= look(name, &found, version, 0, &result);
        status |= result;
    }
    if (status != 0 || found == NULL)
        printf("%s not found: %d\n", name, status);
    return found;
}

int main(int count, char **arguments) {
    if (count != 2)
        return 2;
    way = arguments[1];
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return 3;
    int (*init)(unsigned) = (int (*)(unsigned))find("cuInit", "cuInit", 2000);
    int (*retain)(handle *, int) =
        (int (*)(handle *, int))find("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000);
    int (*set)(handle) = (int (*)(handle))find("cuCtxSetCurrent", "cuCtxSetCurrent", 4000);
    int (*allocate)(device_address *, size_t) =
        (int (*)(device_address *, size_t))find("cuMemAlloc", "cuMemAlloc_v2", 3020);
    int (*release)(device_address) = (int (*)(device_address))find("cuMemFree", "cuMemFree_v2", 3020);
    if (!init || !retain || !set || !allocate || !release)
        return 4;
    handle context;
    SHOW(init(0));
    SHOW(retain(&context, 0));
    SHOW(set(context));
    for (int round = 0; round < 4; round++) {
        device_address one;
        SHOW(allocate(&one, 7 * MIB));
        SHOW(release(one));
    }
    void *absent = dlsym(library, "cuThereIsNoSuchFunction");
    printf("%s, %s\n", absent ? "found" : "not found", dlerror() ? "an error" : "no error");
    return 0;
}
