/*
 * Writes memory at a given pace, and prints a sign of life at short intervals: a guest for
 * migrations that are compared. A thread for each processor fills its part of the memory with
 * words that no compressor packs. Then it goes around the hot pages at the part's beginning. Each
 * period it writes its share of `rate` pages, so that the pages that become dirty in a second do
 * not depend on how fast the host is. A period that begins too late is left out.
 *
 * Every `beat_us` a thread prints its number, a line. The host notes when each line arrives.
 *
 * Each page has its number and the round of its last write. Before a write the thread checks both,
 * and each period it checks a page that is not hot. So a page that was lost or is stale is found,
 * which ends the run with exit code 1.
 *
 * Counters are pages written. The first entry counts to 1 when all memory is filled.
 */
#include "crowd.h"
#include "pattern.h"

#define WORDS (PAGE / 8)
#define ROUND 1 /* the word of a page that has the round; the others have the pattern */

static uint64_t seed, share, hot;

static uint64_t processes(void) { return lacuna_param("processes", lacuna_threads_each(1)); }

static volatile uint64_t *words(uint64_t page) {
    return (volatile uint64_t *)(lacuna_arena() + BLOCK + page * PAGE);
}

static uint64_t word_of(uint64_t page, uint64_t word) {
    return pattern_random(pattern_key(seed, page, 0), word);
}

static void fill(uint64_t first) {
    for (uint64_t page = first; page < first + share; page++) {
        volatile uint64_t *w = words(page);
        for (uint64_t i = 0; i < WORDS; i++)
            w[i] = i == ROUND ? 0 : word_of(page, i);
    }
}

/* Whether a page is as its last write has left it. One word of its pattern is compared. */
static bool check(uint64_t page, uint64_t round) {
    uint64_t i = (page + round) % (WORDS - 2) + 2;
    volatile uint64_t *w = words(page);
    if (w[ROUND] == round && w[i] == word_of(page, i))
        return true;
    lacuna_printf("paced: page %lu is %s: gpa=%lx round=%lu found=%lu\n", page,
                  w[i] ? "stale" : "lost", lacuna_gpa((const void *)w), round, w[ROUND]);
    return false;
}

/* Writes the next `count` hot pages of this thread. */
static bool write_hot(uint64_t first, struct lacuna_status_entry *me, uint64_t count) {
    for (uint64_t i = 0; i < count; i++, me->counter++) {
        uint64_t page = first + me->counter % hot, round = me->counter / hot;
        if (!check(page, round))
            return false;
        words(page)[ROUND] = round + 1;
    }
    return true;
}

static int process(uint64_t index) {
    uint64_t period = lacuna_param("period_us", 2000) * 1000;
    uint64_t beat = lacuna_param("beat_us", 2000) * 1000;
    uint64_t each = lacuna_param("rate", 10000) * period / 1000000000 / processes();
    uint64_t first = index * share, random = lacuna_mix(index + 1) | 1;
    struct lacuna_status_entry *me =
        crowd_member(LACUNA_KIND_WORKER, "paced", index, lacuna_param("writes", 0));
    fill(first);
    crowd_prepared();
    uint64_t next = lacuna_now_ns(), next_beat = next;
    while (crowd_continues(me)) {
        uint64_t now = lacuna_now_ns(), cold = share - hot;
        if (now >= next_beat) {
            lacuna_printf("%lu\n", index);
            next_beat = now - now % beat + beat;
        }
        if (now < next) {
            lacuna_sleep_ns(next - now);
            continue;
        }
        next += (now - next) / period * period + period;
        uint64_t other = first + hot + (cold ? lacuna_below(lacuna_random(&random), cold) : 0);
        if (!write_hot(first, me, each) || (cold && !check(other, 0)))
            return crowd_end(true);
    }
    return crowd_end(false);
}

int main(void) {
    uint64_t n = processes(), period = lacuna_param("period_us", 2000);
    seed = lacuna_mix(lacuna_param("seed", 1));
    share = n && crowd_bytes() > BLOCK ? (crowd_bytes() - BLOCK) / PAGE / n : 0;
    hot = n ? lacuna_param("hot", crowd_bytes() / 8) / PAGE / n : 0;
    if (!n || n >= LACUNA_MAX_THREADS || !hot || hot > share || !period ||
        !lacuna_param("beat_us", 2000)) {
        lacuna_printf("paced: cannot run with processes=%lu bytes=%lu hot=%lu period_us=%lu: give "
                      "1 to %u processes, 2M and a hot page for each, and times above 0\n",
                      n, crowd_bytes(), (uint64_t)(hot * n * PAGE), period,
                      LACUNA_MAX_THREADS - 1);
        return 2;
    }
    struct crowd_run run = {
        .name = "paced",
        .member = process,
        .start = lacuna_thread,
        .members = n,
        .goal = lacuna_param("writes", 0),
    };
    if (!crowd_run(&run))
        return 2;
    lacuna_printf("RESULT written=%lu ns=%lu verdict=%s\n", run.total, run.ns,
                  run.worst ? "FAILED" : "ok");
    return run.worst;
}
