/*
 * Tests kernel/apf.c and its arm64 part on the building machine; this file plays the host, the
 * processor and the scheduler. It sends events in both published forms, to programs, to idle, and
 * into the kernel's work. tests/it/apf.rs builds and runs it.
 */
#include "kernel.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include "../kernel/apf.c"
#include "../kernel/arch/arm64/apf.c"

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            printf("line %d: %s does not hold\n", line_of_check ? line_of_check : __LINE__, #what);\
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define EXTERNAL 0x92000010ull    /* ESR of a program's external abort */
#define TRANSLATION 0x92000007ull /* of a page that it has not */
#define CODE 0x400000             /* somewhere in the kernel */

static struct lacuna_status page;
static struct lacuna_info boot;
struct lacuna_status *status = &page;
struct lacuna_info *info = &boot;
struct machine machine;

static struct cpu cpu;
static struct thread threads[128];
static bool asleep_for_page[128];
static char woken[512]; /* numbers of the threads woken since the last check */
static int line_of_check;
static bool finishing; /* a wake-up must find all events held off */

/* The host. */
static u32 services;
static bool is_kvm = true, has_sdei = true;
static s64 answer; /* to the call that enables or disables */
static u64 area_at, no_event_range, version = 0x010000;
static u32 enables, disables, acks, registered, interrupts_enabled;

asm(".text\n"
    ".globl vectors, vectors_end, idle, idle_end\n"
    "vectors: .skip 3000\n"
    "vectors_end: nop\n"
    "idle: .skip 16\n"
    "idle_end: nop\n");

static jmp_buf restarted;

_Noreturn void restart(struct cpu *c) {
    CHECK(c == &cpu);
    longjmp(restarted, 1);
}

void apf_event(void) {}

/* The kernel halts for a page; the host sends what the test has put here. */
static u32 sent_in_halt[8], nsent;

void apf_halt(volatile u32 *word);
static void send_to_kernel(u64 pc, u32 reason, u32 token);

void apf_halt(volatile u32 *word) {
    for (u32 i = 0; *word; i++) {
        CHECK(i < nsent);
        send_to_kernel((u64)apf_halt, 2, sent_in_halt[i]);
    }
}
asm(".globl apf_halt_end\napf_halt_end: nop\n");

void sched_wake(struct cpu *c, struct thread *t) {
    size_t n = 0;
    while (woken[n])
        n++;
    CHECK(asleep_for_page[t - threads] && n + 5 < sizeof woken && c == &cpu);
    CHECK(!finishing || c->apf.area.reason);
    asleep_for_page[t - threads] = false;
    snprintf(woken + n, sizeof woken - n, "%d ", (int)(t - threads));
}

void sched_block(struct cpu *c, enum thread_state why) {
    CHECK(why == ALIVE);
    asleep_for_page[c->current - threads] = true;
    c->current = NULL;
}

u64 boot_param(const char *name, u64 otherwise) {
    const char *v = lacuna_find_param(info->cmdline, name);
    return v ? lacuna_parse_number(v) : otherwise;
}

void interrupt_enable(struct cpu *c, u32 vector) {
    CHECK(c == &cpu && vector == 23);
    interrupts_enabled++;
}

bool vendor_services(u32 features[4]) {
    features[0] = services;
    return is_kvm;
}

static s64 switch_area(u64 argument) {
    area_at = argument & 1 ? argument & 0x00ffffffffffffc0 : 0;
    enables += argument & 1;
    disables += !(argument & 1);
    return answer;
}

static struct smccc by_abort(u64 argument) {
    switch (argument >> 56) {
    case 0x80: return (struct smccc){{(u64)switch_area(argument)}};
    case 0x40: no_event_range = argument & 0x00ffffffffffffff; return (struct smccc){{0}};
    default: return (struct smccc){{(u64)-1}};
    }
}

static struct smccc sdei_apf(u64 function, u64 argument) {
    switch (function) {
    case 0: return (struct smccc){{0, version}};
    case 2: return (struct smccc){{0, 0x40400001}};
    case 3: return (struct smccc){{0, 23}};
    case 4: return (struct smccc){{(u64)switch_area(argument)}};
    case 5: acks++; return (struct smccc){{0}};
    default: return (struct smccc){{(u64)-1}};
    }
}

struct smccc firmware_call(u64 function, const u64 args[5]) {
    switch (function) {
    case 0x86000001: return by_abort(args[0] | args[1] << 32);
    case 0x86000002: return sdei_apf(args[0], args[1] | args[2] << 32);
    case 0xc4000020: return (struct smccc){{has_sdei ? 1ull << 48 : (u64)-1}};
    case 0xc4000021:
        CHECK(args[0] == 0x40400001 && args[1] == (u64)apf_event && args[2] == (u64)&cpu);
        registered++;
        return (struct smccc){{0}};
    case 0xc4000022:
    case 0xc400002c: return (struct smccc){{0}};
    default: return (struct smccc){{(u64)-1}};
    }
}

/* ---- events ---- */
static struct thread *run(int thread) {
    cpu.current = thread < 0 ? NULL : &threads[thread];
    if (cpu.current)
        cpu.current->cpu = &cpu;
    return cpu.current;
}

static void send_to_program(int thread, u32 reason, u32 token) {
    run(thread);
    CHECK(!cpu.apf.area.reason);
    cpu.apf.area.reason = reason;
    CHECK(apf_from_program(&cpu, EXTERNAL, token));
    CHECK(!cpu.apf.area.reason);
}

/* As trap.S does: the reason word is cleared on the way back. */
static void send_to_kernel(u64 pc, u32 reason, u32 token) {
    struct frame f = {.pc = pc};
    CHECK(!cpu.apf.area.reason);
    cpu.apf.area.reason = reason;
    if (apf_from_kernel(&cpu, &f, token))
        cpu.apf.area.reason = 0;
    CHECK(f.pc == pc);
}

static void send_to_idle(u32 reason, u32 token) {
    run(-1);
    if (setjmp(restarted))
        return;
    send_to_kernel((u64)idle + 8, reason, token);
    CHECK(!"idle starts over");
}

static void expect_woken(int line, const char *who) {
    line_of_check = line;
    CHECK(!__builtin_strcmp(woken, who));
    line_of_check = 0;
    woken[0] = 0;
}

#define WOKEN(who) expect_woken(__LINE__, who)

static void finish(void) {
    finishing = true;
    apf_before_user(&cpu);
    finishing = false;
    CHECK(!cpu.apf.area.reason && !cpu.arch.nlater);
}

static void boots_with(const char *cmdline, u32 bits, bool abort, bool sdei) {
    cpu = (struct cpu){0};
    apf_by_abort = by_sdei = false;
    apf_ready_interrupt = event = 0;
    services = bits;
    area_at = no_event_range = 0;
    snprintf(info->cmdline, sizeof info->cmdline, "%s", cmdline);
    apf_init();
    CHECK(apf_by_abort == abort && by_sdei == sdei);
    CHECK(apf_enable(&cpu) == (abort || sdei));
    CHECK(area_at == (abort || sdei ? (u64)&cpu.apf.area : 0));
    CHECK(no_event_range == (abort ? (u64)(vectors_end - vectors) : 0));
    CHECK(apf_ready_interrupt == (sdei ? 23 : 0));
}

/* ---- tests ---- */
static void the_form_is_chosen(void) {
    const u32 abort = 1 << 1, sdei = 1 << 2;
    boots_with("", 1, false, false);
    boots_with("", abort, true, false);
    boots_with("", sdei, false, true);
    boots_with("", abort | sdei, false, true);
    boots_with("apf=abort", abort | sdei, true, false);
    boots_with("apf=sdei", abort, false, false);
    boots_with("apf=off", abort | sdei, false, false);
    has_sdei = false;
    boots_with("", abort | sdei, true, false);
    has_sdei = true;
    version = 0x020000; /* another service, or a later one */
    boots_with("", sdei, false, false);
    version = 0x010000;
    is_kvm = false;
    boots_with("", abort | sdei, false, false);
    is_kvm = true;
}

static void on_and_off_are_said_once(void) {
    boots_with("", 1 << 1, true, false);
    u32 before = enables;
    CHECK(apf_enable(&cpu) && enables == before);
    before = disables;
    apf_disable(&cpu);
    apf_disable(&cpu);
    CHECK(disables == before + 1 && !area_at);
    answer = -2; /* it was on already */
    CHECK(apf_enable(&cpu));
    apf_disable(&cpu);
    answer = -1;
    CHECK(!apf_enable(&cpu) && !cpu.apf.area.enabled);
    answer = 0;
}

static void threads_sleep_and_wake_by_aborts(void) {
    boots_with("", 1 << 1, true, false);
    send_to_program(1, 1, 0x10000);
    CHECK(!cpu.current && asleep_for_page[1]);
    send_to_program(2, 1, 0x20000);
    send_to_program(3, 2, 0x20000);
    WOKEN("2 ");
    send_to_program(3, 2, 0x30000); /* before its thread sleeps */
    send_to_program(3, 1, 0x30000);
    CHECK(cpu.current == &threads[3]);
    send_to_program(3, 2, ~0u);
    WOKEN("1 ");
}

static void real_aborts_are_left_alone(void) {
    u32 lost = page.apf_lost;
    run(1);
    CHECK(!apf_from_program(&cpu, TRANSLATION, 0x1234) && page.apf_lost == lost);
    CHECK(apf_from_program(&cpu, EXTERNAL, 0x1234) && page.apf_lost == lost + 1);
    boots_with("apf=off", 1 << 1, false, false);
    CHECK(!apf_from_program(&cpu, EXTERNAL, 0x1234));
    boots_with("", 1 << 1, true, false);
}

static void page_ready_waits_for_the_kernel(void) {
    send_to_program(1, 1, 0x10000);
    send_to_program(2, 1, 0x20000);
    run(3);
    send_to_kernel(CODE, 2, 0x20000);
    send_to_kernel(CODE, 2, 0x10000);
    WOKEN("");
    finish();
    WOKEN("2 1 ");
    finish();
}

static void idle_handles_events_at_once(void) {
    send_to_program(1, 1, 0x10000);
    send_to_idle(2, 0x10000);
    WOKEN("1 ");
    u32 idle_events = page.apf_idle;
    send_to_idle(1, 0x20000);
    CHECK(page.apf_idle == idle_events + 1);
    send_to_idle(2, 0x20000);
    CHECK(!cpu.arch.nlater);
}

static void the_kernel_halts_for_its_own_page(void) {
    send_to_program(1, 1, 0x10000);
    run(2);
    sent_in_halt[0] = 0x10000;
    sent_in_halt[1] = 0x50000;
    nsent = 2;
    send_to_kernel(CODE, 1, 0x50000);
    CHECK(!cpu.arch.halted && cpu.current == &threads[2]);
    WOKEN("");
    finish();
    WOKEN("1 ");
    send_to_program(1, 1, 0x10000);
    sent_in_halt[0] = ~0u; /* for all: for the halted kernel, too */
    nsent = 1;
    send_to_kernel(CODE, 1, 0x60000);
    finish();
    WOKEN("1 ");
}

static void more_events_than_there_is_room_for_wake_all(void) {
    for (int i = 0; i < 3; i++)
        send_to_program(i, 1, (u32)(i + 1) << 16);
    run(9);
    for (u32 i = 0; i < APF_LATER + 3; i++)
        send_to_kernel(CODE, 2, (i + 100) << 16);
    CHECK(cpu.arch.nlater == 3);
    finish();
    CHECK(!asleep_for_page[0] && !asleep_for_page[1] && !asleep_for_page[2]);
    woken[0] = 0;
    send_to_program(9, 2, ~0u); /* frees the dummies */
}

static void an_event_by_sdei_puts_its_thread_to_sleep(void) {
    boots_with("", 1 << 2, false, true);
    u32 before = acks;
    CHECK(registered && interrupts_enabled == registered);
    cpu.apf.area.reason = 1;
    cpu.apf.area.token = 0x1000;
    run(1);
    apf_look(&cpu);
    CHECK(asleep_for_page[1] && !cpu.apf.area.reason && !cpu.apf.area.token);
    run(2);
    apf_look(&cpu); /* its interrupt, after another one was first */
    CHECK(cpu.current == &threads[2] && !apf_from_program(&cpu, EXTERNAL, 0x1000));
    cpu.apf.area.reason = 2;
    cpu.apf.area.token = 0x1000;
    apf_look(&cpu);
    CHECK(cpu.apf.area.reason == 2);
    apf_interrupt(&cpu);
    WOKEN("1 ");
    CHECK(acks == before + 1 && !cpu.apf.area.reason && !cpu.apf.area.token);
    apf_interrupt(&cpu); /* on its way when the host took it back */
    CHECK(acks == before + 2);
}

static void disabling_forgets_everything(void) {
    cpu.apf.area.reason = 1;
    cpu.apf.area.token = 0x2000;
    run(4);
    apf_look(&cpu);
    cpu.apf.area.reason = 2;
    cpu.apf.area.token = 0x2000; /* the host sent it before it saw the disable */
    u32 handlers = registered;
    apf_disable(&cpu);
    WOKEN("4 ");
    CHECK(!cpu.apf.area.reason && !cpu.apf.area.token);
    CHECK(apf_enable(&cpu) && registered == handlers);
    boots_with("", 1 << 1, true, false);
    send_to_program(5, 1, 0x10000);
    run(6);
    send_to_kernel(CODE, 2, 0x20000);
    apf_disable(&cpu);
    WOKEN("5 ");
    CHECK(!cpu.arch.nlater);
}

int main(void) {
    for (int i = 0; i < 128; i++)
        threads[i].page_wait.kind = APF_THREAD;
    the_form_is_chosen();
    on_and_off_are_said_once();
    threads_sleep_and_wake_by_aborts();
    real_aborts_are_left_alone();
    page_ready_waits_for_the_kernel();
    idle_handles_events_at_once();
    the_kernel_halts_for_its_own_page();
    more_events_than_there_is_room_for_wake_all();
    an_event_by_sdei_puts_its_thread_to_sleep();
    disabling_forgets_everything();
    puts("apf: ok");
    return 0;
}
