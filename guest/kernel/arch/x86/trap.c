/* Exceptions and interrupts: the tables, and the handler of each event. */
#include "kernel.h"
#include "lacuna/format.h"

struct gate {
    u16 offset0, selector;
    u8 ist, type;
    u16 offset1;
    u32 offset2, reserved;
};

struct pointer {
    u16 limit;
    u64 base;
} __attribute__((packed));

#define PF_USER 4u /* in a page fault's error code */

static struct gate idt[VEC_COUNT];

void trap_init(void) {
    for (u32 v = 0; v < VEC_COUNT; v++) {
        u64 stub = (u64)trap_stubs + v * 16;
        bool fatal = v == 2 || v == 8 || v == 18; /* may find no usable stack */
        if (v == VEC_PF)
            stub = (u64)page_fault_entry;
        if (v == VEC_APF_READY)
            stub = (u64)page_ready_entry;
        idt[v] = (struct gate){(u16)stub, SEL_KCODE, fatal, 0x8e, (u16)(stub >> 16), 0, 0};
    }
}

void trap_cpu_init(struct cpu *c) {
    u64 tss = (u64)&c->arch.tss;
    c->arch.tss.ist[0] = (u64)(c->fatal_stack + sizeof c->fatal_stack);
    c->arch.tss.io_map = sizeof c->arch.tss;
    c->arch.gdt[1] = 0x00af9b000000ffff;
    c->arch.gdt[2] = 0x00cf93000000ffff;
    c->arch.gdt[3] = 0x00cff3000000ffff;
    c->arch.gdt[4] = 0x00affb000000ffff;
    c->arch.gdt[5] = (sizeof c->arch.tss - 1) | (tss & 0xffffff) << 16 | 0x89ull << 40 |
                (tss >> 24 & 0xff) << 56;
    c->arch.gdt[6] = tss >> 32;
    struct pointer gdtr = {sizeof c->arch.gdt - 1, (u64)c->arch.gdt};
    struct pointer idtr = {sizeof idt - 1, (u64)idt};
    asm volatile("lgdt %0" : : "m"(gdtr));
    asm volatile("lidt %0" : : "m"(idtr));
    load_segments();
    asm volatile("ltr %w0" : : "r"(SEL_TSS));
    wrmsr(MSR_GS_BASE, 0);
    wrmsr(MSR_KERNEL_GS_BASE, (u64)c);
    wrmsr(MSR_STAR, (u64)(SEL_KDATA | 3) << 48 | (u64)SEL_KCODE << 32);
    wrmsr(MSR_LSTAR, (u64)syscall_entry);
    wrmsr(MSR_FMASK, 0x47700); /* AC NT IOPL DF IF TF */
}

static void interrupt(struct cpu *c, u64 vector) {
    switch (vector) {
    case VEC_TIMER:
        interrupt_end();
        sched_tick(c);
        break;
    case VEC_RESCHED:
        interrupt_end();
        sched_woken(c);
        break;
    case VEC_APF_READY:
        interrupt_end();
        apf_interrupt(c);
        break;
    case VEC_DEVICE:
        virtio_interrupt(c); /* lowers the line, or it would interrupt again at once */
        interrupt_end();
        break;
    case VEC_SPURIOUS: /* has no EOI */
        break;
    default:
        panic("interrupt on vector %lu: the kernel uses no such vector", vector);
    }
}

/* Ends the thread after an exception that has no handler. In a confined thread that is expected. */
static void kill(struct thread *t) {
    u64 v = t->frame.vector;
    if (!t->kill_at) {
        char name[sizeof status->entry[0].name + 1] = {0}; /* may lack its final NUL */
        __builtin_memcpy(name, status->entry[t->slot].name, sizeof name - 1);
        kprintf("killed: thread %u (%s), exception %lu error %lx at rip %lx", t->slot, name, v,
                t->frame.error, t->frame.rip);
        if (v == VEC_PF)
            kprintf(", page fault at %lx", read_cr2());
        kprintf("\n");
    }
    thread_exit(t, LACUNA_EXIT_FAULT + (u32)v);
}

u32 processor_init(void) {
    const char *how = lacuna_find_param(info->cmdline, "syscall");
    return how && how[0] == 'u' ? LACUNA_SYSCALL_BY_UD2 : 0;
}

/* ud2 in place of syscall: undo the mark, step over the instruction. */
static bool is_ud2_call(struct frame *f) {
    bool by_ud2 = info->processor == LACUNA_SYSCALL_BY_UD2;
    if (f->vector != VEC_UD || !by_ud2 || f->rax >> 32 != LACUNA_UD2_MARK)
        return false;
    f->rax = (u32)f->rax;
    f->rip += 2;
    return true;
}

/*
 * Whether a #PF at CPL 3 or in idle is an event of the host. The reason word says so. If it is
 * empty because a program has moved the area (workload apfhostile), the error code decides: the
 * host leaves it 0, the processor sets the user bit at CPL 3, and idle causes no page faults. Such
 * an event kills no thread: the access is tried again.
 */
static bool is_async(struct cpu *c, const struct frame *f) {
    if (apf_page_fault(c))
        return true;
    if (f->error & PF_USER)
        return false;
    __atomic_fetch_add(&status->apf_lost, 1, __ATOMIC_RELAXED);
    return true;
}

_Noreturn void trap_user(struct thread *t, struct cpu *c, u32 vector) {
    if (vector == VEC_SYSCALL || is_ud2_call(&t->frame))
        syscall(c, t);
    else if (vector >= 32)
        interrupt(c, vector);
    else if (vector != VEC_PF || !is_async(c, &t->frame))
        kill(t);
    sched_resume(c);
}

/*
 * The fast paths: a thread's page is not present, and another thread can run; or a page is ready,
 * and its thread preempts the running one. They are short because some hosts emulate the kernel,
 * and need a microsecond for each instruction.
 */
void trap_page_fault(struct thread *t, struct cpu *c) {
    if (sched_may_block(c) && apf_sleep(c, t))
        sched_next(c);
    else
        trap_user(t, c, VEC_PF);
}

void trap_page_ready(struct thread *t, struct cpu *c) {
    struct thread *woken = apf_sleeper(c); /* acknowledged, if not NULL */
    if (woken)
        sched_preempt(c, t, woken);
    else
        trap_user(t, c, VEC_APF_READY);
}

_Noreturn void trap_idle(u64 vector, struct cpu *c) {
    interrupt(c, vector);
    sched_resume(c);
}

_Noreturn void trap_fatal(struct frame *f) {
    panic("exception %lu error %lx at rip %lx cs %lx rsp %lx cr2 %lx", f->vector, f->error,
          f->rip, f->cs, f->rsp, read_cr2());
}

/*
 * An exception in the kernel is a bug, except for two: an MSR access that raised #GP, and an async
 * page fault of idle, the only code that runs with interrupts on. Idle has no state to return to,
 * so it starts from its beginning, and halts if there is still no thread to run.
 */
void trap_kernel(struct frame *f, struct cpu *c) {
    if (f->vector == 13 && (f->rip == (u64)msr_read_insn || f->rip == (u64)msr_write_insn))
        f->rip = (u64)msr_failed;
    else if (f->vector == VEC_PF && f->rflags & RFLAGS_IF && is_async(c, f))
        sched_resume(c);
    else
        trap_fatal(f);
}
