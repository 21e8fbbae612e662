/* Fork and exit: child processes, and the ways a process ends: fork_and_exit return|exit|_exit|thread|exec.
 *
 * Run: fork_and_exit return
 * Run: fork_and_exit exit
 * Run: fork_and_exit _exit
 * Run: fork_and_exit thread
 * Run: fork_and_exit exec
 */
#include "show.h"

static void *leave(void *unused) {
    (void)unused;
    exit(7);
}

static void free_late(void);
static void *late;

int main(int count, char **arguments) {
    if (count != 2)
        return 2;
    const char *way = arguments[1];
    if (!strcmp(way, "executed")) {
        void *one;
        SHOW(cudaMalloc(&one, MIB));
        SHOW(cudaFree(one));
        return 7;
    }
    /* A child from before the first use is a process like any other. */
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        void *one;
        SHOW(cudaMalloc(&one, MIB));
        SHOW(cudaFree(one));
        exit(5);
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("early child: %d\n", status);
    void *one;
    SHOW(cudaMalloc(&one, MIB));
    SHOW(cudaMalloc(&late, MIB));
    atexit(free_late);
    fflush(stdout);
    child = fork();
    if (child == 0)
        _exit(6);
    waitpid(child, &status, 0);
    printf("late child: %d\n", status);
    show_data("parent", one, MIB, 3);
    SHOW(cudaFree(one));
    fflush(stdout);
    if (!strcmp(way, "return"))
        return 7;
    if (!strcmp(way, "exit"))
        exit(7);
    if (!strcmp(way, "_exit"))
        _exit(7);
    if (!strcmp(way, "thread")) {
        pthread_t thread;
        pthread_create(&thread, NULL, leave, NULL);
        pthread_join(thread, NULL);
    }
    if (!strcmp(way, "exec"))
        execl(arguments[0], arguments[0], "executed", (char *)NULL);
    return 3;
}

static void free_late(void) {
    SHOW(cudaFree(late));
    fflush(stdout);
}
