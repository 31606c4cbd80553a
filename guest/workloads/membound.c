/*
 * Memory-bound threads: each allocates all pages of its part of the arena, writes to each, reads
 * all back, frees all, and repeats. It reads in random order, or with order=ascending as it wrote.
 * With work=N it computes between two pages. With nop=1 a process that only counts runs beside each
 * of them, on the same vCPU. The host may pause those.
 */
#include "crowd.h"
#include "permute.h"

/*
 * A thread's part of the arena. It begins with a page for `struct crowd`, which only the first part
 * uses, and then a bit a page: set = allocated. These first pages, `reserved` of them, are never
 * free.
 */
struct part {
    char *base;
    uint64_t *bitmap;
    uint64_t pages, reserved, hand;
};

static uint64_t threads, rounds;
static volatile uint64_t failed;

static struct part part_new(uint64_t index) {
    struct part p = {0};
    p.pages = crowd_bytes() / PAGE / threads;
    p.base = lacuna_arena() + index * p.pages * PAGE;
    p.bitmap = (uint64_t *)(p.base + PAGE);
    p.reserved = 2 + p.pages / 8 / PAGE;
    for (uint64_t i = 0; i < p.reserved; i++)
        p.bitmap[i / 64] |= 1ull << i % 64;
    return p;
}

/* Next fit. Returns 0, which is never free, when all is allocated. */
static uint64_t allocate(struct part *p) {
    for (uint64_t i = 0; i < p->pages; i++) {
        p->hand = p->hand + 1 < p->pages ? p->hand + 1 : 0;
        if (!(p->bitmap[p->hand / 64] >> p->hand % 64 & 1)) {
            p->bitmap[p->hand / 64] |= 1ull << p->hand % 64;
            return p->hand;
        }
    }
    return 0;
}

static void release(struct part *p, uint64_t page) {
    p->bitmap[page / 64] &= ~(1ull << page % 64);
}

static volatile uint64_t *word(const struct part *p, uint64_t page) {
    return (volatile uint64_t *)(p->base + page * PAGE + page % 512 * 8);
}

static int nop(uint64_t index) {
    struct lacuna_status_entry *me = crowd_member(LACUNA_KIND_WORKER, "nop", index, 0);
    while (!crowd()->stop) {
        for (int i = 0; i < 1024; i++)
            me->counter++;
        crowd_while_paused(LACUNA_KIND_WORKER);
    }
    return 0;
}

/* Some two nanoseconds a step on a fast processor: each step depends on the one before. */
static uint64_t compute(uint64_t iterations, uint64_t v) {
    for (; iterations; iterations--)
        v = lacuna_mix(v);
    return v;
}

/* The steps of computing after each page: the host may change them while the guest runs. */
static uint64_t work(void) {
    uint64_t set = lacuna_setting();
    return set ? set : lacuna_param("work", 0);
}

static int round_once(struct part *p, uint64_t round, struct lacuna_status_entry *me, bool prints) {
    uint64_t page, count = 0, wrong = 0, start = lacuna_now_ns();
    volatile uint64_t computed;
    for (; (page = allocate(p)); count++, me->counter++) {
        *word(p, page) = lacuna_mix(page + round);
        computed = compute(work(), page);
    }
    uint64_t touched = lacuna_now_ns();
    bool ascending = lacuna_param_is("order", "ascending");
    struct permute order = permute_new(p->pages, round);
    for (uint64_t i = 0; i < p->pages; i++) {
        page = ascending ? i : permute_at(&order, i);
        if (page < p->reserved)
            continue;
        wrong += *word(p, page) != lacuna_mix(page + round);
        release(p, page);
        computed = compute(work(), page);
        me->counter++;
    }
    uint64_t end = lacuna_now_ns();
    (void)computed;
    if (prints)
        lacuna_printf("RESULT round=%lu pages=%lu touch_ns_per_page=%lu free_ns_per_page=%lu\n",
                      round, count, (touched - start) / (count + 1),
                      (end - touched) / (count + 1));
    if (wrong)
        lacuna_printf("membound: %lu pages lost what was written\n", wrong);
    return wrong != 0;
}

/* The first thread to find something wrong ends all; the last to end stops the counting ones. */
static int memory_bound(uint64_t index) {
    struct part p = part_new(index);
    uint64_t goal = 2 * rounds * (p.pages - p.reserved);
    struct lacuna_status_entry *me = crowd_member(LACUNA_KIND_FAULTER, "membound", index, goal);
    int wrong = 0;
    for (uint64_t r = 0; r < rounds && !failed; r++) {
        wrong = round_once(&p, r, me, index == 0);
        if (wrong)
            failed = 1;
    }
    if (!__atomic_sub_fetch(&crowd()->left, 1, __ATOMIC_SEQ_CST))
        crowd()->stop = 1;
    return wrong;
}

int main(void) {
    uint64_t nops = lacuna_param("nop", 0), counted = 0;
    int slots[LACUNA_MAX_THREADS];
    threads = lacuna_param("threads", 1);
    rounds = lacuna_param("rounds", 3);
    if (!threads || 2 * threads >= LACUNA_MAX_THREADS || crowd_bytes() / PAGE / threads < 8) {
        lacuna_printf("membound: cannot run with threads=%lu bytes=%lu: give each thread 32K or "
                      "more, and at most %u threads\n",
                      threads, crowd_bytes(), (LACUNA_MAX_THREADS - 1) / 2);
        return 2;
    }
    crowd()->stop = 0;
    crowd()->left = threads;
    bool started = true;
    for (uint64_t i = 1; i < threads; i++)
        started &= lacuna_thread(memory_bound, i, i % lacuna_cpus()) >= 0;
    for (uint64_t i = 0; nops && i < threads; i++)
        started &= (slots[i] = lacuna_spawn(nop, i, i % lacuna_cpus())) >= 0;
    if (!started) {
        lacuna_printf("membound: no memory for %lu threads: give more memory or fewer\n", threads);
        return 2;
    }
    uint64_t start = lacuna_now_ns(), pages = crowd_bytes() / PAGE;
    int worst = memory_bound(0), others = lacuna_wait();
    uint64_t ns = lacuna_now_ns() - start;
    for (uint64_t i = 0; nops && i < threads; i++)
        counted += lacuna_status_of(slots[i])->counter;
    lacuna_printf("RESULT rounds=%lu pages=%lu ns=%lu nop=%lu\n", rounds, pages,
                  ns, counted);
    return worst > others ? worst : others;
}
