/* free:relaxed: cudaFree returns at once, and the memory is reused only after all earlier work, also that of
 * streams which do not wait for the default one: free_relaxed. */
#include "show.h"

int main(void) {
    handle one, two;
    char *a, *b, *host;
    SHOW(cudaStreamCreateWithFlags(&one, NON_BLOCKING));
    SHOW(cudaStreamCreateWithFlags(&two, NON_BLOCKING));
    SHOW(cudaMallocHost((void **)&host, MIB));
    for (int round = 0; round < 20; round++) {
        slow_done = 0;
        host[0] = 0;
        SHOW(cudaMalloc((void **)&a, MIB));
        SHOW(cudaMemsetAsync(a, 10 + round, MIB, one));
        SHOW(cudaStreamSynchronize(one));
        SHOW(cudaLaunchHostFunc(one, slow, NULL));
        SHOW(cudaMemcpyAsync(host, a, MIB, DEVICE_TO_HOST, one));
        SHOW(cudaFree(a));
        printf("returned at once: %d\n", !slow_done);
        SHOW(cudaMalloc((void **)&b, MIB));
        SHOW(cudaMemsetAsync(b, 99, MIB, two));
        SHOW(cudaStreamSynchronize(two));
        SHOW(cudaDeviceSynchronize());
        printf("read what it held: %d\n", host[MIB - 1] == 10 + round);
        SHOW(cudaFree(b));
    }
    return 0;
}
