/* Wrong frees: pointers that are freed twice, or were never allocated.
 *
 * Run: wrong_frees
 */
#include "show.h"

int main(void) {
    char *one, *two;
    int here = 0;
    SHOW(cudaMalloc((void **)&one, MIB));
    SHOW(cudaMalloc((void **)&two, MIB));
    SHOW(cudaFree(one + 512));
    SHOW(cudaGetLastError());
    SHOW(cudaFree(&here));
    SHOW(cudaGetLastError());
    SHOW(cudaFree((void *)0x10000));
    SHOW(cudaFree(one));
    SHOW(cudaFree(one));
    SHOW(cudaPeekAtLastError());
    SHOW(cudaGetLastError());
    SHOW(cudaGetLastError());
    show_data("the other", two, MIB, 9);
    SHOW(cudaFree(two));
    SHOW(cudaFree(two));
    void *managed;
    SHOW(cudaMallocManaged(&managed, MIB, 1));
    SHOW(cudaFree(managed));
    SHOW(cudaFree(managed));
    return 0;
}
