/*
 * A transactional object heap (objects.h): a process for each processor, each with its own heap. A
 * transaction looks up four objects, reads them, updates some, and sometimes frees one and makes it
 * anew.
 *
 * Of 10000 transactions, `cold` use the large cold part of the heap, the others its hot part. That
 * share determines how many pages are newly dirtied each second. The host may set it by the
 * setting on the status page: 1 + the cold transactions of 65536. With `hot=0` all of the heap is
 * cold. At the highest setting, a transaction writes to every page of the process instead.
 *
 * Counters are transactions. Each status entry has the latency percentiles of the last window. A
 * latency is the time since the previous transaction, so it includes all time that the host takes.
 * The first entry counts to 1 when all heaps are made. At the end every object is checked.
 */
#include "crowd.h"
#include "latency.h"
#include "objects.h"

#define EACH 4  /* objects a transaction visits */
#define SWEEP UINT32_MAX
#define READS 8 /* words read of an object: all of a small one */
#define KIND LACUNA_KIND_WORKER

/* The results of a process, which the first process reads. These pages follow crowd()'s page. */
struct record {
    struct latency latency;
    uint64_t updates, cold_updates, replaced;
    uint64_t ended; /* nanoseconds; taken before the check */
};

#define RECORD_PAGES 2
_Static_assert(sizeof(struct record) <= RECORD_PAGES * PAGE, "and a block has room for them all");
/* The first block has crowd()'s page and the records. */
#define PROCESSES_MAX ((BLOCK / PAGE - 1) / RECORD_PAGES)

static struct worker {
    char *share; /* memory of both heaps */
    struct objects hot, cold;
    uint64_t random, writes, frees, colds; /* of 65536 each */
    uint64_t read;                         /* keeps the reads from being optimised away */
    struct record *record;
    struct lacuna_status_entry *me;
    struct latency window;
    uint64_t window_end, window_cycles, last; /* TSC */
} worker;

static struct record *record_of(uint64_t index) {
    return (struct record *)(lacuna_arena() + PAGE + index * RECORD_PAGES * PAGE);
}

static uint64_t processes(void) {
    uint64_t each = lacuna_threads_each(1);
    return lacuna_param("processes", each < PROCESSES_MAX ? each : PROCESSES_MAX);
}
static uint64_t share_bytes(void) { return (crowd_bytes() - BLOCK) / processes() & ~(BLOCK - 1); }
static uint64_t hot_pages(void) {
    return lacuna_param("hot", crowd_bytes() / 8) / processes() / PAGE;
}

static int report_wrong(const char *what, const void *where) {
    lacuna_printf("churn: %s: gpa=%lx\n", what, lacuna_gpa(where));
    return 1;
}

/* Visits one object: reads it, and updates it if the random number says so. False: it is lost. */
static bool visit(struct worker *w, struct objects *h, uint64_t number, uint64_t r) {
    uint64_t *o = objects_find(h, number);
    if (!o)
        return false;
    uint64_t words = objects_words(objects_size(h, h->place[number]));
    for (uint64_t i = 0; i < READS; i++)
        w->read += o[i * words / READS];
    if ((r & 0xffff) < w->writes) {
        objects_update(h, o, 2 + lacuna_below(r << 16, words - 2), w->read ^ r);
        w->record->updates++;
        w->record->cold_updates += h == &w->cold;
    }
    return true;
}

/* Writes to every page the word that is already there. */
static void sweep(const struct worker *w) {
    for (uint64_t at = 0, share = share_bytes(); at < share; at += PAGE) {
        volatile uint64_t *p = (volatile uint64_t *)(w->share + at);
        *p = *p;
    }
}

static int transaction(struct worker *w) {
    uint64_t r = lacuna_random(&w->random), number = 0, setting = lacuna_setting();
    if (setting == SWEEP) {
        sweep(w);
        return 0;
    }
    uint64_t colds = setting ? setting - 1 : w->colds;
    bool cold = !w->hot.count || (r & 0xffff) < colds, replace = (r >> 16 & 0xffff) < w->frees;
    struct objects *h = cold ? &w->cold : &w->hot;
    for (int i = 0; i < EACH; i++) {
        r = lacuna_random(&w->random);
        number = lacuna_below(r, h->count);
        if (!visit(w, h, number, r))
            return report_wrong("lost", &h->place[number]);
    }
    if (replace) {
        w->record->replaced++;
        if (objects_replace(h, number, lacuna_random(&w->random)))
            return report_wrong("free list", &h->place[number]);
    }
    return 0;
}

static uint32_t nanoseconds(uint64_t cycles) {
    uint64_t ns = lacuna_tsc_to_ns(cycles);
    return ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX;
}

