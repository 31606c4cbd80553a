/*
 * Does memory keep the order that the architecture promises, and are atomic operations atomic? Two
 * threads, pinned to two vCPUs if there are two, meet at a barrier and run a test in lockstep on
 * fresh variables; then the results are counted. A forbidden outcome makes the exit code 1 (Arm
 * ARM, B2.3).
 *
 *   SB    W x; R y   |  W y; R x    both read 0
 *   MP    W x; W y   |  R y; R x    new y, old x
 *   LB    R x; W y   |  R y; W x    both read 1
 *   CoRR  W x        |  R x; R x    new then old
 *
 * Plain accesses to two variables may be seen in any order. So the tests without a barrier, an
 * acquire, a release or a dependency are allowed every outcome; they show what a host reorders.
 * A store exclusive must fail also if another thread has stored the old value again (ABA). QEMU's
 * translator keeps neither that nor the order of a release and an acquire. There rcsc=0 allows
 * SB+rel+acq every outcome, and aba=0 leaves that test out.
 */
#include "lacuna.h"

#define PAGE 4096ull
#define BATCH 256

struct slot {
    uint64_t x, pad0[7], y, pad1[7]; /* a cache line each */
    uint64_t r[2][2], pad2[4];       /* what each thread read */
};

enum needs { NOTHING, RCPC };

struct test {
    const char *name;
    void (*run[2])(struct slot *s, uint64_t *r);
    bool (*outcome)(uint64_t (*r)[2]);
    bool forbidden;
    enum needs needs;
};

static struct slot *slots;
static uint64_t arrived;
static uint64_t iterations, additions;
static int failed;

static bool has(uint32_t bit) {
    return ((const struct lacuna_info *)LACUNA_INFO_VA)->processor & bit;
}

static void wait_until(uint64_t *word, uint64_t at_least) {
    for (int spins = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) < at_least; spins++) {
        if (spins > 2000) { /* one vCPU, or the other one is not running */
            lacuna_yield();
            spins = 0;
        }
    }
}

static void barrier(uint64_t *passed) {
    *passed += 2;
    __atomic_fetch_add(&arrived, 1, __ATOMIC_SEQ_CST);
    wait_until(&arrived, *passed);
}

#define W(v) "str %[one], [%[" #v "]]\n"
#define WL(v) "stlr %[one], [%[" #v "]]\n"
#define R(r, v) "ldr %[" #r "], [%[" #v "]]\n"
#define RA(r, v) "ldar %[" #r "], [%[" #v "]]\n"
#define RQ(r, v) ".arch_extension rcpc\n ldapr %[" #r "], [%[" #v "]]\n"
#define DMB "dmb ish\n"
#define DMB_ST "dmb ishst\n"
#define R_AFTER(r, v, dep)                                                                         \
    "eor %[t], %[" #dep "], %[" #dep "]\n ldr %[" #r "], [%[" #v "], %[t]]\n"
#define W_AFTER(v, dep)                                                                            \
    "eor %[t], %[" #dep "], %[" #dep "]\n add %[t], %[t], #1\n str %[t], [%[" #v "]]\n"

#define BODY(name, code)                                                                           \
    static void name(struct slot *s, uint64_t *r) {                                                \
        uint64_t a = 0, b = 0, t = 0;                                                              \
        __asm__ volatile(code                                                                      \
                         : [a] "+&r"(a), [b] "+&r"(b), [t] "+&r"(t)                                \
                         : [x] "r"(&s->x), [y] "r"(&s->y), [one] "r"(1ull)                         \
                         : "memory", "cc");                                                        \
        r[0] = a;                                                                                  \
        r[1] = b;                                                                                  \
    }

BODY(sb0, W(x) R(a, y))
BODY(sb1, W(y) R(a, x))
BODY(sb_dmb0, W(x) DMB R(a, y))
BODY(sb_dmb1, W(y) DMB R(a, x))
BODY(sb_ra0, WL(x) RA(a, y))
BODY(sb_ra1, WL(y) RA(a, x))
BODY(sb_rq0, WL(x) RQ(a, y))
BODY(sb_rq1, WL(y) RQ(a, x))
BODY(mp0, W(x) W(y))
BODY(mp1, R(a, y) R(b, x))
BODY(mp_dmb0, W(x) DMB W(y))
BODY(mp_dmb1, R(a, y) DMB R(b, x))
BODY(mp_rel0, W(x) WL(y))
BODY(mp_acq1, RA(a, y) R(b, x))
BODY(mp_rcpc1, RQ(a, y) R(b, x))
BODY(mp_st0, W(x) DMB_ST W(y))
BODY(mp_addr1, R(a, y) R_AFTER(b, x, a))
BODY(lb0, R(a, x) W(y))
BODY(lb1, R(a, y) W(x))
BODY(lb_data0, R(a, x) W_AFTER(y, a))
BODY(lb_data1, R(a, y) W_AFTER(x, a))
BODY(corr0, W(x))
BODY(corr1, R(a, x) R(b, x))

