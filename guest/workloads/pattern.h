/* The words that `verify` writes. */
#ifndef PATTERN_H
#define PATTERN_H

#include "lacuna.h"

static inline uint64_t pattern_key(uint64_t seed, uint64_t page, uint64_t round) {
    return lacuna_mix(seed + page) + round * 0xd1342543de82ef95;
}

/* A 64-byte line repeated within each KiB of the page: lz4 packs it better than 6:1. */
static inline uint64_t pattern_keyed(uint64_t key, uint64_t word) {
    return lacuna_mix(key + ((word & 7) | (word >> 7) << 3));
}

/* Every word differs: a compressor finds nothing. */
static inline uint64_t pattern_random(uint64_t key, uint64_t word) {
    return lacuna_mix(key + word);
}

#endif
