/* What the kernel's shared files use of the processor. kernel.h includes this file. */
#ifndef ARCH_H
#define ARCH_H

#include "layout.h"
#include "lacuna/abi.h"
#include "x86.h"

/* ---- the frame of a thread: its registers, as trap.S saves them ---- */
struct frame {
    u64 r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi;
    u64 vector, error;
    u64 rip, cs, rflags, rsp, ss;
};

_Static_assert(sizeof(struct frame) % 16 == 0, "the processor aligns RSP0 down");

/* Argument i of a system call, 0 to 3. */
static inline u64 frame_argument(const struct frame *f, int i) {
    switch (i) {
    case 0: return f->rdi;
    case 1: return f->rsi;
    case 2: return f->rdx;
    default: return f->r10;
    }
}

/* The number of a system call is where its result will be. */
static inline u64 frame_call(const struct frame *f) { return f->rax; }
static inline void frame_set_result(struct frame *f, u64 result) { f->rax = result; }

/* The first frame of a thread: args are its entry point and the two arguments of that. */
static inline void frame_start(struct frame *f, const u64 args[3], u64 stack_top) {
    f->rip = args[0];
    f->rdi = args[1];
    f->rsi = args[2];
    f->rsp = stack_top - 8; /* as if called: the compiler relies on that alignment */
    f->rflags = 0x202;
    f->cs = SEL_UCODE;
    f->ss = SEL_UDATA;
}

/* ---- the processor's own structures: the first member of struct cpu ---- */
struct tss {
    u32 reserved0;
    u64 rsp[3], reserved1, ist[7], reserved2;
    u16 reserved3, io_map;
} __attribute__((packed));

/* The area of async page faults that the host writes: KVM's struct kvm_vcpu_pv_apf_data. */
struct apf_area {
    u32 reason; /* of a page fault: 0 a real one, 1 not present, 2 ready (original ABI) */
    u32 token;  /* the page that is ready, 0 if none (today's ABI) */
    u8 reserved[56];
} __attribute__((aligned(64)));

#define APF_TOKEN_SHIFT 12 /* KVM counts its tokens in the bits from here */

struct arch_cpu {
    u64 scratch;
    u32 pad;
    struct tss tss;
    u64 gdt[7];
};

_Static_assert(offsetof(struct arch_cpu, scratch) == CPU_SCRATCH, "layout.h");
_Static_assert(offsetof(struct arch_cpu, tss.rsp) == CPU_RSP0, "layout.h");

/* The next trap from user mode saves its frame here. */
static inline void set_trap_frame(struct arch_cpu *c, struct frame *f) {
    c->tss.rsp[0] = (u64)(f + 1);
}

/* ---- time: a clock that never stops, in cycles ---- */
static inline u64 clock_read(void) { return rdtsc(); }

/* ---- memory: physical = virtual in the kernel ---- */
static inline u64 to_phys(const void *p) { return (u64)p; }
static inline void *from_phys(u64 pa) { return (void *)pa; }
void map_memory(u64 top); /* the kernel's own mapping of all memory below `top` */

static inline void zero_page(void *page) {
    u64 words = PAGE / 8;
    asm volatile("rep stosq" : "+D"(page), "+c"(words) : "a"(0) : "memory");
}

/*
 * Entries of page tables: an address, one of these, and PTE_OWNED if the page or table below is
 * freed with its address space. Programs may execute the arena.
 */
#define PTE_PRESENT PTE_P
#define PTE_TABLE (PTE_P | PTE_W | PTE_U)
#define MAP_CODE (PTE_P | PTE_U)
#define MAP_CONST (PTE_P | PTE_U | PTE_NX)
#define MAP_DATA (PTE_P | PTE_W | PTE_U | PTE_NX)
#define MAP_ARENA (PTE_P | PTE_W | PTE_U)
static inline u64 block_of(u64 flags) { return flags | PTE_PS; } /* in place of a table */
static inline bool entry_is_block(u64 entry) { return entry & PTE_PS; }
static inline bool entry_is_user(u64 entry) {
    return (entry & (PTE_P | PTE_U)) == (PTE_P | PTE_U);
}
static inline void tables_changed(void) {} /* new entries are valid as soon as they are written */

