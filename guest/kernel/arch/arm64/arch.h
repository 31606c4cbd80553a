/* What the kernel's shared files use of the processor. kernel.h includes this file. */
#ifndef ARCH_H
#define ARCH_H

#include "arm64.h"
#include "lacuna/abi.h"
#include "layout.h"

/* ---- the frame of a thread: its registers, as trap.S saves them ---- */
struct frame {
    u64 x[31], sp, pc, pstate, esr, far;
};

_Static_assert(sizeof(struct frame) == FRAME_SIZE && FRAME_SIZE % 16 == 0, "layout.h");
_Static_assert(offsetof(struct frame, sp) == FRAME_SP, "layout.h");
_Static_assert(offsetof(struct frame, pc) == FRAME_PC, "layout.h");
_Static_assert(offsetof(struct frame, pstate) == FRAME_PSTATE, "layout.h");

/* Argument i of a system call, 0 to 3. */
static inline u64 frame_argument(const struct frame *f, int i) { return f->x[i]; }
static inline u64 frame_call(const struct frame *f) { return f->x[8]; }
static inline void frame_set_result(struct frame *f, u64 result) { f->x[0] = result; }

/* The first frame of a thread: args are its entry point and the two arguments of that. */
static inline void frame_start(struct frame *f, const u64 args[3], u64 stack_top) {
    f->pc = args[0];
    f->x[0] = args[1];
    f->x[1] = args[2];
    f->sp = stack_top;
    f->pstate = PSTATE_EL0;
}

/*
 * ---- the area of async page faults that the host writes: struct kvm_vcpu_pv_apf_data of the
 * arm64 series, RFCv2 (which has no token) and v1 to v4 ----
 */
struct apf_area {
    u32 reason; /* 0 none, 1 not present, 2 ready */
    u32 token;
    u8 reserved[56];
    u32 enabled; /* the guest's own */
    u8 pad[60];
} __attribute__((aligned(64)));

#define APF_TOKEN_SHIFT 16 /* RFCv2 counts its tokens in the bits from here, v1 to v4 from 12 */
#define APF_LATER 64       /* a host has at most so many faults of one processor outstanding */

/* ---- the processor's own structures: the first member of struct cpu ---- */
struct arch_cpu {
    volatile u32 nlater; /* page-ready events that arrived while the kernel was busy */
    volatile u32 halted; /* the kernel waits for the page of this token, and runs nothing else */
    u64 interrupt_self;  /* for ICC_SGI1R_EL1: VEC_APF to this processor */
    u32 halted_token;
    bool has_event; /* the handler of the SDEI event is registered */
    u32 later[APF_LATER];
    u64 redistributor; /* its frame of software-generated and private interrupts */
};

_Static_assert(offsetof(struct arch_cpu, nlater) == CPU_LATER, "layout.h");
_Static_assert(offsetof(struct arch_cpu, interrupt_self) == CPU_INTERRUPT_SELF, "layout.h");

/* The next exception from a program saves its frame at SP_EL1, which `resume` sets. */
static inline void set_trap_frame(struct arch_cpu *c, struct frame *f) {
    (void)c;
    (void)f;
}

/* ---- time: a clock that never stops ---- */
static inline u64 clock_read(void) {
    isb();
    return read_sysreg(cntvct_el0);
}

/* ---- memory: the kernel has all of it at KERNEL_BASE, by TTBR1 ---- */
static inline u64 to_phys(const void *p) { return (u64)p & ~KERNEL_BASE; }
static inline void *from_phys(u64 pa) { return (void *)(pa | KERNEL_BASE); }
static inline void map_memory(u64 top) { (void)top; } /* boot_read has done it */
void zero_page(void *page);

/*
 * Entries of page tables: an address, one of these, and PTE_OWNED if the page or table below is
 * freed with its address space. Programs may execute the arena. The kernel may execute a program's
 * code, for call_program.
 */
#define PTE_PRESENT PTE_VALID
#define PTE_TABLE (PTE_VALID | PTE_TABLE_OR_PAGE)
#define PTE_USER_PAGE                                                                              \
    (PTE_VALID | PTE_TABLE_OR_PAGE | PTE_EL0 | PTE_INNER_SHAREABLE | PTE_AF | PTE_NOT_GLOBAL)
