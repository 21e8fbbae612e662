/* The driver's functions by which a program creates and maps memory itself. */
#include "show.h"

/* `CUmemAllocationProp` and `CUmemAccessDesc`. */
struct location {
    int type, device;
};
struct properties {
    int type, handles;
    struct location location;
    void *unused;
    unsigned char flags[8];
};
struct access {
    struct location location;
    int flags;
};
enum { PINNED = 1, ON_DEVICE = 1, READ_AND_WRITE = 3, MINIMUM = 0 };

extern int cuMemGetAllocationGranularity(size_t *, const struct properties *, int);
extern int cuMemAddressReserve(device_address *, size_t, size_t, device_address, uint64_t);
extern int cuMemAddressFree(device_address, size_t);
extern int cuMemCreate(uint64_t *, size_t, const struct properties *, uint64_t), cuMemRelease(uint64_t);
extern int cuMemMap(device_address, size_t, size_t, uint64_t, uint64_t), cuMemUnmap(device_address, size_t);
extern int cuMemSetAccess(device_address, size_t, const struct access *, size_t);
extern int cuMemRetainAllocationHandle(uint64_t *, void *);
