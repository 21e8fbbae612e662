/* dlsym in the program's own malloc, before it can allocate memory. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char early[1 << 16];
static size_t used;
static int looking, nested;
static void *(*real_malloc)(size_t);
static void (*real_free)(void *);

void *malloc(size_t size) {
    if (!real_malloc && !looking) {
        looking = 1;
        void *(*found)(size_t) = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
        real_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
        real_malloc = found;
        looking = 0;
    }
    if (looking) {
        /* Whoever looks a symbol up must not need memory for it. */
        nested++;
        void *block = early + used;
        used += (size + 15) & ~(size_t)15;
        return block;
    }
    return real_malloc(size);
}

void free(void *block) {
    if ((char *)block < early || (char *)block >= early + sizeof early)
        if (block)
            real_free(block);
}

int main(void) {
    char *text = malloc(100);
    strcpy(text, "own allocator");
    printf("%s, %d nested\n", text, nested);
    free(text);
    return 0;
}
