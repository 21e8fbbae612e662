/* Call counts by library: calls of the program, of a library, and of a library on the program's behalf. */
#include "show.h"

extern int take(void **address, size_t bytes);

int main(void) {
    void *one[3], *two;
    for (int i = 0; i < 3; i++)
        SHOW(take(&one[i], MIB));
    SHOW(take(&two, MIB << 20));
    SHOW(cudaMalloc(&two, 5 * MIB));
    for (int i = 0; i < 3; i++)
        SHOW(cudaFree(one[i]));
    SHOW(cudaFree(two));
    return 0;
}
