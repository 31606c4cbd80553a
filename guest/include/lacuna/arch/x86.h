/* The instructions of x86-64 that lacuna.h offers to workloads. */
#ifndef LACUNA_ARCH_X86_H
#define LACUNA_ARCH_X86_H

#include <stdint.h>

static inline uint64_t lacuna_tsc(void) {
    uint32_t lo, hi;
    __asm__ volatile("rdtsc" : "=a"(lo), "=d"(hi));
    return (uint64_t)hi << 32 | lo;
}

static inline void lacuna_pause(void) { __asm__ volatile("pause" : : : "memory"); }

/* The exception vectors that end a program: its exit status is LACUNA_EXIT_FAULT plus one. */
#define LACUNA_FAULT_TRAP 6 /* __builtin_trap */
#define LACUNA_FAULT_PAGE 14

#endif
