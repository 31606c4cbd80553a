/* The instructions that the library uses. memory.c and atomics.S are part of the kernel too. */
#ifndef LIBRARY_H
#define LIBRARY_H

#include "lacuna/abi.h"
#include <stddef.h>

/* A system call: number in x8, arguments in x0 to x3, result in x0. */
static inline uint64_t system_call(const struct lacuna_info *info, uint64_t number, uint64_t a,
                                   uint64_t b, uint64_t c, uint64_t d) {
    register uint64_t x8 __asm__("x8") = number;
    register uint64_t x0 __asm__("x0") = a;
    register uint64_t x1 __asm__("x1") = b;
    register uint64_t x2 __asm__("x2") = c;
    register uint64_t x3 __asm__("x3") = d;
    (void)info;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}

/* a * b / c. The caller ensures that the quotient and b * c fit 64 bits. */
static inline uint64_t multiply_divide(uint64_t a, uint64_t b, uint64_t c) {
    return a / c * b + a % c * b / c;
}

/* Copies upwards, from the lowest byte. */
static inline void copy_up(void *to, const void *from, size_t n) {
    uint64_t a, b;
    for (; n >= 16; n -= 16)
        __asm__ volatile("ldp %0, %1, [%3], #16\n stp %0, %1, [%2], #16"
                         : "=&r"(a), "=&r"(b), "+r"(to), "+r"(from)
                         :
                         : "memory");
    for (; n; n--)
        __asm__ volatile("ldrb %w0, [%2], #1\n strb %w0, [%1], #1"
                         : "=&r"(a), "+r"(to), "+r"(from)
                         :
                         : "memory");
}

/* Zeroes whole blocks by DC ZVA, where that is allowed. Returns what is left. */
static inline size_t zero_blocks(char **to, size_t n) {
    uint64_t zva, block;
    __asm__("mrs %0, dczid_el0" : "=r"(zva));
    block = 4ull << (zva & 15);
    if (zva & 16 || n < block || (uint64_t)*to & (block - 1))
        return n;
    for (; n >= block; n -= block, *to += block)
        __asm__ volatile("dc zva, %0" : : "r"(*to) : "memory");
    return n;
}

static inline void fill(void *at, unsigned char v, size_t n) {
    uint64_t pattern = v * 0x0101010101010101ull;
    char *to = at;
    if (!v && n >= 256) {
        for (; (uint64_t)to & 63; to++, n--)
            *(volatile char *)to = 0;
        n = zero_blocks(&to, n);
    }
    for (; n >= 16; n -= 16)
        __asm__ volatile("stp %1, %1, [%0], #16" : "+r"(to) : "r"(pattern) : "memory");
    for (; n; n--)
        __asm__ volatile("strb %w1, [%0], #1" : "+r"(to) : "r"(pattern) : "memory");
}

#endif
