/*
 * A guest that breaks the rules of async page faults, while its threads touch more memory than the
 * host keeps resident and check what they find. The host must not be harmed, and it must write to
 * no memory outside the area. By `case`:
 *
 *   0  never clears the reason, never acknowledges     5  random arguments to all functions
 *   1  the area lies in a hole                         6  functions and services that do not exist
 *   2  ... on a device                                 7  takes the area back while pages are under
 *   3  ... beyond all memory                              way, and uses it for data
 *   4  ... at one place for all vCPUs                  8  clears both words, never acknowledges
 *                                                      9  enables twice, disables twice, again
 *
 * form=1 uses the function of RFCv2, form=2 the function of v1 to v4. The kernel does not see the
 * events, because its own area stays empty. With apf=abort it tries again after an external abort
 * that it cannot explain. With apf=sdei it expects none, so form=1 may bring it down. With two
 * vCPUs or more the first one keeps the rules, so that it can always end the machine.
 */
#include "checked.h"

#define SERVICE 0x86000000u
#define ABORT_SWITCH (1ull << 63)
#define ABORT_RANGE (1ull << 62)
#define SDEI_APF_ENABLE 4
#define SDEI_APF_ACK 5
#define AREA_WORDS 8

static uint64_t which, form, bits, share;
static volatile uint64_t stop;
static uint64_t wrong, refused;

static void count(uint64_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

static void call(uint64_t function, uint64_t a, uint64_t b, uint64_t c) {
    uint64_t x[4] = {function, a, b, c};
    if (lacuna_hypercall(x) || (int32_t)x[0] < 0)
        count(&refused);
}

/* Enables the area at this address, or disables with 0. */
static void put(uint64_t value) {
    if (form == 1) {
        value |= ABORT_SWITCH;
        call(SERVICE + 1, (uint32_t)value, value >> 32, 0);
    } else {
        call(SERVICE + 2, SDEI_APF_ENABLE, (uint32_t)value, value >> 32);
    }
}

/* A page for each vCPU, in front of the threads' parts. */
static volatile uint64_t *area(uint64_t cpu) {
    return (volatile uint64_t *)(lacuna_arena() + cpu * CHECKED_PAGE);
}

static uint64_t place(uint64_t cpu) {
    switch (which) {
    case 1: return 0x30000000;
    case 2: return 0x08000000;
    case 3: return 1ull << 45;
    case 4: return lacuna_gpa((const void *)area(0));
    default: return lacuna_gpa((const void *)area(cpu));
    }
}

static void anything(uint64_t own, uint64_t *x) {
    const uint64_t places[] = {own,        own + 4,    own + 8,    own + 4000,
                               0x30000000, 0x08000000, 1ull << 45, ~63ull};
    uint64_t r = lacuna_random(x), at = places[lacuna_below(r, 8)] | lacuna_below(r << 8, 64);
    switch (r & 3) {
    case 0: call(SERVICE + 2, lacuna_below(r << 16, 8), (uint32_t)at, at >> 32); break;
    case 1: call(SERVICE + 1, (uint32_t)r, lacuna_random(x), 0); break;
    case 2: call(SERVICE + 1, (uint32_t)at, (at | ABORT_RANGE) >> 32, 0); break;
    default: put(r & 4 ? at : 0); break;
    }
    lacuna_sleep_ns(lacuna_below(lacuna_random(x), 300000));
}

static void no_function(uint64_t *x) {
    uint64_t r = lacuna_random(x);
    call(SERVICE + (r & 127), 6 + (r >> 8 & 0xffff), r, r >> 32);
    call((0x80000000 | (uint32_t)r) & ~0x3f00000full, r, r >> 8, 0); /* no PSCI function */
    lacuna_sleep_ns(lacuna_below(lacuna_random(x), 300000));
}

/* The former area holds data now, so the host must not write to it. */
static void take_back(uint64_t cpu, uint64_t gpa) {
    put(gpa | bits);
    lacuna_sleep_ns(2000000);
    put(0);
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
    if (which != 5 && which != 6 && which != 7)
        put(gpa | bits);
    for (; !stop; me->counter++) {
        switch (which) {
        case 5: anything(gpa, &x); break;
        case 6: no_function(&x); break;
        case 7: take_back(cpu, gpa); break;
        case 9:
            put(me->counter & 2 ? gpa | bits : 0);
            lacuna_sleep_ns(500000);
            break;
        default:
            if (which == 8)
                area(cpu)[0] = 0;
            lacuna_sleep_ns(1000000);
            break;
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
    form = lacuna_param("form", 2);
    bits = lacuna_param("bits", 1);
    share = (lacuna_arena_bytes() / CHECKED_PAGE - cpus) / cpus * CHECKED_PAGE;
    if (which > 9 || form < 1 || form > 2 || 2 * cpus >= LACUNA_MAX_THREADS) {
        lacuna_printf("apfhostile: cannot run with case=%lu form=%lu smp=%lu: give case=0 to 9, "
                      "form=1 or 2, smp=1 to %u\n",
                      which, form, cpus, (LACUNA_MAX_THREADS - 1) / 2);
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
