/* A disk that fails, below Python and SQLite: LD_PRELOAD this, with SLOTSTREAM_FAULTS naming a file of struct faults.
 *
 * Whoever maps that file arms and disarms faults while the process runs; tests/breaking/faults/faulty_disk.py does. A rule says which
 * calls fail (a mask), on which files (a part of their path, and the directory that they are below), how often, and how: with an
 * errno, with half of the bytes (reads and writes), or late.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, RENAME = 16, UNLINK = 32, TRUNCATE = 64, ALLOCATE = 128, MKDIR = 256 };
#define RULES 8

struct rule {
    uint32_t calls;       /* Mask; 0: the rule is off. */
    int32_t error;        /* errno; 0: none. */
    uint32_t per_million; /* How often. */
    uint32_t half;        /* Reads and writes do half of what they were asked for. */
    uint32_t hang_us;     /* They take that much longer. */
    uint32_t seed;
    _Atomic uint64_t seen; /* Calls that the rule is about. */
    _Atomic uint64_t done; /* Of these, those that it failed. */
    char below[512];
    char part[64];
};

static struct rule *rules;

__attribute__((constructor)) static void map_rules(void) {
    const char *name = getenv("SLOTSTREAM_FAULTS");
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
    int fd = name ? real_open(name, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, RULES * sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) rules = at;
    close(fd);
}

static int any(uint32_t call) {
    if (rules)
        for (int i = 0; i < RULES; i++)
            if (rules[i].calls & call) return 1;
    return 0;
}

/* The path of a name relative to a directory's descriptor, or of a descriptor alone. */
static void path_of(int fd, const char *name, char *path, size_t room) {
    char link[64];
    ssize_t got = 0;
    path[0] = 0;
    if (!name || name[0] != '/') {
        if (fd == AT_FDCWD) {
            if (!getcwd(path, room)) return;
            got = (ssize_t)strlen(path);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            got = readlink(link, path, room - 1);
            if (got < 0) got = 0;
            path[got] = 0;
        }
    }
    if (name) snprintf(path + got, room - (size_t)got, "%s%s", got ? "/" : "", name);
}

/* What becomes of a call: 0 nothing, -1 half, else an errno. */
static int fate(uint32_t call, int fd, const char *name) {
    char path[4096];
    if (!any(call)) return 0;
    int saved = errno;
    path_of(fd, name, path, sizeof path);
    errno = saved;
    for (int i = 0; i < RULES; i++) {
        struct rule *r = &rules[i];
        if (!(r->calls & call) || strncmp(path, r->below, strlen(r->below)) || !strstr(path, r->part)) continue;
        uint64_t n = atomic_fetch_add(&r->seen, 1) + 1;
        /* splitmix64: the n-th call of a rule has the same fate in every run. */
        uint64_t x = n * 0x9E3779B97F4A7C15ull + r->seed;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        if ((x ^ (x >> 31)) % 1000000 >= r->per_million) continue;
        atomic_fetch_add(&r->done, 1);
        if (r->hang_us) usleep(r->hang_us);
        if (r->error) return r->error;
        if (r->half) return -1;
    }
    return 0;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define FAIL_IF(call, fd, name) \
    int what = fate(call, fd, name); \
    if (what > 0) { errno = what; return -1; }
#define HALF(count) (what < 0 && (count) > 1 ? (count) / 2 : (count))

#define OPEN_FUNCTION(symbol) \
    int symbol(const char *name, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        REAL(int, symbol, const char *, int, ...); \
        FAIL_IF(OPEN, AT_FDCWD, name) \
        return real(name, flags, mode); \
    }
#define OPENAT_FUNCTION(symbol) \
    int symbol(int dir, const char *name, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        REAL(int, symbol, int, const char *, int, ...); \
        FAIL_IF(OPEN, dir, name) \
        return real(dir, name, flags, mode); \
    }
#define READ_FUNCTION(symbol, offset) \
    ssize_t symbol(int fd, void *data, size_t count, offset at) { \
        REAL(ssize_t, symbol, int, void *, size_t, offset); \
        FAIL_IF(READ, fd, NULL) \
        return real(fd, data, HALF(count), at); \
    }
#define WRITE_FUNCTION(symbol, offset) \
    ssize_t symbol(int fd, const void *data, size_t count, offset at) { \
        REAL(ssize_t, symbol, int, const void *, size_t, offset); \
        FAIL_IF(WRITE, fd, NULL) \
        return real(fd, data, HALF(count), at); \
    }
#define FD_FUNCTION(symbol, call) \
    int symbol(int fd) { \
        REAL(int, symbol, int); \
        FAIL_IF(call, fd, NULL) \
        return real(fd); \
    }
#define TRUNCATE_FUNCTION(symbol, offset) \
    int symbol(int fd, offset size) { \
        REAL(int, symbol, int, offset); \
        FAIL_IF(TRUNCATE, fd, NULL) \
        return real(fd, size); \
    }
#define ALLOCATE_FUNCTION(symbol, offset) \
    int symbol(int fd, offset at, offset size) { \
        REAL(int, symbol, int, offset, offset); \
        int what = fate(ALLOCATE, fd, NULL); \
        return what > 0 ? what : real(fd, at, size); \
    }

OPEN_FUNCTION(open)
OPEN_FUNCTION(open64)
OPENAT_FUNCTION(openat)
OPENAT_FUNCTION(openat64)
READ_FUNCTION(pread, off_t)
READ_FUNCTION(pread64, off64_t)
WRITE_FUNCTION(pwrite, off_t)
WRITE_FUNCTION(pwrite64, off64_t)
FD_FUNCTION(fsync, SYNC)
FD_FUNCTION(fdatasync, SYNC)
TRUNCATE_FUNCTION(ftruncate, off_t)
TRUNCATE_FUNCTION(ftruncate64, off64_t)
ALLOCATE_FUNCTION(posix_fallocate, off_t)
ALLOCATE_FUNCTION(posix_fallocate64, off64_t)

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    FAIL_IF(RENAME, AT_FDCWD, from)
    return real(from, to);
}

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    FAIL_IF(RENAME, from_dir, from)
    return real(from_dir, from, to_dir, to);
}

int unlink(const char *name) {
    REAL(int, unlink, const char *);
    FAIL_IF(UNLINK, AT_FDCWD, name)
    return real(name);
}

int unlinkat(int dir, const char *name, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    FAIL_IF(UNLINK, dir, name)
    return real(dir, name, flags);
}

int mkdir(const char *name, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    FAIL_IF(MKDIR, AT_FDCWD, name)
    return real(name, mode);
}

int mkdirat(int dir, const char *name, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    FAIL_IF(MKDIR, dir, name)
    return real(dir, name, mode);
}