static bool both_zero(uint64_t (*r)[2]) { return !r[0][0] && !r[1][0]; }
static bool both_one(uint64_t (*r)[2]) { return r[0][0] && r[1][0]; }
static bool new_then_old(uint64_t (*r)[2]) { return r[1][0] && !r[1][1]; }

static const struct test tests[] = {
    {"SB", {sb0, sb1}, both_zero, false, NOTHING},
    {"SB+dmbs", {sb_dmb0, sb_dmb1}, both_zero, true, NOTHING},
    {"SB+rel+acq", {sb_ra0, sb_ra1}, both_zero, true, NOTHING},
    {"SB+rel+rcpc", {sb_rq0, sb_rq1}, both_zero, false, RCPC},
    {"MP", {mp0, mp1}, new_then_old, false, NOTHING},
    {"MP+dmbs", {mp_dmb0, mp_dmb1}, new_then_old, true, NOTHING},
    {"MP+rel+acq", {mp_rel0, mp_acq1}, new_then_old, true, NOTHING},
    {"MP+rel+rcpc", {mp_rel0, mp_rcpc1}, new_then_old, true, RCPC},
    {"MP+dmbst+addr", {mp_st0, mp_addr1}, new_then_old, true, NOTHING},
    {"LB", {lb0, lb1}, both_one, false, NOTHING},
    {"LB+datas", {lb_data0, lb_data1}, both_one, true, NOTHING},
    {"CoRR", {corr0, corr1}, new_then_old, true, NOTHING},
};

static void order_test(const struct test *t, uint64_t me, uint64_t *passed) {
    uint64_t seen = 0, n = 0;
    while (n < iterations) {
        if (!me)
            memset(slots, 0, BATCH * sizeof *slots);
        for (int i = 0; i < BATCH; i++, n++) {
            barrier(passed);
            t->run[me](&slots[i], slots[i].r[me]);
        }
        barrier(passed);
        for (int i = 0; i < BATCH && !me; i++)
            seen += t->outcome(slots[i].r);
        barrier(passed);
    }
    if (me)
        return;
    lacuna_printf("RESULT test=%s iterations=%lu seen=%lu %s\n", t->name, n, seen,
                  t->forbidden ? "forbidden" : "allowed");
    if (t->forbidden && seen && (t->run[0] != sb_ra0 || lacuna_param("rcsc", 1)))
        failed = 1;
}

static void add_exclusive(uint64_t *place) {
    uint64_t v;
    uint32_t no;
    __asm__ volatile("1: ldxr %0, [%2]\n add %0, %0, #1\n stxr %w1, %0, [%2]\n cbnz %w1, 1b"
                     : "=&r"(v), "=&r"(no)
                     : "r"(place)
                     : "memory");
    __asm__ volatile("1: ldaxr %0, [%2]\n add %0, %0, #1\n stlxr %w1, %0, [%2]\n cbnz %w1, 1b"
                     : "=&r"(v), "=&r"(no)
                     : "r"(place)
                     : "memory");
}

/* The other way in a pair: only the first word counts, the second must stay as it is. */
static void add_pair(uint64_t *place) {
    uint64_t v, w;
    uint32_t no;
    __asm__ volatile("1: ldxp %0, %1, [%3]\n add %0, %0, #1\n stxp %w2, %0, %1, [%3]\n"
                     "cbnz %w2, 1b"
                     : "=&r"(v), "=&r"(w), "=&r"(no)
                     : "r"(place)
                     : "memory");
}

static void add_lse(uint64_t *place) {
    uint64_t old, expected, next;
    __asm__ volatile(".arch_extension lse\n ldadd %1, %0, [%2]"
                     : "=r"(old)
                     : "r"(1ull), "r"(place)
                     : "memory");
    __asm__ volatile(".arch_extension lse\n stadd %0, [%1]" : : "r"(1ull), "r"(place) : "memory");
    do {
        old = expected = *(volatile uint64_t *)place;
        next = old + 1;
        __asm__ volatile(".arch_extension lse\n casal %0, %1, [%2]"
                         : "+r"(old)
                         : "r"(next), "r"(place)
                         : "memory");
    } while (old != expected);
}