static void end_window(struct worker *w) {
    static const uint64_t percentiles[4] = {5000, 9900, 9990, 10000};
    for (int i = 0; i < 4; i++)
        w->me->latency_ns[i] = nanoseconds(latency_percentile(&w->window, percentiles[i]));
    latency_merge(&w->record->latency, &w->window);
    memset(&w->window, 0, sizeof w->window);
    w->window_end = w->last + w->window_cycles;
}

static void count(struct worker *w) {
    uint64_t now = lacuna_tsc();
    latency_add(&w->window, now - w->last);
    w->last = now;
    w->me->counter++;
    if (now >= w->window_end)
        end_window(w);
}

static int check(const struct objects *h) {
    const void *where = NULL;
    const char *wrong = objects_check(h, &where);
    return wrong ? report_wrong(wrong, where) : 0;
}

static void make(struct worker *w, uint64_t index) {
    uint64_t seed = lacuna_mix(lacuna_param("seed", 1) + index), hot = hot_pages();
    w->share = lacuna_arena() + BLOCK + index * share_bytes();
    objects_init(&w->hot, w->share, hot, seed);
    objects_init(&w->cold, w->share + hot * PAGE, share_bytes() / PAGE - hot, seed + 1);
    w->random = seed | 1;
    w->colds = lacuna_param("cold", 1000) * 65536 / 10000;
    w->writes = lacuna_param("writes", 50) * 65536 / 100;
    w->frees = lacuna_param("frees", 5) * 65536 / 100;
    w->record = record_of(index);
    memset(w->record, 0, sizeof *w->record);
}

static int process(uint64_t index) {
    struct worker *w = &worker;
    int wrong = 0;
    w->me = crowd_member(KIND, "churn", index, lacuna_param("transactions", 0));
    make(w, index);
    crowd_prepared();
    const struct lacuna_info *info = (const struct lacuna_info *)LACUNA_INFO_VA;
    w->window_cycles = info->tsc_khz * lacuna_param("window_ms", 1000);
    w->last = lacuna_tsc();
    w->window_end = w->last + w->window_cycles;
    while (crowd_continues(w->me) && !wrong) {
        if (lacuna_paused(KIND)) {
            crowd_while_paused(KIND);
            w->last = lacuna_tsc(); /* the pause is not part of a transaction's latency */
        }
        wrong = transaction(w);
        count(w);
    }
    end_window(w);
    w->record->ended = lacuna_now_ns();
    return crowd_end(wrong || check(&w->hot) || check(&w->cold));
}

static void report(const char *name, uint64_t value, const struct latency *l) {
    lacuna_printf("RESULT %s=%lu transactions=%lu p50_ns=%lu p99_ns=%lu p999_ns=%lu max_ns=%lu\n",
                  name, value, l->total, lacuna_tsc_to_ns(latency_percentile(l, 5000)),
                  lacuna_tsc_to_ns(latency_percentile(l, 9900)),
                  lacuna_tsc_to_ns(latency_percentile(l, 9990)), lacuna_tsc_to_ns(l->max));
}

static int end(const struct crowd_run *run) {
    static struct record all;
    for (uint64_t i = 0; i < processes(); i++) {
        const struct record *r = record_of(i);
        report("process", i, &r->latency);
        latency_merge(&all.latency, &r->latency);
        all.updates += r->updates;
        all.cold_updates += r->cold_updates;
        all.replaced += r->replaced;
        if (r->ended > all.ended)
            all.ended = r->ended;
    }
    report("processes", processes(), &all.latency);
    lacuna_printf("RESULT updates=%lu cold_updates=%lu replaced=%lu ns=%lu verdict=%s\n",
                  all.updates, all.cold_updates, all.replaced, all.ended - run->began,
                  run->worst ? "wrong" : "ok");
    return run->worst;
}

int main(void) {
    uint64_t n = processes();
    if (!n || n > PROCESSES_MAX || crowd_bytes() < (n + 1) * BLOCK ||
        (hot_pages() + 64) * PAGE > share_bytes() || (hot_pages() && hot_pages() < 64)) {
        lacuna_printf("churn: cannot run with processes=%lu bytes=%lu hot=%lu: give 1 to %llu "
                      "processes, 2M for each and 2M more; of each share at least 64 pages cold, "
                      "and 0 or at least 64 hot\n",
                      n, crowd_bytes(), lacuna_param("hot", crowd_bytes() / 8),
                      PROCESSES_MAX);
        return 2;
    }
    struct crowd_run run = {
        .name = "churn",
        .member = process,
        .start = lacuna_spawn,
        .members = n,
        .goal = lacuna_param("transactions", 0),
    };
    return crowd_run(&run) ? end(&run) : 2;
}
