/* Faults at the border to the operating system, for tests: preload this, then arm it, or have it record.
 *
 * Armed, it counts every write, flush, rename, unlink and mkdir that touches a path below the armed folder, and at
 * the chosen one kills the process or has the call fail. Everything a process does to files passes here,
 * whether Python, Arrow or a C library does it.
 *
 * Recording, it appends every operation that changes files or folders below the recorded folder, and every
 * flush, to a log, in the order in which they happened: replay.py builds from it what a loss of power leaves.
 * Processes started by a recording one record into the same log (SA1B_TEST_RECORD=<folder>:<log>). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
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

/* The log: records of struct entry, both paths, the data written. */
enum { CREATE = 1, WRITE, TRUNCATE, SYNC, MKDIR, RENAME, UNLINK, RMDIR, LINK, SYNC_ALL };
struct entry { uint32_t kind, first, second; uint64_t inode, offset, length; } __attribute__((packed));

static char recorded[PATH_MAX], log_path[PATH_MAX];
static int log_fd = -1;
static pid_t log_pid;
static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

void fault_record(const char *path, const char *log) {
    snprintf(log_path, sizeof log_path, "%s", log);
    snprintf(recorded, sizeof recorded, "%s", path);
}

__attribute__((constructor)) static void record_from_environment(void) {
    const char *said = getenv("SA1B_TEST_RECORD");
    const char *colon = said ? strchr(said, ':') : NULL;
    if (!colon) return;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s", (int)(colon - said), said);
    fault_record(path, colon + 1);
}

