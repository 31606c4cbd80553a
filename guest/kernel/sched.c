/*
 * Who runs: preemptive round-robin, one queue a processor.
 *
 *            wake (to the head, and preempt)           slice over (to the tail)
 *   SLEEPING ------------------> READY <--------------------------- RUNNING
 *   WAITING                        '---------- switch_thread ----------^ |
 *   PAGE_WAIT                                                            |
 *      ^-----------------------------------------------------------------'
 *                       sched_sleep, sched_block (PAGE_WAIT: apf.c)
 *
 * The woken stand at the head in the order of their wake-ups. A thread that one of them preempted
 * comes next, with the rest of its slice, and then those who wait for a slice of their own.
 * All state of a thread belongs to its processor; others may only put it into the queue, under
 * that queue's lock. Since a thread is its saved frame, it may be queued while its processor is
 * still leaving it: nobody else would resume it.
 */
#include "kernel.h"

extern u64 kernel_pml4[];

static u64 tick_tsc, slice_tsc;

void sched_init(u64 tick_us, u64 slice_us) {
    tick_tsc = (tick_us ? tick_us : 1) * tsc_khz / 1000;
    slice_tsc = (slice_us ? slice_us : 1) * tsc_khz / 1000;
}

static void push_back(struct cpu *c, struct thread *t) {
    t->state = READY;
    t->next = NULL;
    if (c->head)
        c->tail->next = t;
    else
        c->head = t;
    c->tail = t;
}

/* Behind the woken, before all others. */
static void push_front(struct cpu *c, struct thread *t) {
    struct thread **at = &c->head;
    while (*at && (*at)->woken)
        at = &(*at)->next;
    t->state = READY;
    t->next = *at;
    if (!t->next)
        c->tail = t;
    *at = t;
}

static struct thread *pop(struct cpu *c) {
    struct thread *t = c->head;
    if (t) {
        c->head = t->next;
        t->woken = false;
    }
    return t;
}

/* The timer fires at the next tick while somebody runs, and for the first sleeper. */
static void arm(struct cpu *c, u64 tick_at) {
    u64 at = tick_at;
    if (c->sleepers && c->sleepers->wake_at < at)
        at = c->sleepers->wake_at;
    if (at < c->timer_at) {
        c->timer_at = at;
        apic_timer(at);
    }
}

static struct thread *switch_thread(struct cpu *c) {
    u64 now = rdtsc();
    lock(&c->lock);
    c->resched = false;
    struct thread *old = c->current, *next = pop(c);
    if (old && next) {
        old->slice_left = old->slice_end > now ? old->slice_end - now : 0;
        if (old->slice_left)
            push_front(c, old);
        else
            push_back(c, old);
    }
    unlock(&c->lock);
    if (!next)
        next = old;
    if (!next)
        return NULL;
    if (!next->slice_left || next == old)
        next->slice_left = slice_tsc;
    next->slice_end = now + next->slice_left;
    next->state = RUNNING;
    if (next != old) {
        c->current = next;
        c->tss.rsp[0] = (u64)(&next->frame + 1);
        if (c->space != next->space) {
            c->space = next->space;
            write_cr3((u64)c->space->pml4);
        }
    }
    arm(c, now + tick_tsc);
    return next;
}

/* The end of every way through the kernel. */
void sched_resume(struct cpu *c) {
    struct thread *t = c->current;
    if (!t || c->resched)
        t = switch_thread(c);
    if (t)
        resume(t);
    arm(c, NEVER);
    idle();
}

void sched_tick(struct cpu *c) {
    u64 now = rdtsc();
    c->timer_at = NEVER;
    while (c->sleepers && c->sleepers->wake_at <= now) {
        struct thread *t = c->sleepers;
        c->sleepers = t->next;
        sched_wake(t);
    }
    struct thread *t = c->current;
    if (!t)
        return;
    if (t->kill_at && now >= t->kill_at) {
        thread_exit(t, LACUNA_EXIT_TIMEOUT);
        return;
    }
    if (now >= t->slice_end)
        c->resched = true;
    arm(c, now + tick_tsc);
}

/* The processor that t will run on, its queue locked. t itself is neither queued nor running. */
static struct cpu *lock_queue(struct thread *t) {
    struct cpu *c = t->cpu;
    lock(&c->lock);
    if (!c->offline)
        return c;
    unlock(&c->lock);
    c = t->cpu = cpu_at(0);
    status->entry[t->slot].cpu = 0;
    lock(&c->lock);
    return c;
}

void sched_wake(struct thread *t) {
    struct cpu *c = lock_queue(t);
    push_front(c, t);
    t->woken = true;
    unlock(&c->lock);
    if (c == this_cpu())
        c->resched = true;
    else
        apic_send(c->apic_id, VEC_RESCHED);
}

/* Another processor woke somebody here, who may have had his turn already. */
void sched_woken(struct cpu *c) {
    lock(&c->lock);
    if (c->head && c->head->woken)
        c->resched = true;
    unlock(&c->lock);
}

/* A newcomer waits for its turn; only an idle processor is disturbed. */
void sched_start(struct thread *t) {
    struct cpu *c = lock_queue(t);
    push_back(c, t);
    bool is_idle = !c->current; /* or about to look into the queue, after us */
    unlock(&c->lock);
    if (is_idle && c != this_cpu())
        apic_send(c->apic_id, VEC_RESCHED);
}

void sched_yield(struct cpu *c) {
    c->current->slice_end = 0;
    c->resched = true;
}

void sched_block(struct cpu *c, enum thread_state why) {
    c->current->state = why;
    c->current->slice_left = 0;
    c->current = NULL;
}

void sched_sleep(struct cpu *c, u64 wake_at) {
    struct thread *t = c->current, **at = &c->sleepers;
    sched_block(c, SLEEPING);
    t->wake_at = wake_at;
    while (*at && (*at)->wake_at <= wake_at)
        at = &(*at)->next;
    t->next = *at;
    *at = t;
}

/*
 * Takes the calling processor, which is not the first, out of use: whoever is in its queue goes to
 * the first one, and so does everybody whom a wake-up puts there later (lock_queue). It stays
 * awake for its timer, on which sleepers may still be waiting.
 */
void sched_offline(struct cpu *c) {
    struct thread *t = c->current, *next;
    lock(&c->lock);
    c->offline = true;
    t->next = c->head;
    c->head = NULL;
    unlock(&c->lock);
    c->current = NULL;
    c->space = NULL;
    write_cr3((u64)kernel_pml4); /* from here on t may run, end, and free its tables */
    for (; t; t = next) {
        next = t->next;
        t->woken = false;
        sched_start(t);
    }
}