#define MAP_CODE (PTE_USER_PAGE | PTE_READ_ONLY)
#define MAP_CONST (PTE_USER_PAGE | PTE_READ_ONLY | PTE_UXN | PTE_PXN)
#define MAP_DATA (PTE_USER_PAGE | PTE_UXN | PTE_PXN)
#define MAP_ARENA (arena_entry_bits)
extern u64 arena_entry_bits; /* PTE_USER_PAGE, or that as hardware returns it (fdt.c) */
static inline u64 block_of(u64 flags) { return flags & ~PTE_TABLE_OR_PAGE; }
static inline bool entry_is_block(u64 entry) { return !(entry & PTE_TABLE_OR_PAGE); }
static inline bool entry_is_user(u64 entry) { return entry & PTE_VALID; } /* all in TTBR0 are */

/* New entries: the table walker sees them, and the processor uses nothing that it read before. */
static inline void tables_changed(void) {
    dsb_stores();
    isb();
}

/* Tags are ASIDs: the TLB marks each entry that is not global with one. Tag 0
 * has the kernel's tables, and the programs beyond the last tag. */
#define TABLES_KEEP 1ull /* in the value for load_tables: keep the TLB entries with this tag */
#define TAG_SHIFT 48
#define TAGS 256 /* every processor has 8 bits */
static inline bool has_tags(void) { return true; }
static inline void enable_tags(void) {}
static inline u64 tables_of(const u64 *root, u32 tag) {
    return to_phys(root) | (u64)tag << TAG_SHIFT;
}
void load_tables(u64 value);

struct cpu;
struct thread;

/* ---- fdt.c: the machine, from the device tree; zero: it has none ---- */
struct machine {
    u64 uart, distributor, host;
    struct {
        u64 start, end;
    } redistributors[4];
    u32 nredistributors;
    u32 timer_interrupt;
    u64 ids[LACUNA_MAX_CPUS]; /* affinities, as in MPIDR_EL1; the first processor's is first */
    bool by_smc; /* firmware is called by SMC, not by HVC */
    const char *cmdline;
};
extern struct machine machine;
u64 map_device(u64 pa, u64 bytes); /* the virtual address of device memory, or 0 */

/* ---- host.c: firmware and the host's devices ---- */
struct smccc {
    u64 x[4];
};
struct smccc firmware_call(u64 function, const u64 args[5]);
bool vendor_services(u32 features[4]); /* KVM's services; false: the host has none */
void console_out(u8 byte);
void announce_status(u64 frame);
void exit_machine(u32 code);
void start_other_cpus(void);
u32 processor_init(void); /* the word of the info page for programs */
/* A system call that only this processor has. */
u64 processor_call(struct thread *t, u64 number, u64 arg);

/* ---- trap.S, trap.c ---- */
extern u8 vectors[], vectors_end[], idle_end[], apf_halt_end[];
extern u8 msr_read_insn[], msr_write_insn[], msr_failed[];
_Noreturn void idle(struct cpu *c);
_Noreturn void restart(struct cpu *c);
_Noreturn void resume(struct thread *t);
#define resume_any resume
void apf_halt(volatile u32 *word);
void apf_event(void);
int msr_run_read(u32 instruction, u64 *value);
int msr_run_write(u32 instruction, u64 value);
int msr_read(u32 index, u64 *value); /* index: op0's low bit, op1, CRn, CRm, op2 */
int msr_write(u32 index, u64 value);
void trap_init(void);
void trap_cpu_init(struct cpu *c);
void call_program(u64 va, u64 pa); /* calls a function of a program in the kernel */

static inline void interrupts_off(void) { asm volatile("msr daifset, #2"); }
static inline void halt(void) { asm volatile("dsb sy\n wfi"); }

/* ---- apf.c ---- */
bool apf_is_lost(u64 esr);
bool apf_from_program(struct cpu *c, u64 esr, u64 far); /* false: it is a real abort */
bool apf_from_kernel(struct cpu *c, struct frame *f, u32 token);
extern bool apf_by_abort; /* both events are data aborts */
void apf_interrupt(struct cpu *c);
void apf_look(struct cpu *c); /* for an event delivered by SDEI */
void apf_finish(struct cpu *c);
static inline void apf_before_user(struct cpu *c) {
    if (((struct arch_cpu *)c)->nlater)
        apf_finish(c);
}
extern u32 apf_ready_interrupt; /* 0: page-ready is no interrupt */

/* ---- gic.c: interrupts and the timer ---- */
void interrupts_init(void);
void interrupt_enable(struct cpu *c, u32 vector); /* a private one of this processor */
void interrupt_send(u32 hardware_id, u32 vector);
/* Routes a device's level-triggered line to the first processor. */
void interrupt_route(u32 line);
void timer_set(u64 at); /* NEVER stops it */

extern u64 clock_khz;
void time_init(void);

#endif
