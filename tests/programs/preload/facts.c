/* What CUDA does where its documentation leaves it open, and what its calls cost. For reading, on a
 * real GPU, bare. */
#include "map.h"
#include <time.h>

extern int cuStreamQuery(handle), cuStreamGetId(handle, uint64_t *), cuStreamGetCtx(handle, handle *);
extern int cuStreamIsCapturing(handle, int *), cuEventQuery(handle), cuEventCreate(handle *, unsigned);
extern int cuMemPoolGetAttribute(handle, int, void *);
extern int cuDeviceGetDefaultMemPool(handle *, int);
extern int cuThreadExchangeStreamCaptureMode(int *);
extern int cuModuleLoadData(handle *, const void *), cuModuleGetFunction(handle *, handle, const char *);
extern int cuLaunchKernel(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          handle, void **, void **);

typedef struct {
    char bytes[64];
} ipc_handle;
extern int cuMemExportToShareableHandle(void *, uint64_t, int, uint64_t);
extern int cuMemImportFromShareableHandle(uint64_t *, void *, int);
extern int cudaIpcGetMemHandle(ipc_handle *, void *), cudaIpcOpenMemHandle(void **, ipc_handle, unsigned);
extern int cudaIpcCloseMemHandle(void *);

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

/* What it costs to make chunks that other processes and network cards can reach. */
static void chunks(void) {
    enum { MOST = 64 };
    static const size_t sizes[] = {2, 20, 128, 512};
    static const struct access access = {{1, 0}, 3};
    for (int at = 0; at < 4; at++)
        for (int round = 0; round < 2; round++)
            for (int kind = 0; kind < 4; kind++) {
                size_t size = sizes[at] * MIB;
                int count = 4096 / sizes[at] < MOST ? 4096 / sizes[at] : MOST, status = 0;
                struct properties properties = {1, kind & 1, {1, 0}, NULL, {0}};
                properties.flags[1] = kind >> 1;
                uint64_t made[MOST] = {0};
                device_address base = 0;
                double times[6];
                status |= cuMemAddressReserve(&base, count * size, 0, 0, 0);
                times[0] = now();
                for (int i = 0; i < count; i++)
                    status |= cuMemCreate(&made[i], size, &properties, 0);
                times[1] = now();
                for (int i = 0; i < count; i++)
                    status |= cuMemMap(base + i * size, size, 0, made[i], 0);
                times[2] = now();
                for (int i = 0; i < count; i++)
                    status |= cuMemSetAccess(base + i * size, size, &access, 1);
                times[3] = now();
                for (int i = 0; i < count; i++)
                    status |= cuMemUnmap(base + i * size, size);
                times[4] = now();
                for (int i = 0; i < count; i++)
                    status |= cuMemRelease(made[i]);
                times[5] = now();
                status |= cuMemAddressFree(base, count * size);
                printf("%zu MiB, file %d, network %d: status %d; microseconds a chunk:", sizes[at], kind & 1,
                       kind >> 1, status);
                static const char *names[] = {"create", "map", "access", "unmap", "release"};
                for (int i = 0; i < 5; i++)
                    printf(" %s %.1f", names[i], (times[i + 1] - times[i]) / 1e3 / count);
                printf("\n");
            }
}

/* A chunk's file, taken in twice, and several mappings opened and taken down at once. */
static void files(void) {
    static const struct properties properties = {1, 1, {1, 0}, NULL, {0}};
    static const struct access access = {{1, 0}, 3};
    uint64_t chunk, again[2];
    device_address base;
    int file;
    SHOW(cuMemCreate(&chunk, 2 * MIB, &properties, 0));
    double start = now();
    SHOW(cuMemExportToShareableHandle(&file, chunk, 1, 0));
    printf("  %.1f us\n", (now() - start) / 1e3);
    for (int i = 0; i < 2; i++) {
        start = now();
        SHOW(cuMemImportFromShareableHandle(&again[i], (void *)(long)file, 1));
        printf("  %.1f us; the chunk itself: %d\n", (now() - start) / 1e3, again[i] == chunk);
    }
    close(file);
    SHOW(cuMemAddressReserve(&base, 4 * MIB, 0, 0, 0));
    for (int i = 0; i < 2; i++) {
        SHOW(cuMemMap(base + i * 2 * MIB, 2 * MIB, 0, again[i], 0));
        SHOW(cuMemRelease(again[i]));
    }
    SHOW(cuMemSetAccess(base, 4 * MIB, &access, 1));
    SHOW(cuMemsetD8_v2(base, 42, 2 * MIB));
    unsigned char byte = 0;
    SHOW(cuMemcpyDtoH_v2(&byte, base + 2 * MIB, 1));
    printf("the same memory: %d\n", byte == 42);
    /* What Triton asks of each pointer at each launch; of CUDA's own memory for comparison. */
    device_address mapped = base + MIB, plain, answer;
    SHOW(cuMemAlloc_v2(&plain, MIB));
    COST(cuPointerGetAttribute(&answer, 3, mapped));
    COST(cuPointerGetAttribute(&answer, 3, plain));
    SHOW(cuMemFree_v2(plain));
    SHOW(cuMemUnmap(base, 4 * MIB));
    SHOW(cuMemAddressFree(base, 4 * MIB));
    SHOW(cuMemRelease(chunk));
}

