/*
 * The library of a workload for Lacuna's guest kernel. A workload includes this file, defines
 * main(), and is built with build-guest.sh. Only integer code works, because there is no FPU state.
 * There is no C library beyond what is declared here.
 */
#ifndef LACUNA_H
#define LACUNA_H

#include "lacuna/abi.h"
#include "lacuna/arch.h"
#include <stdbool.h>

/* A program is one static piece: addresses are relative to its code, and no GOT is needed. */
#pragma GCC visibility push(hidden)

/* The first process begins at `int main(void)`; its result is the machine's exit code. */

/* ---- the console ---- */
int lacuna_printf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* ---- parameters: words `name=value` of the kernel command line ---- */
uint64_t lacuna_param(const char *name, uint64_t otherwise); /* 7, 0x10, 512K, 2M, 1G */
bool lacuna_param_is(const char *name, const char *value);   /* false if not given */
bool lacuna_param_given(const char *name);

/* ---- the machine ---- */
uint32_t lacuna_cpus(void);
/*
 * The default number of threads of each kind, for a workload with this many kinds: one for each
 * processor, but no more than there is room for beside the first thread.
 */
uint64_t lacuna_threads_each(uint64_t kinds);
char *lacuna_arena(void);           /* nearly all guest memory, the same for every process */
uint64_t lacuna_arena_bytes(void);  /* a multiple of the page; untouched so far, hence zero */
uint64_t lacuna_gpa(const void *p); /* guest-physical address, for reports */
int lacuna_alias(void *at, const void *arena_page); /* map a page again; 0, or -1 */

/* ---- time ---- */
uint64_t lacuna_now_ns(void);
uint64_t lacuna_tsc_to_ns(uint64_t cycles);
void lacuna_sleep_ns(uint64_t ns);

/* The processor's header has two more functions:
 *     uint64_t lacuna_tsc(void);   cycles, for lacuna_tsc_to_ns
 *     void lacuna_pause(void);     in a loop that waits for another processor
 */

/* ---- threads and processes; cpu: a processor's number, or LACUNA_ANY_CPU ---- */
#define LACUNA_ANY_CPU (~0ull)
typedef int lacuna_main_fn(uint64_t arg);
int lacuna_thread(lacuna_main_fn *fn, uint64_t arg, uint64_t cpu); /* shares all; slot or -1 */
int lacuna_spawn(lacuna_main_fn *fn, uint64_t arg, uint64_t cpu);  /* own space, fresh globals */
int lacuna_wait(void); /* for all children; the worst exit status among them */
void lacuna_yield(void);
_Noreturn void lacuna_exit(int status);
void lacuna_confine(uint64_t ns); /* end this thread and its children after a time, quietly */

/* ---- progress, which the host reads: describe this thread, then count in its entry ---- */
struct lacuna_status_entry *lacuna_status(uint32_t kind, const char *name, uint64_t goal);
struct lacuna_status_entry *lacuna_status_of(int slot);

/* The whole page, with the machine's own counters. */
static inline struct lacuna_status *lacuna_status_page(void) {
    return (struct lacuna_status *)LACUNA_STATUS_VA;
}

/* True while the host wants threads of this kind to pause. A thread should call it often (it is one
 * load), and sleep while it returns true. */
static inline bool lacuna_paused(uint32_t kind) {
    return lacuna_status_page()->paused >> kind & 1;
}

/* The setting that the host gives the workload; 0 until the host sets it. */
static inline uint32_t lacuna_setting(void) { return lacuna_status_page()->setting; }

/* ---- privileged services, for tests of the host ---- */
int lacuna_rdmsr(uint32_t index, uint64_t *value); /* 0, or -1 if the processor refused */
int lacuna_wrmsr(uint32_t index, uint64_t value);
void lacuna_kernel_call(void (*fn)(void)); /* run fn in the kernel, interrupts off */
int lacuna_apf_enable(void);   /* async page faults on this processor: 0, or -1 if there are none */
void lacuna_apf_disable(void); /* threads that wait for a page here try again */
int lacuna_cpu_offline(void);  /* moves all threads here, the caller too, to CPU 0; -1 on CPU 0 */

/* ---- the disk and the balloon; abi.h has their operations. 0, or -1: refused, or an error ---- */
uint64_t lacuna_disk_sectors(void); /* of 512 bytes; 0: there is no disk */
int lacuna_disk(uint64_t operation, uint64_t sector, void *arena, uint64_t bytes);
int lacuna_balloon(uint64_t operation, void *arena_page);

/* ---- small helpers ---- */

/* A bijection that scatters all bits (the finaliser of splitmix64). */
static inline uint64_t lacuna_mix(uint64_t v) {
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9;
    v = (v ^ v >> 27) * 0x94d049bb133111eb;
    return v ^ v >> 31;
}

/* xorshift64: state must not be 0. */
static inline uint64_t lacuna_random(uint64_t *state) {
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

/* Uniform below n, for n < 2^32: one multiplication, no division. */
static inline uint64_t lacuna_below(uint64_t random, uint64_t n) {
    return (random >> 32) * n >> 32;
}

#pragma GCC visibility pop

void *memcpy(void *restrict to, const void *restrict from, size_t n);
void *memset(void *to, int v, size_t n);
int memcmp(const void *a, const void *b, size_t n);

#endif
