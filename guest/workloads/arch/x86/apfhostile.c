/*
 * A guest that breaks the rules of async page faults, while its threads touch more memory than the
 * host keeps resident and check what they find. The host must not be harmed, and it must write to
 * no memory outside the area. By `case`:
 *
 *   0  never zeroes the token, never acknowledges      5  random values in all three registers
 *   1  the area lies in a hole                         6  page-ready on a vector below 16
 *   2  ... on the local APIC                           7  takes the area back while pages are under
 *   3  ... beyond all memory                              way, and uses it for data
 *   4  ... at one place for all vCPUs                  8  zeroes both words, never acknowledges
 *
 * The kernel does not see the events, because its own area stays empty. After a page-not-present
 * that it cannot explain it tries the access again; a page-ready interrupt without a token it
 * ignores. With two vCPUs or more the first one keeps the rules, so that it can always end the
 * machine.
 */
#include "checked.h"

#define MSR_EN 0x4b564d02
#define MSR_INT 0x4b564d06
#define MSR_ACK 0x4b564d07
#define VEC_READY 0xf3
#define AREA_WORDS 8

static uint64_t which, bits, share;
static volatile uint64_t stop;
static uint64_t wrong, refused;

static void count(uint64_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

static void put(uint32_t index, uint64_t value) {
    if (lacuna_wrmsr(index, value))
        count(&refused);
}

/* A page for each vCPU, in front of the threads' parts. */
static volatile uint64_t *area(uint64_t cpu) {
    return (volatile uint64_t *)(lacuna_arena() + cpu * CHECKED_PAGE);
}

static uint64_t place(uint64_t cpu) {
    switch (which) {
    case 1: return 0xd0000000;
    case 2: return 0xfee00000;
    case 3: return 1ull << 45;
    case 4: return lacuna_gpa((const void *)area(0));
    default: return lacuna_gpa((const void *)area(cpu));
    }
}

/* Vectors that the kernel handles, vectors that no APIC delivers, and numbers that are no
 * vectors. */
static uint64_t some_vector(uint64_t r) {
    static const uint16_t vectors[] = {0, 1, 14, 15, 32, 33, VEC_READY, VEC_READY, 0x1f3, 0xff00};
    return vectors[lacuna_below(r, sizeof vectors / sizeof *vectors)];
}

static void anything(uint64_t own, uint64_t *x) {
    const uint64_t places[] = {own, own, own + 8, 0, 0xd0000000, 0xfee00000, 1ull << 45, ~63ull};
    uint64_t r = lacuna_random(x), at = places[lacuna_below(r, 8)];
    switch (r & 3) {
    case 0: put(MSR_INT, some_vector(lacuna_random(x))); break;
    case 1: put(MSR_ACK, r & 4 ? 1 : lacuna_random(x)); break;
    default:
        /* The kernel's memory begins at 0: no area may be enabled there. */
        put(MSR_EN, at ? at | lacuna_below(lacuna_random(x), 64) : 0);
        break;
    }
    lacuna_sleep_ns(lacuna_below(lacuna_random(x), 300000));
}

/* The former area holds data now, so the host must not write to it. */
static void take_back(uint64_t cpu, uint64_t gpa) {
    put(MSR_EN, gpa | bits);
    lacuna_sleep_ns(2000000);
    put(MSR_EN, 0);
    for (uint64_t i = 0; i < AREA_WORDS; i++)
        area(cpu)[i] = lacuna_mix(i);
    lacuna_sleep_ns(2000000);
    for (uint64_t i = 0; i < AREA_WORDS; i++) {
        if (area(cpu)[i] != lacuna_mix(i)) {
            lacuna_printf("apfhostile: the host wrote word %lu of a former area\n", i);
            count(&wrong);
        }
        area(cpu)[i] = 0;
    }
}

static int breaker(uint64_t cpu) {
    uint64_t gpa = place(cpu), x = lacuna_mix(lacuna_param("seed", 1) + cpu) | 1;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "breaker", 0);
    /* After this, no event would wake a thread that the kernel has put to sleep: wake them all
     * now. */
    lacuna_apf_disable();
    put(MSR_INT, which == 6 ? 6 : VEC_READY);
    if (which != 5 && which != 7)
        put(MSR_EN, gpa | bits);
    for (; !stop; me->counter++) {
        if (which == 5) {
            anything(gpa, &x);
        } else if (which == 7) {
            take_back(cpu, gpa);
        } else {
            if (which == 8)
                area(cpu)[0] = 0;
            lacuna_sleep_ns(1000000);
        }
    }
    return 0;
}

static int toucher(uint64_t index) {
    char *at = lacuna_arena() + lacuna_cpus() * CHECKED_PAGE + index * share;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_FAULTER, "toucher", 0);
    struct checked part = checked_new(at, share, lacuna_param("seed", 1) + index);
    for (; !stop; me->counter++) {
        if (checked_access(&part))
            count(&wrong);
    }
    return 0;
}

/* Does not wait for threads that are stuck: the machine must end without them. */
static uint64_t wait_for(uint64_t accesses, uint64_t limit_ms, const int *slots) {
    uint64_t done = 0, end = lacuna_now_ns() + limit_ms * 1000000;
    while (done < accesses && !wrong && lacuna_now_ns() < end) {
        lacuna_sleep_ns(1000000);
        done = 0;
        for (uint64_t i = 0; i < lacuna_cpus(); i++)
            done += lacuna_status_of(slots[i])->counter;
    }
    return done;
}

int main(void) {
    uint64_t cpus = lacuna_cpus(), first = cpus > 1;
    int slots[LACUNA_MAX_THREADS], failed = 0;
    which = lacuna_param("case", 0);
    bits = lacuna_param("bits", 9);
    share = (lacuna_arena_bytes() / CHECKED_PAGE - cpus) / cpus * CHECKED_PAGE;
    if (which > 8 || 2 * cpus >= LACUNA_MAX_THREADS) {
        lacuna_printf("apfhostile: cannot run with case=%lu smp=%lu: give case=0 to 8, smp=1 to "
                      "%u\n",
                      which, cpus, (LACUNA_MAX_THREADS - 1) / 2);
        return 2;
    }
    lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    for (uint64_t i = first; i < cpus; i++)
        failed |= lacuna_thread(breaker, i, i) < 0;
    for (uint64_t i = 0; i < cpus; i++)
        failed |= (slots[i] = lacuna_thread(toucher, i, i)) < 0;
    if (failed) {
        lacuna_printf("apfhostile: no room for %lu threads: give less smp, or more memory\n",
                      2 * cpus);
        return 2;
    }
    uint64_t limit_ms = lacuna_param("limit_ms", 10000);
    uint64_t done = wait_for(lacuna_param("accesses", 50000), limit_ms, slots);
    stop = 1;
    const struct lacuna_status *s = lacuna_status_page();
    lacuna_printf("RESULT case=%lu accesses=%lu wrong=%lu refused=%lu not_present=%u ready=%u "
                  "lost=%u\n",
                  which, done, wrong, refused, s->apf_not_present, s->apf_ready, s->apf_lost);
    return wrong != 0;
}
