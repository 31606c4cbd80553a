/*
 * Skewed access under memory pressure. Processes read and write pages by Zipf's law (zipf.h), each
 * in its own part of the arena. Ranks are in address order, so hot pages are neighbours, as with
 * allocators that place by age; with scatter=1 they are anywhere. Parts are whole 2 MiB blocks
 * after the first block, which all processes share.
 *
 * With gate=1 each process waits, when all are prepared, until the host sets the setting. From then
 * on the setting is the seed of the accesses. The pages stay where they are, and each process uses
 * the first `set` pages of its law. So a guest that is saved at its gate can be resumed several
 * times, with the same working set and other accesses.
 *
 * Each page has a version, and a word computed from the version and the page's number. By these a
 * reader finds a page that is lost, torn, or in another page's place. It cannot distinguish an old
 * version from a new one; `verify` can. A process that finds a wrong page ends all of them.
 */
#include "crowd.h"
#include "pattern.h"
#include "permute.h"
#include "zipf.h"

/* Accesses to existing pages for each page that is added. */
#define USES_A_NEW_PAGE 16

struct part {
    char *base;
    uint64_t pages, seed;
};

static struct part part_of(uint64_t index) {
    uint64_t processes = lacuna_param("processes", lacuna_threads_each(1));
    uint64_t bytes = (crowd_bytes() - BLOCK) / processes & ~(BLOCK - 1);
    return (struct part){
        .base = lacuna_arena() + BLOCK + index * bytes,
        .pages = bytes / PAGE,
        .seed = lacuna_mix(lacuna_param("seed", 1) + index) | 1,
    };
}

static volatile uint64_t *page_at(const struct part *p, uint64_t page) {
    return (volatile uint64_t *)(p->base + page * PAGE);
}

/* Where a page has its version, and where the word that belongs to it. */
static uint64_t version_at(uint64_t page) { return page % 256; }
static uint64_t witness_at(uint64_t page) { return 511 - page % 256; }

static uint64_t witness(const struct part *p, uint64_t page, uint64_t version) {
    return lacuna_mix(p->seed + page + (version << 32));
}

/* Bytes that compress to some degree: neither random nor constant. */
static void fill(const struct part *p, uint64_t page) {
    volatile uint64_t *words = page_at(p, page);
    for (uint64_t i = 0; i < PAGE / 8; i++)
        words[i] = pattern_keyed(p->seed + page, i);
    words[version_at(page)] = 0;
    words[witness_at(page)] = witness(p, page, 0);
}

/* Reads or writes one page; returns 1 if it was wrong. */
static uint64_t access(const struct part *p, uint64_t page, bool write) {
    volatile uint64_t *words = page_at(p, page);
    uint64_t version = words[version_at(page)], found = words[witness_at(page)];
    uint64_t expected = witness(p, page, version);
    if (found != expected) {
        lacuna_printf("wrong: gpa=%lx version=%lu expected=%lx found=%lx\n",
                      lacuna_gpa((const void *)words), version, expected, found);
        return 1;
    }
    if (write) {
        words[version_at(page)] = version + 1;
        words[witness_at(page)] = witness(p, page, version + 1);
    }
    return 0;
}

/* How a process chooses the pages that it accesses. */
struct use {
    struct part part;
    struct permute order;
    uint64_t random, writes;
    bool scatter;
};

/* Accesses the next page by the law, if it is below `end`; returns 1 if it was wrong. */
static uint64_t use_one(struct use *u, const struct zipf *law, uint64_t end) {
    uint64_t rank = zipf_draw(law, &u->random);
    uint64_t page = u->scatter ? permute_at(&u->order, rank) : rank;
    bool write = zipf_share(&u->random, u->writes);
    return page < end ? access(&u->part, page, write) : 0;
}

/* Adds pages while the existing ones are in use. If all pages were made first, the pages that are
 * hot later would look least recently used when memory gets scarce. Returns the number of wrong
 * pages. */
static uint64_t grow(struct use *u, const struct zipf *law) {
    uint64_t wrong = 0;
    for (uint64_t page = 0; page < u->part.pages && !wrong && !crowd()->stop; page++) {
        fill(&u->part, page);
        for (uint64_t i = 0; i < USES_A_NEW_PAGE; i++)
            wrong += use_one(u, law, page + 1);
    }
    return wrong;
}

/* Waits at the gate, if there is one. */
static void pass_gate(struct use *u, struct zipf *law, uint64_t index) {
    if (!lacuna_param("gate", 0))
        return;
    while (!lacuna_setting() && !crowd()->stop)
        lacuna_pause();
    uint64_t set = lacuna_param("set", u->part.pages);
    zipf_init(law, set < u->part.pages ? set : u->part.pages, lacuna_param("skew", 99));
    u->random = lacuna_mix(lacuna_setting() + index) | 1;
    lacuna_printf("zipf: process %lu goes on with seed %u\n", index, lacuna_setting());
}

static int process(uint64_t index) {
    static struct zipf law;
    struct part part = part_of(index);
    struct use use = {
        .part = part,
        .order = permute_new(part.pages, part.seed),
        .random = part.seed,
        .writes = lacuna_param("writes", 50) * (1 << 16) / 100,
        .scatter = lacuna_param("scatter", 0),
    };
    uint64_t goal = lacuna_param("accesses", 0);
    struct lacuna_status_entry *me = crowd_member(LACUNA_KIND_FAULTER, "zipf", index, goal);
    zipf_init(&law, part.pages, lacuna_param("skew", 99));
    uint64_t wrong = grow(&use, &law);
    crowd_prepared();
    pass_gate(&use, &law, index);
    while (crowd_continues(me) && !wrong) {
        crowd_while_paused(LACUNA_KIND_FAULTER);
        wrong += use_one(&use, &law, part.pages);
        me->counter++;
    }
    return crowd_end(wrong);
}

int main(void) {
    uint64_t processes = lacuna_param("processes", lacuna_threads_each(1));
    if (!processes || processes >= LACUNA_MAX_THREADS || crowd_bytes() < (processes + 1) * BLOCK) {
        lacuna_printf("zipf: cannot run with processes=%lu bytes=%lu: give 1 to %u processes, 2M "
                      "for each and 2M more\n",
                      processes, crowd_bytes(), LACUNA_MAX_THREADS - 1);
        return 2;
    }
    struct crowd_run run = {
        .name = "zipf",
        .member = process,
        .start = lacuna_spawn,
        .members = processes,
        .goal = lacuna_param("accesses", 0),
    };
    if (!crowd_run(&run))
        return 2;
    lacuna_printf("RESULT processes=%lu accesses=%lu ns=%lu verdict=%s\n", processes, run.total,
                  run.ns, run.worst ? "wrong" : "ok");
    return run.worst;
}