/* Both threads add to one place in several ways at once. No addition may be lost. */
static void add_test(uint64_t *place, uint64_t me, uint64_t *passed) {
    uint64_t each = has(LACUNA_HAS_LSE) ? 6 : 3;
    barrier(passed);
    for (uint64_t i = 0; i < additions; i++) {
        add_exclusive(place);
        add_pair(place);
        if (has(LACUNA_HAS_LSE))
            add_lse(place);
    }
    barrier(passed);
    if (me)
        return;
    lacuna_printf("RESULT test=add lse=%u expected=%lu found=%lu\n", has(LACUNA_HAS_LSE),
                  2 * each * additions, *place);
    if (*place != 2 * each * additions || place[1])
        failed = 1;
}

/* Thread 0 loads exclusively; thread 1 stores another value, and the old one again. */
static void aba_test(uint64_t *place, uint64_t me, uint64_t *passed) {
    uint64_t seen = 0, n = additions / 10 + 1;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t v;
        uint32_t no = 1;
        barrier(passed);
        if (!me)
            __asm__ volatile("ldxr %0, [%2]\n stlr %3, [%4]\n"
                             "1: ldar %0, [%5]\n cmp %0, %3\n b.ne 1b\n stxr %w1, %3, [%2]"
                             : "=&r"(v), "=&r"(no)
                             : "r"(place), "r"(i + 1), "r"(place + 8), "r"(place + 16)
                             : "memory", "cc");
        else
            wait_until(place + 8, i + 1);
        if (me) {
            uint64_t old = *place;
            __atomic_store_n(place, ~old, __ATOMIC_RELEASE);
            __atomic_store_n(place, old, __ATOMIC_RELEASE);
            __atomic_store_n(place + 16, i + 1, __ATOMIC_RELEASE);
        }
        seen += !no;
        barrier(passed);
    }
    if (me)
        return;
    lacuna_printf("RESULT test=ABA iterations=%lu seen=%lu forbidden\n", n, seen);
    if (seen)
        failed = 1;
}

/* A value written at an odd address reads back, whole and in halves, and changes no neighbour. */
static void misaligned_test(char *page_end) {
    for (int offset = -72; offset <= 8; offset++) {
        volatile char *around = page_end + offset - 8;
        for (int i = 0; i < 24; i++)
            around[i] = 0x55;
        uint64_t value = lacuna_mix((uint64_t)(offset + 100)), found;
        __asm__ volatile("str %0, [%1]" : : "r"(value), "r"(page_end + offset) : "memory");
        __asm__ volatile("ldr %0, [%1]" : "=r"(found) : "r"(page_end + offset) : "memory");
        uint32_t high = *(volatile uint32_t *)(page_end + offset + 4);
        bool neighbours = around[7] == 0x55 && around[16] == 0x55;
        if (found != value || high != value >> 32 || !neighbours) {
            lacuna_printf("litmus: misaligned access at page end %d went wrong\n", offset);
            failed = 1;
        }
    }
}

static int player(uint64_t me) {
    uint64_t passed = 0;
    struct lacuna_status_entry *entry =
        lacuna_status(LACUNA_KIND_OTHER, me ? "litmus1" : "litmus0", 0);
    uint64_t *place = (uint64_t *)(lacuna_arena() + 64 * PAGE);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++, entry->counter++) {
        if (tests[i].needs == NOTHING || has(LACUNA_HAS_RCPC))
            order_test(&tests[i], me, &passed);
    }
    add_test(place, me, &passed);
    if (lacuna_param("aba", 1) && lacuna_cpus() > 1)
        aba_test(place + 64, me, &passed);
    return 0;
}

int main(void) {
    iterations = lacuna_param("iters", 20000);
    additions = lacuna_param("adds", 20000);
    slots = (struct slot *)lacuna_arena();
    lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    misaligned_test(lacuna_arena() + 129 * PAGE);
    memset(lacuna_arena() + 64 * PAGE, 0, 2 * PAGE);
    if (lacuna_thread(player, 0, 0) < 0 || lacuna_thread(player, 1, 1) < 0) {
        lacuna_printf("litmus: no memory for two threads: give more memory\n");
        return 2;
    }
    int worst = lacuna_wait();
    lacuna_printf("RESULT verdict=%s\n", failed || worst ? "FAILED" : "ok");
    return failed ? 1 : worst;
}
