/* Does no more than make CUDA start. */
#include "real.h"

int main(void) {
    CHECK(cudaFree(NULL));
    int device;
    CHECK(cudaGetDevice(&device));
    printf("device: %d\n", device);
    return 0;
}
