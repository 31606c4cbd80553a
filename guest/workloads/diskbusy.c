/*
 * Keeps the disk busy, and checks it: does a block hold the last write that was acknowledged?
 * Threads write and read 4 KiB blocks of the disk at random, each thread its own. A block has its
 * number, the number of its write, and a pattern of both. The first page of the arena has the
 * number of each block's last acknowledged write. So a lost write shows as an older number or a
 * wrong pattern, and so does a write that is applied again after a later one.
 *
 * Each thread has a pool of pages as buffers. The content of a pool's page is checked before its
 * next use. With balloon=1 a page is reported as free after some of its uses, or goes through the
 * balloon. Then it may also be zero.
 *
 * The disk must be zeroed. The guest ends when each thread has made `requests` requests, or when
 * the host sets the setting. Then the main thread reads every block. The address of the first page
 * is in the last line, so that the host can compare the disk's file with it.
 */
#include "pattern.h"

#define PAGE 4096ull
#define WORDS 512
#define BLOCKS_MAX 512 /* numbers in a page */
#define SECTORS 8      /* of a block */

/* What a page of a pool holds: a block, as one of its writes left it. */
struct held {
    uint64_t block, write;
    bool may_be_zero;
};

static uint64_t seed, requests, blocks, share, pool;
static bool has_balloon;
static uint64_t failures, made;

static volatile uint64_t *last_write(uint64_t block) {
    return (volatile uint64_t *)lacuna_arena() + block;
}

static uint64_t expected(const struct held *h, uint64_t word) {
    if (!h->write)
        return 0;
    if (word < 2)
        return word ? h->block : h->write;
    return pattern_random(pattern_key(seed, h->block, h->write), word);
}

static bool fail(const char *what, const struct held *h, uint64_t word, uint64_t found) {
    lacuna_printf("diskbusy: %s: block=%lu write=%lu word=%lu expected=%lx found=%lx\n", what,
                  h->block, h->write, word, expected(h, word), found);
    __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    return false;
}

static bool check(const char *what, volatile uint64_t *page, const struct held *h) {
    bool is_zero = h->may_be_zero && !page[0];
    for (uint64_t i = 0; i < WORDS; i++) {
        uint64_t found = page[i];
        if (found != (is_zero ? 0 : expected(h, i)))
            return fail(what, h, i, found);
    }
    return true;
}

static bool transfer(uint64_t operation, volatile uint64_t *page, const struct held *h) {
    __atomic_fetch_add(&made, 1, __ATOMIC_RELAXED);
    if (!lacuna_disk(operation, h->block * SECTORS, (void *)page, PAGE))
        return true;
    return fail("I/O error", h, 0, operation);
}

static bool write(volatile uint64_t *page, struct held *h, uint64_t block) {
    *h = (struct held){block, *last_write(block) + 1, false};
    for (uint64_t i = 0; i < WORDS; i++)
        page[i] = expected(h, i);
    if (!transfer(LACUNA_DISK_WRITE, page, h))
        return false;
    *last_write(block) = h->write;
    return true;
}

static bool read(volatile uint64_t *page, struct held *h, uint64_t block) {
    *h = (struct held){block, *last_write(block), false};
    return transfer(LACUNA_DISK_READ, page, h) && check("wrong on the disk", page, h);
}

/* Gives a page to the host, and takes it back at once. */
static bool give(volatile uint64_t *page, struct held *h, bool reports) {
    h->may_be_zero = true;
    int refused = reports ? lacuna_balloon(LACUNA_BALLOON_REPORT, (void *)page)
                          : lacuna_balloon(LACUNA_BALLOON_INFLATE, (void *)page) |
                                lacuna_balloon(LACUNA_BALLOON_DEFLATE, (void *)page);
    return !refused || fail("the balloon refused", h, 0, reports);
}

static int user(uint64_t index) {
    struct held held[64] = {0};
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_FAULTER, "diskbusy", requests);
    uint64_t state = lacuna_mix(seed + index) | 1, first = index * share;
    char *pages = lacuna_arena() + PAGE + index * pool * PAGE;
    while ((!requests || me->counter < requests) && !lacuna_setting()) {
        uint64_t random = lacuna_random(&state), at = lacuna_below(random, pool);
        uint64_t block = first + lacuna_below(lacuna_random(&state), share);
        volatile uint64_t *page = (volatile uint64_t *)(pages + at * PAGE);
        struct held *h = &held[at];
        if (!check("wrong in memory", page, h) ||
            !(random & 1 ? write : read)(page, h, block) ||
            (has_balloon && random & 2 && !give(page, h, random & 4)))
            return 1;
        me->counter++;
    }
    return 0;
}

static int verdict(void) {
    struct held h = {0};
    volatile uint64_t *page = (volatile uint64_t *)(lacuna_arena() + PAGE);
    if (lacuna_disk(LACUNA_DISK_FLUSH, 0, NULL, 0))
        fail("no flush", &h, 0, 0);
    for (uint64_t block = 0; block < blocks && failures < 16; block++)
        read(page, &h, block);
    lacuna_printf("RESULT blocks=%lu requests=%lu writes=%lx failures=%lu verdict=%s\n", blocks,
                  made, lacuna_gpa(lacuna_arena()), failures, failures ? "FAILED" : "ok");
    return failures != 0;
}

int main(void) {
    uint64_t threads = lacuna_param("threads", 4), have = lacuna_disk_sectors() / SECTORS;
    blocks = have < BLOCKS_MAX ? have : BLOCKS_MAX;
    seed = lacuna_mix(lacuna_param("seed", 1));
    requests = lacuna_param("requests", 10000);
    pool = lacuna_param("pool", 16);
    has_balloon = lacuna_param("balloon", 0);
    share = threads ? blocks / threads : 0;
    blocks = share * threads;
    if (!share || threads >= LACUNA_VIRTIO_SLOTS || !pool || pool > 64 ||
        lacuna_arena_bytes() / PAGE < 1 + threads * pool) {
        lacuna_printf("diskbusy: cannot run with threads=%lu pool=%lu on a disk of %lu blocks: "
                      "give 1 to %u threads, 1 to 64 pages, and 4 KiB for each thread\n",
                      threads, pool, have, LACUNA_VIRTIO_SLOTS - 1);
        return 2;
    }
    for (uint64_t block = 0; block < blocks; block++)
        *last_write(block) = 0;
    for (uint64_t i = 0; i < threads; i++) {
        if (lacuna_thread(user, i, i % lacuna_cpus()) < 0) {
            lacuna_printf("diskbusy: no memory for thread %lu: give more memory or fewer\n", i);
            return 2;
        }
    }
    int worst = lacuna_wait();
    return worst | verdict();
}
