/* dlopen: the runtime is opened and closed again, as interpreters do.
 *
 * Run: dlopen_runtime
 */
#include "show.h"

int main(void) {
    for (int round = 0; round < 3; round++) {
        void *library = dlopen("libcudart.so.13", RTLD_NOW | RTLD_LOCAL);
        if (!library)
            library = dlopen("libcudart.so.12", RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            printf("no runtime\n");
            return 0;
        }
        int (*allocate)(void **, size_t) = (int (*)(void **, size_t))dlsym(library, "cudaMalloc");
        int (*release)(void *) = (int (*)(void *))dlsym(library, "cudaFree");
        void *one;
        SHOW(allocate(&one, MIB));
        SHOW(release(one));
        SHOW(dlclose(library));
    }
    return 0;
}
