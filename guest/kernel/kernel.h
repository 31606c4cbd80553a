/* The declarations that the kernel's files share, one section for each file. */
#ifndef KERNEL_H
#define KERNEL_H

#include "arch.h"
#include "lacuna/abi.h"

typedef struct {
    volatile u32 held;
} spinlock;

static inline void lock(spinlock *l) {
    while (__atomic_exchange_n(&l->held, 1, __ATOMIC_ACQUIRE)) {
        while (l->held)
            pause();
    }
}

static inline void unlock(spinlock *l) { __atomic_store_n(&l->held, 0, __ATOMIC_RELEASE); }

/* ---- mm.c: memory ---- */
static inline u64 page_up(u64 v) { return (v + PAGE - 1) & ~(PAGE - 1); }
static inline u64 page_down(u64 v) { return v & ~(PAGE - 1); }

struct space {
    u64 *root;
    u64 tables; /* for load_tables: the root, and the tag of the space */
    u64 keep;   /* TABLES_KEEP if the space has a tag of its own, else 0 */
    u64 entered[LACUNA_MAX_CPUS / 64]; /* a bit for each processor that has entered the space */
    spinlock lock; /* the private part of the tables */
    u32 threads;
    bool used;
};

extern struct lacuna_status *status;
extern struct lacuna_info *info;

#define MAX_RAM 32

/* What the loader says of the machine. */
struct ram {
    u64 start, end; /* whole pages */
};

struct boot {
    struct ram ram[MAX_RAM];
    u32 nram;
    u32 ncpus; /* boot_read: if smp= is not given */
    const char *cmdline; /* NULL: none */
};

void boot_read(const void *start, struct boot *boot); /* the processor's */
void mm_init(struct boot *boot);
struct lacuna_status_entry *status_entry(u32 slot);
void *page_alloc(void); /* zeroed; NULL if there is none */
void page_free(void *page);
bool map_page(struct space *s, u64 va, u64 pa, u64 flags); /* false: no memory, or already mapped */
u64 translate(struct space *s, u64 va); /* physical address, or ~0 if no user page is there */

/* ---- space.c: address spaces ---- */
struct cpu;
struct space *space_create(u64 *entry);
void space_enter(struct cpu *c, struct space *s);
void space_leave(struct cpu *c); /* to the kernel's own tables */
void space_cpu_init(void);
bool space_add_stack(struct space *s, u32 slot, u64 *stack_top);
void space_release(struct space *s); /* one thread less; the last one frees the space */

/* ---- apf.c: async page faults; arch/ARCH/apf.c: the host's events ---- */
#define TOKEN_EVERYBODY (~0u)

enum apf_kind { APF_FREE, APF_THREAD, APF_IDLE, APF_DUMMY };

struct apf_node {
    struct apf_node *next; /* in its bucket; NULL outside */
    u32 token;
    enum apf_kind kind;
};

#define APF_BUCKETS 64
#define APF_SPARE 80 /* a host has at most 64 faults of one processor outstanding */

/* The async page faults of one processor. Only that processor uses it, because the host sends both
 * events to the processor that faulted. */
struct apf {
    struct apf_area area;
    struct apf_node *bucket[APF_BUCKETS];
    struct apf_node spare[APF_SPARE]; /* for dummies and idle */
    u32 not_present, ready; /* counted since apf_publish: an atomic each time is slow */
};

struct thread;
void apf_not_present(struct cpu *c, u32 token); /* the current thread, or idle, waits for it */
void apf_page_ready(struct cpu *c, u32 token);
void apf_wake_all(struct cpu *c);
void apf_publish(struct cpu *c); /* its counters, to the status page */
bool apf_try_sleep(struct cpu *c, struct thread *t, u32 token);
struct thread *apf_try_wake(struct cpu *c, u32 token);

void apf_init(void);
bool apf_enable(struct cpu *c);
void apf_disable(struct cpu *c);

