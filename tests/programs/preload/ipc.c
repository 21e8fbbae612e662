/* IPC: memory of one process in another, by cudaIpcGetMemHandle.
 *
 * With `devices` the other process also opens a block on a second device, where there is one.
 *
 * With `freed` it also says whether the handle of a block that was freed opens. It must not; of CUDA's own
 * it may, for a while (H100, driver 580), so that there is nothing to compare on a GPU.
 *
 * Run: ipc
 * Run: ipc devices
 */
#include "show.h"

#include <sys/socket.h>

typedef struct {
    char bytes[64];
} ipc_handle;

extern int cudaDeviceCanAccessPeer(int *, int, int);
extern int cudaIpcGetMemHandle(ipc_handle *, void *), cudaIpcCloseMemHandle(void *);
extern int cudaIpcOpenMemHandle(void **, ipc_handle, unsigned);
extern int cudaIpcGetEventHandle(ipc_handle *, handle), cudaIpcOpenEventHandle(handle *, ipc_handle);
extern int cudaEventSynchronize(handle);

enum { BLOCKS = 3, INTERPROCESS = 6 };
/* Several allocations lie in one piece of the pool's memory, and one in several. */
static const size_t sizes[BLOCKS] = {512 << 10, 512 << 10, 24 << 20};
static unsigned char copy[24 << 20];

static void show_filled(const char *what, void *address, size_t size, unsigned char value) {
    memset(copy, ~value, size);
    int copied = cudaMemcpy(copy, address, size, DEVICE_TO_HOST);
    size_t same = 0;
    while (same < size && copy[same] == value)
        same++;
    printf("%s: copied %d, %s\n", what, copied, same == size ? "as it was written" : "OTHER");
    fflush(stdout);
}

static void say(int to) {
    if (write(to, "", 1) != 1)
        _exit(2);
}

static void listen_to(int from) {
    char byte;
    if (read(from, &byte, 1) != 1)
        _exit(2);
}

static ipc_handle receive(int from) {
    ipc_handle found;
    if (read(from, &found, sizeof found) != sizeof found)
        _exit(2);
    return found;
}

static void send_handle(int to, ipc_handle handle) {
    if (write(to, &handle, sizeof handle) != sizeof handle)
        _exit(2);
}

/* A block of this device's, opened on the other one beside where it is open already. */
static void show_on_second_device(ipc_handle handle, void *block, size_t size, unsigned char value) {
    int devices = 0, reaches = 0;
    SHOW(cudaGetDeviceCount(&devices));
    if (devices < 2 || cudaDeviceCanAccessPeer(&reaches, 1, 0) != 0 || !reaches) {
        printf("no second device reaches the first\n");
        return;
    }
    void *there, *again;
    SHOW(cudaSetDevice(1));
    SHOW(cudaIpcOpenMemHandle(&there, handle, 1));
    show_filled("second device", there, size, value);
    SHOW(cudaIpcOpenMemHandle(&again, handle, 1));
    printf("the same there: %d\n", again == there);
    SHOW(cudaMemset(there, value + 1, size));
    SHOW(cudaDeviceSynchronize());
    SHOW(cudaIpcCloseMemHandle(there));
    SHOW(cudaIpcCloseMemHandle(there));
    SHOW(cudaSetDevice(0));
    show_filled("first device", block, size, value + 1);
    SHOW(cudaMemset(block, value, size));
}

