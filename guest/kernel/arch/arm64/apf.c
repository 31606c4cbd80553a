/*
 * The host's events of async page faults, in the two forms that were published for arm64:
 *
 *                   page not present                     page ready
 *   abort (RFCv2)   data abort, reason 1, FAR = token    data abort, reason 2, FAR = token
 *   sdei (v1-v4)    SDEI event, reason 1, token          interrupt, reason 2, token; then ACK
 *
 * The host sends no event while the reason word is not 0.
 *
 * Nothing masks an abort. So in the first form page-ready may interrupt the kernel at any
 * instruction, except for those between `vectors` and `vectors_end` (trap.S). The kernel's lists
 * may then be half changed. So the token waits in `later` until the kernel's work is done: on the
 * way to a program, or in idle. With apf_always=1 page-not-present may interrupt the kernel too. It
 * cannot put itself aside, so it halts until that page is ready.
 *
 * In the second form the event's handler only sends an interrupt to its own processor. The reason
 * word is cleared when that interrupt, or any other, is handled, so no event follows until then.
 */
#include "kernel.h"
#include "lacuna/format.h"

#define REASON_NOT_PRESENT 1u
#define REASON_READY 2u
#define REASON_NO_EVENTS 3u /* of the guest's own: it holds events off */

#define FLAG_ENABLED 1ull
#define FLAG_SEND_ALWAYS 2ull

/* Vendor-specific hypervisor services: their numbers, also in the bitmap of services. */
#define SERVICE_ABORT 1
#define SERVICE_SDEI 2
#define SERVICE(number) (0x86000000u + (number))

/* SERVICE_ABORT takes 64 bits in two halves. */
#define ABORT_SWITCH (1ull << 63) /* on or off: address of the area, and flags */
#define ABORT_RANGE (1ull << 62)  /* bytes from VBAR_EL1 where no event is sent */

enum { SDEI_APF_VERSION, SDEI_APF_SLOTS, SDEI_APF_EVENT, SDEI_APF_IRQ, SDEI_APF_ENABLE,
       SDEI_APF_ACK };
#define SDEI_APF_MAJOR 1

/* SDEI (Arm DEN 0054) */
#define SDEI_VERSION 0xc4000020
#define SDEI_EVENT_REGISTER 0xc4000021
#define SDEI_EVENT_ENABLE 0xc4000022
#define SDEI_PE_UNMASK 0xc400002c

#define NOT_REQUIRED (-2ll)

bool apf_by_abort;
u32 apf_ready_interrupt;
static bool by_sdei;
static u32 event;
static u64 flags;

static s64 call(u64 function, u64 a, u64 b, u64 c, u64 *value) {
    struct smccc result = firmware_call(function, (const u64[5]){a, b, c, 0, 0});
    if (value)
        *value = result.x[1];
    /* The 32-bit convention leaves the upper half of the result open. */
    return function >> 30 & 1 ? (s64)result.x[0] : (int32_t)result.x[0];
}

static s64 call_abort(u64 argument) {
    return call(SERVICE(SERVICE_ABORT), (u32)argument, argument >> 32, 0, NULL);
}

static s64 call_sdei_apf(u32 function, u64 argument, u64 *value) {
    return call(SERVICE(SERVICE_SDEI), function, (u32)argument, argument >> 32, value);
}

/* Another hypervisor may have another service of that number, so its answers are checked. */
static bool sdei_is_offered(void) {
    u64 version, number, interrupt;
    if (call(SDEI_VERSION, 0, 0, 0, NULL) < 0)
        return false;
    if (call_sdei_apf(SDEI_APF_VERSION, 0, &version) || version >> 16 != SDEI_APF_MAJOR ||
        call_sdei_apf(SDEI_APF_EVENT, 0, &number) || !number ||
        call_sdei_apf(SDEI_APF_IRQ, 0, &interrupt) || interrupt < 16 || interrupt > 31)
        return false;
    event = (u32)number;
    apf_ready_interrupt = (u32)interrupt;
    return true;
}

/* Chooses the form: the one in apf=off|abort|sdei, else v1-v4 if the host offers it. */
void apf_init(void) {
    u32 services[4];
    const char *how = lacuna_find_param(info->cmdline, "apf");
    if (!vendor_services(services))
        return;
    if ((!how || how[0] == 's') && services[0] >> SERVICE_SDEI & 1)
        by_sdei = sdei_is_offered();
    if ((!how || how[0] == 'a') && !by_sdei)
        apf_by_abort = services[0] >> SERVICE_ABORT & 1;
    flags = FLAG_ENABLED | (apf_by_abort && boot_param("apf_always", 0) ? FLAG_SEND_ALWAYS : 0);
}

static bool enable_by_abort(const struct apf_area *area) {
    if (call_abort(ABORT_RANGE | (u64)(vectors_end - vectors)))
        return false;
    s64 result = call_abort(ABORT_SWITCH | to_phys(area) | flags);
    return !result || result == NOT_REQUIRED;
}

/* Each processor registers its own handler, once. */
static bool register_event(struct cpu *c) {
    const u64 args[5] = {event, (u64)apf_event, (u64)c, 0, 0};
    if (!c->arch.has_event) {
        if (firmware_call(SDEI_EVENT_REGISTER, args).x[0] ||
            call(SDEI_EVENT_ENABLE, event, 0, 0, NULL) || call(SDEI_PE_UNMASK, 0, 0, 0, NULL) < 0)
            return false;
        interrupt_enable(c, apf_ready_interrupt);
    }
    return c->arch.has_event = true;
}

