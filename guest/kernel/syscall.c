/* System calls. Hostile programs (workload `random`) make them too: check every argument. */
#include "kernel.h"

#define FAIL (~0ull)
#define MAX_SLEEP_NS 1000000000000000000ull

static u64 clock_after(u64 ns) {
    if (ns > MAX_SLEEP_NS)
        ns = MAX_SLEEP_NS;
    return clock_read() + muldiv(ns, clock_khz, 1000000);
}

/* Copies only within pages that the table walk found, so no fault can happen here. */
static u64 sys_write(struct thread *t, u64 va, u64 bytes) {
    char chunk[256];
    u64 done = 0;
    while (done < bytes) {
        u64 at = va + done, n = PAGE - (at & (PAGE - 1)), pa = translate(t->space, at);
        if (pa == NEVER)
            return FAIL;
        n = n > bytes - done ? bytes - done : n;
        n = n > sizeof chunk ? sizeof chunk : n;
        __builtin_memcpy(chunk, from_phys(pa), n);
        console_write(chunk, n);
        done += n;
    }
    return done;
}

/* args: the entry point and its two arguments, and the processor. */
static u64 sys_thread(struct thread *t, const u64 args[4]) {
    __atomic_fetch_add(&t->space->threads, 1, __ATOMIC_RELAXED);
    int slot = thread_create(t, t->space, args, args[3]);
    if (slot < 0)
        space_release(t->space);
    return (u64)slot;
}

static u64 sys_spawn(struct thread *t, const u64 args[4]) {
    u64 entry;
    struct space *space = space_create(&entry);
    if (!space)
        return FAIL;
    int slot = thread_create(t, space, args, args[3]);
    if (slot < 0)
        space_release(space);
    return (u64)slot;
}

static u64 sys_alias(struct thread *t, u64 va, u64 arena_va) {
    u64 offset = arena_va - LACUNA_ARENA_BASE;
    if (va < LACUNA_ALIAS_BASE || va >= LACUNA_USER_END || offset >= info->arena_bytes)
        return FAIL;
    va &= ~(PAGE - 1);
    u64 pa = translate(t->space, arena_va) & ~(PAGE - 1);
    /* Only new mappings are made, so no TLB has to be flushed. */
    return map_page(t->space, va, pa, MAP_ARENA) ? 0 : FAIL;
}

static u64 sys_rdmsr(struct thread *t, u64 index, u64 va) {
    u64 value, pa = translate(t->space, va);
    if (pa == NEVER || va % 8 || msr_read((u32)index, &value))
        return FAIL;
    *(u64 *)from_phys(pa) = value;
    return 0;
}

static u64 privileged(struct thread *t, u64 number, const u64 args[4]) {
    if (t->kill_at)
        return FAIL;
    switch (number) {
    case LACUNA_SYS_RDMSR: return sys_rdmsr(t, args[0], args[1]);
    case LACUNA_SYS_WRMSR: return msr_write((u32)args[0], args[1]) ? FAIL : 0;
    case LACUNA_SYS_APF_ENABLE: return apf_enable(t->cpu) ? 0 : FAIL;
    case LACUNA_SYS_APF_DISABLE: apf_disable(t->cpu); return 0;
    default: call_program(args[0], translate(t->space, args[0])); return 0;
    }
}

/* A confined thread may end at any time, so it makes no requests. */
static void sys_virtio(struct cpu *c, struct thread *t, u64 number, const u64 args[4]) {
    bool waits = false;
    u64 result = FAIL;
    if (!t->kill_at)
        result = number == LACUNA_SYS_DISK ? virtio_disk(c, args, &waits)
                                           : virtio_balloon(c, args, &waits);
    if (!waits)
        frame_set_result(&t->frame, result);
}

static void sys_sleep(struct cpu *c, struct thread *t, u64 ns) {
    u64 at = clock_after(ns);
    if (t->kill_at && at > t->kill_at)
        at = t->kill_at;
    sched_sleep(c, at);
}

static void sys_confine(struct thread *t, u64 ns) {
    u64 at = clock_after(ns);
    if (!t->kill_at || at < t->kill_at)
        t->kill_at = at;
}

/* Once the thread has moved, it may run on CPU 0 at once, so its frame must not be used here. */
static void sys_cpu_offline(struct cpu *c, struct thread *t) {
    if (t->kill_at || c == cpu_at(0)) {
        frame_set_result(&t->frame, FAIL);
        return;
    }
    apf_disable(c);
    sched_offline(c);
}

/* The result may be in the register of the first argument, so all arguments are read first. */
void syscall(struct cpu *c, struct thread *t) {
    struct frame *f = &t->frame;
    const u64 number = frame_call(f), args[4] = {frame_argument(f, 0), frame_argument(f, 1),
                                                 frame_argument(f, 2), frame_argument(f, 3)};
    frame_set_result(f, 0);
    switch (number) {
    case LACUNA_SYS_EXIT: thread_exit(t, (u32)args[0]); break;
    case LACUNA_SYS_WRITE: frame_set_result(f, sys_write(t, args[0], args[1])); break;
    case LACUNA_SYS_YIELD: sched_yield(c); break;
    case LACUNA_SYS_SLEEP: sys_sleep(c, t, args[0]); break;
    case LACUNA_SYS_NOW: frame_set_result(f, muldiv(clock_read(), 1000000, clock_khz)); break;
    case LACUNA_SYS_THREAD: frame_set_result(f, sys_thread(t, args)); break;
    case LACUNA_SYS_SPAWN: frame_set_result(f, sys_spawn(t, args)); break;
    case LACUNA_SYS_WAIT: thread_wait(c); break;
    case LACUNA_SYS_SELF: frame_set_result(f, t->slot); break;
    case LACUNA_SYS_GPA: frame_set_result(f, translate(t->space, args[0])); break;
    case LACUNA_SYS_ALIAS: frame_set_result(f, sys_alias(t, args[0], args[1])); break;
    case LACUNA_SYS_CONFINE: sys_confine(t, args[0]); break;
    case LACUNA_SYS_RDMSR:
    case LACUNA_SYS_WRMSR:
    case LACUNA_SYS_KCALL:
    case LACUNA_SYS_APF_ENABLE:
    case LACUNA_SYS_APF_DISABLE: frame_set_result(f, privileged(t, number, args)); break;
    case LACUNA_SYS_CPU_OFFLINE: sys_cpu_offline(c, t); break;
    case LACUNA_SYS_DISK:
    case LACUNA_SYS_BALLOON: sys_virtio(c, t, number, args); break;
    default: frame_set_result(f, processor_call(t, number, args[0])); break;
    }
}
