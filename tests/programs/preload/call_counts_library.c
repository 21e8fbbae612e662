/* The library that call_counts_by_library.c calls. */
#include "show.h"

/* Not a tail call, which would leave nothing of this library on the stack. */
int take(void **address, size_t bytes) {
    volatile int status = cudaMalloc(address, bytes);
    return status;
}