static bool enable_by_sdei(struct cpu *c) {
    if (!register_event(c))
        return false;
    s64 result = call_sdei_apf(SDEI_APF_ENABLE, to_phys(&c->apf.area) | flags, NULL);
    return !result || result == NOT_REQUIRED;
}

bool apf_enable(struct cpu *c) {
    struct apf_area *area = &c->apf.area;
    if (area->enabled)
        return true;
    area->enabled = 1; /* events may arrive before the call has returned */
    if (!apf_by_abort && !by_sdei)
        area->enabled = 0;
    else if (!(apf_by_abort ? enable_by_abort(area) : enable_by_sdei(c)))
        area->enabled = 0;
    return area->enabled;
}

/* Once disabled, the host has forgotten the faults of this processor, and does not write to
 * the area any more. */
void apf_disable(struct cpu *c) {
    struct apf_area *area = &c->apf.area;
    if (!area->enabled)
        return;
    if (apf_by_abort)
        call_abort(ABORT_SWITCH);
    else
        call_sdei_apf(SDEI_APF_ENABLE, 0, NULL);
    area->reason = area->token = area->enabled = 0;
    c->arch.nlater = 0;
    apf_wake_all(c);
}

/* The host may send the next event. */
static void consumed(struct cpu *c) {
    c->apf.area.token = 0;
    __atomic_store_n(&c->apf.area.reason, 0, __ATOMIC_RELEASE);
}

static void handle(struct cpu *c, u32 reason, u32 token) {
    if (reason == REASON_NOT_PRESENT)
        apf_not_present(c, token);
    else
        apf_page_ready(c, token);
    consumed(c);
}

/*
 * Whether a data abort is an event whose reason word is elsewhere, because a program has moved the
 * area (workload apfhostile). The status code decides: the devices of this machine answer, so
 * nothing but the host causes an external abort. Such an event kills no thread and no kernel: the
 * instruction is tried again.
 */
bool apf_is_lost(u64 esr) {
    bool lost = apf_by_abort && ESR_STATUS(esr) == STATUS_EXTERNAL;
    __atomic_fetch_add(&status->apf_lost, lost, __ATOMIC_RELAXED);
    return lost;
}

/* Whether a data abort of a program is an event. The reason word says so. */
bool apf_from_program(struct cpu *c, u64 esr, u64 far) {
    u32 reason = c->apf.area.reason;
    if (!apf_by_abort || !reason)
        return apf_is_lost(esr);
    handle(c, reason, (u32)far);
    return true;
}

static void halt_for(struct cpu *c, u32 token) {
    c->apf.not_present++;
    c->arch.halted_token = token;
    c->arch.halted = 1;
    consumed(c);
    apf_halt(&c->arch.halted);
}

/* A token waits until the kernel's work is done. If there is no room, all threads try again. */
static void put_off(struct cpu *c, u32 token) {
    if (c->arch.nlater == APF_LATER) {
        token = TOKEN_EVERYBODY;
        c->arch.nlater = 0;
    }
    c->arch.later[c->arch.nlater] = token;
    c->arch.nlater++;
}

static void ready_in_kernel(struct cpu *c, u32 token) {
    bool halted = c->arch.halted && (token == c->arch.halted_token || token == TOKEN_EVERYBODY);
    if (halted)
        c->arch.halted = 0;
    if (halted && token != TOKEN_EVERYBODY)
        c->apf.ready++;
    else
        put_off(c, token);
}

/* An event that interrupted the kernel. True: the reason word is still to be cleared. */
bool apf_from_kernel(struct cpu *c, struct frame *f, u32 token) {
    u32 reason = c->apf.area.reason;
    if (f->pc >= (u64)idle && f->pc < (u64)idle_end) {
        handle(c, reason, token);
        restart(c);
    }
    if (reason == REASON_NOT_PRESENT) {
        halt_for(c, token);
        return false;
    }
    ready_in_kernel(c, token);
    if (f->pc >= (u64)apf_halt && f->pc < (u64)apf_halt_end)
        f->pc = (u64)apf_halt;
    return true;
}

/* Handles the events that arrived while the kernel was at work. The table and the queues change
 * here, so no other event may be sent meanwhile. */
void apf_finish(struct cpu *c) {
    volatile u32 *reason = &c->apf.area.reason;
    *reason = REASON_NO_EVENTS;
    u32 n = c->arch.nlater;
    c->arch.nlater = 0;
    for (u32 i = 0; i < n; i++)
        apf_page_ready(c, c->arch.later[i]);
    consumed(c);
}

void apf_look(struct cpu *c) {
    if (by_sdei && *(volatile u32 *)&c->apf.area.reason == REASON_NOT_PRESENT)
        handle(c, REASON_NOT_PRESENT, c->apf.area.token);
}

/* If page-ready is not the reason, this interrupt was already on its way when apf_disable cleared
 * the area. The acknowledgement withdraws it. */
void apf_interrupt(struct cpu *c) {
    if (*(volatile u32 *)&c->apf.area.reason == REASON_READY)
        handle(c, REASON_READY, c->apf.area.token);
    call_sdei_apf(SDEI_APF_ACK, 0, NULL);
}
