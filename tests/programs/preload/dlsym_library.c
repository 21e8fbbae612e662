/* A library for dlsym.c. */
#define _GNU_SOURCE
#include <dlfcn.h>

int who(void) { return 1; }
int only_here(void) { return 2; }
int cuMemAlloc_v2(void) { return 3; }

/* Not a tail call, which would make the caller of this function dlsym's. */
void *ask(void *library, const char *name) {
    void *volatile found = dlsym(library, name);
    return found;
}
