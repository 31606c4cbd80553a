/* A seeded order of 0 .. n-1 that needs no memory: a bijection on k bits, repeated until below
 * n. */
#ifndef PERMUTE_H
#define PERMUTE_H

#include "lacuna.h"

struct permute {
    uint64_t n, mask, seed;
    unsigned shift;
};

static inline struct permute permute_new(uint64_t n, uint64_t seed) {
    unsigned bits = 2;
    while (1ull << bits < n)
        bits++;
    return (struct permute){n, (1ull << bits) - 1, lacuna_mix(seed), bits / 2 + 1};
}

static inline uint64_t permute_at(const struct permute *p, uint64_t i) {
    do {
        i = (i + p->seed) & p->mask;
        i = (i ^ i >> p->shift) * 0x9e3779b97f4a7c15 & p->mask;
        i = (i ^ i >> p->shift) * 0xbf58476d1ce4e5b9 & p->mask;
        i ^= i >> p->shift;
    } while (i >= p->n);
    return i;
}

#endif
