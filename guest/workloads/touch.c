/* First touch: the cost of the first write to a page, in sequence or in random order. */
#include "permute.h"

#define PAGE 4096ull

static uint64_t share; /* pages of each thread */

static int toucher(uint64_t index) {
    bool at_random = lacuna_param_is("order", "random");
    char *base = lacuna_arena() + index * share * PAGE;
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
    share = threads ? bytes / PAGE / threads : 0;
    if (!share || threads >= LACUNA_MAX_THREADS) {
        lacuna_printf("touch: cannot run with threads=%lu bytes=%lu: give 1 to %u threads, and a "
                      "page for each\n",
                      threads, bytes, LACUNA_MAX_THREADS - 1);
        return 2;
    }
    lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    uint64_t start = lacuna_tsc();
    for (uint64_t i = 0; i < threads; i++) {
        if (lacuna_thread(toucher, i, i % lacuna_cpus()) < 0) {
            lacuna_printf("touch: no memory for thread %lu: give more memory or fewer\n", i);
            return 2;
        }
    }
    int worst = lacuna_wait();
    uint64_t cycles = lacuna_tsc() - start, pages = share * threads;
    lacuna_printf("RESULT threads=%lu pages=%lu cycles=%lu ns=%lu ns_per_page=%lu\n", threads,
                  pages, cycles, lacuna_tsc_to_ns(cycles), lacuna_tsc_to_ns(cycles) / pages);
    return worst;
}
