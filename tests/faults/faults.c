/* Faults at the border to the operating system, for tests: preload this, then arm it.
 *
 * It counts every write, flush, rename, unlink and mkdir that touches a path below the armed folder, and at
 * the chosen one kills the process or has the call fail. Everything a process does to files passes here,
 * whether Python, Arrow or a C library does it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long calls, kill_at = -1, bytes_left = -1;
static uint64_t eio_state, eio_one_in;

void fault_arm(const char *path, long at, long disk_bytes, uint64_t seed, uint64_t one_in) {
    snprintf(folder, sizeof folder, "%s", path);
    calls = 0;
    kill_at = at;
    bytes_left = disk_bytes;
    eio_state = seed * 2 + 1;
    eio_one_in = one_in;
}

long fault_calls(void) { return calls; }

static int below(const char *path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static int below_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return below(path);
}

/* 0 to go on, else the errno of the injected failure. */
static int step(void) {
    long now = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (now == kill_at) kill(getpid(), SIGKILL);
    if (eio_one_in) {
        eio_state = eio_state * 6364136223846793005ULL + 1442695040888963407ULL;
        if ((eio_state >> 33) % eio_one_in == 0) return EIO;
    }
    return 0;
}

#define REAL(name, type, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    if (below_fd(fd)) {
        int error = step();
        if (!error && bytes_left >= 0) {
            if (bytes_left == 0 && size) error = ENOSPC;
            if (size > (size_t)bytes_left) size = bytes_left;
            bytes_left -= size;
        }
        if (error) { errno = error; return -1; }
    }
    return REAL(write, ssize_t, int, const void *, size_t)(fd, data, size);
}

int fsync(int fd) {
    if (below_fd(fd)) {
        int error = step();
        if (error) { errno = error; return -1; }
    }
    return REAL(fsync, int, int)(fd);
}

#define PATH_CALL(name, test, type, params, args)                 \
    int name params {                                             \
        if (test) {                                               \
            int error = step();                                   \
            if (error && error != EIO) { errno = error; return -1; } \
        }                                                         \
        return ((int(*) type)dlsym(RTLD_NEXT, #name)) args;       \
    }

PATH_CALL(rename, below(to), (const char *, const char *), (const char *from, const char *to), (from, to))
PATH_CALL(renameat, below(to), (int, const char *, int, const char *),
          (int a, const char *from, int b, const char *to), (a, from, b, to))
PATH_CALL(unlink, below(path), (const char *), (const char *path), (path))
PATH_CALL(unlinkat, 1, (int, const char *, int), (int dir, const char *path, int flags), (dir, path, flags))
PATH_CALL(mkdir, below(path), (const char *, mode_t), (const char *path, mode_t mode), (path, mode))
PATH_CALL(rmdir, below(path), (const char *), (const char *path), (path))
