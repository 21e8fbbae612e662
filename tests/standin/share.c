/* Two processes share memory in the two ways that CUDA has, handles of 64 bytes and file descriptors,
 * and an event. Says at the first thing that is not as CUDA promises. Linked with libcudart and libcuda,
 * without CUDA's headers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

typedef void *handle;
typedef struct { char bytes[64]; } shared;

extern int cudaMalloc(void **, size_t), cudaFree(void *), cudaMemset(void *, int, size_t);
extern int cudaMemcpy(void *, const void *, size_t, int), cudaDeviceSynchronize(void);
extern int cudaMemGetInfo(size_t *, size_t *);
extern int cudaIpcGetMemHandle(shared *, void *), cudaIpcCloseMemHandle(void *);
extern int cudaIpcOpenMemHandle(void **, shared, unsigned);
extern int cudaEventCreateWithFlags(handle *, unsigned), cudaEventRecord(handle, handle);
extern int cudaIpcGetEventHandle(shared *, handle), cudaIpcOpenEventHandle(handle *, shared);
extern int cudaEventSynchronize(handle);

struct location { int type, id; };
struct properties { int type, handles; struct location location; void *meta; char flags[8]; };
struct access { struct location location; int flags; };
extern int cuMemCreate(unsigned long long *, size_t, const struct properties *, unsigned long long);
extern int cuMemRelease(unsigned long long), cuMemUnmap(void *, size_t);
extern int cuMemAddressReserve(void **, size_t, size_t, void *, unsigned long long);
extern int cuMemMap(void *, size_t, size_t, unsigned long long, unsigned long long);
extern int cuMemSetAccess(void *, size_t, const struct access *, size_t);
extern int cuMemExportToShareableHandle(void *, unsigned long long, int, unsigned long long);
extern int cuMemImportFromShareableHandle(unsigned long long *, void *, int);
extern int cuMemRetainAllocationHandle(unsigned long long *, void *);

#define IS(what, wanted)                                                                          \
    do {                                                                                          \
        long got_ = (long)(what), wanted_ = (long)(wanted);                                       \
        if (got_ != wanted_) {                                                                    \
            printf("%s, line %d: %s is %ld, wanted %ld\n", who, __LINE__, #what, got_, wanted_);  \
            fflush(stdout);                                                                       \
            _exit(1);                                                                             \
        }                                                                                         \
    } while (0)

enum { SIZE = 70000, CHUNK = 2 << 20 };
static const char *who = "parent";
static char buffer[CHUNK];

static void filled(const void *memory, int value, size_t size) {
    IS(cudaMemcpy(buffer, memory, size, 2), 0);
    for (size_t i = 0; i < size; i++)
        IS(buffer[i], value);
}

static void *mapped(unsigned long long chunk) {
    void *address;
    struct access access = {{1, 0}, 3};
    IS(cuMemAddressReserve(&address, CHUNK, 0, 0, 0), 0);
    IS(cuMemMap(address, CHUNK, 0, chunk, 0), 0);
    IS(cuMemSetAccess(address, CHUNK, &access, 1), 0);
    return address;
}

/* A descriptor, with its process's one byte. */
static void send_file(int to, int file) {
    char byte = 0, control[CMSG_SPACE(sizeof file)] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(head), &file, sizeof file);
    IS(sendmsg(to, &message, 0), 1);
}

static int receive_file(int from) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    IS(recvmsg(from, &message, 0), 1);
    int file;
    memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof file);
    return file;
}

static int child(int socket) {
    who = "child";
    shared memory, done;
    void *there, *again;
    handle event;
    IS(read(socket, &memory, sizeof memory), sizeof memory);
    IS(read(socket, &done, sizeof done), sizeof done);
    IS(cudaIpcOpenEventHandle(&event, done), 0);
    IS(cudaEventSynchronize(event), 0);
    IS(cudaIpcOpenMemHandle(&there, memory, 1), 0);
    filled(there, 5, SIZE);
    /* Once more is the same, and is closed as often. */
    IS(cudaIpcOpenMemHandle(&again, memory, 1), 0);
    IS(again, there);
    IS(cudaIpcCloseMemHandle(again), 0);
    IS(cudaMemset(there, 6, SIZE), 0);
    IS(cudaDeviceSynchronize(), 0);
    IS(cudaIpcCloseMemHandle(there), 0);
    IS(cudaIpcCloseMemHandle(there), 1);

    unsigned long long chunk;
    int file = receive_file(socket);
    IS(cuMemImportFromShareableHandle(&chunk, (void *)(long)file, 1), 0);
    close(file);
    there = mapped(chunk);
    filled(there, 7, CHUNK);
    IS(cudaMemset(there, 8, CHUNK), 0);
    IS(cudaDeviceSynchronize(), 0);
    IS(cuMemUnmap(there, CHUNK), 0);
    IS(cuMemRelease(chunk), 0);
    return 0;
}

int main(void) {
    int sockets[2], ended;
    IS(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    /* Before either uses CUDA. */
    pid_t other = fork();
    if (other == 0)
        _exit(child(sockets[1]));

    void *memory;
    shared description;
    handle event;
    size_t before, after, total;
    IS(cudaMalloc(&memory, SIZE), 0);
    IS(cudaMemset(memory, 5, SIZE), 0);
    IS(cudaEventCreateWithFlags(&event, 6), 0);
    IS(cudaEventRecord(event, 0), 0);
    IS(cudaIpcGetMemHandle(&description, memory), 0);
    IS(cudaIpcOpenMemHandle(&(void *){0}, description, 1), 201);
    IS(write(sockets[0], &description, sizeof description), sizeof description);
    IS(cudaIpcGetEventHandle(&description, event), 0);
    IS(write(sockets[0], &description, sizeof description), sizeof description);

    unsigned long long chunk, again;
    int file;
    struct properties properties = {1, 1, {1, 0}, 0, {0}};
    IS(cudaMemGetInfo(&before, &total), 0);
    IS(cuMemCreate(&chunk, CHUNK, &properties, 0), 0);
    void *there = mapped(chunk);
    IS(cudaMemset(there, 7, CHUNK), 0);
    IS(cudaDeviceSynchronize(), 0);
    IS(cuMemExportToShareableHandle(&file, chunk, 1, 0), 0);
    send_file(sockets[0], file);
    close(file);
    IS(waitpid(other, &ended, 0), other);
    IS(ended, 0);
    filled(memory, 6, SIZE);
    filled(there, 8, CHUNK);

    /* A second hold, and what cannot be shared. */
    IS(cuMemRetainAllocationHandle(&again, there), 0);
    IS(again, chunk);
    IS(cuMemUnmap(there, CHUNK) | cuMemRelease(chunk) | cuMemRelease(again), 0);
    IS(cudaMemGetInfo(&after, &total), 0);
    IS(after, before);
    properties.handles = 0;
    IS(cuMemCreate(&chunk, CHUNK, &properties, 0), 0);
    IS(cuMemExportToShareableHandle(&file, chunk, 1, 0), 1);
    IS(cudaIpcGetMemHandle(&description, mapped(chunk)), 1);
    printf("as promised\n");
    return 0;
}
