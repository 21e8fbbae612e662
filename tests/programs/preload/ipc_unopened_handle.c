/* IPC: cudaIpcGetMemHandle, whose handle nobody opens: ipc_unopened_handle. */
#include "show.h"

typedef struct {
    char bytes[64];
} ipc_handle;
extern int cudaIpcGetMemHandle(ipc_handle *, void *);

int main(void) {
    void *block;
    ipc_handle handle;
    SHOW(cudaMalloc(&block, MIB));
    SHOW(cudaIpcGetMemHandle(&handle, block));
    SHOW(cudaFree(block));
    return 0;
}
