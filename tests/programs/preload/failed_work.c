/* Errors: on a GPU that is told to fail, work that has failed or memory that has run out: failed_work. */
#include "show.h"

int main(void) {
    void *one = NULL, *two = NULL;
    SHOW(cudaMalloc(&one, MIB));
    SHOW(cudaPeekAtLastError());
    if (one) {
        SHOW(cudaFree(one));
        SHOW(cudaPeekAtLastError());
    }
    SHOW(cudaMalloc(&two, 3 * MIB));
    SHOW(cudaGetLastError());
    if (two)
        SHOW(cudaFree(two));
    SHOW(cudaGetLastError());
    SHOW(cudaMallocAsync(&one, MIB, NULL));
    SHOW(cudaGetLastError());
    return 0;
}
