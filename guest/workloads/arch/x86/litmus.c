/*
 * Does memory keep x86's order, and are locked operations atomic at every address? Two threads,
 * pinned to two vCPUs if there are two, meet at a barrier and run a test in lockstep on fresh
 * variables; then the results are counted. A forbidden outcome makes the exit code 1.
 *
 *   SB    W x; R y   |  W y; R x    both read 0: allowed, and shows that the test can detect it
 *   SB+lock, SB+xchg                both read 0: forbidden
 *   MP    W x; W y   |  R y; R x    new y, old x: forbidden
 *   LB    R x; W y   |  R y; W x    both read 1: forbidden
 *   CoRR  W x        |  R x; R x    new then old: forbidden
 */
#include "lacuna.h"

#define PAGE 4096ull
#define BATCH 256

struct slot {
    uint64_t x, pad0[7], y, pad1[7]; /* a cache line each */
    uint64_t r[2][2], pad2[4];       /* what each thread read */
};

struct test {
    const char *name;
    void (*run[2])(struct slot *s, uint64_t *r);
    bool (*outcome)(uint64_t (*r)[2]);
    bool forbidden;
};

static struct slot *slots;
static uint64_t arrived;
static uint64_t iterations, additions;
static int failed;

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

#define STORE_X "movq $1, %[x]\n"
#define STORE_Y "movq $1, %[y]\n"
#define BODY(name, code)                                                                           \
    static void name(struct slot *s, uint64_t *r) {                                                \
        uint64_t a = 0, b = 0;                                                                     \
        __asm__ volatile(code                                                                      \
                         : [a] "+&r"(a), [b] "+&r"(b), [x] "+m"(s->x), [y] "+m"(s->y)              \
                         :                                                                         \
                         : "memory", "cc");                                                        \
        r[0] = a;                                                                                  \
        r[1] = b;                                                                                  \
    }

BODY(sb0, STORE_X "movq %[y], %[a]")
BODY(sb1, STORE_Y "movq %[x], %[a]")
BODY(sb_lock0, STORE_X "lock orq $0, (%%rsp)\n movq %[y], %[a]")
BODY(sb_lock1, STORE_Y "lock orq $0, (%%rsp)\n movq %[x], %[a]")
BODY(sb_xchg0, "movl $1, %k[b]\n xchgq %[b], %[x]\n movq %[y], %[a]")
BODY(sb_xchg1, "movl $1, %k[b]\n xchgq %[b], %[y]\n movq %[x], %[a]")
BODY(mp0, STORE_X STORE_Y)
BODY(mp1, "movq %[y], %[a]\n movq %[x], %[b]")
BODY(lb0, "movq %[x], %[a]\n" STORE_Y)
BODY(lb1, "movq %[y], %[a]\n" STORE_X)
BODY(corr0, STORE_X)
BODY(corr1, "movq %[x], %[a]\n movq %[x], %[b]")

static bool both_zero(uint64_t (*r)[2]) { return !r[0][0] && !r[1][0]; }
static bool both_one(uint64_t (*r)[2]) { return r[0][0] && r[1][0]; }
static bool new_then_old(uint64_t (*r)[2]) { return r[1][0] && !r[1][1]; }

static struct test tests[] = {
    {"SB", {sb0, sb1}, both_zero, false},
    {"SB+lock", {sb_lock0, sb_lock1}, both_zero, true},
    {"SB+xchg", {sb_xchg0, sb_xchg1}, both_zero, true},
    {"MP", {mp0, mp1}, new_then_old, true},
    {"LB", {lb0, lb1}, both_one, true},
    {"CoRR", {corr0, corr1}, new_then_old, true},
};

static void judge(const struct test *t, uint64_t n, uint64_t seen) {
    lacuna_printf("RESULT test=%s iterations=%lu seen=%lu %s\n", t->name, n, seen,
                  t->forbidden ? "forbidden" : "allowed");
    if (t->forbidden && seen)
        failed = 1;
}

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
    if (!me)
        judge(t, n, seen);
}

/* Both threads add to one place by three locked instructions. No addition may be lost. */
static void add_test(const char *where, uint64_t *place, uint64_t me, uint64_t *passed) {
    barrier(passed);
    for (uint64_t i = 0; i < additions; i++) {
        uint64_t one = 1, old;
        __asm__ volatile("lock addq $1, %0" : "+m"(*place) : : "cc");
        __asm__ volatile("lock xaddq %1, %0" : "+m"(*place), "+r"(one) : : "cc");
        old = *(volatile uint64_t *)place;
        __asm__ volatile("1: leaq 1(%%rax), %%rcx\n lock cmpxchgq %%rcx, %0\n jne 1b"
                         : "+m"(*place), "+a"(old)
                         :
                         : "rcx", "cc");
    }
    barrier(passed);
    if (me)
        return;
    lacuna_printf("RESULT test=locked_add place=%s expected=%lu found=%lu\n", where, 6 * additions,
                  *place);
    if (*place != 6 * additions)
        failed = 1;
}

/* A value written at an odd address reads back, whole and in halves, and changes no neighbour. */
static void misaligned_test(char *page_end) {
    for (int offset = -72; offset <= 8; offset++) {
        volatile char *around = page_end + offset - 8;
        for (int i = 0; i < 24; i++)
            around[i] = 0x55;
        uint64_t value = lacuna_mix((uint64_t)(offset + 100)), found;
        __asm__ volatile("movq %0, (%1)" : : "r"(value), "r"(page_end + offset) : "memory");
        __asm__ volatile("movq (%1), %0" : "=r"(found) : "r"(page_end + offset) : "memory");
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
    char *place = lacuna_arena() + 32 * PAGE;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++, entry->counter++)
        order_test(&tests[i], me, &passed);
    add_test("aligned", (uint64_t *)place, me, &passed);
    add_test("within_line", (uint64_t *)(place + 64 + 3), me, &passed);
    add_test("across_lines", (uint64_t *)(place + 192 - 3), me, &passed);
    add_test("across_pages", (uint64_t *)(place + PAGE - 5), me, &passed);
    return 0;
}

int main(void) {
    iterations = lacuna_param("iters", 20000);
    additions = lacuna_param("adds", 20000);
    slots = (struct slot *)lacuna_arena();
    lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    misaligned_test(lacuna_arena() + 65 * PAGE);
    memset(lacuna_arena() + 32 * PAGE, 0, 2 * PAGE);
    if (lacuna_thread(player, 0, 0) < 0 || lacuna_thread(player, 1, 1) < 0) {
        lacuna_printf("litmus: no memory for two threads: give more memory\n");
        return 2;
    }
    int worst = lacuna_wait();
    lacuna_printf("RESULT verdict=%s\n", failed || worst ? "FAILED" : "ok");
    return failed ? 1 : worst;
}
