/*
 * The scheduler: preemptive round-robin, two queues a processor.
 *
 *            wake (into `woken`, and preempt)      slice over (to the tail of `queue`)
 *   waiting ---------------------------------> queued <------------------------ running
 *      ^                                         '------- next_thread -----------^ |
 *      '---------------------------------------------------------------------------'
 *                    sched_sleep, sched_block, apf_sleep (for a page)
 *
 * Woken threads run first, in the order of their wake-ups. A thread that one of them preempted runs
 * next, with the rest of its slice; then the threads that wait for a new slice. A slice is a number
 * of ticks. A tick is charged to the thread that runs then, so that a switch reads no clock. Two
 * rules share the processor fairly between a thread that waits often and one that never does:
 *
 * - A woken thread has the rest of its slice. If each wake-up gave it a new one, a thread that
 *   computes for nearly a slice between two waits would never let the others run.
 * - A tick is charged only while another thread waits for the processor. So a thread that runs
 *   because all others wait for something does not pay for that time with its next turn.
 *
 * Only a thread's own processor changes its state. Another processor may only put the thread into
 * the inbox, under the inbox's lock. It may do so while the thread's processor is still leaving
 * that thread, because a thread is nothing but its saved frame, and no other processor resumes it.
 */
#include "kernel.h"

static u64 tick_cycles;
static u32 slice_ticks;

void sched_init(u64 tick_us, u64 slice_us) {
    tick_us = tick_us ? tick_us : 1;
    tick_cycles = tick_us * clock_khz / 1000;
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

/* Programs the timer for the next tick or the first sleeper, whichever is earlier. A timer that
 * fires too early is harmless; one that fires too late is not. */
static void arm(struct cpu *c) {
    u64 at = c->tick_at;
    if (c->sleepers && c->sleepers->wake_at < at)
        at = c->sleepers->wake_at;
    if (at < c->timer_at) {
        c->timer_at = at;
        timer_set(at);
    }
}

/* An idle processor needs no tick, which would only wake it. */
static void arm_for_idle(struct cpu *c) {
    u64 at = c->sleepers ? c->sleepers->wake_at : NEVER;
    c->tick_at = NEVER;
    if (at != c->timer_at) {
        c->timer_at = at;
        timer_set(at);
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
    set_trap_frame(&c->arch, &t->frame);
    if (c->space != t->space)
        space_enter(c, t->space);
}

/* Switches to another thread, or gives the same one a new slice. NULL: no thread can run. */
static struct thread *switch_thread(struct cpu *c) {
    struct thread *old = c->current, *next;
    c->resched = false;
    /* Read without the lock: a thread that must run soon is also announced by an interrupt. */
    if (old && c->inbox.head)
        read_inbox(c);
    next = pop(c);
    if (!next && !old) {
        /* Under the lock: either the posting processor sees that no thread runs here, or its
         * thread is seen. */
        read_inbox(c);
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

/* The end of every path through the kernel except the fast ones. */
void sched_resume(struct cpu *c) {
    apf_before_user(c);
    struct thread *t = c->current;
    if (!t || c->resched)
        t = switch_thread(c);
    if (!t) {
        arm_for_idle(c);
        apf_publish(c);
        idle(c);
    }
    if (c->tick_at == NEVER) {
        c->tick_at = clock_read() + tick_cycles;
        arm(c);
    }
    resume(t);
}

/* Whether sched_next would have a thread to run after the current one. */
bool sched_may_block(const struct cpu *c) { return c->queue.head && !c->woken.head; }

/* The current thread waits for something: runs the next one, which the caller has checked for. */
void sched_next(struct cpu *c) {
    struct thread *next = c->queue.head;
    c->queue.head = next->next;
    make_current(c, next);
    resume_any(next);
}

/* Runs a thread that has waited, before the current one. No other thread runs before it. */
void sched_preempt(struct cpu *c, struct thread *running, struct thread *woken) {
    prepend(&c->queue, running);
    make_current(c, woken);
    resume_any(woken);
}

void sched_tick(struct cpu *c) {
    u64 now = clock_read();
    c->timer_at = NEVER;
    apf_publish(c);
    /* New threads: while woken threads run one after another, only this reads the inbox. */
    if (c->inbox.head)
        read_inbox(c);
    while (c->sleepers && c->sleepers->wake_at <= now) {
        struct thread *t = c->sleepers;
        c->sleepers = t->next;
        sched_wake(c, t);
    }
    struct thread *t = c->current;
    if (t && now >= c->tick_at) {
        c->tick_at = now + tick_cycles;
        if ((c->queue.head || c->woken.head) && !--t->ticks)
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
    append(&to->inbox, t);
    bool is_urgent = woken || !to->current; /* idle: it may be about to read the inbox, after us */
    unlock(&to->lock);
    if (is_urgent)
        interrupt_send(to->hardware_id, VEC_RESCHED);
}

/* In this and the following functions, c is the calling processor. */
void sched_wake(struct cpu *c, struct thread *t) {
    if (t->cpu == c && !c->offline) {
        append(&c->woken, t);
        c->resched = true;
    } else {
        post(t, true);
    }
}

/* Another processor woke or started a thread of this one. */
void sched_woken(struct cpu *c) {
    read_inbox(c);
    if (c->woken.head)
        c->resched = true;
}

/* A new thread waits for its turn. Only an idle processor gets an interrupt for it. */
void sched_start(struct cpu *c, struct thread *t) {
    t->ticks = slice_ticks;
    if (t->cpu == c && !c->offline)
        append(&c->queue, t);
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

/* This processor is offline: sends every thread in one of its lists to the first processor. */
static void send_away(struct cpu *c, struct thread *t) {
    for (struct thread *next; t; t = next) {
        next = t->next;
        sched_start(c, t);
    }
}

/*
 * Takes the calling processor out of use; it must not be the first one. The threads in its queues
 * go to the first processor, and so do those that a later wake-up puts here (post). This processor
 * still handles its timer, because threads may be sleeping on it.
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
