/* A wall clock that somebody sets, below Python: LD_PRELOAD this, with SLOTSTREAM_CLOCK naming a file of one int64, nanoseconds
 * that are added to CLOCK_REALTIME. Whoever maps that file sets the clock while the process runs; shifted_clock.py does.
 *
 * Only the interpreter's own calls see it. gRPC waits in the kernel until a time of the wall clock, and the kernel's clock is
 * not shifted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static _Atomic int64_t *shift_ns;
static void *interpreter;

static void *object_of(void *address) {
    Dl_info info;
    return address && dladdr(address, &info) ? info.dli_fbase : NULL;
}

__attribute__((constructor)) static void map_shift(void) {
    const char *name = getenv("SLOTSTREAM_CLOCK");
    int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    interpreter = object_of(dlsym(RTLD_DEFAULT, "Py_BytesMain"));
    void *at = mmap(NULL, sizeof *shift_ns, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) shift_ns = at;
    close(fd);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(which, now);
    int64_t by = shift_ns && which == CLOCK_REALTIME ? atomic_load(shift_ns) : 0;
    if (done || !by || object_of(__builtin_return_address(0)) != interpreter) return done;
    int64_t ns = now->tv_sec * 1000000000ll + now->tv_nsec + by;
    now->tv_sec = ns / 1000000000ll;
    now->tv_nsec = ns % 1000000000ll;
    return 0;
}
