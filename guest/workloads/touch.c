/* First touch: the cost of the first write to a page, in sequence or in random order. */
#include "permute.h"

#define PAGE 4096ull

static uint64_t share;  /* pages of each thread */
static uint64_t stride; /* pages from the first of one thread to the first of the next */

static int toucher(uint64_t index) {
    bool at_random = lacuna_param_is("order", "random");
    char *base = lacuna_arena() + index * stride * PAGE;
    struct permute order = permute_new(share, lacuna_param("seed", 1) + index);
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_FAULTER, "touch", share);
    uint64_t start = lacuna_tsc();
    for (uint64_t i = 0; i < share; i++) {
        uint64_t page = at_random ? permute_at(&order, i) : i;
        *(volatile uint64_t *)(base + page * PAGE) = i;
        me->counter++;
    }
    uint64_t cycles = lacuna_tsc() - start;
    lacuna_printf("RESULT thread=touch%lu cpu=%u pages=%lu cycles_per_page=%lu ns_per_page=%lu\n",
                  index, me->cpu, share, cycles / share, lacuna_tsc_to_ns(cycles) / share);
    return 0;
}

int main(void) {
    uint64_t threads = lacuna_param("threads", lacuna_threads_each(1));
    uint64_t bytes = lacuna_param("bytes", lacuna_arena_bytes());
    if (bytes > lacuna_arena_bytes())
        bytes = lacuna_arena_bytes();
    bool overlap = lacuna_param("overlap", 0);
    share = !threads ? 0 : overlap ? bytes / PAGE : bytes / PAGE / threads;
    stride = overlap ? 0 : share;
    if (!share || threads >= LACUNA_MAX_THREADS) {
        lacuna_printf("touch: cannot run with threads=%lu bytes=%lu: give 1 to %u threads, and a "
                      "page for each\n",
                      threads, bytes, LACUNA_MAX_THREADS - 1);
        return 2;
    }
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    if (lacuna_param("gate", 0)) {
        me->counter = 1; /* shows the host that this thread waits */
        while (!lacuna_setting())
            lacuna_pause();
    }
    uint64_t start = lacuna_tsc();
    for (uint64_t i = 0; i < threads; i++) {
        if (lacuna_thread(toucher, i, i % lacuna_cpus()) < 0) {
            lacuna_printf("touch: no memory for thread %lu: give more memory or fewer\n", i);
            return 2;
        }
    }
    int worst = lacuna_wait();
    uint64_t cycles = lacuna_tsc() - start, pages = overlap ? share : share * threads;
    lacuna_printf("RESULT threads=%lu pages=%lu cycles=%lu ns=%lu ns_per_page=%lu\n", threads,
                  pages, cycles, lacuna_tsc_to_ns(cycles), lacuna_tsc_to_ns(cycles) / pages);
    return worst;
}
