/* The implementation of lacuna.h. */
#include "lacuna.h"
#include "lacuna/format.h"
#include "library.h"

#define INFO ((const struct lacuna_info *)LACUNA_INFO_VA)

__attribute__((visibility("hidden"))) void thread_start(void);

static uint64_t call(uint64_t number, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return system_call(INFO, number, a, b, c, d);
}

int lacuna_printf(const char *fmt, ...) {
    char line[400];
    va_list args;
    va_start(args, fmt);
    size_t n = lacuna_format(line, sizeof line, fmt, args);
    va_end(args);
    return (int)call(LACUNA_SYS_WRITE, (uint64_t)line, n, 0, 0);
}

uint64_t lacuna_param(const char *name, uint64_t otherwise) {
    const char *v = lacuna_find_param(INFO->cmdline, name);
    return v ? lacuna_parse_number(v) : otherwise;
}

bool lacuna_param_is(const char *name, const char *value) {
    const char *v = lacuna_find_param(INFO->cmdline, name);
    if (!v)
        return false;
    while (*value && *v == *value)
        v++, value++;
    return !*value && (*v == ' ' || !*v);
}

bool lacuna_param_given(const char *name) { return lacuna_find_param(INFO->cmdline, name); }

uint32_t lacuna_cpus(void) { return INFO->ncpus; }

uint64_t lacuna_threads_each(uint64_t kinds) {
    uint64_t room = (LACUNA_MAX_THREADS - 1) / kinds;
    return INFO->ncpus < room ? INFO->ncpus : room;
}

char *lacuna_arena(void) { return (char *)LACUNA_ARENA_BASE; }
uint64_t lacuna_arena_bytes(void) { return INFO->arena_bytes; }

uint64_t lacuna_gpa(const void *p) { return call(LACUNA_SYS_GPA, (uint64_t)p, 0, 0, 0); }

int lacuna_alias(void *at, const void *arena_page) {
    return (int)call(LACUNA_SYS_ALIAS, (uint64_t)at, (uint64_t)arena_page, 0, 0);
}

uint64_t lacuna_now_ns(void) { return lacuna_tsc_to_ns(lacuna_tsc()); }

uint64_t lacuna_tsc_to_ns(uint64_t cycles) {
    return multiply_divide(cycles, 1000000, INFO->tsc_khz);
}

void lacuna_sleep_ns(uint64_t ns) { call(LACUNA_SYS_SLEEP, ns, 0, 0, 0); }

int lacuna_thread(lacuna_main_fn *fn, uint64_t arg, uint64_t cpu) {
    return (int)call(LACUNA_SYS_THREAD, (uint64_t)thread_start, (uint64_t)fn, arg, cpu);
}

int lacuna_spawn(lacuna_main_fn *fn, uint64_t arg, uint64_t cpu) {
    return (int)call(LACUNA_SYS_SPAWN, (uint64_t)thread_start, (uint64_t)fn, arg, cpu);
}

int lacuna_wait(void) { return (int)call(LACUNA_SYS_WAIT, 0, 0, 0, 0); }
void lacuna_yield(void) { call(LACUNA_SYS_YIELD, 0, 0, 0, 0); }

void lacuna_exit(int status) {
    call(LACUNA_SYS_EXIT, (uint64_t)status, 0, 0, 0);
    __builtin_unreachable();
}

void lacuna_confine(uint64_t ns) { call(LACUNA_SYS_CONFINE, ns, 0, 0, 0); }

struct lacuna_status_entry *lacuna_status_of(int slot) {
    return &lacuna_status_page()->entry[slot];
}

struct lacuna_status_entry *lacuna_status(uint32_t kind, const char *name, uint64_t goal) {
    struct lacuna_status_entry *e = lacuna_status_of((int)call(LACUNA_SYS_SELF, 0, 0, 0, 0));
    e->kind = kind;
    e->goal = goal;
    for (size_t i = 0; i + 1 < sizeof e->name && name[i]; i++)
        e->name[i] = name[i];
    return e;
}

int lacuna_rdmsr(uint32_t index, uint64_t *value) {
    return (int)call(LACUNA_SYS_RDMSR, index, (uint64_t)value, 0, 0);
}

int lacuna_wrmsr(uint32_t index, uint64_t value) {
    return (int)call(LACUNA_SYS_WRMSR, index, value, 0, 0);
}

int lacuna_apf_enable(void) { return (int)call(LACUNA_SYS_APF_ENABLE, 0, 0, 0, 0); }
void lacuna_apf_disable(void) { call(LACUNA_SYS_APF_DISABLE, 0, 0, 0, 0); }
int lacuna_cpu_offline(void) { return (int)call(LACUNA_SYS_CPU_OFFLINE, 0, 0, 0, 0); }

uint64_t lacuna_disk_sectors(void) {
    return call(LACUNA_SYS_DISK, LACUNA_DISK_SECTORS, 0, 0, 0);
}

int lacuna_disk(uint64_t operation, uint64_t sector, void *arena, uint64_t bytes) {
    return (int)call(LACUNA_SYS_DISK, operation, sector, (uint64_t)arena, bytes);
}

int lacuna_balloon(uint64_t operation, void *arena_page) {
    return (int)call(LACUNA_SYS_BALLOON, operation, (uint64_t)arena_page, 0, 0);
}

void lacuna_kernel_call(void (*fn)(void)) { call(LACUNA_SYS_KCALL, (uint64_t)fn, 0, 0, 0); }
