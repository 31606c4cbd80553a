/*
 * Skewed access under memory pressure: processes, each in a part of the arena, that read and write
 * pages by Zipf's law (zipf.h). Ranks lie in address order, so that hot pages are neighbours, as
 * allocators by age leave them; with scatter=1 they lie anywhere. Parts are whole blocks of 2 MiB,
 * after the first one, which is everybody's.
 *
 * Each page carries a version and a word made of it and of the page's number: whoever reads it
 * finds out whether it is lost, torn or another's. An old version is not told from a new one:
 * `verify` does that. The first entry of the status page counts to 1 when all is populated.
 */
#include "crowd.h"
#include "pattern.h"
#include "permute.h"
#include "zipf.h"

struct part {
    char *base;
    uint64_t pages, seed;
};

static struct part part_of(uint64_t index) {
    uint64_t processes = lacuna_param("processes", lacuna_cpus());
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

/* Where the version is, and the word that goes with it. */
static uint64_t version_at(uint64_t page) { return page % 256; }
static uint64_t witness_at(uint64_t page) { return 511 - page % 256; }

static uint64_t witness(const struct part *p, uint64_t page, uint64_t version) {
    return lacuna_mix(p->seed + page + (version << 32));
}

/* Pages that a compressor finds something in, but not nothing. */
static void populate(const struct part *p) {
    for (uint64_t page = 0; page < p->pages; page++) {
        volatile uint64_t *words = page_at(p, page);
        for (uint64_t i = 0; i < PAGE / 8; i++)
            words[i] = pattern_keyed(p->seed + page, i);
        words[version_at(page)] = 0;
        words[witness_at(page)] = witness(p, page, 0);
    }
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

static int process(uint64_t index) {
    static struct zipf law;
    struct part part = part_of(index);
    uint64_t goal = lacuna_param("accesses", 0), wrong = 0, random = part.seed;
    uint64_t writes = lacuna_param("writes", 50) * (1 << 16) / 100;
    bool scatter = lacuna_param("scatter", 0);
    struct permute order = permute_new(part.pages, part.seed);
    struct lacuna_status_entry *me = crowd_member(LACUNA_KIND_FAULTER, "zipf", index, goal);
    zipf_init(&law, part.pages, lacuna_param("skew", 99));
    populate(&part);
    __atomic_sub_fetch(&crowd()->left, 1, __ATOMIC_SEQ_CST);
    while (crowd()->left)
        lacuna_sleep_ns(1000000);
    while (!crowd()->stop && (!goal || me->counter < goal) && !wrong) {
        crowd_while_paused(LACUNA_KIND_FAULTER);
        uint64_t rank = zipf_draw(&law, &random);
        uint64_t page = scatter ? permute_at(&order, rank) : rank;
        wrong += access(&part, page, (random >> 40 & 0xffff) < writes);
        me->counter++;
    }
    return wrong != 0;
}

int main(void) {
    uint64_t processes = lacuna_param("processes", lacuna_cpus()), total = 0;
    int slots[LACUNA_MAX_THREADS];
    if (!processes || processes >= LACUNA_MAX_THREADS || crowd_bytes() < (processes + 1) * BLOCK) {
        lacuna_printf("zipf: processes=%lu bytes=%lu cannot be: 2 MiB each, and 2\n", processes,
                      crowd_bytes());
        return 2;
    }
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    crowd()->stop = 0;
    crowd()->left = processes;
    for (uint64_t i = 0; i < processes; i++) {
        slots[i] = lacuna_spawn(process, i, i % lacuna_cpus());
        if (slots[i] < 0) {
            lacuna_printf("zipf: no memory for process %lu\n", i);
            return 2;
        }
    }
    while (crowd()->left)
        lacuna_sleep_ns(1000000);
    me->counter = 1; /* the host may begin to measure */
    uint64_t start = lacuna_now_ns();
    if (!lacuna_param("accesses", 0)) {
        lacuna_sleep_ns(lacuna_param("seconds", 10) * 1000000000);
        crowd()->stop = 1;
    }
    int worst = lacuna_wait();
    uint64_t ns = lacuna_now_ns() - start;
    for (uint64_t i = 0; i < processes; i++)
        total += lacuna_status_of(slots[i])->counter;
    lacuna_printf("RESULT processes=%lu accesses=%lu ns=%lu verdict=%s\n", processes, total, ns,
                  worst ? "wrong" : "ok");
    return worst;
}
