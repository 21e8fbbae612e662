/* cudaFreeAsync on another device's stream: the memory is not reused until that stream has done its work.
 *
 * Run: free_async_on_another_device
 */
#include "show.h"

int main(void) {
    handle here, there;
    void *first, *second;
    SHOW(cudaDeviceEnablePeerAccess(1, 0));
    SHOW(cudaStreamCreateWithFlags(&here, NON_BLOCKING));
    SHOW(cudaMalloc(&first, 4 * MIB));
    SHOW(cudaFree(first));
    SHOW(cudaMallocAsync(&first, 4 * MIB, here));
    SHOW(cudaStreamSynchronize(here));
    SHOW(cudaSetDevice(1));
    SHOW(cudaDeviceEnablePeerAccess(0, 0));
    SHOW(cudaStreamCreateWithFlags(&there, NON_BLOCKING));
    SHOW(cudaMalloc(&second, 4 * MIB));
    SHOW(cudaFree(second));
    SHOW(cudaMemsetAsync(first, 1, 4 * MIB, there));
    SHOW(cudaFreeAsync(first, there));
    SHOW(cudaSetDevice(0));
    for (int i = 0; i < 8; i++) {
        SHOW(cudaMallocAsync(&second, 4 * MIB, here));
        SHOW(cudaMemsetAsync(second, 2, 4 * MIB, here));
        SHOW(cudaDeviceSynchronize());
    }
    SHOW(cudaSetDevice(1));
    SHOW(cudaStreamSynchronize(there));
    return 0;
}
