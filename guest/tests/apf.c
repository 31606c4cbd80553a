/*
 * Tests kernel/apf.c and its x86 part on the building machine; this file plays the host. It sends
 * every order of events that the interface allows, and some that it does not. tests/it/apf.rs
 * builds and runs it.
 */
#include "x86.h"

int msr_write(u32 index, u64 value);
#define wrmsr(index, value) ((void)msr_write(index, value))
#include "kernel.h"

#include <stdio.h>
#include <stdlib.h>

static u64 cr2;
static bool takes_msr = true, has_kvm = true;
static u32 host_features;
static u64 en, vector, acks;

/* In place of what needs privileged instructions. */
#define read_cr2() cr2
#define kvm_leaves() (has_kvm ? 0x40000001u : 0)
#define cpuid(leaf) ((struct cpuid){(leaf) == 0x40000001 ? host_features : 0, 0, 0, 0})
#include "../kernel/apf.c"
#include "../kernel/arch/x86/apf.c"

static struct lacuna_status page;
static struct lacuna_info boot;
struct lacuna_status *status = &page;
struct lacuna_info *info = &boot;

static struct cpu cpu, other;
static struct thread threads[128];
static bool asleep_for_page[128];
static u32 eois;
bool x2apic = true;
static char woken[256]; /* numbers of the threads woken since the last check */
static int line_of_check; /* the test's line, for checks in a helper */

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            printf("line %d: %s does not hold\n", line_of_check ? line_of_check : __LINE__, #what);\
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

void sched_wake(struct cpu *c, struct thread *t) {
    size_t n = 0;
    while (woken[n])
        n++;
    CHECK(asleep_for_page[t - threads] && n + 4 < sizeof woken);
    CHECK(c == t->cpu);
    asleep_for_page[t - threads] = false;
    snprintf(woken + n, sizeof woken - n, "%d ", (int)(t - threads));
}

void sched_block(struct cpu *c, enum thread_state why) {
    CHECK(why == ALIVE);
    asleep_for_page[c->current - threads] = true;
    c->current = NULL;
}

int msr_write(u32 index, u64 value) {
    if (!takes_msr)
        return -1;
    if (index == 0x4b564d02)
        en = value;
    else if (index == 0x4b564d06)
        vector = value;
    else if (index == 0x4b564d07 && value == 1)
        acks++;
    else if (index == MSR_X2APIC_EOI)
        eois++;
    else
        return -1;
    return 0;
}

u64 boot_param(const char *name, u64 otherwise) {
    const char *v = lacuna_find_param(info->cmdline, name);
    return v ? lacuna_parse_number(v) : otherwise;
}

static void fault(struct cpu *c, int thread, u32 reason, u32 token) {
    c->current = thread < 0 ? NULL : &threads[thread];
    if (c->current)
        c->current->cpu = c;
    c->apf.area.reason = reason;
    cr2 = token;
    CHECK(apf_page_fault(c));
    CHECK(!c->apf.area.reason);
}

static void sleeps_at(int line, struct cpu *c, int thread, u32 token) {
    line_of_check = line;
    fault(c, thread, 1, token);
    CHECK(!c->current && asleep_for_page[thread]);
    line_of_check = 0;
}

static void goes_on_at(int line, struct cpu *c, int thread, u32 token) {
    line_of_check = line;
    fault(c, thread, 1, token);
    CHECK(c->current == &threads[thread]);
    line_of_check = 0;
}

static void interrupt_wakes(int line, struct cpu *c, u32 token, const char *who) {
    u64 before = acks;
    line_of_check = line;
    woken[0] = 0;
    c->apf.area.token = token;
    apf_interrupt(c);
    CHECK(!c->apf.area.token && acks == before + 1);
    CHECK(!__builtin_strcmp(woken, who));
    line_of_check = 0;
}

static void fault_wakes(int line, struct cpu *c, u32 token, const char *who) {
    line_of_check = line;
    woken[0] = 0;
    fault(c, -1, 2, token);
    CHECK(!__builtin_strcmp(woken, who));
    line_of_check = 0;
}

#define SLEEPS(...) sleeps_at(__LINE__, __VA_ARGS__)
#define GOES_ON(...) goes_on_at(__LINE__, __VA_ARGS__)
#define INTERRUPT_WAKES(...) interrupt_wakes(__LINE__, __VA_ARGS__)
#define FAULT_WAKES(...) fault_wakes(__LINE__, __VA_ARGS__)

static void boots_with(const char *cmdline, u32 bits, bool enabled, u64 low_bits) {
    control = 0;
    en = vector = 0;
    host_features = bits;
    snprintf(info->cmdline, sizeof info->cmdline, "%s", cmdline);
    apf_init();
    CHECK(apf_enable(&cpu) == enabled);
    CHECK(en == (enabled ? (u64)&cpu.apf.area | low_bits : 0));
    CHECK(vector == (low_bits & 8 ? 0xf3 : 0));
}

static void the_delivery_is_chosen(void) {
    const u32 old = 1 << 4, today = 1 << 4 | 1 << 14;
    boots_with("", 0, false, 0);
    boots_with("", 1 << 14, false, 0);
    boots_with("", old, true, 1);
    boots_with("apf=int", old, false, 0);
    boots_with("apf=off", today, false, 0);
    boots_with("apf=pf", today, true, 1);
    boots_with("apf_always=1 apf=pf", today, true, 3);
    boots_with("apf_always=1", today, true, 11);
    has_kvm = false;
    boots_with("", today, false, 0);
    has_kvm = true;
    takes_msr = false;
    boots_with("", today, false, 0);
    takes_msr = true;
    boots_with("", today, true, 9);
}

static void a_true_fault_is_left_alone(void) {
    cpu.current = &threads[0];
    CHECK(!apf_page_fault(&cpu));
    CHECK(cpu.current == &threads[0]);
}

static void ready_wakes_who_waits(void) {
    SLEEPS(&cpu, 1, 0x1000);
    SLEEPS(&cpu, 2, 0x2000);
    SLEEPS(&other, 3, 0x1000);
    INTERRUPT_WAKES(&cpu, 0x1000, "1 ");
    FAULT_WAKES(&cpu, 0x2000, "2 ");
    INTERRUPT_WAKES(&other, 0x1000, "3 ");
}

static void ready_may_come_first(void) {
    u32 dummies = page.apf_dummy;
    INTERRUPT_WAKES(&cpu, 0x3000, "");
    FAULT_WAKES(&cpu, 0x3000, "");
    CHECK(page.apf_dummy == dummies + 2);
    GOES_ON(&cpu, 1, 0x3000);
    GOES_ON(&cpu, 1, 0x3000);
    SLEEPS(&cpu, 1, 0x3000);
    INTERRUPT_WAKES(&cpu, 0x3000, "1 ");
}

static void a_token_may_be_had_twice(void) {
    SLEEPS(&cpu, 1, 0x4000);
    SLEEPS(&cpu, 2, 0x4000);
    INTERRUPT_WAKES(&cpu, 0x4000, "2 1 ");
    INTERRUPT_WAKES(&cpu, 0x4000, ""); /* the other processor's token: a dummy */
    GOES_ON(&cpu, 3, 0x4000);
}

static void everybody_on_this_processor_wakes(void) {
    SLEEPS(&other, 5, 0x5001);
    for (int i = 0; i < 64; i++)
        SLEEPS(&cpu, 20 + i, (u32)i << 12 | 1);
    woken[0] = 0;
    cpu.apf.area.token = ~0u;
    apf_interrupt(&cpu);
    for (int i = 0; i < 64; i++)
        CHECK(!asleep_for_page[20 + i]);
    CHECK(asleep_for_page[5]);
    FAULT_WAKES(&other, ~0u, "5 ");
}

static void idle_waits_too(void) {
    u32 idle = page.apf_idle, dummies = page.apf_dummy;
    fault(&cpu, -1, 1, 0x6000);
    CHECK(page.apf_idle == idle + 1 && !cpu.current);
    INTERRUPT_WAKES(&cpu, 0x6000, "");
    CHECK(page.apf_dummy == dummies);
    INTERRUPT_WAKES(&cpu, 0x7000, "");
    fault(&cpu, -1, 1, 0x7000);
    CHECK(page.apf_idle == idle + 1);
}

static void invented_tokens_are_dropped(void) {
    u32 dummies = page.apf_dummy, lost = page.apf_lost;
    for (u32 i = 0; i < 200; i++)
        INTERRUPT_WAKES(&cpu, 0x10001 + i * 0x1000, "");
    CHECK(page.apf_dummy == dummies + APF_SPARE && page.apf_lost == lost + 200 - APF_SPARE);
    SLEEPS(&cpu, 1, 0x8000);
    INTERRUPT_WAKES(&cpu, 0x8000, "1 ");
    INTERRUPT_WAKES(&cpu, ~0u, "");
    INTERRUPT_WAKES(&cpu, 0x10001, ""); /* there is room again */
    CHECK(page.apf_dummy == dummies + APF_SPARE + 1);
}

static void disabling_forgets_everything(void) {
    SLEEPS(&cpu, 1, 0x9000);
    INTERRUPT_WAKES(&cpu, 0xa000, "");
    cpu.apf.area.token = 0x9000; /* the host sent it before it saw the disable */
    woken[0] = 0;
    apf_disable(&cpu);
    CHECK(!en && !__builtin_strcmp(woken, "1 ") && !cpu.apf.area.token);
    u64 before = acks;
    apf_interrupt(&cpu);
    CHECK(acks == before);
    CHECK(apf_enable(&cpu));
    SLEEPS(&cpu, 1, 0xa000);
    INTERRUPT_WAKES(&cpu, 0xa000, "1 ");
}

/* The fast path that trap.c tries first, and then the slow one, as there. */
static bool sleeps_shortly(int thread, u32 token) {
    struct thread *t = cpu.current = &threads[thread];
    t->cpu = &cpu;
    cpu.apf.area.reason = 1;
    cr2 = token;
    if (!apf_sleep(&cpu, t)) {
        CHECK(cpu.apf.area.reason == 1);
        return false;
    }
    CHECK(!cpu.apf.area.reason);
    return asleep_for_page[thread] = true;
}

static int wakes_shortly(u32 token) {
    u64 acked = acks;
    u32 ended = eois;
    cpu.apf.area.token = token;
    struct thread *t = apf_sleeper(&cpu);
    CHECK(acks - acked == (t != NULL) && eois - ended == (t != NULL));
    CHECK(cpu.apf.area.token == (t ? 0 : token));
    cpu.apf.area.token = 0;
    if (t)
        asleep_for_page[t - threads] = false;
    return t ? (int)(t - threads) : -1;
}

static void short_ways_do_as_the_long_ones(void) {
    CHECK(sleeps_shortly(1, 0x1000) && sleeps_shortly(2, 0x2000));
    SLEEPS(&cpu, 3, 0x3000);
    CHECK(wakes_shortly(0x2000) == 2 && wakes_shortly(0x2000) < 0);
    INTERRUPT_WAKES(&cpu, 0x1000, "1 ");
    CHECK(wakes_shortly(0x3000) == 3);
    apf_publish(&cpu);
    u32 not_present = page.apf_not_present, ready_events = page.apf_ready;
    CHECK(sleeps_shortly(1, 0x1000) && wakes_shortly(0x1000) == 1);
    CHECK(page.apf_not_present == not_present && page.apf_ready == ready_events);
    apf_publish(&cpu);
    apf_publish(&cpu);
    CHECK(page.apf_not_present == not_present + 1 && page.apf_ready == ready_events + 1);
}

static void short_ways_leave_what_is_not_plain(void) {
    cpu.current = &threads[1];
    CHECK(!cpu.apf.area.reason && !apf_sleep(&cpu, &threads[1])); /* a real fault */
    cpu.apf.area.reason = 2; /* ready by #PF */
    CHECK(!apf_sleep(&cpu, &threads[1]) && cpu.apf.area.reason == 2);
    cpu.apf.area.reason = 0;

    INTERRUPT_WAKES(&cpu, 0x1000, ""); /* a dummy */
    CHECK(wakes_shortly(0x1000) < 0 && !sleeps_shortly(1, 0x1000));
    cpu.apf.area.reason = 0;
    GOES_ON(&cpu, 1, 0x1000);

    CHECK(sleeps_shortly(1, 0x1000) && !sleeps_shortly(2, 0x1000)); /* two with one token */
    cpu.apf.area.reason = 0;
    SLEEPS(&cpu, 2, 0x1000);
    CHECK(wakes_shortly(0x1000) < 0);
    INTERRUPT_WAKES(&cpu, 0x1000, "2 1 ");

    CHECK(sleeps_shortly(1, 0x1000) && wakes_shortly(0x1001) < 0 && wakes_shortly(~0u) < 0);
    cpu.woken.head = &threads[4]; /* a thread woken earlier runs first */
    CHECK(wakes_shortly(0x1000) < 0);
    cpu.woken.head = NULL;
    INTERRUPT_WAKES(&cpu, ~0u, "1 ");

    fault(&cpu, -1, 1, 0x1000); /* idle */
    CHECK(wakes_shortly(0x1000) < 0);
    INTERRUPT_WAKES(&cpu, 0x1000, "");
}

/* Random events against the simplest possible model; at most 64 outstanding, as with a real
 * host. */
static void a_long_run_wakes_the_right_ones(void) {
    u32 asleep[32] = {0}, early[32] = {0}, next = 1;
    u64 x = 88172645463325252ull;
    for (int step = 0; step < 300000; step++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        int i = (int)(x >> 40 & 31);
        char name[8] = "";
        if (asleep[i]) {
            snprintf(name, sizeof name, "%d ", i);
            if (!(x >> 61 & 1) || wakes_shortly(asleep[i]) != i)
                INTERRUPT_WAKES(&cpu, asleep[i], name);
            asleep[i] = 0;
        } else if (early[i]) {
            GOES_ON(&cpu, i, early[i]);
            early[i] = 0;
        } else {
            u32 token = next++ << 12;
            if (x >> 60 & 1) {
                asleep[i] = token;
                if (!(x >> 61 & 1) || !sleeps_shortly(i, token))
                    SLEEPS(&cpu, i, token);
            } else {
                INTERRUPT_WAKES(&cpu, early[i] = token, "");
            }
        }
    }
    CHECK(page.apf_lost == 200 - APF_SPARE);
}

int main(void) {
    for (int i = 0; i < 128; i++)
        threads[i].page_wait.kind = APF_THREAD;
    the_delivery_is_chosen();
    a_true_fault_is_left_alone();
    ready_wakes_who_waits();
    ready_may_come_first();
    a_token_may_be_had_twice();
    everybody_on_this_processor_wakes();
    idle_waits_too();
    invented_tokens_are_dropped();
    disabling_forgets_everything();
    short_ways_do_as_the_long_ones();
    short_ways_leave_what_is_not_plain();
    a_long_run_wakes_the_right_ones();
    puts("apf: ok");
    return 0;
}