static int child(int peer, int freed, int devices) {
    void *blocks[BLOCKS], *again;
    ipc_handle handles[BLOCKS];
    handle event;
    SHOW(cudaIpcOpenEventHandle(&event, receive(peer)));
    SHOW(cudaEventSynchronize(event));
    for (int i = 0; i < BLOCKS; i++) {
        handles[i] = receive(peer);
        SHOW(cudaIpcOpenMemHandle(&blocks[i], handles[i], 1));
        show_filled("child", blocks[i], sizes[i], 10 + i);
    }
    if (devices)
        show_on_second_device(handles[2], blocks[2], sizes[2], 12);
    printf("apart: %d\n", blocks[0] != blocks[1] && blocks[1] != blocks[2]);
    SHOW(cudaIpcOpenMemHandle(&again, handles[1], 1));
    printf("the same: %d\n", again == blocks[1]);
    SHOW(cudaIpcOpenMemHandle(&again, handles[1], 0));
    struct pointer_attributes attributes;
    SHOW(cudaPointerGetAttributes(&attributes, (char *)blocks[2] + MIB));
    printf("type %d, device %d\n", attributes.type, attributes.device);
    device_address start;
    size_t size;
    SHOW(cuMemGetAddressRange_v2(&start, &size, (device_address)blocks[2] + MIB));
    printf("its start: %d, its size: %d\n", start == (device_address)blocks[2], size == sizes[2]);
    ipc_handle other;
    printf("passed on: %d\n", cudaIpcGetMemHandle(&other, blocks[2]) == 0);
    for (int i = 0; i < BLOCKS; i++)
        SHOW(cudaMemset(blocks[i], 20 + i, sizes[i]));
    SHOW(cudaIpcCloseMemHandle(blocks[1]));
    show_filled("closed once", blocks[1], sizes[1], 21);
    SHOW(cudaDeviceSynchronize());
    say(peer);
    listen_to(peer);
    /* The first block is the parent's again, and no handle opens it any more. */
    SHOW(cudaIpcCloseMemHandle(blocks[0]));
    say(peer);
    listen_to(peer);
    if (freed)
        printf("what was freed opens: %d\n", cudaIpcOpenMemHandle(&again, handles[0], 1) == 0);
    cudaGetLastError();
    SHOW(cudaIpcCloseMemHandle(blocks[1]));
    SHOW(cudaIpcCloseMemHandle(blocks[1]));
    show_filled("still open", blocks[2], sizes[2], 22);
    say(peer);
    /* The last is never closed, but goes with the context. */
    listen_to(peer);
    SHOW(cudaDeviceReset());
    SHOW(cudaIpcCloseMemHandle(blocks[2]));
    SHOW(cudaMalloc(&again, MIB));
    show_data("after a reset", again, MIB, 50);
    SHOW(cudaFree(again));
    fflush(stdout);
    _exit(0);
}

int main(int count, char **arguments) {
    int sockets[2], status;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0)
        return 2;
    pid_t other = fork();
    if (other == 0)
        _exit(child(sockets[1], count > 1 && !strcmp(arguments[1], "freed"),
                    count > 1 && !strcmp(arguments[1], "devices")));
    close(sockets[1]);
    int peer = sockets[0];
    void *blocks[BLOCKS], *stream_ordered;
    ipc_handle shared[BLOCKS], again;
    for (int i = 0; i < BLOCKS; i++) {
        SHOW(cudaMalloc(&blocks[i], sizes[i]));
        SHOW(cudaMemset(blocks[i], 10 + i, sizes[i]));
        SHOW(cudaIpcGetMemHandle(&shared[i], blocks[i]));
    }
    SHOW(cudaIpcGetMemHandle(&again, blocks[0]));
    printf("the same handle: %d\n", !memcmp(&again, &shared[0], sizeof again));
    SHOW(cudaIpcGetMemHandle(&again, (char *)blocks[2] + MIB + 7));
    printf("the same handle from the middle: %d\n", !memcmp(&again, &shared[2], sizeof again));
    SHOW(cudaIpcOpenMemHandle(&(void *){NULL}, shared[0], 1));
    SHOW(cudaMallocAsync(&stream_ordered, MIB, NULL));
    SHOW(cudaIpcGetMemHandle(&again, stream_ordered));
    SHOW(cudaFreeAsync(stream_ordered, NULL));
    memset(&again, 0, sizeof again);
    printf("none of ours opens: %d\n", cudaIpcOpenMemHandle(&(void *){NULL}, again, 1) == 0);
    cudaGetLastError();
    handle event;
    SHOW(cudaEventCreateWithFlags(&event, INTERPROCESS));
    SHOW(cudaEventRecord(event, NULL));
    SHOW(cudaIpcGetEventHandle(&again, event));
    fflush(stdout);
    send_handle(peer, again);
    for (int i = 0; i < BLOCKS; i++)
        send_handle(peer, shared[i]);
    listen_to(peer);
    for (int i = 0; i < BLOCKS; i++)
        show_filled("parent", blocks[i], sizes[i], 20 + i);
    say(peer);
    listen_to(peer);
    SHOW(cudaFree(blocks[0]));
    SHOW(cudaIpcGetMemHandle(&again, blocks[0]));
    cudaGetLastError();
    void *next;
    SHOW(cudaMalloc(&next, sizes[0]));
    SHOW(cudaMemset(next, 30, sizes[0]));
    fflush(stdout);
    say(peer);
    listen_to(peer);
    say(peer);
    waitpid(other, &status, 0);
    printf("child: %d\n", status);
    show_data("after it", blocks[2], sizes[2], 40);
    SHOW(cudaFree(blocks[1]));
    SHOW(cudaFree(blocks[2]));
    SHOW(cudaFree(next));
    return 0;
}
