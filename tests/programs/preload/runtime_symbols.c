/* Hooks: every way to allocate of the runtime, linked by symbol.
 *
 * Run: runtime_symbols
 */
#include "show.h"

int main(void) {
    for (int round = 0; round < 3; round++) {
        void *plain, *small, *rows;
        size_t pitch;
        SHOW(cudaMalloc(&plain, 5 * MIB));
        SHOW(cudaMalloc(&small, 100));
        SHOW(cudaMallocPitch(&rows, &pitch, 1000, 64));
        printf("pitch %zu\n", pitch);
        struct pitched box;
        SHOW(cudaMalloc3D(&box, (struct extent){1000, 8, 8}));
        printf("pitch %zu, width %zu, height %zu\n", box.pitch, box.width, box.height);
        show_data("plain", plain, 5 * MIB, 1);
        show_data("small", small, 100, 2);
        show_data("rows", rows, pitch * 64, 3);
        show_data("box", box.pointer, box.pitch * 64, 4);
        SHOW(cudaFree(plain));
        SHOW(cudaFree(small));
        SHOW(cudaFree(rows));
        SHOW(cudaFree(box.pointer));
    }
    SHOW(cudaGetLastError());
    return 0;
}
