/* cudaMallocAsync and cudaFreeAsync on several streams.
 *
 * Run: malloc_async
 */
#include "show.h"

static unsigned char *host;
static handle one, two;

static void show_byte(const char *what) {
    SHOW(cudaDeviceSynchronize());
    printf("%s: %d\n", what, host[MIB - 1]);
}

int main(void) {
    void *a, *b, *c;
    SHOW(cudaStreamCreateWithFlags(&one, NON_BLOCKING));
    SHOW(cudaStreamCreateWithFlags(&two, NON_BLOCKING));
    SHOW(cudaMallocHost((void **)&host, MIB));

    /* A stream's own memory comes back in its order. */
    for (int round = 0; round < 3; round++) {
        SHOW(cudaMallocAsync(&a, MIB, one));
        SHOW(cudaMemsetAsync(a, 10 + round, MIB, one));
        SHOW(cudaLaunchHostFunc(one, slow, NULL));
        SHOW(cudaMemcpyAsync(host, a, MIB, DEVICE_TO_HOST, one));
        slow_done = 0;
        SHOW(cudaFreeAsync(a, one));
        printf("did not wait: %d\n", !slow_done);
        SHOW(cudaMallocAsync(&b, MIB, one));
        SHOW(cudaMemsetAsync(b, 99, MIB, one));
        SHOW(cudaFreeAsync(b, one));
        show_byte("read before it was used again");
    }

    /* Freed on another stream, behind that one's work: not to be had before by the first. */
    handle event;
    SHOW(cudaEventCreateWithFlags(&event, 2));
    SHOW(cudaMallocAsync(&a, MIB, one));
    SHOW(cudaMemsetAsync(a, 20, MIB, one));
    SHOW(cudaEventRecord(event, one));
    SHOW(cudaStreamWaitEvent(two, event, 0));
    SHOW(cudaLaunchHostFunc(two, slow, NULL));
    SHOW(cudaMemcpyAsync(host, a, MIB, DEVICE_TO_HOST, two));
    SHOW(cudaFreeAsync(a, two));
    SHOW(cudaMallocAsync(&b, MIB, one));
    SHOW(cudaMemsetAsync(b, 99, MIB, one));
    SHOW(cudaStreamSynchronize(one));
    show_byte("read on the other stream");
    SHOW(cudaFreeAsync(b, one));

    /* Freed in order, then wanted by everybody. */
    SHOW(cudaMallocAsync(&a, MIB, one));
    SHOW(cudaMemsetAsync(a, 30, MIB, one));
    SHOW(cudaLaunchHostFunc(one, slow, NULL));
    SHOW(cudaMemcpyAsync(host, a, MIB, DEVICE_TO_HOST, one));
    SHOW(cudaFreeAsync(a, one));
    SHOW(cudaMalloc(&c, MIB));
    SHOW(cudaMemset(c, 99, MIB));
    show_byte("read before everybody had it");
    SHOW(cudaFree(c));

    /* Freed on the default stream, wanted by everybody: a stream that does not wait for it, too. */
    SHOW(cudaMallocAsync(&a, 17 * MIB, NULL));
    SHOW(cudaMemsetAsync(a, 40, MIB, NULL));
    SHOW(cudaStreamSynchronize(NULL));
    SHOW(cudaLaunchHostFunc(NULL, slow, NULL));
    SHOW(cudaMemcpyAsync(host, a, MIB, DEVICE_TO_HOST, NULL));
    SHOW(cudaFreeAsync(a, NULL));
    SHOW(cudaMalloc(&c, 17 * MIB));
    SHOW(cudaMemsetAsync(c, 99, MIB, two));
    SHOW(cudaStreamSynchronize(two));
    show_byte("read on the default stream");
    SHOW(cudaFree(c));

    /* Freed at once what was allocated in order. */
    SHOW(cudaMallocAsync(&a, MIB, one));
    SHOW(cudaMemsetAsync(a, 50, MIB, one));
    SHOW(cudaFree(a));

    /* A stream that is gone, and one that may have its handle. */
    SHOW(cudaMallocAsync(&a, MIB, one));
    SHOW(cudaMemsetAsync(a, 60, MIB, one));
    SHOW(cudaLaunchHostFunc(one, slow, NULL));
    SHOW(cudaMemcpyAsync(host, a, MIB, DEVICE_TO_HOST, one));
    SHOW(cudaFreeAsync(a, one));
    SHOW(cudaStreamDestroy(one));
    SHOW(cudaStreamCreateWithFlags(&one, NON_BLOCKING));
    SHOW(cudaMallocAsync(&b, MIB, one));
    SHOW(cudaMemsetAsync(b, 99, MIB, one));
    SHOW(cudaStreamSynchronize(one));
    show_byte("read on a stream that is gone");
    SHOW(cudaFreeAsync(b, one));
    SHOW(cudaStreamDestroy(one));
    SHOW(cudaStreamDestroy(two));
    SHOW(cudaGetLastError());
    return 0;
}
