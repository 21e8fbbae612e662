/* A loop that takes memory for what it computes and gives it back, as most programs do that were
 * written without a pool.
 *
 *     temporaries malloc|async|driver|kept
 *
 * The memory is had from cudaMalloc, from cudaMallocAsync, from the driver's cuMemAlloc, or once before
 * the loop: a program that has nothing to gain must not lose. */
#include "kernels.h"
#include "real.h"
#include <cuda.h>
#include <string.h>

static const size_t MOST = ((size_t)4 << 20) * SCALES;
static char way;
static unsigned *kept[2];
static unsigned long long *total;

static __global__ void add(unsigned *y, const unsigned *x, size_t count) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        y[i] += x[i] >> 3;
}

static unsigned *take(int which, size_t bytes) {
    void *address = NULL;
    CUdeviceptr driver;
    switch (way) {
    case 'm':
        CHECK(cudaMalloc(&address, bytes));
        return (unsigned *)address;
    case 'a':
        CHECK(cudaMallocAsync(&address, bytes, 0));
        return (unsigned *)address;
    case 'd':
        CHECK(cuMemAlloc(&driver, bytes));
        return (unsigned *)driver;
    default:
        return kept[which];
    }
}

static void give_back(unsigned *address) {
    switch (way) {
    case 'm':
        CHECK(cudaFree(address));
        break;
    case 'a':
        CHECK(cudaFreeAsync(address, 0));
        break;
    case 'd':
        CHECK(cuMemFree((CUdeviceptr)address));
        break;
    }
}

static void loop(void) {
    for (unsigned round = 0; round < 300; round++) {
        size_t count = 1000 + ((size_t)1024 << round % 11) * scale;
        unsigned *x = take(0, count * sizeof *x);
        fill<<<64, 128>>>(x, count, round);
        unsigned *y = take(1, count * sizeof *y);
        fill<<<64, 128>>>(y, count, ~round);
        add<<<64, 128>>>(y, x, count);
        give_back(x);
        sum<<<16, 128>>>(y, count, total);
        give_back(y);
    }
    CHECK(cudaDeviceSynchronize());
}

int main(int count, char **arguments) {
    static const char *const ways[] = {"malloc", "async", "driver", "kept"};
    for (int i = 0; i < 4 && count == 2; i++)
        if (strcmp(arguments[1], ways[i]) == 0)
            way = arguments[1][0];
    if (way == 0) {
        fprintf(stderr, "temporaries: one of malloc, async, driver and kept is wanted\n");
        return 2;
    }
    CHECK(cudaMalloc((void **)&total, sizeof *total));
    CHECK(cudaMemset(total, 0, sizeof *total));
    for (int i = 0; i < 2 && way == 'k'; i++)
        CHECK(cudaMalloc((void **)&kept[i], MOST + 4000));
    time_loop(loop);
    unsigned long long result;
    CHECK(cudaMemcpy(&result, total, sizeof result, cudaMemcpyDeviceToHost));
    CHECK(cudaGetLastError());
    printf("sum: %llu\n", result);
    return 0;
}
