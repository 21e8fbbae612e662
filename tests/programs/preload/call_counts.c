/* Call counts in the statistics: every kind of call, from one thread and from many.
 *
 * Run: call_counts
 */
#include "show.h"

static pthread_key_t key;

/* Runs while its thread ends. */
static void free_last(void *address) { cudaFree(address); }

static void *thread(void *unused) {
    (void)unused;
    void *address;
    for (int i = 0; i < 100; i++)
        if (cudaMalloc(&address, 512) == 0)
            cudaFree(address);
    if (cudaMalloc(&address, 512) == 0)
        pthread_setspecific(key, address);
    return NULL;
}

int main(void) {
    void *address[3], *ordered;
    device_address pitched;
    size_t pitch;
    pthread_key_create(&key, free_last);
    for (int i = 0; i < 3; i++)
        SHOW(cudaMalloc(&address[i], (i + 1) * MIB));
    SHOW(cudaMalloc(&ordered, MIB << 20));
    SHOW(cudaFree(address[0]));
    SHOW(cudaFree(address[1]));
    SHOW(cudaFree((void *)1) != 0);
    for (int i = 0; i < 5; i++) {
        SHOW(cudaMallocAsync(&ordered, 4 * MIB, NULL));
        SHOW(cudaFreeAsync(ordered, NULL));
    }
    SHOW(cuMemAllocPitch_v2(&pitched, &pitch, 1000, 10, 4));
    SHOW(cuMemAllocPitch_v2(&pitched, &pitch, 1000, 20, 4));
    printf("pitch %zu\n", pitch);
    /* Twice, so that the second ones find what the first ones left. */
    for (int turn = 0; turn < 2; turn++) {
        pthread_t threads[8];
        for (int i = 0; i < 8; i++)
            pthread_create(&threads[i], NULL, thread, NULL);
        for (int i = 0; i < 8; i++)
            pthread_join(threads[i], NULL);
    }
    return 0;
}