/* CUDA's own way to share memory, of one process with its child. */
static void shared(void) {
    int down[2], up[2];
    struct {
        ipc_handle whole, inside;
    } handles;
    if (pipe(down) != 0 || pipe(up) != 0)
        return;
    fflush(stdout);
    if (fork() == 0) {
        void *whole, *inside;
        device_address start;
        size_t size;
        char byte;
        if (read(down[0], &handles, sizeof handles) != sizeof handles)
            _exit(1);
        SHOW(cudaIpcOpenMemHandle(&whole, handles.whole, 0));
        double begin = now();
        SHOW(cudaIpcOpenMemHandle(&whole, handles.whole, 1));
        printf("  %.0f us\n", (now() - begin) / 1e3);
        SHOW(cudaIpcOpenMemHandle(&inside, handles.inside, 1));
        printf("inside: %ld bytes from the start\n", (long)((char *)inside - (char *)whole));
        SHOW(cuMemGetAddressRange_v2(&start, &size, (device_address)whole));
        printf("range: %d, %zu bytes\n", start == (device_address)whole, size);
        static const int attributes[] = {1, 7, 10, 11, 12, 14, 15, 17, 18, 19, 20};
        for (size_t at = 0; at < sizeof attributes / sizeof *attributes; at++) {
            uint64_t value = 0;
            int status = cuPointerGetAttribute(&value, attributes[at], (device_address)whole);
            printf("  attribute %d: %d, %#lx\n", attributes[at], status, (long)value);
        }
        ipc_handle on;
        SHOW(cudaIpcGetMemHandle(&on, whole));
        SHOW(cudaFree(whole));
        SHOW(cudaIpcCloseMemHandle(whole));
        SHOW(cudaIpcCloseMemHandle(whole));
        SHOW(cudaIpcCloseMemHandle(whole));
        fflush(stdout);
        if (write(up[1], "", 1) != 1 || read(down[0], &byte, 1) != 1)
            _exit(1);
        SHOW(cudaIpcOpenMemHandle(&whole, handles.whole, 1));
        fflush(stdout);
        _exit(0);
    }
    char *block;
    void *again;
    char byte;
    close(up[1]);
    SHOW(cudaMalloc((void **)&block, 5 * MIB));
    SHOW(cudaIpcGetMemHandle(&handles.whole, block));
    SHOW(cudaIpcGetMemHandle(&handles.inside, block + MIB));
    SHOW(cudaIpcOpenMemHandle(&again, handles.whole, 1));
    fflush(stdout);
    if (write(down[1], &handles, sizeof handles) != sizeof handles || read(up[0], &byte, 1) != 1)
        return;
    SHOW(cudaFree(block));
    fflush(stdout);
    if (write(down[1], "", 1) == 1)
        wait(NULL);
}

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

/* Work that faults, and what can be done afterwards. In a process of its own, which may end by that. */
static void faults(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) {
        int status = 0;
        waitpid(child, &status, 0);
        printf("the process with the fault ended with status %d, by signal %d\n", WEXITSTATUS(status),
               WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        return;
    }
    static const char *text = ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry fault()\n"
                              "{\n.reg .b64 a;\nmov.u64 a, 64;\nst.global.u32 [a], 1;\nret;\n}\n";
    handle module, function, event;
    void *block = NULL;
    cudaFree(NULL);
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
    exit(0);
}

int main(void) {
    handle stream, event, context;
    uint64_t number;
    int capturing;
    /* First: their children use CUDA, too. */
    faults();
    shared();
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
    chunks();
    files();
    ranges();
    frees();
    captures();
    return 0;
}
