/* A clock that jumps, for the processes of one server: loaded by LD_PRELOAD, it adds as many seconds to what Python reads
 * from CLOCK_REALTIME as stand in the file that CHAOS_CLOCK names (one double, shared by all processes).
 *
 * Only the interpreter is lied to: it sleeps and waits by the monotonic clock. A library that computes when to wake up
 * by the wall clock would have to be lied to by the kernel as well, or it would sleep for as long as the jump. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile double *offset;
static uintptr_t begin, end, inside;
static int (*real)(clockid_t, struct timespec *);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int look(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    (void)data;
    uintptr_t low = UINTPTR_MAX, high = 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            uintptr_t at = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            low = at < low ? at : low;
            high = at + info->dlpi_phdr[i].p_memsz > high ? at + info->dlpi_phdr[i].p_memsz : high;
        }
    if (inside < low || inside >= high) return 0;
    begin = low;
    end = high;
    return 1;
}

static void prepare(void) {
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    inside = (uintptr_t)dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    const char *path = getenv("CHAOS_CLOCK");
    if (!inside || !path) return;
    dl_iterate_phdr(look, NULL);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) offset = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    pthread_once(&once, prepare);
    int code = real ? real(clock, found) : (int)syscall(SYS_clock_gettime, clock, found);
    if (code || clock != CLOCK_REALTIME || !offset || caller < begin || caller >= end) return code;
    double whole = floor(*offset);
    long more = found->tv_nsec + (long)((*offset - whole) * 1e9);
    found->tv_sec += (time_t)whole + more / 1000000000;
    found->tv_nsec = more % 1000000000;
    return 0;
}
