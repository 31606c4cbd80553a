/*
 * A heap of objects of 64 to 1024 bytes. All objects of a page have one size, which follows from
 * the page's number. An object is named by its number; the directory has its place.
 *
 *   at   [ directory: u32 a number ][ page | page | ... ]
 *   object   u32 number + 1, u32 version, u64 checksum, payload
 *   free     u64 FREE, u64 next of its size, u64 checksum
 *
 * An object's checksum shows that the object is whole, not that it is the newest version. The sum
 * of all checksums shows that, and it is kept outside the heap. So after any number of changes, one
 * pass over the heap finds what was lost, torn, or reverted to an older version.
 */
#ifndef OBJECTS_H
#define OBJECTS_H

#include "lacuna.h"

#define OBJECTS_PAGE 4096ull
#define OBJECTS_LINE 64ull /* bytes of the smallest object; the unit of places */
#define OBJECTS_LINES (OBJECTS_PAGE / OBJECTS_LINE)
#define OBJECTS_SIZES 5 /* 1, 2, 4, 8, 16 lines */
#define OBJECTS_FILLED 8 /* words a new object begins with; the rest is zero */
#define OBJECTS_FREE 0xffffffff00000000
#define OBJECTS_VERSION (1ull << 32)

struct objects {
    char *base;
    uint32_t *place; /* of each object, in lines from the base */
    uint64_t pages, count, spare, key;
    uint64_t free[OBJECTS_SIZES]; /* place + 1 of the first; 0: none */
    uint64_t sum;                 /* of all checksums */
};

static inline unsigned objects_size_of_page(const struct objects *h, uint64_t page) {
    return (unsigned)lacuna_below(lacuna_mix(h->key + page), OBJECTS_SIZES);
}

static inline unsigned objects_size(const struct objects *h, uint64_t place) {
    return objects_size_of_page(h, place / OBJECTS_LINES);
}

static inline uint64_t objects_words(unsigned size) { return OBJECTS_LINE / 8 << size; }

static inline uint64_t *objects_at(const struct objects *h, uint64_t place) {
    return (uint64_t *)(h->base + place * OBJECTS_LINE);
}

/* What a word adds to the checksum of its object. */
static inline uint64_t objects_weigh(uint64_t word, uint64_t index) {
    return word * (2 * index + 1);
}

static inline uint64_t objects_checksum(const uint64_t *o, uint64_t words) {
    uint64_t sum = objects_weigh(o[0], 0);
    for (uint64_t i = 2; i < words; i++)
        sum += objects_weigh(o[i], i);
    return sum;
}

static inline uint64_t objects_free_mark(const struct objects *h, uint64_t place, uint64_t next) {
    return lacuna_mix(h->key ^ (place << 32 | next));
}

static inline void objects_release(struct objects *h, uint64_t place) {
    unsigned size = objects_size(h, place);
    uint64_t *o = objects_at(h, place);
    o[0] = OBJECTS_FREE;
    o[1] = h->free[size];
    o[2] = objects_free_mark(h, place, o[1]);
    h->free[size] = place + 1;
    h->spare++;
}

static inline bool objects_is_free(const struct objects *h, uint64_t place) {
    const uint64_t *o = objects_at(h, place);
    return o[0] == OBJECTS_FREE && o[2] == objects_free_mark(h, place, o[1]);
}

/* Makes object `number` anew, in a place that no object has. */
static inline void objects_make(struct objects *h, uint64_t number, uint64_t place, uint64_t fill) {
    uint64_t words = objects_words(objects_size(h, place)), *o = objects_at(h, place);
    o[0] = number + 1;
    for (uint64_t i = 2; i < OBJECTS_FILLED; i++)
        o[i] = fill = lacuna_mix(fill + i);
    memset(o + OBJECTS_FILLED, 0, (words - OBJECTS_FILLED) * 8);
    o[1] = objects_checksum(o, OBJECTS_FILLED);
    h->sum += o[1];
    h->place[number] = (uint32_t)place;
}

/* One place in sixteen stays free. */
static inline void objects_init(struct objects *h, char *at, uint64_t pages, uint64_t seed) {
    uint64_t places = 0;
    *h = (struct objects){.key = lacuna_mix(seed)};
    for (uint64_t page = 0; page < pages; page++)
        places += OBJECTS_LINES >> objects_size_of_page(h, page);
    uint64_t directory = (places * sizeof(uint32_t) + OBJECTS_PAGE - 1) / OBJECTS_PAGE;
    h->place = (uint32_t *)at;
    h->base = at + directory * OBJECTS_PAGE;
    h->pages = pages - directory;
    for (uint64_t page = 0, n = 0; page < h->pages; page++) {
        uint64_t lines = 1ull << objects_size_of_page(h, page), first = page * OBJECTS_LINES;
        for (uint64_t place = first; place < first + OBJECTS_LINES; place += lines) {
            if (n++ % 16 == 15)
                objects_release(h, place);
            else
                objects_make(h, h->count++, place, h->key + place);
        }
    }
}

/* The object of that number; NULL if another one is there, or the directory is wrong. */
static inline uint64_t *objects_find(const struct objects *h, uint64_t number) {
    uint64_t place = h->place[number], *o = objects_at(h, place);
    return place < h->pages * OBJECTS_LINES && (uint32_t)o[0] == number + 1 ? o : NULL;
}

/* Changes a word of an object's payload. */
static inline void objects_update(struct objects *h, uint64_t *o, uint64_t index, uint64_t value) {
    uint64_t change = objects_weigh(value - o[index], index) + objects_weigh(OBJECTS_VERSION, 0);
    o[index] = value;
    o[0] += OBJECTS_VERSION;
    o[1] += change;
    h->sum += change;
}

/*
 * Frees an object and makes it anew elsewhere, with another size if there is room. -1: the new
 * place is in the free list, but it is not free.
 */
static inline int objects_replace(struct objects *h, uint64_t number, uint64_t random) {
    uint64_t old = h->place[number];
    unsigned size = (unsigned)lacuna_below(random, OBJECTS_SIZES);
    if (!h->free[size])
        size = objects_size(h, old);
    if (!h->free[size])
        return 0;
    uint64_t place = h->free[size] - 1;
    if (!objects_is_free(h, place))
        return -1;
    h->free[size] = objects_at(h, place)[1];
    h->spare--;
    h->sum -= objects_at(h, old)[1];
    objects_release(h, old);
    objects_make(h, number, place, random);
    return 0;
}

/* Checks every object and every free place. Returns the first error, and where, or NULL. */
static inline const char *objects_check(const struct objects *h, const void **where) {
    uint64_t sum = 0, spare = 0;
    for (uint64_t number = 0; number < h->count; number++) {
        const uint64_t *o = *where = objects_find(h, number);
        if (!o)
            return *where = &h->place[number], "lost";
        if (o[1] != objects_checksum(o, objects_words(objects_size(h, h->place[number]))))
            return "torn";
        sum += o[1];
    }
    *where = h->base;
    for (unsigned size = 0; size < OBJECTS_SIZES; size++) {
        uint64_t next = h->free[size];
        for (; next && spare <= h->spare; next = objects_at(h, next - 1)[1], spare++) {
            if (next > h->pages * OBJECTS_LINES || !objects_is_free(h, next - 1))
                return "free list";
        }
    }
    return sum != h->sum ? "stale" : spare != h->spare ? "free count" : NULL;
}

#endif
