/* Per-thread default streams, as programs built with `--default-stream per-thread` use them: what one thread
 * frees in the order of its stream is not another's to use at once.
 *
 * Run: per_thread_default_stream
 */
#include "show.h"

extern int cudaMallocAsync_ptsz(void **, size_t, handle), cudaFreeAsync_ptsz(void *, handle);
extern int cudaMemsetAsync_ptsz(void *, int, size_t, handle), cudaStreamSynchronize_ptsz(handle);
extern int cudaMemcpyAsync_ptsz(void *, const void *, size_t, int, handle);
extern int cudaLaunchHostFunc_ptsz(handle, void (*)(void *), void *);
extern int cuMemAllocAsync_ptsz(device_address *, size_t, handle);
extern int cuMemFreeAsync_ptsz(device_address, handle);

enum { ROUNDS = 4 };

static unsigned char *host;

/* By the runtime's functions, and by the driver's. */
static int take(void **address, int way) {
    device_address found = 0;
    if (way == 0)
        return cudaMallocAsync_ptsz(address, MIB, NULL);
    int status = cuMemAllocAsync_ptsz(&found, MIB, NULL);
    *address = (void *)found;
    return status;
}

static int give_back(void *address, int way) {
    return way == 0 ? cudaFreeAsync_ptsz(address, NULL)
                    : cuMemFreeAsync_ptsz((device_address)address, NULL);
}

static void *read_slowly(void *round) {
    int number = (int)(intptr_t)round;
    void *block;
    SHOW(cudaFree(NULL));
    SHOW(take(&block, number % 2));
    SHOW(cudaMemsetAsync_ptsz(block, number, MIB, NULL));
    SHOW(cudaLaunchHostFunc_ptsz(NULL, slow, NULL));
    SHOW(cudaMemcpyAsync_ptsz(host, block, MIB, DEVICE_TO_HOST, NULL));
    SHOW(give_back(block, number % 2));
    return NULL;
}

static void *overwrite(void *round) {
    int number = (int)(intptr_t)round;
    void *block;
    SHOW(cudaFree(NULL));
    SHOW(take(&block, number % 2));
    SHOW(cudaMemsetAsync_ptsz(block, 99, MIB, NULL));
    SHOW(cudaStreamSynchronize_ptsz(NULL));
    SHOW(give_back(block, number % 2));
    return NULL;
}

static void run(void *(*work)(void *), int round) {
    pthread_t thread;
    pthread_create(&thread, NULL, work, (void *)(intptr_t)round);
    pthread_join(thread, NULL);
}

int main(void) {
    SHOW(cudaMallocHost((void **)&host, MIB));
    for (int round = 0; round < ROUNDS; round++) {
        run(read_slowly, round);
        run(overwrite, round);
        SHOW(cudaDeviceSynchronize());
        printf("read what the thread wrote: %d\n", host[0] == round && host[MIB - 1] == round);
    }
    SHOW(cudaFreeHost(host));
    return 0;
}
