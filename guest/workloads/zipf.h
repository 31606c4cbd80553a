/*
 * Zipf's law without floating point: rank r of 1 .. n is drawn with probability proportional to
 * r^-s. The method is rejection. First an octave [2^k, 2^(k+1)) of ranks is drawn, as if all its
 * ranks had the weight of the first; then a rank in it, evenly; the rank is kept with probability
 * (r / 2^k)^-s. A table of 1024 steps an octave has that factor: exact for the first 2047 ranks,
 * accurate to a thousandth beyond.
 */
#ifndef ZIPF_H
#define ZIPF_H

#include "lacuna.h"

#define ZIPF_ONE (1ull << 31) /* fixed point: 1.0 */
#define ZIPF_STEPS 1024
#define ZIPF_OCTAVES 32

struct zipf {
    uint64_t n;
    unsigned octaves;
    uint64_t below[ZIPF_OCTAVES]; /* weights of all ranks up to the end of this octave */
    uint32_t keep[ZIPF_STEPS];    /* of 2^31 */
};

/* log2 of x, both fixed point; x in [1, 2). Each squaring gives one binary digit. */
static inline uint64_t zipf_log2(uint64_t x) {
    uint64_t log = 0;
    for (unsigned bit = 31; bit--;) {
        x = x * x >> 31;
        if (x >= 2 * ZIPF_ONE) {
            x >>= 1;
            log |= 1ull << bit;
        }
    }
    return log;
}

/* The square root of a fixed-point number below 1. */
static inline uint64_t zipf_root(uint64_t x) {
    uint64_t root = 0;
    for (uint64_t bit = ZIPF_ONE; bit; bit >>= 1) {
        if ((root | bit) * (root | bit) <= x << 31)
            root |= bit;
    }
    return root;
}

/* 2^-x. Each whole unit of x contributes 2^-1; the first digit contributes the square root of
 * that, the next digit the root of the root, and so on. */
static inline uint64_t zipf_exp2_minus(uint64_t x) {
    if (x >= 63 * ZIPF_ONE)
        return 0;
    uint64_t value = ZIPF_ONE >> x / ZIPF_ONE, factor = ZIPF_ONE / 2;
    for (unsigned bit = 31; bit--;) {
        factor = zipf_root(factor);
        if (x >> bit & 1)
            value = value * factor >> 31;
    }
    return value;
}

/* The number of ranks in the octave that begins there. */
static inline uint64_t zipf_ranks(const struct zipf *z, uint64_t first) {
    return z->n - first + 1 < first ? z->n - first + 1 : first;
}

/* s is in hundredths; n is below 2^32. */
static inline void zipf_init(struct zipf *z, uint64_t n, uint64_t s) {
    uint64_t sum = 0;
    z->n = n;
    z->octaves = 0;
    for (uint64_t first = 1; first <= n; first *= 2) {
        sum += zipf_ranks(z, first) * zipf_exp2_minus(z->octaves * ZIPF_ONE * s / 100);
        z->below[z->octaves++] = sum;
    }
    for (uint64_t i = 0; i < ZIPF_STEPS; i++) {
        uint64_t log = zipf_log2(ZIPF_ONE + i * (ZIPF_ONE / ZIPF_STEPS));
        z->keep[i] = (uint32_t)zipf_exp2_minus(log * s / 100);
    }
}

/* Draws a rank, counted from 0. */
static inline uint64_t zipf_draw(const struct zipf *z, uint64_t *random) {
    for (;;) {
        uint64_t octave = 0, total = z->below[z->octaves - 1];
        uint64_t at = (uint64_t)((unsigned __int128)lacuna_random(random) * total >> 64);
        while (at >= z->below[octave])
            octave++;
        uint64_t first = 1ull << octave, r = lacuna_random(random);
        uint64_t past = lacuna_below(r, zipf_ranks(z, first));
        if ((r & (ZIPF_ONE - 1)) < z->keep[past * ZIPF_STEPS >> octave])
            return first + past - 1;
    }
}

/* True `share` times in 65536, whatever rank was drawn before. It takes a new random number,
 * because the last one of a draw chose the rank. */
static inline bool zipf_share(uint64_t *random, uint64_t share) {
    return (lacuna_random(random) & 0xffff) < share;
}

#endif
