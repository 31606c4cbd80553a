/*
 * Who runs: preemptive round-robin, two queues a processor.
 *
 *            wake (into `woken`, and preempt)      slice over (to the tail of `queue`)
 *   waiting ---------------------------------> queued <------------------------ running
 *      ^                                         '------- next_thread -----------^ |
 *      '---------------------------------------------------------------------------'
 *                    sched_sleep, sched_block, apf_sleep (for a page)
 *
 * The woken come first, in the order of their wake-ups. A thread that one of them preempted comes
 * next, with the rest of its slice, and then those who wait for a slice of their own. A slice is
 * some ticks long, and a tick is charged to whoever runs then: switching threads needs no clock.
 *
 * All state of a thread belongs to its processor; others may only put it into the inbox, under
 * that inbox's lock. Since a thread is its saved frame, it may be there while its processor is
 * still leaving it: nobody else would resume it.
 */
#include "kernel.h"

static u64 tick_tsc;
static u32 slice_ticks;

void sched_init(u64 tick_us, u64 slice_us) {
    tick_us = tick_us ? tick_us : 1;
    tick_tsc = tick_us * tsc_khz / 1000;
    slice_ticks = slice_us > tick_us ? (u32)(slice_us / tick_us) : 1;
}

static void append(struct list *list, struct thread *t) {
    t->next = NULL;
    if (list->head)
        list->tail->next = t;
    else
        list->head = t;
    list->tail = t;
}

static void append_for_slice(struct list *list, struct thread *t) {
    t->ticks = slice_ticks;
    append(list, t);
}

static void prepend(struct list *list, struct thread *t) {
    t->next = list->head;
    if (!t->next)
        list->tail = t;
    list->head = t;
}

/* Programs the timer for the next tick or the first sleeper; early is harmless, late is not. */
static void arm(struct cpu *c) {
    u64 at = c->tick_at;
    if (c->sleepers && c->sleepers->wake_at < at)
        at = c->sleepers->wake_at;
    if (at < c->timer_at) {
        c->timer_at = at;
        apic_timer(at);
    }
}

/* Nobody to run: no tick, which would only wake an idle processor. */
static void arm_for_idle(struct cpu *c) {
    u64 at = c->sleepers ? c->sleepers->wake_at : NEVER;
    c->tick_at = NEVER;
    if (at != c->timer_at) {
        c->timer_at = at;
        apic_timer(at);
    }
}

static void read_inbox(struct cpu *c) {
    lock(&c->lock);
    struct thread *t = c->inbox.head, *next;
    c->inbox.head = NULL;
    unlock(&c->lock);
    for (; t; t = next) {
        next = t->next;
        append(t->woken ? &c->woken : &c->queue, t);
    }
}

static struct thread *pop(struct cpu *c) {
    struct list *list = c->woken.head ? &c->woken : &c->queue;
    struct thread *t = list->head;
    if (t)
        list->head = t->next;
    return t;
}

static inline void make_current(struct cpu *c, struct thread *t) {
    c->current = t;
    c->tss.rsp[0] = (u64)(&t->frame + 1);
    if (c->space != t->space)
        space_enter(c, t->space);
}

/* Another thread, or the same one again with a slice of its own; NULL: nobody. */
static struct thread *switch_thread(struct cpu *c) {
    struct thread *old = c->current, *next;
    c->resched = false;
    if (old && c->inbox.head) /* a glance without the lock: the urgent send an interrupt, too */
        read_inbox(c);
    next = pop(c);
    if (!next && !old) {
        read_inbox(c); /* under the lock: who posts sees that nobody runs here, or is seen */
        next = pop(c);
    }
    if (old && next && old->ticks)
        prepend(&c->queue, old);
    else if (old && next)
        append_for_slice(&c->queue, old);
    else if (old)
        old->ticks = slice_ticks;
    if (next)
        make_current(c, next);
    return next ? next : old;
}

/* The end of every way through the kernel but the short ones. */
void sched_resume(struct cpu *c) {
    struct thread *t = c->current;
    if (!t || c->resched)
        t = switch_thread(c);
    if (!t) {
        arm_for_idle(c);
        apf_publish(c);
        idle(c);
    }
    if (c->tick_at == NEVER) {
        c->tick_at = rdtsc() + tick_tsc;
        arm(c);
    }
    resume(t);
}

