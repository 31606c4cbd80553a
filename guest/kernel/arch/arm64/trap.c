/* Exceptions and interrupts: the handler of each event. */
#include "kernel.h"

_Static_assert(offsetof(struct cpu, apf.area.reason) == CPU_REASON, "layout.h");

static spinlock msr_lock;

void trap_init(void) {}

void trap_cpu_init(struct cpu *c) {
    write_sysreg(tpidr_el1, c);
    write_sysreg(vbar_el1, vectors);
    isb();
}

/* Ends the thread after an exception that has no handler. In a confined thread that is expected. */
static void kill(struct thread *t) {
    const struct frame *f = &t->frame;
    u32 class = ESR_CLASS(f->esr);
    if (!t->kill_at) {
        char name[sizeof status->entry[0].name + 1] = {0}; /* may lack its final NUL */
        __builtin_memcpy(name, status->entry[t->slot].name, sizeof name - 1);
        kprintf("killed: thread %u (%s), exception class %x syndrome %lx at pc %lx", t->slot, name,
                class, f->esr, f->pc);
        if (class == CLASS_ABORT_EL0)
            kprintf(", page fault at %lx", f->far);
        kprintf("\n");
    }
    thread_exit(t, LACUNA_EXIT_FAULT + class);
}

_Noreturn void trap_exception(struct thread *t, struct cpu *c, u64 esr, u64 far) {
    if (ESR_CLASS(esr) == CLASS_SVC64) {
        syscall(c, t);
    } else if (ESR_CLASS(esr) != CLASS_ABORT_EL0 || !apf_from_program(c, esr, far)) {
        t->frame.esr = esr;
        t->frame.far = far;
        kill(t);
    }
    sched_resume(c);
}

static void interrupt(struct cpu *c) {
    u32 vector = (u32)read_sysreg(s3_0_c12_c12_0) & 0xffffff; /* ICC_IAR1_EL1 */
    if (vector >= 1020)
        return; /* it is gone */
    if (vector == machine.timer_interrupt) {
        timer_set(NEVER); /* or it would fire again at once */
        sched_tick(c);
    } else if (vector == VEC_RESCHED) {
        sched_woken(c);
    } else if (vector == apf_ready_interrupt) {
        apf_interrupt(c);
    } else if (vector >= 32) {
        virtio_interrupt(c);
    } else if (vector != VEC_APF) {
        panic("interrupt %u: the kernel uses no such interrupt", vector);
    }
    write_sysreg(s3_0_c12_c12_1, vector); /* ICC_EOIR1_EL1 */
    isb();
}

_Noreturn void trap_interrupt(struct thread *t, struct cpu *c) {
    (void)t;
    apf_look(c); /* first: the event is about the thread that runs now */
    interrupt(c);
    sched_resume(c);
}

_Noreturn void trap_idle(struct cpu *c) {
    apf_look(c);
    interrupt(c);
    sched_resume(c);
}

_Noreturn void trap_fatal(struct frame *f, struct cpu *c, u64 esr, u64 far) {
    (void)c;
    panic("exception class %x syndrome %lx at pc %lx pstate %lx sp %lx far %lx", ESR_CLASS(esr),
          esr, f->pc, f->pstate, f->sp, far);
}

/*
 * An exception in the kernel is a bug, except for two: a system register that is undefined or
 * trapped, and an async page fault. True: the reason word is to be cleared on the way back.
 */
bool trap_kernel(struct frame *f, struct cpu *c, u64 esr, u64 far) {
    u32 class = ESR_CLASS(esr);
    if (f->pc == (u64)msr_read_insn || f->pc == (u64)msr_write_insn) {
        f->pc = (u64)msr_failed;
        return false;
    }
    if (class == CLASS_ABORT_EL1 && apf_by_abort && c->apf.area.reason)
        return apf_from_kernel(c, f, (u32)far);
    if (class != CLASS_ABORT_EL1 || !apf_is_lost(esr))
        trap_fatal(f, c, esr, far);
    return false;
}

/* One processor at a time: the instruction is written into the kernel's code. */
int msr_read(u32 index, u64 *value) {
    lock(&msr_lock);
    int result = msr_run_read(0xd5300002 | (index & 0x7fff) << 5, value);
    unlock(&msr_lock);
    return result;
}

int msr_write(u32 index, u64 value) {
    lock(&msr_lock);
    int result = msr_run_write(0xd5100001 | (index & 0x7fff) << 5, value);
    unlock(&msr_lock);
    return result;
}

/* The kernel cannot execute memory that programs can write, so code in the arena runs at its
 * address in the kernel. PAN is off meanwhile: the function may use the program's data. */
void call_program(u64 va, u64 pa) {
    bool in_arena = va >= LACUNA_ARENA_BASE;
    bool has_pan = read_sysreg(id_aa64mmfr1_el1) >> 20 & 15;
    void (*fn)(void) = (void (*)(void))(in_arena ? (u64)from_phys(pa) : va);
    if (has_pan)
        asm volatile(".inst 0xd500409f"); /* msr pan, #0 */
    fn();
    if (has_pan)
        asm volatile(".inst 0xd500419f");
}
