/*
 * Does memory hold what was written? Every page gets a pattern keyed by (seed, page, round, word).
 * The next round checks it, in another order, and writes the next pattern. A lost, stale or torn
 * page is reported and ends the run with exit code 1.
 *
 * By a hash of (seed, page) a page is
 *   6/8  written: checked and rewritten every round
 *   1/8  read:    only read, must stay zero
 *   1/8  left:    not touched before the end, must be zero
 *
 * With gate=1 each thread waits before its last check until the host sets the setting. So a guest
 * can be saved between two passes over its memory.
 *
 * With pattern=keyed a compressor can pack the pages, with pattern=random it cannot (pattern.h).
 * The host must give zeroed memory. Where firmware leaves data in it, as under QEMU, clear=1 zeroes
 * all pages first.
 */
#include "pattern.h"
#include "permute.h"

#define PAGE 4096ull
#define WORDS 512

enum page_class { WRITTEN, READ, LEFT };

static uint64_t seed, rounds, share;
static bool incompressible;
static uint64_t failures;

static enum page_class class_of(uint64_t page) {
    uint64_t h = lacuna_mix(seed ^ page * 0x9e3779b97f4a7c15) & 7;
    return h == 0 ? LEFT : h == 1 ? READ : WRITTEN;
}

/* Rounds count from 1; before round 1 no page has been written. */
static uint64_t expected(uint64_t page, uint64_t round, uint64_t word) {
    if (!round || class_of(page) != WRITTEN)
        return 0;
    uint64_t key = pattern_key(seed, page, round);
    return incompressible ? pattern_random(key, word) : pattern_keyed(key, word);
}

static volatile uint64_t *words(uint64_t page) {
    return (volatile uint64_t *)(lacuna_arena() + page * PAGE);
}

static bool check(uint64_t page, uint64_t round) {
    volatile uint64_t *w = words(page);
    for (uint64_t i = 0; i < WORDS; i++) {
        uint64_t want = expected(page, round, i), found = w[i];
        if (found == want)
            continue;
        const char *kind = round > 1 && found == expected(page, round - 1, i) ? "stale"
                           : !found                                           ? "lost"
                                                                              : "torn";
        lacuna_printf("verify: %s: gpa=%lx page=%lu word=%lu round=%lu expected=%lx found=%lx\n",
                      kind, lacuna_gpa((const void *)&w[i]), page, i, round, want, found);
        __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
        return false;
    }
    return true;
}

static void write(uint64_t page, uint64_t round) {
    volatile uint64_t *w = words(page);
    for (uint64_t i = 0; i < WORDS; i++)
        w[i] = expected(page, round, i);
}

/* Waits at the gate, if there is one. */
static void pass_gate(uint64_t index) {
    if (!lacuna_param("gate", 0))
        return;
    while (!lacuna_setting())
        lacuna_pause();
    lacuna_printf("verify: thread %lu makes its last check\n", index);
}

static int verifier(uint64_t index) {
    uint64_t first = index * share;
    struct lacuna_status_entry *me =
        lacuna_status(LACUNA_KIND_FAULTER, "verify", share * (rounds + 1));
    if (lacuna_param("clear", 0))
        memset(lacuna_arena() + first * PAGE, 0, share * PAGE);
    for (uint64_t round = 1; round <= rounds + 1; round++) {
        bool last = round == rounds + 1;
        if (last)
            pass_gate(index);
        struct permute order = permute_new(share, seed + index * 1000 + round);
        for (uint64_t i = 0; i < share && failures < 16; i++, me->counter++) {
            uint64_t page = first + permute_at(&order, i);
            enum page_class class = class_of(page);
            if (class == LEFT && !last)
                continue;
            if (check(page, round - 1) && class == WRITTEN && !last)
                write(page, round);
        }
    }
    return failures != 0;
}

int main(void) {
    uint64_t threads = lacuna_param("threads", lacuna_threads_each(1));
    uint64_t all = lacuna_arena_bytes() / PAGE, pages = lacuna_param("pages", all);
    if (pages > all)
        pages = all;
    seed = lacuna_mix(lacuna_param("seed", 1));
    rounds = lacuna_param("rounds", 3);
    incompressible = lacuna_param_is("pattern", "random");
    share = threads ? pages / threads : 0;
    if (!share || threads >= LACUNA_MAX_THREADS) {
        lacuna_printf("verify: cannot run with threads=%lu pages=%lu: give 1 to %u threads, and a "
                      "page for each\n",
                      threads, pages, LACUNA_MAX_THREADS - 1);
        return 2;
    }
    lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    uint64_t start = lacuna_now_ns();
    for (uint64_t i = 0; i < threads; i++) {
        if (lacuna_thread(verifier, i, i % lacuna_cpus()) < 0) {
            lacuna_printf("verify: no memory for thread %lu: give more memory or fewer\n", i);
            return 2;
        }
    }
    int worst = lacuna_wait();
    lacuna_printf("RESULT pages=%lu rounds=%lu threads=%lu failures=%lu ns=%lu verdict=%s\n",
                  share * threads, rounds, threads, failures, lacuna_now_ns() - start,
                  failures || worst ? "FAILED" : "ok");
    return failures ? 1 : worst;
}
