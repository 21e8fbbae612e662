/* cudaFree waits for all work of the device, cudaMalloc for none.
 *
 * Run: cuda_free_waits
 */
#include "show.h"

int main(void) {
    handle stream;
    char *one, *two, *host;
    SHOW(cudaStreamCreateWithFlags(&stream, NON_BLOCKING));
    SHOW(cudaMallocHost((void **)&host, MIB));
    SHOW(cudaMalloc((void **)&one, MIB));
    SHOW(cudaMemset(one, 5, MIB));
    SHOW(cudaDeviceSynchronize());
    for (int round = 0; round < 2; round++) {
        memset(host, 0, MIB);
        slow_done = 0;
        SHOW(cudaLaunchHostFunc(stream, slow, NULL));
        SHOW(cudaMemcpyAsync(host, one, MIB, DEVICE_TO_HOST, stream));
        SHOW(cudaMalloc((void **)&two, MIB));
        printf("after cudaMalloc: done %d\n", slow_done);
        SHOW(cudaFree(two));
        printf("after cudaFree: done %d, byte %d\n", slow_done, host[MIB - 1]);
    }
    /* Memory freed while a stream still reads it is safe. */
    slow_done = 0;
    memset(host, 0, MIB);
    SHOW(cudaLaunchHostFunc(stream, slow, NULL));
    SHOW(cudaMemcpyAsync(host, one, MIB, DEVICE_TO_HOST, stream));
    SHOW(cudaFree(one));
    SHOW(cudaMalloc((void **)&two, MIB));
    SHOW(cudaMemset(two, 6, MIB));
    SHOW(cudaDeviceSynchronize());
    printf("read %d\n", host[MIB - 1]);
    SHOW(cudaFree(two));
    SHOW(cudaStreamDestroy(stream));
    SHOW(cudaFreeHost(host));
    return 0;
}
