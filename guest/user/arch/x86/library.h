/* The instructions that the library uses. memory.c is part of the kernel too. */
#ifndef LIBRARY_H
#define LIBRARY_H

#include "lacuna/abi.h"
#include <stddef.h>

/*
 * A system call: number in rax, arguments in rdi rsi rdx r10, result in rax.
 * The call is the syscall instruction. With the boot parameter syscall=ud2, which the info page
 * passes on, it is ud2 with a mark in the upper half of rax. That is for hosts that deliver
 * exceptions from CPL 3 but neither syscall nor int (kvm_pvm, seen on Linux 6.18: syscall arrives
 * at LSTAR still in CPL 3, and int n is #UD).
 */
static inline uint64_t system_call(const struct lacuna_info *info, uint64_t number, uint64_t a,
                                   uint64_t b, uint64_t c, uint64_t d) {
    register uint64_t r10 __asm__("r10") = d;
    if (info->processor == LACUNA_SYSCALL_BY_UD2) {
        number |= LACUNA_UD2_MARK << 32;
        __asm__ volatile("ud2"
                         : "+a"(number)
                         : "D"(a), "S"(b), "d"(c), "r"(r10)
                         : "memory");
    } else {
        __asm__ volatile("syscall"
                         : "+a"(number)
                         : "D"(a), "S"(b), "d"(c), "r"(r10)
                         : "rcx", "r11", "memory");
    }
    return number;
}

/* a * b / c with a 128-bit product. The caller ensures that the quotient fits 64 bits. */
static inline uint64_t multiply_divide(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t lo = a, hi;
    __asm__("mulq %2" : "+a"(lo), "=d"(hi) : "r"(b));
    __asm__("divq %2" : "+a"(lo), "+d"(hi) : "r"(c));
    return lo;
}

/* Copies upwards, from the lowest byte. */
static inline void copy_up(void *to, const void *from, size_t n) {
    size_t words = n / 8;
    n %= 8;
    __asm__ volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(words) : : "memory");
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
}

static inline void fill(void *to, unsigned char v, size_t n) {
    size_t words = n / 8, pattern = v * 0x0101010101010101ull;
    n %= 8;
    __asm__ volatile("rep stosq" : "+D"(to), "+c"(words) : "a"(pattern) : "memory");
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(pattern) : "memory");
}

#endif
