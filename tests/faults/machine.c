/* A machine that misbehaves, for `python -m tests.hunt`: preload this.
 *
 * SA1B_TEST_CLOCK=SECONDS: the clock of the calendar jumps by up to so many seconds, in both directions, every few
 * seconds; clocks that only count on do not. All processes see the same jumps.
 * SA1B_TEST_DISK=MILLISECONDS: each flush, rename and opening of a file to write takes up to so long. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name, type, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

static long jump, delay;

__attribute__((constructor)) static void read_environment(void) {
    const char *clock = getenv("SA1B_TEST_CLOCK"), *disk = getenv("SA1B_TEST_DISK");
    jump = clock ? atol(clock) : 0;
    delay = disk ? atol(disk) : 0;
}

static uint64_t mixed(uint64_t value) {
    value = (value ^ value >> 31) * 0x9e3779b97f4a7c15ULL;
    return value ^ value >> 29;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = REAL(clock_gettime, int, clockid_t, struct timespec *)(id, now);
    if (jump && result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += (long)(mixed(now->tv_sec / 7) % (2 * jump + 1)) - jump;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (result) *result = precise.tv_sec;
    return precise.tv_sec;
}

static void linger(void) {
    static _Thread_local uint64_t state;
    if (!delay) return;
    state = mixed(state + getpid() + 1);
    usleep(state % (1000 * delay));
}

int fsync(int file) { linger(); return REAL(fsync, int, int)(file); }
int fdatasync(int file) { linger(); return REAL(fdatasync, int, int)(file); }

int rename(const char *from, const char *to) {
    linger();
    return REAL(rename, int, const char *, const char *)(from, to);
}

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...) {                                      \
        va_list rest;                                                                 \
        va_start(rest, flags);                                                        \
        int mode = va_arg(rest, int);                                                 \
        va_end(rest);                                                                 \
        if (flags & (O_WRONLY | O_RDWR)) linger();                                    \
        return REAL(name, int, const char *, int, ...)(path, flags, mode);            \
    }
OPEN(open)
OPEN(open64)
