/* The local APIC: x2APIC by MSR where CPUID has it, memory-mapped otherwise (same registers). */
#include "kernel.h"
#include "lacuna/format.h"

#define APIC_MMIO 0xfee00000ull

/* Register numbers as x2APIC counts them; memory-mapped ones are 16 bytes apart. */
enum { TPR = 0x08, SVR = 0x0f, ICR = 0x30, ICR_HIGH = 0x31, LVT_TIMER = 0x32,
       LVT_LINT0 = 0x35, LVT_LINT1 = 0x36, TIMER_INITIAL = 0x38, TIMER_CURRENT = 0x39,
       TIMER_DIVIDE = 0x3e };

#define LVT_MASKED 0x10000u
#define LVT_TSC_DEADLINE 0x40000u
#define ICR_BUSY 0x1000u
#define ICR_INIT 0x4500u
#define ICR_STARTUP 0x4600u
#define ICR_ALL_BUT_SELF 0xc0000u

/* The I/O APIC has a register that selects another, and the selected one. */
#define IOAPIC_SELECT 0xfec00000ull
#define IOAPIC_DATA 0xfec00010ull
#define IOAPIC_LEVEL 0x8000u

bool x2apic;
static bool tsc_deadline;

static volatile u32 *mmio(u32 reg) { return (volatile u32 *)(APIC_MMIO + reg * 16); }

static void write(u32 reg, u32 v) {
    if (x2apic)
        wrmsr(MSR_X2APIC + reg, v);
    else
        *mmio(reg) = v;
}

static u32 read(u32 reg) { return x2apic ? (u32)rdmsr(MSR_X2APIC + reg) : *mmio(reg); }

static void send(u32 hardware_id, u32 command) {
    if (x2apic) {
        wrmsr(MSR_X2APIC + ICR, (u64)hardware_id << 32 | command);
        return;
    }
    *mmio(ICR_HIGH) = hardware_id << 24;
    *mmio(ICR) = command;
    while (*mmio(ICR) & ICR_BUSY)
        pause();
}

void interrupts_init(void) {
    struct cpuid features = cpuid(1);
    x2apic = features.ecx >> 21 & 1;
    tsc_deadline = features.ecx >> 24 & 1;
    u64 base = rdmsr(MSR_APIC_BASE) | 0x800;
    wrmsr(MSR_APIC_BASE, base);
    if (x2apic)
        wrmsr(MSR_APIC_BASE, base | 0xc00);
    write(TPR, 0);
    write(SVR, 0x100 | VEC_SPURIOUS);
    write(LVT_LINT0, LVT_MASKED); /* masks the old interrupt controller, if there is one */
    write(LVT_LINT1, LVT_MASKED);
    write(TIMER_DIVIDE, 0xb); /* by 1 */
    write(LVT_TIMER, VEC_TIMER | (tsc_deadline ? LVT_TSC_DEADLINE : 0));
}

/* Programs the timer for a TSC value. It may fire too early: the scheduler then reads the clock. */
void timer_set(u64 at) {
    if (tsc_deadline) {
        wrmsr(MSR_TSC_DEADLINE, at == NEVER ? 0 : at);
        return;
    }
    if (at == NEVER) {
        write(TIMER_INITIAL, 0);
        return;
    }
    u64 now = rdtsc(), wait = at > now ? at - now : 1;
    if (wait > clock_khz * 1000)
        wait = clock_khz * 1000; /* a second fits 32 bits of any bus clock */
    u64 count = muldiv(wait, apic_khz, clock_khz);
    write(TIMER_INITIAL, count ? (u32)count : 1);
}

void apic_timer_free_run(void) {
    write(LVT_TIMER, LVT_MASKED | VEC_TIMER);
    write(TIMER_INITIAL, ~0u);
}

u32 apic_timer_elapsed(void) { return ~0u - read(TIMER_CURRENT); }

void interrupt_send(u32 hardware_id, u32 vector) { send(hardware_id, vector | 0x4000); }

/* Level-triggered, to APIC id 0. */
void interrupt_route(u32 line) {
    write32(IOAPIC_SELECT, 0x11 + 2 * line);
    write32(IOAPIC_DATA, 0);
    write32(IOAPIC_SELECT, 0x10 + 2 * line);
    write32(IOAPIC_DATA, IOAPIC_LEVEL | VEC_DEVICE);
}

static void delay_us(u64 us) {
    for (u64 end = rdtsc() + us * clock_khz / 1000; rdtsc() < end;)
        pause();
}

volatile u32 cpus_released; /* boot.S waits for it */

/* INIT, then SIPI to each by id. Processors count from 0 without gaps. With ap=direct they run
 * already. */
void start_other_cpus(void) {
    extern u8 trampoline[], trampoline_end[];
    const char *how = lacuna_find_param(info->cmdline, "ap");
    __atomic_store_n(&cpus_released, 1, __ATOMIC_SEQ_CST);
    if (how && how[0] == 'd') {
        send(0, ICR_ALL_BUT_SELF | 0x4000 | VEC_RESCHED);
        return;
    }
    __builtin_memcpy((void *)TRAMPOLINE, trampoline, (size_t)(trampoline_end - trampoline));
    for (u32 i = 1; i < ncpus; i++) {
        send(i, ICR_INIT);
        delay_us(1000);
        send(i, ICR_STARTUP | TRAMPOLINE >> 12);
        delay_us(200);
        send(i, ICR_STARTUP | TRAMPOLINE >> 12);
    }
}
