/* What several of the programs here compute. */
#pragma once
#include <stddef.h>

/* Numbers that depend on their places and the seed. */
static __global__ void fill(unsigned *x, size_t count, unsigned seed) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        x[i] = (unsigned)i * 2654435761u ^ seed;
}

/* Adds their sum to the total. */
static __global__ void sum(const unsigned *x, size_t count, unsigned long long *total) {
    unsigned long long mine = 0;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        mine += x[i];
    atomicAdd(total, mine);
}
