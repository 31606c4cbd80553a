/* The instructions of AArch64 that lacuna.h offers to workloads. */
#ifndef LACUNA_ARCH_ARM64_H
#define LACUNA_ARCH_ARM64_H

#include <stddef.h>
#include <stdint.h>

/* The virtual counter. The instructions around it may run before or after it. */
static inline uint64_t lacuna_tsc(void) {
    uint64_t v;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(v));
    return v;
}

static inline void lacuna_pause(void) { __asm__ volatile("yield" : : : "memory"); }

/*
 * Makes instructions that were written to `at` visible to all processors (Arm ARM, "Concurrent
 * modification and execution of instructions"). Another processor also needs an isb, or an
 * exception, before it runs them.
 */
static inline void lacuna_code_written(const void *at, size_t bytes) {
    uint64_t type, line;
    __asm__("mrs %0, ctr_el0" : "=r"(type));
    line = 4ull << (type >> 16 & 15);
    for (uint64_t p = (uint64_t)at & ~(line - 1); p < (uint64_t)at + bytes; p += line)
        __asm__ volatile("dc cvau, %0" : : "r"(p) : "memory");
    __asm__ volatile("dsb ish" : : : "memory");
    line = 4ull << (type & 15);
    for (uint64_t p = (uint64_t)at & ~(line - 1); p < (uint64_t)at + bytes; p += line)
        __asm__ volatile("ic ivau, %0" : : "r"(p) : "memory");
    __asm__ volatile("dsb ish\n isb" : : : "memory");
}

/* SMCCC, in the kernel: x0 to x3 are the arguments, then the results. 0, or -1: not allowed. */
int lacuna_hypercall(uint64_t x[4]);

/* The exception classes that end a program: its exit status is LACUNA_EXIT_FAULT plus one. */
#define LACUNA_FAULT_UNDEFINED 0
#define LACUNA_FAULT_FETCH 0x20
#define LACUNA_FAULT_PAGE 0x24
#define LACUNA_FAULT_TRAP 0x3c /* __builtin_trap */

#endif
