/*
 * Random reads of 8 bytes over much memory, by one thread for each processor: measures a
 * translation that is in no cache. Every word is first written with its own number; reads check it.
 */
#include "crowd.h"

#define AT_ONCE 64 /* reads between two looks at the status page */

/* The words begin after crowd()'s page. */
static volatile uint64_t *first_word(void) {
    return (volatile uint64_t *)(lacuna_arena() + PAGE);
}

static uint64_t words_in_use(void) { return (crowd_bytes() - PAGE) / 8; }

static int reader(uint64_t index) {
    uint64_t words = words_in_use(), wrong = 0;
    uint64_t random = lacuna_mix(lacuna_param("seed", 1) + index) | 1;
    const volatile uint64_t *first = first_word();
    struct lacuna_status_entry *me =
        crowd_member(LACUNA_KIND_FAULTER, "reader", index, lacuna_param("reads", 0));
    crowd_prepared();
    while (crowd_continues(me) && !wrong) {
        crowd_while_paused(LACUNA_KIND_FAULTER);
        for (int i = 0; i < AT_ONCE; i++) {
            uint64_t word = lacuna_below(lacuna_random(&random), words);
            wrong |= first[word] ^ word;
        }
        me->counter += AT_ONCE;
    }
    if (wrong)
        lacuna_printf("reads: a word is wrong in these bits: %lx\n", wrong);
    return crowd_end(wrong);
}

int main(void) {
    uint64_t threads = lacuna_param("threads", lacuna_threads_each(1));
    if (!threads || threads >= LACUNA_MAX_THREADS || crowd_bytes() < 8 * PAGE) {
        lacuna_printf("reads: cannot run with threads=%lu bytes=%lu: give 1 to %u threads, and at "
                      "least 32K\n",
                      threads, crowd_bytes(), LACUNA_MAX_THREADS - 1);
        return 2;
    }
    volatile uint64_t *first = first_word();
    for (uint64_t i = 0, words = words_in_use(); i < words; i++)
        first[i] = i;
    struct crowd_run run = {
        .name = "reads",
        .member = reader,
        .start = lacuna_thread,
        .members = threads,
        .goal = lacuna_param("reads", 0),
    };
    if (!crowd_run(&run))
        return 2;
    lacuna_printf("RESULT threads=%lu reads=%lu ns=%lu\n", threads, run.total, run.ns);
    return run.worst;
}