/* Whether sched_next would have somebody to run after the current thread. */
bool sched_may_block(const struct cpu *c) { return c->queue.head && !c->woken.head; }

/* The current thread waits for something: the next one, who is there. */
void sched_next(struct cpu *c) {
    struct thread *next = c->queue.head;
    c->queue.head = next->next;
    make_current(c, next);
    resume_by_iret(next);
}

/* A thread that waited goes before the running one; nobody else does. */
void sched_preempt(struct cpu *c, struct thread *running, struct thread *woken) {
    prepend(&c->queue, running);
    woken->ticks = slice_ticks;
    make_current(c, woken);
    resume_by_iret(woken);
}

void sched_tick(struct cpu *c) {
    u64 now = rdtsc();
    c->timer_at = NEVER;
    apf_publish(c);
    if (c->inbox.head) /* newcomers: woken threads may go on and on without a look there */
        read_inbox(c);
    while (c->sleepers && c->sleepers->wake_at <= now) {
        struct thread *t = c->sleepers;
        c->sleepers = t->next;
        sched_wake(c, t);
    }
    struct thread *t = c->current;
    if (t && now >= c->tick_at) {
        c->tick_at = now + tick_tsc;
        if (!--t->ticks)
            c->resched = true;
    }
    if (t && t->kill_at && now >= t->kill_at)
        thread_exit(t, LACUNA_EXIT_TIMEOUT);
    arm(c);
}

/* Puts t, which is neither queued nor running, into its processor's inbox. */
static void post(struct thread *t, bool woken) {
    struct cpu *to = t->cpu;
    lock(&to->lock);
    if (to->offline) {
        unlock(&to->lock);
        to = t->cpu = cpu_at(0);
        status->entry[t->slot].cpu = 0;
        lock(&to->lock);
    }
    t->woken = woken;
    append_for_slice(&to->inbox, t);
    bool is_urgent = woken || !to->current; /* or about to look into the inbox, after us */
    unlock(&to->lock);
    if (is_urgent)
        apic_send(to->apic_id, VEC_RESCHED);
}

/* c is the calling processor, here and below. */
void sched_wake(struct cpu *c, struct thread *t) {
    if (t->cpu == c && !c->offline) {
        append_for_slice(&c->woken, t);
        c->resched = true;
    } else {
        post(t, true);
    }
}

/* Another processor woke or started somebody here. */
void sched_woken(struct cpu *c) {
    read_inbox(c);
    if (c->woken.head)
        c->resched = true;
}

/* A newcomer waits for its turn; only an idle processor is disturbed. */
void sched_start(struct cpu *c, struct thread *t) {
    if (t->cpu == c && !c->offline)
        append_for_slice(&c->queue, t);
    else
        post(t, false);
}

void sched_yield(struct cpu *c) {
    c->current->ticks = 0;
    c->resched = true;
}

void sched_block(struct cpu *c, enum thread_state why) {
    c->current->state = why;
    c->current = NULL;
}

void sched_sleep(struct cpu *c, u64 wake_at) {
    struct thread *t = c->current, **at = &c->sleepers;
    sched_block(c, ALIVE);
    t->wake_at = wake_at;
    while (*at && (*at)->wake_at <= wake_at)
        at = &(*at)->next;
    t->next = *at;
    *at = t;
    arm(c);
}

/* Everybody in a list of this processor's, which is offline, goes to the first one. */
static void send_away(struct cpu *c, struct thread *t) {
    for (struct thread *next; t; t = next) {
        next = t->next;
        sched_start(c, t);
    }
}

/*
 * Takes the calling processor, which is not the first, out of use: whoever is in its queues goes
 * to the first one, and so does everybody whom a wake-up puts there later (post). It stays awake
 * for its timer, on which sleepers may still be waiting.
 */
void sched_offline(struct cpu *c) {
    lock(&c->lock);
    c->offline = true;
    unlock(&c->lock);
    read_inbox(c);
    struct thread *t = c->current, *woken = c->woken.head, *queue = c->queue.head;
    c->current = c->woken.head = c->queue.head = NULL;
    space_leave(c); /* from here on t may run, end, and free its tables */
    t->next = NULL;
    send_away(c, t);
    send_away(c, woken);
    send_away(c, queue);
}
