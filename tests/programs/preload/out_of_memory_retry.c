/* Out of memory in the driver's own allocations, after the program has had all memory and freed it: by the name
 * of what is allocated, and nothing but that; without a name the first ones, which leave a GPU as they found it.
 *
 * Run: out_of_memory_retry
 */
#include "show.h"

/* `CUDA_ARRAY_DESCRIPTOR`, and one of its formats. */
struct array_descriptor {
    size_t width, height;
    unsigned format, channels;
};
enum { FLOAT = 32, WIDTH = 131072, CHANNELS = 4 };

/* `cudaMemPoolProps`: pinned memory of a device, with no handle to export. */
struct pool_properties {
    int kind, handle_types, location_kind, location;
    unsigned char rest[256];
};

extern int cuArrayCreate_v2(handle *, const struct array_descriptor *), cuArrayDestroy(handle);
extern int cuModuleLoadData(handle *, const void *), cuModuleUnload(handle);
extern int cuModuleLoadDataEx(handle *, const void *, unsigned, int *, void **);
extern int cuModuleGetFunction(handle *, handle, const char *);
extern int cuLaunchKernel(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle,
                          void **, void **);

/* Two kernels: one that needs no memory and a variable of so many bytes; one that has 64 KiB in each thread,
 * which takes as much for each that the GPU can run at once. */
static const char *MODULE = ".version 7.0\n.target sm_70\n.address_size 64\n"
                            ".visible .global .align 8 .b8 large[%zu];\n"
                            ".visible .entry nothing() { ret; }\n";
static const char *DEEP = ".version 7.0\n.target sm_70\n.address_size 64\n"
                          ".visible .entry deep(.param .u64 to, .param .u32 at) {\n"
                          ".local .align 4 .b8 own[65536];\n"
                          ".reg .b64 %d<6>;\n.reg .b32 %r<5>;\n"
                          "ld.param.u64 %d1, [to];\nld.param.u32 %r1, [at];\n"
                          "mov.u64 %d2, own;\nmul.wide.u32 %d3, %r1, 4;\nadd.s64 %d4, %d2, %d3;\n"
                          "st.local.u32 [%d4], %r1;\n"
                          "xor.b32 %r2, %r1, 1;\nmul.wide.u32 %d5, %r2, 4;\nadd.s64 %d5, %d2, %d5;\n"
                          "mov.u32 %r4, 5;\nst.local.u32 [%d5], %r4;\nld.local.u32 %r3, [%d4];\nld.local.u32 %r4, [%d5];\n"
                          "add.s32 %r3, %r3, %r4;\n"
                          "cvta.to.global.u64 %d1, %d1;\nst.global.u32 [%d1], %r3;\nret;\n}\n";

enum { MOST = 8192 };
static void *blocks[MOST];
static size_t total;

/* All memory that there is in pieces of so many bytes; returns how many more there are. */
static int take_all(int count, size_t size) {
    while (count < MOST && cudaMalloc(&blocks[count], size) == 0)
        count++;
    cudaGetLastError();
    return count;
}

static void had_it_all(void) {
    int status = 0, count = take_all(take_all(0, total / 50 / (2 * MIB) * (2 * MIB)), 16 * MIB);
    for (int i = 0; i < count; i++)
        status |= cudaFree(blocks[i]);
    printf("had it all: %d\n", count > 10 && status == 0);
}

static handle make_array(size_t bytes) {
    struct array_descriptor what = {WIDTH, bytes / (16 * WIDTH), FLOAT, CHANNELS};
    handle array = NULL;
    SHOW(cuArrayCreate_v2(&array, &what));
    return array;
}

static void try_array(void) {
    handle array = make_array(total / 8);
    SHOW(cuArrayDestroy(array));
}

static void try_pool(void) {
    struct pool_properties properties;
    handle pool;
    void *block = NULL;
    memset(&properties, 0, sizeof properties);
    properties.kind = properties.location_kind = 1;
    SHOW(cudaMemPoolCreate(&pool, &properties));
    SHOW(cudaMallocFromPoolAsync(&block, total / 8, pool, NULL));
    SHOW(cudaFreeAsync(block, NULL));
    SHOW(cudaDeviceSynchronize());
    SHOW(cudaMemPoolDestroy(pool));
}

/* Of each width the driver says how far apart the rows are. */
static void try_pitch(void) {
    device_address rows;
    size_t pitch = 0;
    SHOW(cuMemAllocPitch_v2(&rows, &pitch, MIB, total / 8 / MIB, 16));
    printf("pitch %zu\n", pitch);
    SHOW(cuMemFree_v2(rows));
}

