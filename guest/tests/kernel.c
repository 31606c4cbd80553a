/* Tests of the kernel's services. build-guest.sh builds this program, tests/qemu runs it. */
#include "lacuna.h"

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            lacuna_printf("line %d: %s does not hold\n", __LINE__, #what);                         \
            lacuna_exit(1);                                                                        \
        }                                                                                          \
    } while (0)

struct shared {
    volatile uint64_t seen, order, done;
    volatile uint64_t woke_at;
};

static struct shared *shared(void) { return (struct shared *)lacuna_arena(); }
static volatile uint64_t global = 7;

static int reads_global(uint64_t expected) {
    shared()->seen = global;
    global = 99;
    return global == 99 && shared()->seen == expected ? 0 : 1;
}

static void data_is_private_to_a_process(void) {
    global = 8;
    CHECK(lacuna_spawn(reads_global, 7, LACUNA_ANY_CPU) >= 0);
    CHECK(lacuna_wait() == 0);
    CHECK(global == 8);
    CHECK(lacuna_thread(reads_global, 8, LACUNA_ANY_CPU) >= 0);
    CHECK(lacuna_wait() == 0);
    CHECK(global == 99);
}

static int exits_with(uint64_t status) { return (int)status; }

static int faults(uint64_t unused) {
    (void)unused;
    *(volatile int *)0x123456789000 = 1;
    return 0;
}

static int writes_text(uint64_t unused) {
    (void)unused;
    *(volatile char *)(uint64_t)exits_with = 0;
    return 0;
}

static int traps(uint64_t unused) {
    (void)unused;
    __builtin_trap();
}

static int spins(uint64_t us) {
    lacuna_confine(us * 1000);
    while (!shared()->woke_at) {
    }
    return 0;
}

static int status_of(lacuna_main_fn *fn, uint64_t arg) {
    CHECK(lacuna_spawn(fn, arg, LACUNA_ANY_CPU) >= 0);
    return lacuna_wait();
}

static void endings_have_their_status(void) {
    CHECK(lacuna_wait() == 0);
    CHECK(status_of(exits_with, 5) == 5);
    CHECK(status_of(faults, 0) == LACUNA_EXIT_FAULT + LACUNA_FAULT_PAGE);
    CHECK(status_of(writes_text, 0) == LACUNA_EXIT_FAULT + LACUNA_FAULT_PAGE);
    CHECK(status_of(traps, 0) == LACUNA_EXIT_FAULT + LACUNA_FAULT_TRAP);
    CHECK(status_of(spins, 3000) == LACUNA_EXIT_TIMEOUT);
    for (uint64_t i = 0; i < 8; i++)
        CHECK(lacuna_spawn(exits_with, i, i) >= 0);
    CHECK(lacuna_wait() == 7);
}

static int sleeps(uint64_t ms) {
    lacuna_sleep_ns(ms * 1000000);
    shared()->order = shared()->order * 10 + ms / 100;
    return 0;
}

static void sleepers_wake_in_time(void) {
    shared()->order = 0;
    CHECK(lacuna_spawn(sleeps, 600, 0) >= 0);
    CHECK(lacuna_spawn(sleeps, 200, 0) >= 0);
    CHECK(lacuna_spawn(sleeps, 400, 0) >= 0);
    uint64_t start = lacuna_now_ns();
    CHECK(lacuna_wait() == 0);
    CHECK(shared()->order == 246);
    CHECK(lacuna_now_ns() - start >= 500000000);
}

static int hogs(uint64_t unused) {
    (void)unused;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_WORKER, "hog", 0);
    while (!shared()->done)
        me->counter++;
    return 0;
}

static int wakes(uint64_t unused) {
    (void)unused;
    for (int i = 0; i < 5; i++)
        lacuna_sleep_ns(2000000);
    shared()->woke_at = lacuna_now_ns();
    __atomic_fetch_add(&shared()->seen, 1, __ATOMIC_SEQ_CST);
    return 0;
}

/*
 * With a slice of 10 s (the test's parameter), sleepers finish early only by preemption. All
 * threads that one tick woke must run before the hog, which keeps the rest of its slice.
 */
static void a_wakeup_preempts(void) {
    shared()->done = shared()->seen = 0;
    uint64_t start = lacuna_now_ns();
    for (int i = 0; i < 4; i++)
        CHECK(lacuna_spawn(wakes, 0, 0) >= 0);
    CHECK(lacuna_spawn(hogs, 0, 0) >= 0);
    while (shared()->seen < 4 && lacuna_now_ns() - start < 8000000000)
        lacuna_sleep_ns(1000000);
    shared()->done = 1;
    CHECK(lacuna_wait() == 0);
    CHECK(shared()->seen == 4 && shared()->woke_at - start < 8000000000);
}