/*
 * Tags: the TLB marks each entry with the tag of its address space (PCID). The tag is in the low
 * bits of the value that load_tables takes; the address of the root table is in the others.
 */
#define TABLES_KEEP CR3_KEEP /* in that value: keep the TLB entries with this tag */
#define TAGS 4096
static inline bool has_tags(void) { return cpuid(1).ecx >> 17 & 1; }
/* The tables in use must have tag 0. */
static inline void enable_tags(void) { write_cr4(read_cr4() | CR4_PCIDE); }
static inline u64 tables_of(const u64 *root, u32 tag) { return (u64)root | tag; }
static inline void load_tables(u64 value) { write_cr3(value); }

/* ---- the host's devices ---- */
/* The virtual address of device memory, or 0. All below 4 GiB is mapped. */
static inline u64 map_device(u64 pa, u64 bytes) { return pa + bytes <= 4ull << 30 ? pa : 0; }
static inline void console_out(u8 byte) { outb(LACUNA_PORT_COM1, byte); }
static inline void announce_status(u64 frame) { outl(LACUNA_PORT_STATUS, (u32)frame); }
static inline void exit_machine(u32 code) { outl(LACUNA_PORT_EXIT, code); }

/* ---- trap.S, trap.c ---- */
struct cpu;
struct thread;
extern u8 trap_stubs[], msr_read_insn[], msr_write_insn[], msr_failed[];
void syscall_entry(void);
void page_fault_entry(void);
void page_ready_entry(void);
_Noreturn void idle(struct cpu *c);
_Noreturn void resume(struct thread *t);
void resume_any(struct thread *t); /* not _Noreturn: gcc then jumps instead of calling */
void load_segments(void);
int msr_read(u32 index, u64 *value);
int msr_write(u32 index, u64 value);
u32 processor_init(void); /* the word of the info page for programs */
void trap_init(void);
void trap_cpu_init(struct cpu *c);

/* A system call that only this processor has: none. */
static inline u64 processor_call(struct thread *t, u64 number, u64 arg) {
    (void)t;
    (void)number;
    (void)arg;
    return ~0ull;
}

/* Calls a function of a program in the kernel. Anything may follow. */
static inline void call_program(u64 va, u64 pa) {
    (void)pa;
    ((void (*)(void))va)();
}

static inline void interrupts_off(void) { asm volatile("cli"); }
static inline void halt(void) { asm volatile("cli; hlt"); }

/* ---- apf.c ---- */
bool apf_page_fault(struct cpu *c); /* false: it is a real page fault */
void apf_interrupt(struct cpu *c);
static inline void apf_before_user(struct cpu *c) { (void)c; } /* no event interrupts the kernel */

/* The fast paths. If one returns false or NULL, it has changed nothing; call the full form then. */
bool apf_sleep(struct cpu *c, struct thread *t); /* t's page is not present: it sleeps now */
struct thread *apf_sleeper(struct cpu *c); /* the thread that slept for the page that is ready */

/* ---- apic.c: interrupts, timer, other processors; time.c: clock frequencies ---- */
void interrupts_init(void);
void interrupt_send(u32 hardware_id, u32 vector);
/* Routes a device's level-triggered line to the first processor. */
void interrupt_route(u32 line);
void timer_set(u64 at); /* NEVER stops it */
void start_other_cpus(void);
void apic_timer_free_run(void);
u32 apic_timer_elapsed(void);
#define APIC_EOI 0xfee000b0ull
extern bool x2apic;
static inline void interrupt_end(void) {
    if (x2apic)
        wrmsr(MSR_X2APIC_EOI, 0);
    else
        *(volatile u32 *)APIC_EOI = 0;
}

extern u64 clock_khz, apic_khz;
void time_init(void);

#endif