static void try_module(void) {
    char text[1024];
    handle module = NULL, function = NULL;
    snprintf(text, sizeof text, MODULE, (size_t)256 * MIB);
    /* `CU_JIT_INFO_LOG_BUFFER` and its size, which becomes that of the message. */
    char message[256] = "";
    int options[] = {3, 4};
    void *values[] = {message, (void *)sizeof message};
    SHOW(cuModuleLoadDataEx(&module, text, 2, options, values));
    printf("message of %zu\n", (size_t)values[1]);
    SHOW(cuModuleGetFunction(&function, module, "nothing"));
    SHOW(cuModuleUnload(module));
}

static void try_context(void) {
    handle context = NULL, before = NULL;
    SHOW(cuCtxGetCurrent(&before));
    SHOW(cuCtxCreate_v2(&context, 0, 0));
    SHOW(cuCtxDestroy_v2(context));
    SHOW(cuCtxSetCurrent(before));
}

static void try_kernel(void) {
    handle module = NULL, function = NULL;
    device_address to = 0;
    unsigned at = 100, result = 0;
    void *arguments[] = {&to, &at};
    SHOW(cuModuleLoadData(&module, DEEP));
    SHOW(cuModuleGetFunction(&function, module, "deep"));
    SHOW(cuMemAlloc_v2(&to, 4));
    SHOW(cuMemsetD8_v2(to, 0, 4));
    SHOW(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL));
    SHOW(cuMemcpyDtoH_v2(&result, to, 4));
    printf("result %u\n", result);
    SHOW(cuMemFree_v2(to));
    SHOW(cuModuleUnload(module));
}

static pthread_barrier_t ready;

static void *array_with_others(void *failed) {
    struct array_descriptor what = {WIDTH, total / 16 / (16 * WIDTH), FLOAT, CHANNELS};
    handle array = NULL;
    cudaSetDevice(0);
    pthread_barrier_wait(&ready);
    *(int *)failed += cuArrayCreate_v2(&array, &what) != 0;
    pthread_barrier_wait(&ready);
    cuArrayDestroy(array);
    return NULL;
}

/* Memory that one thread makes room for is there for the others. */
static void try_threads(void) {
    enum { ROUNDS = 5, THREADS = 4 };
    int failed[THREADS] = {0};
    pthread_t threads[THREADS];
    pthread_barrier_init(&ready, NULL, THREADS);
    for (int round = 0; round < ROUNDS; round++) {
        had_it_all();
        for (int i = 0; i < THREADS; i++)
            pthread_create(&threads[i], NULL, array_with_others, &failed[i]);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
    }
    printf("failed: %d %d %d %d\n", failed[0], failed[1], failed[2], failed[3]);
}

/* Work that waits for the thread that asks for memory. */
static volatile int asked;
static void wait_for_it(void *unused) {
    (void)unused;
    for (int i = 0; i < 300 && !asked; i++)
        usleep(10000);
    printf("asked %d\n", asked);
}

static void try_held(void) {
    handle stream;
    SHOW(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    SHOW(cudaLaunchHostFunc(stream, wait_for_it, NULL));
    handle array = make_array(total / 8);
    asked = 1;
    SHOW(cudaStreamSynchronize(stream));
    SHOW(cuArrayDestroy(array));
}

/* Memory of another device than the current one. */
static void try_devices(void) {
    struct pool_properties properties;
    handle pool, stream;
    void *block = NULL;
    SHOW(cudaSetDevice(1));
    had_it_all();
    memset(&properties, 0, sizeof properties);
    properties.kind = properties.location_kind = properties.location = 1;
    SHOW(cudaMemPoolCreate(&pool, &properties));
    SHOW(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    SHOW(cudaSetDevice(0));
    SHOW(cudaMallocFromPoolAsync(&block, total / 8, pool, stream));
    SHOW(cudaFreeAsync(block, stream));
}

static void try_managed(void) {
    void *block = NULL;
    SHOW(cudaMallocManaged(&block, total / 8, 1));
    SHOW(cudaFree(block));
}

static const struct {
    const char *name;
    void (*run)(void);
    int always;
} TRIES[] = {
    {"array", try_array, 1}, {"pitch", try_pitch, 1},   {"pool", try_pool, 1},       {"module", try_module, 1},
    {"context", try_context, 1}, {"threads", try_threads, 1}, {"kernel", try_kernel, 1},
    {"held", try_held, 0},     {"devices", try_devices, 0}, {"managed", try_managed, 0},
};

int main(int count, char **arguments) {
    size_t free;
    SHOW(cudaFree(NULL));
    SHOW(cudaMemGetInfo(&free, &total));
    for (size_t i = 0; i < sizeof TRIES / sizeof *TRIES; i++) {
        if (count == 1 ? !TRIES[i].always : strcmp(arguments[1], TRIES[i].name) != 0)
            continue;
        had_it_all();
        printf("%s\n", TRIES[i].name);
        TRIES[i].run();
    }
    SHOW(cudaGetLastError());
    return 0;
}