static void memory_comes_back(void) {
    for (uint64_t i = lacuna_param("churn", 2000); i; i--)
        CHECK(status_of(exits_with, 0) == 0);
}

static int waits(uint64_t unused) {
    (void)unused;
    while (!shared()->done)
        lacuna_sleep_ns(10000000);
    return 0;
}

static void threads_run_out_gracefully(void) {
    int n = 0;
    shared()->done = 0;
    while (lacuna_spawn(waits, 0, LACUNA_ANY_CPU) >= 0)
        n++;
    CHECK(n >= 60); /* with little memory, the stacks run out before the threads */
    shared()->done = 1;
    CHECK(lacuna_wait() == 0);
}

static void bad_arguments_are_refused(void) {
    CHECK(lacuna_gpa((void *)0x1000) == ~0ull);
    CHECK(lacuna_gpa((void *)~0ull) == ~0ull);
    CHECK(lacuna_gpa(lacuna_arena()) != ~0ull);
    CHECK(lacuna_alias(lacuna_arena(), lacuna_arena()) == -1);
    CHECK(lacuna_alias((void *)LACUNA_ALIAS_BASE, (void *)0x1000) == -1);
    CHECK(lacuna_alias((void *)LACUNA_ALIAS_BASE, lacuna_arena()) == 0);
    CHECK(lacuna_alias((void *)LACUNA_ALIAS_BASE, lacuna_arena()) == -1);
    *(volatile uint64_t *)LACUNA_ALIAS_BASE = 4711;
    CHECK(*(volatile uint64_t *)lacuna_arena() == 4711);
}

/* With huge=1. `verify` checks that every page is there once. */
static void the_arena_begins_with_blocks(void) {
    const uint64_t block = 2 << 20;
    if (!lacuna_param("huge", 0))
        return;
    CHECK(lacuna_arena_bytes() % block != 0); /* and ends with pages */
    for (uint64_t at = 0; at < lacuna_arena_bytes() / 2; at += block) {
        uint64_t gpa = lacuna_gpa(lacuna_arena() + at);
        CHECK(gpa % block == 0);
        CHECK(lacuna_gpa(lacuna_arena() + at + block - 1) == gpa + block - 1);
    }
    char *last = lacuna_arena() + lacuna_arena_bytes() - 1;
    CHECK(lacuna_gpa(last) != ~0ull && lacuna_gpa(last + 1) == ~0ull);
}

static int sleeps_elsewhere(uint64_t ms) {
    lacuna_sleep_ns(ms * 1000000);
    return lacuna_status(LACUNA_KIND_OTHER, "slept", 0)->cpu != 0;
}

static int waits_elsewhere(uint64_t cpu) {
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "waits", 0);
    if (me->cpu != cpu || lacuna_spawn(sleeps, 300, 0) < 0 || lacuna_wait() != 0)
        return 1;
    return me->cpu != 0;
}

static int goes_offline(uint64_t cpu) {
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "offline", 0);
    lacuna_sleep_ns(50000000);
    if (me->cpu != cpu || lacuna_cpu_offline() != 0 || me->cpu != 0)
        return 1;
    /* From now on a thread that is made for that processor starts here, on the first one. */
    lacuna_confine(3600000000000);
    return lacuna_cpu_offline() != -1 || lacuna_spawn(sleeps_elsewhere, 0, cpu) < 0 ||
           lacuna_wait() != 0;
}

/* Threads that run, sleep, or wait there all end on the first processor. */
static void a_processor_goes_offline(void) {
    uint64_t last = lacuna_cpus() - 1;
    CHECK(lacuna_cpu_offline() == -1);
    if (!last)
        return;
    shared()->done = 0;
    CHECK(lacuna_spawn(hogs, 0, last) >= 0);
    CHECK(lacuna_spawn(waits, 0, last) >= 0);
    CHECK(lacuna_spawn(sleeps_elsewhere, 200, last) >= 0);
    CHECK(lacuna_spawn(waits_elsewhere, last, last) >= 0);
    CHECK(lacuna_spawn(goes_offline, last, last) >= 0);
    lacuna_sleep_ns(400000000);
    shared()->done = 1;
    CHECK(lacuna_wait() == 0);
}

static void a_machine_without_async_page_faults_says_so(void) {
    CHECK(lacuna_apf_enable() == -1);
    lacuna_apf_disable();
}

int main(void) {
    lacuna_status(LACUNA_KIND_OTHER, "kernel test", 0);
    data_is_private_to_a_process();
    endings_have_their_status();
    sleepers_wake_in_time();
    a_wakeup_preempts();
    memory_comes_back();
    threads_run_out_gracefully();
    bad_arguments_are_refused();
    the_arena_begins_with_blocks();
    a_machine_without_async_page_faults_says_so();
    a_processor_goes_offline();
    lacuna_printf("kernel: ok, now a fault of the first process\n");
    faults(0);
    return 0;
}
