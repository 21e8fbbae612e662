/* What CUDA does where its documentation leaves it open, and what its calls cost. For reading, on a
 * real GPU, bare. */
#include "show.h"
#include <time.h>

extern int cuStreamQuery(handle), cuStreamGetId(handle, uint64_t *), cuStreamGetCtx(handle, handle *);
extern int cuStreamIsCapturing(handle, int *), cuEventQuery(handle), cuEventCreate(handle *, unsigned);
extern int cuMemPoolGetAttribute(handle, int, void *);
extern int cuDeviceGetDefaultMemPool(handle *, int);
extern int cuThreadExchangeStreamCaptureMode(int *);
extern int cuModuleLoadData(handle *, const void *), cuModuleGetFunction(handle *, handle, const char *);
extern int cuLaunchKernel(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          handle, void **, void **);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

#define COST(call)                                                                                     \
    do {                                                                                               \
        double start = now();                                                                          \
        int status = 0;                                                                                \
        for (int i = 0; i < 10000; i++)                                                                \
            status = (call);                                                                           \
        printf("cost of %s: %.0f ns, status %d\n", #call, (now() - start) / 10000, status);            \
    } while (0)

static void ranges(void) {
    static const size_t sizes[] = {1, 1000, 3 * MIB + 5};
    for (int i = 0; i < 3; i++)
        for (int ordered = 0; ordered < 2; ordered++) {
            void *block;
            device_address start = 0, value = 77;
            size_t size = 0, before, after, total;
            cudaMemGetInfo(&before, &total);
            int status = ordered ? cudaMallocAsync(&block, sizes[i], NULL) : cudaMalloc(&block, sizes[i]);
            cudaMemGetInfo(&after, &total);
            printf("%zu bytes, ordered %d: %d, free memory less by %zu\n", sizes[i], ordered, status,
                   before - after);
            status = cuMemGetAddressRange_v2(&start, &size, (device_address)block);
            printf("  range %d: start %d, size %zu\n", status, start == (device_address)block, size);
            static const int attributes[] = {1, 7, 10, 11, 12, 14, 15, 17, 18, 19, 20};
            for (size_t at = 0; at < sizeof attributes / sizeof *attributes; at++) {
                value = 0;
                status = cuPointerGetAttribute(&value, attributes[at], (device_address)block);
                printf("  attribute %d: %d, %#lx\n", attributes[at], status, (long)value);
            }
            SHOW(cudaFree(block));
        }
}

static void frees(void) {
    void *plain, *ordered;
    SHOW(cudaMalloc(&plain, MIB));
    SHOW(cudaFreeAsync(plain, NULL));
    SHOW(cudaFree(plain));
    SHOW(cudaMallocAsync(&ordered, MIB, NULL));
    SHOW(cudaFree(ordered));
    SHOW(cudaMallocAsync(&ordered, 0, NULL));
    SHOW(cudaFreeAsync(NULL, NULL));
    SHOW(cudaMallocAsync(&ordered, MIB, NULL));
    SHOW(cudaFreeAsync(ordered, NULL));
    SHOW(cudaFreeAsync(ordered, NULL));
    SHOW(cudaGetLastError());
    handle pool;
    cuDeviceGetDefaultMemPool(&pool, 0);
    SHOW(cudaMallocAsync(&ordered, 3 * MIB + 5, NULL));
    for (int attribute = 5; attribute <= 8; attribute++) {
        uint64_t value = 0;
        int status = cuMemPoolGetAttribute(pool, attribute, &value);
        printf("pool attribute %d: %d, %lu\n", attribute, status, (long)value);
    }
    SHOW(cudaFreeAsync(ordered, NULL));
}

static void captures(void) {
    for (int mode = 0; mode < 3; mode++) {
        handle stream, graph = NULL;
        void *before, *inside = NULL;
        int capturing = -1, relaxed = 2;
        printf("capture, mode %d\n", mode);
        cudaMalloc(&before, MIB);
        cudaStreamCreateWithFlags(&stream, NON_BLOCKING);
        SHOW(cudaStreamBeginCapture(stream, mode));
        cuThreadExchangeStreamCaptureMode(&relaxed);
        SHOW(cuStreamIsCapturing(NULL, &capturing));
        SHOW(cudaMalloc(&inside, MIB));
        SHOW(cudaFree(inside));
        SHOW(cuCtxSynchronize());
        cuThreadExchangeStreamCaptureMode(&relaxed);
        SHOW(cudaMallocAsync(&inside, MIB, stream));
        SHOW(cudaFreeAsync(inside, stream));
        SHOW(cudaStreamIsCapturing(stream, &capturing));
        printf("capturing %d\n", capturing);
        SHOW(cudaFree(before));
        SHOW(cudaStreamIsCapturing(stream, &capturing));
        printf("capturing %d\n", capturing);
        SHOW(cudaStreamEndCapture(stream, &graph));
        SHOW(cudaFree(before));
        SHOW(cudaStreamDestroy(stream));
        SHOW(cudaGetLastError());
    }
}

static void faults(void) {
    static const char *text = ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry fault()\n"
                              "{\n.reg .b64 a;\nmov.u64 a, 64;\nst.global.u32 [a], 1;\nret;\n}\n";
    handle module, function, event;
    void *block;
    SHOW(cuEventCreate(&event, 2));
    SHOW(cuModuleLoadData(&module, text));
    SHOW(cuModuleGetFunction(&function, module, "fault"));
    SHOW(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
    usleep(200000);
    SHOW(cuStreamQuery(NULL));
    SHOW(cuEventQuery(event));
    uint64_t number = 0;
    int capturing = 0;
    SHOW(cuStreamGetId(NULL, &number));
    SHOW(cuStreamIsCapturing(NULL, &capturing));
    SHOW(cudaMalloc(&block, MIB));
    SHOW(cudaMallocAsync(&block, MIB, NULL));
    SHOW(cuCtxSynchronize());
    SHOW(cudaFree(NULL));
    SHOW(cudaGetLastError());
    SHOW(cudaGetLastError());
    SHOW(cudaDeviceReset());
    SHOW(cudaMalloc(&block, MIB));
    SHOW(cudaFree(block));
}

int main(void) {
    handle stream, event, context;
    uint64_t number;
    int capturing;
    cudaFree(NULL);
    void *found = NULL, *library = dlopen("libcuda.so.1", RTLD_NOW);
    cudaGetDriverEntryPointByVersion("cuMemAlloc", &found, 12000, 0, &capturing);
    printf("one address: %d\n", found == dlsym(library, "cuMemAlloc_v2"));
    cudaStreamCreateWithFlags(&stream, NON_BLOCKING);
    cuEventCreate(&event, 2);
    COST(cuStreamQuery(NULL));
    COST(cuStreamQuery(stream));
    COST(cuEventQuery(event));
    COST(cuStreamGetId(stream, &number));
    COST(cuStreamGetCtx(stream, &context));
    COST(cuStreamIsCapturing(NULL, &capturing));
    COST(cuCtxGetCurrent(&context));
    COST(cuCtxSynchronize());
    ranges();
    frees();
    captures();
    faults();
    return 0;
}
