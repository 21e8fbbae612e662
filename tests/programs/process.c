/* One case of a process's life with the library: process LIBRARY CASE [FILE].
 *
 * Exits with 0 where the case went as it should. FILE is where the statistics would be. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "concertina.h"

#define MIB ((size_t)1 << 20)

static __typeof__(&concertina_malloc) allocate;
static __typeof__(&concertina_free) release;
static __typeof__(&concertina_dump_stats) dump;
static __typeof__(&concertina_stats_json) text;
static __typeof__(&concertina_version) version;

static const char *file;
static void *late[2];

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "failed: %s\n", what);
        _exit(99);
    }
}

static void load(const char *library) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    check(handle != NULL, "dlopen");
    /* A function pointer that dlsym returns is a pointer to void in C. */
    *(void **)&allocate = dlsym(handle, "concertina_malloc");
    *(void **)&release = dlsym(handle, "concertina_free");
    *(void **)&dump = dlsym(handle, "concertina_dump_stats");
    *(void **)&text = dlsym(handle, "concertina_stats_json");
    *(void **)&version = dlsym(handle, "concertina_version");
    check(allocate && release && dump && text && version, "dlsym");
}

static void *get(void) {
    void *block = allocate(MIB, 0, NULL);
    check(block != NULL, "memory");
    return block;
}

static void tell(const char *line) {
    check(write(STDOUT_FILENO, line, strlen(line)) > 0, "write");
}

/* Stands in for the C library's, which the library under test calls last. */
static int hangs;
int rename(const char *from, const char *to) {
    while (hangs)
        usleep(5000);
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}

static volatile sig_atomic_t own_signals;
static void count_signal(int signal, siginfo_t *info, void *context) {
    own_signals += signal == SIGUSR2 && info->si_pid == getpid() && context != NULL;
}

/* Waits for the file, at most ten seconds, and takes it away. */
static void take_file(void) {
    for (int tries = 0; access(file, F_OK) != 0; tries++) {
        check(tries < 2000, "no file");
        usleep(5000);
    }
    char taken[8192];
    snprintf(taken, sizeof taken, "%s.taken", file);
    check(renameat(AT_FDCWD, file, AT_FDCWD, taken) == 0, "rename");
}

static void free_late(void) {
    if (late[0])
        release(late[0], MIB, 0, NULL);
}

__attribute__((destructor)) static void free_later(void) {
    if (late[1])
        release(late[1], MIB, 0, NULL);
}

static void own_handler(int signal) {
    (void)signal;
    tell("own handler\n");
    exit(7);
}

/* Waits for a child, at most ten seconds. */
static int status_of(pid_t child) {
    int status = 0;
    check(child > 0, "fork");
    for (int tries = 0; tries < 2000; tries++) {
        if (waitpid(child, &status, WNOHANG) == child)
            return status;
        usleep(5000);
    }
    kill(child, SIGKILL);
    check(0, "the child hangs");
    return status;
}

static int is_there(void) { return access(file, F_OK) == 0; }

static void *hammer(void *ignored) {
    (void)ignored;
    for (;;)
        release(get(), MIB, 0, NULL);
    return NULL;
}

static void start_hammers(int count) {
    pthread_t thread;
    for (int i = 0; i < count; i++)
        check(pthread_create(&thread, NULL, hammer, NULL) == 0, "thread");
}

/* In a child: no memory, nothing freed, no statistics. */
static void use_in_child(void *block) {
    check(allocate(MIB, 0, NULL) == NULL, "a child got memory");
    release(block, MIB, 0, NULL);
    check(dump(NULL) == 10 /* ECHILD */, "a child wrote statistics");
}

/* The whole text on standard output, if it keeps to the caller's buffer. */
static int print_text(void) {
    char small[9];
    memset(small, '#', sizeof small);
    size_t length = text(NULL, 0);
    check(length > 8, "length");
    text(small, 0);
    check(small[0] == '#', "a capacity of 0");
    text(small, 1);
    check(small[0] == '\0' && small[1] == '#', "a capacity of 1");
    text(small, 8);
    check(strlen(small) == 7 && small[8] == '#', "a capacity of 8");
    char *whole = malloc(length + 100);
    check(whole != NULL, "malloc");
    length = text(whole, length + 100);
    check(strlen(whole) == length, "the whole text");
    check(strncmp(whole, small, 7) == 0, "the same text");
    printf("%s\n%s\n", version(), whole);
    free(whole);
    return 0;
}

