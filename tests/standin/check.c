/* Uses the runtime and the driver as a program does that was built with CUDA, and says at the first
 * thing that is not as CUDA promises. Linked with libcudart and libcuda, without CUDA's headers; made
 * for two devices of 64 MiB that work late, and the runtime of VERSION. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef void *handle;

extern int cudaDriverGetVersion(int *), cudaRuntimeGetVersion(int *), cudaGetDeviceCount(int *);
extern int cudaMalloc(void **, size_t), cudaFree(void *), cudaMemGetInfo(size_t *, size_t *);
extern int cudaMemcpy(void *, const void *, size_t, int), cudaMemset(void *, int, size_t);
extern int cudaMemcpyAsync(void *, const void *, size_t, int, handle);
extern int cudaHostAlloc(void **, size_t, unsigned), cudaFreeHost(void *);
extern int cudaStreamCreateWithFlags(handle *, unsigned), cudaStreamDestroy(handle);
extern int cudaStreamSynchronize(handle), cudaDeviceSynchronize(void), cudaDeviceReset(void);
extern int cudaEventCreate(handle *), cudaEventRecord(handle, handle), cudaEventQuery(handle);
extern int cudaEventSynchronize(handle), cudaEventElapsedTime(float *, handle, handle);
extern int cudaEventDestroy(handle), cudaStreamQuery(handle), cudaGetLastError(void);
extern int cudaPointerGetAttributes(void *, const void *);
extern int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *);
extern int cudaMallocAsync(void **, size_t, handle), cudaFreeAsync(void *, handle);
extern int cudaDeviceGetDefaultMemPool(handle *, int), cudaMemPoolGetAttribute(handle, int, void *);
extern int cudaStreamBeginCapture(handle, int), cudaStreamEndCapture(handle, handle *);
extern int cudaGraphInstantiateWithFlags(handle *, handle, unsigned long long);
extern int cudaGraphLaunch(handle, handle), cudaGraphDestroy(handle), cudaGraphExecDestroy(handle);
extern int cudaMemcpyAsync_ptsz(void *, const void *, size_t, int, handle);
extern int cudaMemcpy_ptds(void *, const void *, size_t, int);
extern int cudaStreamGetId(handle, unsigned long long *), cudaStreamQuery_ptsz(handle);
extern int cudaGetDriverEntryPointByVersion_ptsz(const char *, void **, unsigned, unsigned long long,
                                                 int *);
extern int cuStreamGetId_ptsz(handle, unsigned long long *);
extern int cuCtxGetCurrent(handle *), cuMemGetAddressRange_v2(void **, size_t *, void *);

static int line_of_failure(int line, const char *what, long got, long wanted) {
    if (got != wanted)
        printf("line %d: %s is %ld, wanted %ld\n", line, what, got, wanted);
    return got != wanted;
}
#define IS(what, wanted) \
    do { if (line_of_failure(__LINE__, #what, (long)(what), (long)(wanted))) return 1; } while (0)

enum { MIB = 1 << 20, SIZE = 3 * MIB + 5 };

int main(void) {
    int number = 0;
    IS(cudaDriverGetVersion(&number), 0);
    IS(number, 13000);
    IS(cudaRuntimeGetVersion(&number), 0);
    IS(number, VERSION);
    IS(cudaGetDeviceCount(&number), 0);
    IS(number, 2);

    /* Memory: bytes come back, and what is used is not free. */
    size_t free_before, free_now, total;
    IS(cudaMemGetInfo(&free_before, &total), 0);
    IS(total, 64 * MIB);
    char *from = malloc(SIZE), *to = calloc(1, SIZE);
    for (int i = 0; i < SIZE; i++)
        from[i] = (char)(i * 31);
    void *one, *two;
    IS(cudaMalloc(&one, SIZE), 0);
    IS(cudaMalloc(&two, SIZE), 0);
    IS(cudaMemGetInfo(&free_now, &total), 0);
    IS(free_before - free_now >= 2 * SIZE, 1);
    IS(cudaMemcpy(one, from, SIZE, 1), 0);
    IS(cudaMemcpy(two, one, SIZE, 3), 0);
    IS(cudaMemcpy(to, two, SIZE, 2), 0);
    IS(memcmp(from, to, SIZE), 0);
    IS(cudaMemset((char *)two + 1, 7, 3), 0);
    IS(cudaMemcpy(to, two, 8, 4), 0);
    IS(to[1] == 7 && to[3] == 7 && to[0] == from[0] && to[4] == from[4], 1);

    /* Errors, and the last one. */
    void *much = (void *)1;
    IS(cudaMalloc(&much, 65 * MIB), 2);
    IS(cudaGetLastError(), 2);
    IS(cudaGetLastError(), 0);
    IS(cudaMalloc(&much, 0), 0);
    IS(much, 0);
    IS(cudaFree((char *)one + 512), 1);
    IS(cudaGetLastError(), 1);

    /* Pointers: device memory, page-locked memory, any other. */
    struct { int type, device; void *device_pointer, *host_pointer; long reserved[8]; } about;
    IS(cudaPointerGetAttributes(&about, (char *)one + 100), 0);
    IS(about.type == 2 && about.device == 0 && about.device_pointer == (char *)one + 100, 1);
    IS(about.host_pointer, 0);
    void *locked;
    IS(cudaHostAlloc(&locked, 4096, 0), 0);
    IS(cudaPointerGetAttributes(&about, locked), 0);
    IS(about.type == 1 && about.host_pointer == locked, 1);
    IS(cudaPointerGetAttributes(&about, from), 0);
    IS(about.type == 0 && about.device == -2, 1);

    /* Streams and events: in order, and late where the machine is. */
    handle stream, first, last;
    IS(cudaStreamCreateWithFlags(&stream, 1), 0);
    IS(cudaEventCreate(&first), 0);
    IS(cudaEventCreate(&last), 0);
    memset(locked, 1, 4096);
    IS(cudaEventRecord(first, stream), 0);
    IS(cudaMemcpyAsync(one, locked, 4096, 1, stream), 0);
    IS(cudaEventRecord(last, stream), 0);
    IS(cudaEventQuery(last), 600);
    IS(cudaStreamQuery(stream), 600);
    memset(locked, 2, 4096); /* read when its turn comes: now is early enough */
    IS(cudaEventSynchronize(last), 0);
    float time = -1;
    IS(cudaEventElapsedTime(&time, first, last), 0);
    IS(time > 0, 1);
    IS(cudaMemcpy(to, one, 4096, 2), 0);
    IS(to[0] == 2 && to[4095] == 2, 1);

    /* In stream order, from the default pool. */
    handle pool;
    unsigned long long used;
    IS(cudaDeviceGetDefaultMemPool(&pool, 0), 0);
    IS(cudaMallocAsync(&much, SIZE, stream), 0);
    IS(cudaMemcpyAsync(much, from, SIZE, 1, stream), 0);
    IS(cudaMemcpyAsync(to, much, SIZE, 2, stream), 0);
    IS(cudaMemPoolGetAttribute(pool, 7, &used), 0);
    IS(used >= SIZE, 1);
    IS(cudaFreeAsync(much, stream), 0);
    IS(cudaFreeAsync(much, stream), 1);
    IS(cudaStreamSynchronize(stream), 0);
    IS(cudaMemPoolGetAttribute(pool, 7, &used), 0);
    IS(used, 0);
    IS(memcmp(from, to, SIZE), 0);

    /* A graph: nothing happens in the capture, all of it at each launch. */
    handle graph, executable;
    IS(cudaMemset(two, 0, SIZE), 0);
    IS(cudaStreamBeginCapture(stream, 0), 0);
    IS(cudaMemcpyAsync(two, one, 4096, 3, stream), 0);
    IS(cudaMalloc(&much, 512), 900);
    IS(cudaStreamEndCapture(stream, &graph), 901);
    IS(cudaStreamBeginCapture(stream, 0), 0);
    IS(cudaMemcpyAsync(two, one, 4096, 3, stream), 0);
    IS(cudaStreamEndCapture(stream, &graph), 0);
    IS(cudaGraphInstantiateWithFlags(&executable, graph, 0), 0);
    IS(cudaMemcpy(to, two, 4096, 2), 0);
    IS(to[0] == 0 && to[4095] == 0, 1);
    IS(cudaGraphLaunch(executable, stream), 0);
    IS(cudaStreamSynchronize(stream), 0);
    IS(cudaMemcpy(to, two, 4096, 2), 0);
    IS(to[0] == 2 && to[4095] == 2, 1);
    IS(cudaGraphDestroy(graph) | cudaGraphExecDestroy(executable), 0);
    IS(cudaEventDestroy(first) | cudaEventDestroy(last) | cudaStreamDestroy(stream), 0);
    IS(cudaFreeHost(locked), 0);

    /* The driver beside the runtime: one context, and functions by version. */
    handle context = 0;
    IS(cuCtxGetCurrent(&context), 0);
    IS(context != 0, 1);
    void *start;
    size_t size;
    IS(cuMemGetAddressRange_v2(&start, &size, (char *)two + 5), 0);
    IS(start == two && size >= SIZE, 1);
    int status = -1;
    int (*allocate)(void **, size_t) = 0;
    IS(cudaGetDriverEntryPointByVersion("cuMemAlloc", (void **)&allocate, 12000, 0, &status), 0);
    IS(status, 0);
    IS(allocate(&much, 512), 0);
    IS(cudaGetDriverEntryPointByVersion("cuMemAlloc", (void **)&allocate, 3000, 0, &status), 0);
    IS(status != 0 && allocate == 0, 1);

    /* Each thread's own default stream, by the names that a compiler's option gives functions. */
    unsigned long long legacy_id, own_id, found_id;
    int (*get_id)(handle, unsigned long long *) = 0;
    IS(cudaStreamGetId(0, &legacy_id), 0);
    IS(cuStreamGetId_ptsz(0, &own_id), 0);
    IS(own_id != legacy_id, 1);
    IS(cudaGetDriverEntryPointByVersion_ptsz("cuStreamGetId", (void **)&get_id, 12000, 0, 0), 0);
    IS(get_id(0, &found_id), 0);
    IS(found_id, own_id);
    IS(cudaGetDriverEntryPointByVersion("cuStreamGetId", (void **)&get_id, 12000, 2, 0), 0);
    IS(get_id(0, &found_id), 0);
    IS(found_id, own_id);
    IS(cudaGetDriverEntryPointByVersion_ptsz("cuStreamGetId", (void **)&get_id, 12000, 1, 0), 0);
    IS(get_id(0, &found_id), 0);
    IS(found_id, legacy_id);
    IS(cudaDeviceSynchronize(), 0);
    IS(cudaMemcpyAsync_ptsz(one, from, SIZE, 1, 0), 0);
    IS(cudaStreamQuery_ptsz(0), 600);
    IS(cudaMemcpy_ptds(to, one, SIZE, 2), 0);
    IS(cudaStreamQuery_ptsz(0), 0);
    IS(memcmp(from, to, SIZE), 0);

    IS(cudaFree(one) | cudaFree(two) | cudaFree(much), 0);
    IS(cudaDeviceSynchronize(), 0);
    IS(cudaMalloc(&one, SIZE), 0);
    IS(cudaDeviceReset(), 0);
    IS(cudaMemGetInfo(&free_now, &total), 0);
    IS(free_now, free_before);
    IS(cudaFree(one), 1);

    /* A forked child can't use CUDA. */
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(cudaMalloc(&one, 512));
    int ended;
    IS(waitpid(child, &ended, 0), child);
    IS(WEXITSTATUS(ended), 3);
    printf("as promised\n");
    return 0;
}
