/* dlsym: what it returns to the program, to a library it is linked to, and to one that it loads for itself:
 * dlsym LIBRARY OTHER, made from dlsym_library.c. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* The file that a symbol lies in, without its directory. */
static const char *file(void *address) {
    Dl_info info;
    if (address == NULL)
        return "nowhere";
    if (!dladdr(address, &info))
        return "unknown";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}

static void show(const char *what, void *address) {
    const char *error = dlerror();
    printf("%s: %s, %s\n", what, file(address), error ? "an error" : "no error");
}

int main(int count, char **arguments) {
    if (count != 3)
        return 2;
    void *local = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    void *other = dlopen(arguments[2], RTLD_NOW | RTLD_LOCAL);
    void *program = dlopen(NULL, RTLD_NOW);
    if (!local || !other || !program)
        return 3;

    /* Names that are none of ours. */
    show("printf here", dlsym(RTLD_DEFAULT, "printf"));
    show("printf next", dlsym(RTLD_NEXT, "printf"));
    show("nothing", dlsym(RTLD_DEFAULT, "there_is_no_such_thing"));
    show("cuda-like", dlsym(RTLD_DEFAULT, "cuThereIsNoSuchThing"));
    show("c", dlsym(RTLD_DEFAULT, "c"));
    show("empty", dlsym(RTLD_DEFAULT, ""));
    show("next to the program", dlsym(RTLD_NEXT, "who"));
    show("a library's own", dlsym(local, "who"));
    show("not in the library", dlsym(local, "there_is_no_such_thing"));

    /* Who asks decides. */
    void *(*ask)(void *, const char *) = (void *(*)(void *, const char *))dlsym(local, "ask");
    show("a local library, itself", ask(RTLD_DEFAULT, "who"));
    show("a local library, next", ask(RTLD_NEXT, "who"));
    show("a local library, its own name", ask(RTLD_DEFAULT, "only_here"));
    show("the program, that name", dlsym(RTLD_DEFAULT, "only_here"));

    /* Names of the driver, where there is none. */
    show("no driver", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
    show("no driver, next", dlsym(RTLD_NEXT, "cuMemFree_v2"));
    show("no driver, program", dlsym(program, "cuGetProcAddress"));
    /* Another library's function of the same name stays that library's. */
    show("another's", dlsym(local, "cuMemAlloc_v2"));
    show("another's, by itself", ask(RTLD_DEFAULT, "cuMemAlloc_v2"));
    return 0;
}
