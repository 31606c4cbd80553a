/*
 * Random accesses to pages with known contents. They find a lost, stale or torn page, and a word
 * that another program or the host wrote. No access makes a system call.
 */
#ifndef CHECKED_H
#define CHECKED_H

#include "lacuna.h"

#define CHECKED_PAGE 4096ull
#define CHECKED_WORDS 8 /* of each page, spread over it */

struct checked {
    volatile uint32_t *version; /* of each page: the number of writes; 0: not checked yet */
    char *base;
    uint64_t pages, key, random;
};

/* A part of the arena for this thread only. Its first pages hold the versions. */
static inline struct checked checked_new(char *at, uint64_t bytes, uint64_t seed) {
    uint64_t pages = bytes / CHECKED_PAGE;
    uint64_t heads = (pages * sizeof(uint32_t) + CHECKED_PAGE - 1) / CHECKED_PAGE;
    memset(at, 0, heads * CHECKED_PAGE);
    return (struct checked){
        .version = (volatile uint32_t *)at,
        .base = at + heads * CHECKED_PAGE,
        .pages = pages - heads,
        .key = lacuna_mix(seed),
        .random = lacuna_mix(seed) | 1,
    };
}

static inline volatile uint64_t *checked_word(const struct checked *c, uint64_t page, uint64_t i) {
    return (volatile uint64_t *)(c->base + page * CHECKED_PAGE + i * 512 + page % 64 * 8);
}

static inline uint64_t checked_value(const struct checked *c, uint64_t page, uint32_t version) {
    return lacuna_mix(c->key + page + ((uint64_t)version << 32));
}

/* Checks a page, and writes to half of the pages it checks. Returns 1 if the page was wrong. */
static inline uint64_t checked_access(struct checked *c) {
    uint64_t r = lacuna_random(&c->random), page = lacuna_below(r, c->pages);
    uint32_t version = c->version[page];
    uint64_t value = checked_value(c, page, version);
    for (uint64_t i = 0; i < CHECKED_WORDS && version; i++) {
        uint64_t found = *checked_word(c, page, i);
        if (found == value + i)
            continue;
        lacuna_printf("wrong: gpa=%lx version=%u expected=%lx found=%lx\n",
                      lacuna_gpa((const void *)checked_word(c, page, i)), version, value + i,
                      found);
        return 1;
    }
    if (version && r & 512)
        return 0;
    value = checked_value(c, page, ++version);
    for (uint64_t i = 0; i < CHECKED_WORDS; i++)
        *checked_word(c, page, i) = value + i;
    c->version[page] = version;
    return 0;
}

#endif
