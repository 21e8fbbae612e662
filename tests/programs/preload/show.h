/* What the programs here use of CUDA, declared as its headers do, so that they need none: the same
 * sources are built against the stand-ins and against CUDA itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

typedef void *handle;
typedef uint64_t device_address;

enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 };
enum { NON_BLOCKING = 1 };

/* The runtime. */
extern int cudaSetDevice(int), cudaGetDevice(int *), cudaGetDeviceCount(int *);
extern int cudaMalloc(void **, size_t), cudaFree(void *), cudaMemGetInfo(size_t *, size_t *);
extern int cudaMallocPitch(void **, size_t *, size_t, size_t);
extern int cudaMallocManaged(void **, size_t, unsigned);
extern int cudaMallocAsync(void **, size_t, handle), cudaFreeAsync(void *, handle);
extern int cudaMallocFromPoolAsync(void **, size_t, handle, handle);
extern int cudaDeviceGetDefaultMemPool(handle *, int), cudaDeviceSetMemPool(int, handle);
extern int cudaMemPoolGetAttribute(handle, int, void *), cudaMemPoolSetAttribute(handle, int, void *);
extern int cudaMemPoolCreate(handle *, const void *), cudaMemPoolDestroy(handle);
extern int cudaMemset(void *, int, size_t), cudaMemsetAsync(void *, int, size_t, handle);
extern int cudaMemcpy(void *, const void *, size_t, int);
extern int cudaMemcpyAsync(void *, const void *, size_t, int, handle);
extern int cudaMemcpyPeer(void *, int, const void *, int, size_t);
extern int cudaMallocHost(void **, size_t), cudaFreeHost(void *);
extern int cudaStreamCreateWithFlags(handle *, unsigned), cudaStreamDestroy(handle);
extern int cudaStreamQuery(handle), cudaStreamSynchronize(handle), cudaDeviceSynchronize(void), cudaDeviceReset(void);
extern int cudaStreamBeginCapture(handle, int), cudaStreamEndCapture(handle, handle *);
extern int cudaStreamIsCapturing(handle, int *);
extern int cudaEventCreateWithFlags(handle *, unsigned), cudaEventRecord(handle, handle);
extern int cudaStreamWaitEvent(handle, handle, unsigned);
extern int cudaLaunchHostFunc(handle, void (*)(void *), void *);
extern int cudaGetLastError(void), cudaPeekAtLastError(void);
extern int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *);
extern int cudaDeviceCanAccessPeer(int *, int, int), cudaDeviceEnablePeerAccess(int, unsigned);

struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
};
extern int cudaPointerGetAttributes(struct pointer_attributes *, const void *);

/* `cudaPitchedPtr` and `cudaExtent`. */
struct pitched {
    void *pointer;
    size_t pitch, width, height;
};
struct extent {
    size_t width, height, depth;
};
extern int cudaMalloc3D(struct pitched *, struct extent);

/* The driver. */
extern int cuInit(unsigned), cuDeviceGet(int *, int);
extern int cuDevicePrimaryCtxRetain(handle *, int), cuDevicePrimaryCtxRelease_v2(int);
extern int cuDevicePrimaryCtxReset_v2(int);
extern int cuCtxSetCurrent(handle), cuCtxGetCurrent(handle *), cuCtxSynchronize(void);
extern int cuCtxCreate_v2(handle *, unsigned, int), cuCtxDestroy_v2(handle);
extern int cuMemAlloc_v2(device_address *, size_t), cuMemFree_v2(device_address);
extern int cuMemAllocPitch_v2(device_address *, size_t *, size_t, size_t, unsigned);
extern int cuMemAllocAsync(device_address *, size_t, handle), cuMemFreeAsync(device_address, handle);
extern int cuMemGetInfo_v2(size_t *, size_t *);
extern int cuMemGetAddressRange_v2(device_address *, size_t *, device_address);
extern int cuMemsetD8_v2(device_address, unsigned char, size_t);
extern int cuMemcpyDtoH_v2(void *, device_address, size_t);
extern int cuPointerGetAttribute(void *, int, device_address);

/* Prints what a call returned. */
#define SHOW(call) (printf("%s: %d\n", #call, (int)(call)), fflush(stdout))

/* Fills memory, reads it back, and says whether it is what was written. */
static inline void show_data(const char *what, void *address, size_t size, unsigned char value) {
    unsigned char *copy = malloc(size);
    memset(copy, ~value, size);
    int filled = cudaMemset(address, value, size);
    int copied = cudaMemcpy(copy, address, size, DEVICE_TO_HOST);
    size_t same = 0;
    while (same < size && copy[same] == value)
        same++;
    printf("%s: filled %d, copied %d, %s\n", what, filled, copied, same == size ? "the same" : "OTHER");
    free(copy);
}

/* Work that takes a while, and leaves a mark at its end. */
static volatile int slow_done;
static inline void slow(void *unused) {
    (void)unused;
    usleep(100000);
    slow_done = 1;
}