static int is_recorded(const char *path) {
    size_t length = strlen(recorded);
    return length && strncmp(path, recorded, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* One operation and its record at a time, over all threads and processes. */
static void begin(void) {
    pthread_mutex_lock(&mutex);
    if (log_fd < 0 || log_pid != getpid()) { /* a lock of its own for each process */
        log_fd = REAL(open, int, const char *, int, ...)(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        log_pid = getpid();
    }
    flock(log_fd, LOCK_EX);
}

static void end(void) {
    int error = errno;
    flock(log_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    errno = error;
}

static void record(int kind, uint64_t inode, const char *first, const char *second, uint64_t offset,
                   const void *data, uint64_t length, uint64_t stored) {
    struct entry entry = {kind, strlen(first), strlen(second), inode, offset, length};
    struct iovec parts[4] = {{&entry, sizeof entry}, {(void *)first, entry.first},
                             {(void *)second, entry.second}, {(void *)data, stored}};
    int error = errno;
    ssize_t done = writev(log_fd, parts, 4);
    if (done != (ssize_t)(sizeof entry + entry.first + entry.second + stored)) abort();
    errno = error;
}

/* The absolute path behind (folder descriptor, path); only "." and no ".." in it, as Python makes them. */
static const char *absolute(int dir, const char *path, char *out) {
    char link[64], base[PATH_MAX];
    if (path[0] == '/') { snprintf(out, PATH_MAX, "%s", path); return out; }
    if (dir == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t length = readlink(link, base, sizeof base - 1);
    base[length > 0 ? length : 0] = 0;
    snprintf(out, PATH_MAX, "%s/%s", base, path);
    return out;
}

static int is_recorded_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!recorded[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return is_recorded(path);
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 ? found.st_ino : 0;
}

static ssize_t write_recorded(int fd, const void *data, size_t size) {
    if (!is_recorded_fd(fd)) return REAL(write, ssize_t, int, const void *, size_t)(fd, data, size);
    begin();
    ssize_t done = REAL(write, ssize_t, int, const void *, size_t)(fd, data, size);
    if (done > 0) record(WRITE, inode_of(fd), "", "", lseek(fd, 0, SEEK_CUR) - done, data, done, done);
    end();
    return done;
}

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
    return write_recorded(fd, data, size);
}

#define PWRITE(name)                                                                              \
    ssize_t name(int fd, const void *data, size_t size, off_t offset) {                           \
        int seen = is_recorded_fd(fd);                                                            \
        if (seen) begin();                                                                        \
        ssize_t done = REAL(name, ssize_t, int, const void *, size_t, off_t)(fd, data, size, offset); \
        if (seen && done > 0) record(WRITE, inode_of(fd), "", "", offset, data, done, done);      \
        if (seen) end();                                                                          \
        return done;                                                                              \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

/* Calls that would write past the record: the callers fall back to write. */
ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    if (is_recorded_fd(out)) { errno = EINVAL; return -1; }
    return REAL(sendfile, ssize_t, int, int, off_t *, size_t)(out, in, offset, size);
}
ssize_t sendfile64(int out, int in, off_t *offset, size_t size) { return sendfile(out, in, offset, size); }
ssize_t copy_file_range(int in, off_t *a, int out, off_t *b, size_t size, unsigned flags) {
    if (is_recorded_fd(out)) { errno = EXDEV; return -1; }
    return REAL(copy_file_range, ssize_t, int, off_t *, int, off_t *, size_t, unsigned)(in, a, out, b, size, flags);
}

#define SYNC_CALL(name, kind)                                            \
    int name(int fd) {                                                   \
        if (below_fd(fd)) {                                              \
            int error = step();                                          \
            if (error) { errno = error; return -1; }                     \
        }                                                                \
        int seen = is_recorded_fd(fd);                                   \
        if (seen) begin();                                               \
        int failed = REAL(name, int, int)(fd);                           \
        if (seen && !failed) record(kind, inode_of(fd), "", "", 0, "", 0, 0); \
        if (seen) end();                                                 \
        return failed;                                                   \
    }
SYNC_CALL(fsync, SYNC)
SYNC_CALL(fdatasync, SYNC)
SYNC_CALL(syncfs, SYNC_ALL)

#define FTRUNCATE(name)                                                           \
    int name(int fd, off_t length) {                                              \
        int seen = is_recorded_fd(fd);                                            \
        if (seen) begin();                                                        \
        int failed = REAL(name, int, int, off_t)(fd, length);                     \
        if (seen && !failed) record(TRUNCATE, inode_of(fd), "", "", 0, "", length, 0); \
        if (seen) end();                                                          \
        return failed;                                                            \
    }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

static int opened(int fd, int dir, const char *path, int flags) {
    char full[PATH_MAX];
    if (fd >= 0 && recorded[0] && (flags & (O_CREAT | O_TRUNC)) && is_recorded(absolute(dir, path, full))) {
        if (flags & O_CREAT) record(CREATE, inode_of(fd), full, "", 0, "", 0, 0);
        if (flags & O_TRUNC) record(TRUNCATE, inode_of(fd), "", "", 0, "", 0, 0);
    }
    return fd;
}

#define OPEN_CALL(name, params, types, args, dir)                              \
    int name params {                                                          \
        char full[PATH_MAX];                                                   \
        va_list more;                                                          \
        va_start(more, flags);                                                 \
        mode_t mode = flags & O_CREAT ? va_arg(more, int) : 0;   \
        va_end(more);                                                          \
        int seen = recorded[0] && (flags & (O_CREAT | O_TRUNC)) && is_recorded(absolute(dir, path, full)); \
        if (seen) begin();                                                     \
        int fd = ((int(*) types)dlsym(RTLD_NEXT, #name)) args;                 \
        if (seen) { opened(fd, dir, path, flags); end(); }                     \
        return fd;                                                             \
    }
OPEN_CALL(open, (const char *path, int flags, ...), (const char *, int, ...), (path, flags, mode), AT_FDCWD)
OPEN_CALL(open64, (const char *path, int flags, ...), (const char *, int, ...), (path, flags, mode), AT_FDCWD)
OPEN_CALL(openat, (int at, const char *path, int flags, ...), (int, const char *, int, ...), (at, path, flags, mode), at)
OPEN_CALL(openat64, (int at, const char *path, int flags, ...), (int, const char *, int, ...), (at, path, flags, mode), at)

static uint64_t inode_at(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0 ? found.st_ino : 0;
}

/* Calls on one path: counted if `test`, recorded with the inode that the path names afterwards. */
#define PATH_CALL(name, test, type, params, args, dir, path, kind)                \
    int name params {                                                             \
        char full[PATH_MAX];                                                      \
        if (test) {                                                               \
            int error = step();                                                   \
            if (error && error != EIO) { errno = error; return -1; }              \
        }                                                                         \
        int seen = recorded[0] && is_recorded(absolute(dir, path, full));         \
        if (seen) begin();                                                        \
        int failed = ((int(*) type)dlsym(RTLD_NEXT, #name)) args;                 \
        if (seen && !failed) record(kind, kind == MKDIR ? inode_at(full) : 0, full, "", 0, "", 0, 0); \
        if (seen) end();                                                          \
        return failed;                                                            \
    }
PATH_CALL(unlink, below(path), (const char *), (const char *path), (path), AT_FDCWD, path, UNLINK)
PATH_CALL(unlinkat, 1, (int, const char *, int), (int dir, const char *path, int flags), (dir, path, flags), dir, path,
          (flags & AT_REMOVEDIR ? RMDIR : UNLINK))
PATH_CALL(mkdir, below(path), (const char *, mode_t), (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, MKDIR)
PATH_CALL(mkdirat, 0, (int, const char *, mode_t), (int dir, const char *path, mode_t mode), (dir, path, mode), dir, path, MKDIR)
PATH_CALL(rmdir, below(path), (const char *), (const char *path), (path), AT_FDCWD, path, RMDIR)

/* Calls on two paths. */
#define TWO_PATHS_CALL(name, test, type, params, args, a, from, b, to, kind)      \
    int name params {                                                             \
        char first[PATH_MAX], second[PATH_MAX];                                   \
        if (test) {                                                               \
            int error = step();                                                   \
            if (error && error != EIO) { errno = error; return -1; }              \
        }                                                                         \
        int seen = recorded[0] && is_recorded(absolute(b, to, second));           \
        if (seen) begin();                                                        \
        int failed = ((int(*) type)dlsym(RTLD_NEXT, #name)) args;                 \
        if (seen && !failed) record(kind, inode_at(second), absolute(a, from, first), second, 0, "", 0, 0); \
        if (seen) end();                                                          \
        return failed;                                                            \
    }
TWO_PATHS_CALL(rename, below(to), (const char *, const char *), (const char *from, const char *to), (from, to),
               AT_FDCWD, from, AT_FDCWD, to, RENAME)
TWO_PATHS_CALL(renameat, below(to), (int, const char *, int, const char *),
               (int a, const char *from, int b, const char *to), (a, from, b, to), a, from, b, to, RENAME)
TWO_PATHS_CALL(link, below(to), (const char *, const char *), (const char *from, const char *to), (from, to),
               AT_FDCWD, from, AT_FDCWD, to, LINK)
TWO_PATHS_CALL(linkat, below(to), (int, const char *, int, const char *, int),
               (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags), a, from, b, to, LINK)