int main(int count, char **arguments) {
    check(count >= 3, "usage: process LIBRARY CASE [FILE]");
    const char *name = arguments[2];
    file = count > 3 ? arguments[3] : "/nonexistent";
#define CASE(text) (strcmp(name, text) == 0)

    if (CASE("late")) {
        /* Registered before the library is there, so it runs after what the library registers. */
        atexit(free_late);
        load(arguments[1]);
        late[0] = get();
        late[1] = get();
        return 0;
    }
    if (CASE("crash late"))
        atexit(abort);
    load(arguments[1]);

    if (CASE("unused"))
        return 0;
    if (CASE("text")) {
        get();
        return print_text();
    }
    if (CASE("by hand")) {
        check(dump(file) == 0, "dump");
        check(is_there(), "no file");
        return 0;
    }
    if (CASE("by hand and exit")) {
        get();
        check(dump(NULL) == 0, "dump");
        check(is_there(), "no file");
        get();
        return 0;
    }
    if (CASE("fork unused")) {
        pid_t child = fork();
        if (child == 0) {
            get();
            exit(0);
        }
        check(status_of(child) == 0, "status");
        return 0;
    }
    if (CASE("own handler")) {
        signal(SIGTERM, own_handler);
        get();
    } else if (CASE("own handler later")) {
        get();
        signal(SIGTERM, own_handler);
    } else if (CASE("ignored")) {
        signal(SIGTERM, SIG_IGN);
        get();
        raise(SIGTERM);
        return 0;
    }

    if (CASE("signal") || CASE("signal once")) {
        struct sigaction own = {.sa_sigaction = count_signal, .sa_flags = SA_SIGINFO};
        if (CASE("signal once"))
            own.sa_flags |= SA_RESETHAND;
        sigaction(SIGUSR2, &own, NULL);
        get();
        for (int i = 1; i <= 3; i++) {
            check(!is_there(), "a file before the signal");
            raise(SIGUSR2);
            check(own_signals == (CASE("signal") ? i : 1), "the program's handler");
            take_file();
        }
        get();
        /* A child's signal is the program's own affair. */
        pid_t child = fork();
        if (child == 0) {
            raise(SIGUSR2);
            _exit(own_signals);
        }
        int expected = CASE("signal") ? 4 : 1;
        check(WEXITSTATUS(status_of(child)) == expected, "the child's handler");
        check(!is_there(), "a child had the file written");
        return 0;
    }
    if (CASE("signal alone") || CASE("interval")) {
        get();
        for (int i = 0; i < 2; i++) {
            if (CASE("signal alone"))
                raise(SIGUSR2);
            take_file();
        }
        get();
        return 0;
    }
    if (CASE("signals and exit")) {
        get();
        start_hammers(2);
        for (int i = 0; i < 1000; i++)
            raise(SIGUSR2);
        exit(0);
    }

    void *block = get();
    if (CASE("crash late"))
        return 0;
    if (CASE("exit"))
        exit(3);
    if (CASE("hammer"))
        start_hammers(4);
    hangs = CASE("term while hanging");
    if (hangs || CASE("term") || CASE("hammer") || strncmp(name, "own handler", 11) == 0) {
        tell("ready\n");
        /* One that comes back from SIGTERM would end the process with 0. */
        pause();
        _exit(0);
    }
    if (CASE("hammer alone")) {
        tell("ready\n");
        hammer(NULL);
    }
    if (CASE("fork")) {
        pid_t child = fork();
        if (child == 0) {
            use_in_child(block);
            exit(0);
        }
        check(status_of(child) == 0, "status");
        check(!is_there(), "a child wrote the file");
    } else if (CASE("clone")) {
        /* A fork that no handler hears of. */
        pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (child == 0)
            exit(0);
        check(status_of(child) == 0, "status");
        child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (child == 0) {
            pause();
            _exit(0);
        }
        usleep(20000);
        kill(child, SIGTERM);
        int status = status_of(child);
        check(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM, "status");
        check(!is_there(), "a child wrote the file");
    } else if (CASE("fork and term")) {
        pid_t child = fork();
        if (child == 0) {
            pause();
            _exit(0);
        }
        usleep(20000);
        kill(child, SIGTERM);
        int status = status_of(child);
        check(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM, "status");
        check(!is_there(), "a child wrote the file");
    } else if (CASE("fork while locked")) {
        start_hammers(4);
        for (int i = 0; i < 200; i++) {
            pid_t child = fork();
            if (child == 0) {
                use_in_child(block);
                exit(0);
            }
            check(status_of(child) == 0, "status");
        }
        check(!is_there(), "a child wrote the file");
    } else {
        check(0, "no such case");
    }
    return 0;
}
