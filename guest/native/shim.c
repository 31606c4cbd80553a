/*
 * The part of lacuna.h that cpubench uses, on a C library. So the same object code runs on the host
 * itself. Its arguments are the parameters: `cpubench-native test=alu iters=1000`.
 */
#define _GNU_SOURCE
#include "lacuna.h"
#include "lacuna/format.h"
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#define ARENA_BYTES (128ull << 20)

static char cmdline[2048];
static char *arena;

extern int lacuna_main(void);

int lacuna_printf(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vprintf(fmt, args);
    va_end(args);
    fflush(stdout); /* the program that reads the lines also times them */
    return n;
}

uint64_t lacuna_param(const char *name, uint64_t otherwise) {
    const char *v = lacuna_find_param(cmdline, name);
    return v ? lacuna_parse_number(v) : otherwise;
}

bool lacuna_param_given(const char *name) { return lacuna_find_param(cmdline, name); }

bool lacuna_param_is(const char *name, const char *value) {
    const char *v = lacuna_find_param(cmdline, name);
    if (!v)
        return false;
    while (*value && *v == *value)
        v++, value++;
    return !*value && (*v == ' ' || !*v);
}

char *lacuna_arena(void) { return arena; }
uint64_t lacuna_arena_bytes(void) { return ARENA_BYTES; }

uint64_t lacuna_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

struct lacuna_status_entry *lacuna_status(uint32_t kind, const char *name, uint64_t goal) {
    static struct lacuna_status_entry entry;
    (void)name;
    entry.kind = kind;
    entry.goal = goal;
    return &entry;
}

int main(int argc, char **argv) {
    size_t n = 0;
    for (int i = 1; i < argc && n < sizeof cmdline; i++)
        n += (size_t)snprintf(cmdline + n, sizeof cmdline - n, "%s ", argv[i]);
    arena = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) {
        perror("cpubench: mmap");
        return 2;
    }
    return lacuna_main();
}
