/*
 * How much time a guest loses between two instructions because of its host.
 *
 * One thread for each processor writes a byte to random pages and reads the TSC after each write.
 * An interval longer than the limit is a gap: a fault that the host handled, an exit, a wait. A
 * counter is the nanoseconds of the thread's gaps, each less the usual time of a write. An interval
 * longer than `most_us` means that the host's scheduler ran something else on the processor. Such
 * intervals do not count as the host's work; the last line reports them separately. Every page is
 * written once before the measurement.
 */
#include "crowd.h"

#define SMOOTH 256 /* writes over which the usual time of one is averaged */

struct meter {
    uint64_t limit, most, usual; /* cycles; `usual` times SMOOTH */
    uint64_t steps, gaps, cycles, away, away_cycles;
};

static struct meter meters[LACUNA_MAX_THREADS];

static uint64_t pages(void) { return crowd_bytes() / PAGE - 1; }

/* After crowd()'s page. */
static volatile uint8_t *page(uint64_t number) {
    return (volatile uint8_t *)lacuna_arena() + (1 + number) * PAGE;
}

static void step(struct meter *m, uint64_t cycles) {
    m->steps++;
    if (cycles <= m->limit) {
        m->usual += cycles - m->usual / SMOOTH;
        return;
    }
    uint64_t gone = cycles - m->usual / SMOOTH;
    if (cycles > m->most) {
        m->away++;
        m->away_cycles += gone;
        return;
    }
    m->gaps++;
    m->cycles += gone;
}

static int member(uint64_t index) {
    struct meter *m = &meters[index];
    const struct lacuna_info *info = (const struct lacuna_info *)LACUNA_INFO_VA;
    uint64_t random = lacuna_mix(lacuna_param("seed", 1) + index) | 1, all = pages();
    struct lacuna_status_entry *me = crowd_member(LACUNA_KIND_WORKER, "gaps", index, 0);
    m->limit = info->tsc_khz * lacuna_param("limit_ns", 2000) / 1000000;
    m->most = info->tsc_khz * lacuna_param("most_us", 1000) / 1000;
    m->usual = m->limit / 2 * SMOOTH;
    crowd_prepared();
    uint64_t last = lacuna_tsc();
    while (crowd_continues(me)) {
        if (lacuna_paused(LACUNA_KIND_WORKER)) {
            crowd_while_paused(LACUNA_KIND_WORKER);
            last = lacuna_tsc();
        }
        *page(lacuna_below(lacuna_random(&random), all)) = (uint8_t)random;
        uint64_t now = lacuna_tsc(), gaps = m->gaps;
        step(m, now - last);
        last = now;
        if (m->gaps != gaps)
            me->counter = lacuna_tsc_to_ns(m->cycles);
    }
    return crowd_end(false);
}

int main(void) {
    uint64_t threads = lacuna_param("threads", lacuna_threads_each(1));
    if (!threads || threads >= LACUNA_MAX_THREADS || crowd_bytes() < 8 * PAGE) {
        lacuna_printf("gaps: cannot run with threads=%lu bytes=%lu: give 1 to %u threads, and at "
                      "least 32K\n",
                      threads, crowd_bytes(), LACUNA_MAX_THREADS - 1);
        return 2;
    }
    for (uint64_t i = 0, all = pages(); i < all; i++)
        *page(i) = 1;
    struct crowd_run run = {
        .name = "gaps",
        .member = member,
        .start = lacuna_thread,
        .members = threads,
    };
    if (!crowd_run(&run))
        return 2;
    struct meter all = {0};
    for (uint64_t i = 0; i < threads; i++) {
        all.steps += meters[i].steps;
        all.gaps += meters[i].gaps;
        all.usual += meters[i].usual / SMOOTH;
        all.away += meters[i].away;
        all.away_cycles += meters[i].away_cycles;
    }
    lacuna_printf("RESULT threads=%lu steps=%lu usual_ns=%lu gaps=%lu gone_ns=%lu away=%lu "
                  "away_ns=%lu ns=%lu\n",
                  threads, all.steps, lacuna_tsc_to_ns(all.usual / threads), all.gaps, run.total,
                  all.away, lacuna_tsc_to_ns(all.away_cycles), run.ns);
    return run.worst;
}
