/* The interrupt controller (Arm GICv3, IHI 0069) and the virtual timer. */
#include "kernel.h"

/* Distributor */
#define GICD_CTLR 0x0000
#define CTLR_AFFINITY (1u << 4)
#define CTLR_GROUP1 (1u << 1)
#define CTLR_PENDING (1u << 31)

#define GICD_IGROUPR 0x0080
#define GICD_ISENABLER 0x0100
#define GICD_IPRIORITYR 0x0400
#define GICD_IROUTER 0x6000

/* Redistributor: a frame of control, then one of private interrupts, 64 KiB each */
#define GICR_TYPER 0x0008
#define GICR_WAKER 0x0014
#define GICR_FRAME 0x10000
#define GICR_IGROUPR0 0x0080
#define GICR_ISENABLER0 0x0100
#define GICR_ICENABLER0 0x0180
#define GICR_IPRIORITYR 0x0400
#define TYPER_VLPIS 2u
#define TYPER_LAST 16u
#define WAKER_SLEEP 2u
#define WAKER_ASLEEP 4u

#define PRIORITY 0xa0

u64 clock_khz;

void time_init(void) {
    clock_khz = read_sysreg(cntfrq_el0) / 1000;
    if (!clock_khz)
        panic("the timer's frequency is %lu Hz: set CNTFRQ_EL0", read_sysreg(cntfrq_el0));
}

/* It may fire too early, and the scheduler reads the clock. */
void timer_set(u64 at) {
    if (at == NEVER) {
        write_sysreg(cntv_ctl_el0, 0);
    } else {
        write_sysreg(cntv_cval_el0, at);
        write_sysreg(cntv_ctl_el0, 1);
    }
    isb();
}

static u64 own_id(void) { return read_sysreg(mpidr_el1) & 0xff00ffffff; }

static u64 find_redistributor(void) {
    u64 id = own_id(), affinity = (id >> 32 << 24) | (id & 0xffffff);
    for (u32 i = 0; i < machine.nredistributors; i++) {
        u64 at = machine.redistributors[i].start, type;
        for (; at < machine.redistributors[i].end; at += 2 * GICR_FRAME) {
            type = read64(at + GICR_TYPER);
            if (type >> 32 == affinity)
                return at;
            if (type & TYPER_LAST)
                break;
            if (type & TYPER_VLPIS)
                at += 2 * GICR_FRAME;
        }
    }
    panic("no redistributor for processor %lx in the device tree", id);
}

static void distributor_init(void) {
    u64 at = machine.distributor + GICD_CTLR;
    write32(at, CTLR_AFFINITY | CTLR_GROUP1);
    while (read32(at) & CTLR_PENDING)
        pause();
}

void interrupt_enable(struct cpu *c, u32 vector) {
    write32(c->arch.redistributor + GICR_ISENABLER0, 1u << vector);
}

static void redistributor_init(struct cpu *c) {
    u64 at = find_redistributor(), private = at + GICR_FRAME;
    write32(at + GICR_WAKER, read32(at + GICR_WAKER) & ~WAKER_SLEEP);
    while (read32(at + GICR_WAKER) & WAKER_ASLEEP)
        pause();
    write32(private + GICR_ICENABLER0, ~0u);
    write32(private + GICR_IGROUPR0, ~0u);
    for (u32 i = 0; i < 32; i++)
        write8(private + GICR_IPRIORITYR + i, PRIORITY);
    c->arch.redistributor = private;
    interrupt_enable(c, VEC_RESCHED);
    interrupt_enable(c, VEC_APF);
    interrupt_enable(c, machine.timer_interrupt);
}

/* Lines are level-triggered after a reset (GICD_ICFGR). */
void interrupt_route(u32 line) {
    u64 at = machine.distributor, word = line / 32 * 4;
    u32 bit = 1u << line % 32;
    write32(at + GICD_IGROUPR + word, read32(at + GICD_IGROUPR + word) | bit);
    write8(at + GICD_IPRIORITYR + line, PRIORITY);
    write32(at + GICD_IROUTER + 8 * line, (u32)machine.ids[0]);
    write32(at + GICD_IROUTER + 8 * line + 4, (u32)(machine.ids[0] >> 32));
    write32(at + GICD_ISENABLER + word, bit);
}

/* The value for ICC_SGI1R_EL1. */
static u64 software_interrupt(u64 id, u64 vector) {
    u64 aff0 = id & 0xff, aff1 = id >> 8 & 0xff, aff2 = id >> 16 & 0xff, aff3 = id >> 32 & 0xff;
    return aff3 << 48 | (aff0 >> 4) << 44 | aff2 << 32 | vector << 24 | aff1 << 16 |
           1ull << (aff0 & 15);
}

/* For the calling processor. The CPU interface is in system registers. */
void interrupts_init(void) {
    struct cpu *c = (struct cpu *)read_sysreg(tpidr_el1);
    if (c == cpu_at(0))
        distributor_init();
    redistributor_init(c);
    c->arch.interrupt_self = software_interrupt(own_id(), VEC_APF);
    write_sysreg(s3_0_c12_c12_5, read_sysreg(s3_0_c12_c12_5) | 1); /* ICC_SRE_EL1.SRE */
    isb();
    write_sysreg(s3_0_c4_c6_0, 0xff);   /* ICC_PMR_EL1: no interrupt is masked by priority */
    write_sysreg(s3_0_c12_c12_4, 0);    /* ICC_CTLR_EL1: one write ends an interrupt */
    write_sysreg(s3_0_c12_c12_7, 1);    /* ICC_IGRPEN1_EL1 */
    timer_set(NEVER);
}

void interrupt_send(u32 hardware_id, u32 vector) {
    dsb_stores(); /* what the other processor is to see */
    write_sysreg(s3_0_c12_c11_5, software_interrupt(machine.ids[hardware_id], vector));
    isb();
}
