/*
 * A histogram of durations, with eight buckets for each power of two. A percentile is the upper end
 * of its bucket, so it is at most an eighth too large.
 */
#ifndef LATENCY_H
#define LATENCY_H

#include "lacuna.h"

#define LATENCY_BUCKETS 496

struct latency {
    uint64_t count[LATENCY_BUCKETS], total, max;
};

static inline unsigned latency_bucket(uint64_t value) {
    if (value < 8)
        return (unsigned)value;
    unsigned octave = 63 - (unsigned)__builtin_clzll(value);
    return (octave - 2) * 8 + (value >> (octave - 3) & 7);
}

/* The greatest value of a bucket. */
static inline uint64_t latency_end(unsigned bucket) {
    return bucket < 8 ? bucket : ((bucket % 8 + 9ull) << (bucket / 8 - 1)) - 1;
}

static inline void latency_add(struct latency *l, uint64_t value) {
    l->count[latency_bucket(value)]++;
    l->total++;
    if (value > l->max)
        l->max = value;
}

static inline void latency_merge(struct latency *to, const struct latency *from) {
    for (unsigned i = 0; i < LATENCY_BUCKETS; i++)
        to->count[i] += from->count[i];
    to->total += from->total;
    if (from->max > to->max)
        to->max = from->max;
}

/* The value that so many in ten thousand do not exceed; 0 if there are no values. */
static inline uint64_t latency_percentile(const struct latency *l, uint64_t in_10000) {
    uint64_t wanted = (l->total * in_10000 + 9999) / 10000, below = 0;
    for (unsigned i = 0; i < LATENCY_BUCKETS; i++) {
        below += l->count[i];
        if (below && below >= wanted)
            return latency_end(i) < l->max ? latency_end(i) : l->max;
    }
    return 0;
}

#endif
