/*
 * A memory-bound program: allocates all pages, writes to each, reads all back, frees all, and
 * repeats. With work=N it computes between two pages. With nop=1 a process that only counts runs
 * beside it.
 */
#include "permute.h"

#define PAGE 4096ull

/*
 * The arena begins with a page for the stop flag and then a bit a page: set = allocated. These
 * first pages, `reserved` of them, are never free.
 */
static uint64_t *bitmap;
static uint64_t pages, reserved, hand;

static void allocator_init(void) {
    bitmap = (uint64_t *)(lacuna_arena() + PAGE);
    pages = lacuna_param("bytes", lacuna_arena_bytes()) / PAGE;
    if (pages > lacuna_arena_bytes() / PAGE)
        pages = lacuna_arena_bytes() / PAGE;
    reserved = 2 + pages / 8 / PAGE;
    for (uint64_t i = 0; i < reserved; i++)
        bitmap[i / 64] |= 1ull << i % 64;
}

static volatile uint64_t *stop_flag(void) { return (volatile uint64_t *)lacuna_arena(); }

/* Next fit. Returns 0, which is never free, when all is allocated. */
static uint64_t allocate(void) {
    for (uint64_t i = 0; i < pages; i++) {
        hand = hand + 1 < pages ? hand + 1 : 0;
        if (!(bitmap[hand / 64] >> hand % 64 & 1)) {
            bitmap[hand / 64] |= 1ull << hand % 64;
            return hand;
        }
    }
    return 0;
}

static void release(uint64_t page) { bitmap[page / 64] &= ~(1ull << page % 64); }

static volatile uint64_t *word(uint64_t page) {
    return (volatile uint64_t *)(lacuna_arena() + page * PAGE + page % 512 * 8);
}

static int nop(uint64_t unused) {
    (void)unused;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_WORKER, "nop", 0);
    while (!*stop_flag()) {
        for (int i = 0; i < 1024; i++)
            me->counter++;
    }
    return 0;
}

/* Some two nanoseconds a step on a fast processor: each step depends on the one before. */
static uint64_t compute(uint64_t iterations, uint64_t v) {
    for (; iterations; iterations--)
        v = lacuna_mix(v);
    return v;
}

static int round_once(uint64_t round, struct lacuna_status_entry *me) {
    uint64_t page, count = 0, wrong = 0, start = lacuna_now_ns();
    uint64_t work = lacuna_param("work", 0);
    volatile uint64_t computed;
    for (; (page = allocate()); count++, me->counter++) {
        *word(page) = lacuna_mix(page + round);
        computed = compute(work, page);
    }
    uint64_t touched = lacuna_now_ns();
    struct permute order = permute_new(pages, round);
    for (uint64_t i = 0; i < pages; i++) {
        page = permute_at(&order, i);
        if (page < reserved)
            continue;
        wrong += *word(page) != lacuna_mix(page + round);
        release(page);
        computed = compute(work, page);
        me->counter++;
    }
    uint64_t end = lacuna_now_ns();
    (void)computed;
    lacuna_printf("RESULT round=%lu pages=%lu touch_ns_per_page=%lu free_ns_per_page=%lu\n",
                  round, count, (touched - start) / (count + 1), (end - touched) / (count + 1));
    if (wrong)
        lacuna_printf("membound: %lu pages lost what was written\n", wrong);
    return wrong != 0;
}

int main(void) {
    uint64_t rounds = lacuna_param("rounds", 3), nops = lacuna_param("nop", 0);
    int slot = -1, failed = 0;
    allocator_init();
    struct lacuna_status_entry *me =
        lacuna_status(LACUNA_KIND_FAULTER, "membound", 2 * rounds * (pages - reserved));
    if (nops)
        slot = lacuna_spawn(nop, 0, 0);
    uint64_t start = lacuna_now_ns();
    for (uint64_t r = 0; r < rounds && !failed; r++)
        failed = round_once(r, me);
    uint64_t ns = lacuna_now_ns() - start;
    *stop_flag() = 1;
    lacuna_wait();
    lacuna_printf("RESULT rounds=%lu pages=%lu ns=%lu nop=%lu\n", rounds, pages, ns,
                  slot < 0 ? 0 : lacuna_status_of(slot)->counter);
    return failed;
}