/* ---- sched.c: the scheduler ---- */
enum thread_state { FREE, ALIVE, WAITING }; /* WAITING: for its children */

struct thread {
    struct frame frame; /* first: set_trap_frame */
    struct space *space;
    struct cpu *cpu; /* fixed, until that processor goes offline */
    struct thread *next; /* in a list of its processor's */
    struct thread *parent;
    u64 wake_at, kill_at; /* by clock_read; kill_at 0 = unconfined */
    u32 ticks; /* left of its slice; 0 only while it runs and has to stop */
    enum thread_state state;
    bool woken; /* it is in an inbox because of a wake-up */
    u32 slot;
    u32 children, worst_status;
    struct apf_node page_wait; /* in its processor's apf.bucket while it waits for a page */
} __attribute__((aligned(16)));

struct list {
    struct thread *head, *tail; /* the list is empty if head is NULL, whatever tail is */
};

struct cpu {
    struct arch_cpu arch;
    u32 hardware_id;
    bool resched; /* choose a thread again before leaving the kernel */
    bool offline; /* it runs no threads; set once, under `lock` */
    struct thread *current;
    struct list woken, queue; /* `woken` runs before `queue` */
    struct thread *sleepers; /* by wake_at */
    struct space *space; /* the one whose tables are in use; NULL: the kernel's own tables */
    u64 tick_at; /* of the running thread, NEVER in idle */
    u64 timer_at; /* when the timer will fire, NEVER if it will not */
    spinlock lock; /* the inbox, and `offline` */
    struct list inbox; /* for `woken` and `queue`, which only their own processor touches */
    struct apf apf;
    u8 fatal_stack[1024] __attribute__((aligned(16)));
};

_Static_assert(offsetof(struct cpu, arch) == 0, "layout.h");
_Static_assert(offsetof(struct thread, cpu) == THREAD_CPU, "layout.h");
_Static_assert(sizeof(struct cpu) <= CPU_SIZE - 4096, "a page of stack");

#define NEVER (~0ull)

extern u32 ncpus;
extern struct cpu *cpus; /* CPU_SIZE apart: use cpu_at */
static inline struct cpu *cpu_at(u32 i) { return (struct cpu *)((u8 *)cpus + i * CPU_SIZE); }

void sched_init(u64 tick_us, u64 slice_us);
_Noreturn void sched_resume(struct cpu *c);
void sched_tick(struct cpu *c);
void sched_wake(struct cpu *c, struct thread *t);
void sched_woken(struct cpu *c);
void sched_yield(struct cpu *c);
void sched_sleep(struct cpu *c, u64 wake_at);
void sched_block(struct cpu *c, enum thread_state why);
void sched_start(struct cpu *c, struct thread *t);
void sched_offline(struct cpu *c);
bool sched_may_block(const struct cpu *c);
void sched_next(struct cpu *c);
void sched_preempt(struct cpu *c, struct thread *running, struct thread *woken);

/* ---- thread.c: how threads are made, waited for and ended ---- */
int thread_create(struct thread *parent, struct space *space, const u64 args[3], u64 cpu);
void thread_exit(struct thread *t, u32 status_code);
void thread_wait(struct cpu *c);

/* ---- virtio.c: a disk and a balloon ---- */
void virtio_init(void);
void virtio_interrupt(struct cpu *c);
/* The system calls of these numbers. If `*waits`, the thread gets its result later. */
u64 virtio_disk(struct cpu *c, const u64 args[4], bool *waits);
u64 virtio_balloon(struct cpu *c, const u64 args[4], bool *waits);

/* ---- syscall.c ---- */
void syscall(struct cpu *c, struct thread *t);

/* ---- console.c ---- */
void console_write(const char *s, size_t n);
void kprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
_Noreturn void panic(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
_Noreturn void shutdown(u32 code);

/* ---- start.c ---- */
u64 boot_param(const char *name, u64 otherwise);

#endif
