/*
 * Async page faults, the part of every architecture: the table of threads that wait for pages. The
 * host's events are in arch/ARCH/apf.c.
 *
 * If a thread's page is not present, the thread sleeps in its processor's table, under the token,
 * until that token is ready. The host sends both events to the processor that faulted, so only that
 * processor uses the table, and interrupts are off then. So no lock is needed. Besides threads, the
 * table holds
 *
 *   dummies   ready preceded the thread's wait: the next thread with that token does not sleep
 *   idle      the idle loop cannot be put to sleep; its node is there for `ready` to find
 *
 * Two threads may have the same token, because the host's counter wraps. Page-ready wakes both. A
 * thread that is woken too early only faults once more. A thread that is not woken waits for ever.
 */
#include "kernel.h"

/* Adds the counts of processor c to the status page. No event is added twice, whichever processor
 * calls. At the end of the run another processor calls. Then an event that c counts at that moment
 * may be lost. */
void apf_publish(struct cpu *c) {
    u32 not_present = __atomic_exchange_n(&c->apf.not_present, 0, __ATOMIC_RELAXED);
    u32 ready = __atomic_exchange_n(&c->apf.ready, 0, __ATOMIC_RELAXED);
    __atomic_fetch_add(&status->apf_not_present, not_present, __ATOMIC_RELAXED);
    __atomic_fetch_add(&status->apf_ready, ready, __ATOMIC_RELAXED);
}

static void count(u32 *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

static struct apf_node **bucket(struct cpu *c, u32 token) {
    return &c->apf.bucket[token >> APF_TOKEN_SHIFT & (APF_BUCKETS - 1)];
}

static void insert(struct cpu *c, struct apf_node *n, u32 token, enum apf_kind kind) {
    struct apf_node **head = bucket(c, token);
    *n = (struct apf_node){*head, token, kind};
    *head = n;
}

/* Too rare to need more than a linear search. */
static bool insert_spare(struct cpu *c, u32 token, enum apf_kind kind) {
    for (struct apf_node *n = c->apf.spare; n < c->apf.spare + APF_SPARE; n++) {
        if (n->kind == APF_FREE) {
            insert(c, n, token, kind);
            return true;
        }
    }
    count(&status->apf_lost); /* a host that invents tokens */
    return false;
}

static struct thread *thread_of(struct apf_node *n) {
    return (struct thread *)((u8 *)n - offsetof(struct thread, page_wait));
}

/* Takes a node out of the table and wakes its thread, which from then on may run anywhere. */
static void release(struct cpu *c, struct apf_node **at) {
    struct apf_node *n = *at;
    *at = n->next;
    n->next = NULL;
    if (n->kind == APF_THREAD)
        sched_wake(c, thread_of(n));
    else
        n->kind = APF_FREE;
}

/* Wakes all sleeping threads, which then try their accesses again. Frees the dummies too, because
 * no event with an earlier token can follow. */
void apf_wake_all(struct cpu *c) {
    for (u32 i = 0; i < APF_BUCKETS; i++) {
        while (c->apf.bucket[i])
            release(c, &c->apf.bucket[i]);
    }
}

static bool ready_came_first(struct cpu *c, u32 token) {
    for (struct apf_node **at = bucket(c, token); *at; at = &(*at)->next) {
        if ((*at)->token == token && (*at)->kind == APF_DUMMY) {
            release(c, at);
            return true;
        }
    }
    return false;
}

void apf_not_present(struct cpu *c, u32 token) {
    struct thread *t = c->current;
    c->apf.not_present++;
    if (ready_came_first(c, token))
        return;
    if (t) {
        insert(c, &t->page_wait, token, APF_THREAD);
        sched_block(c, ALIVE);
    } else {
        insert_spare(c, token, APF_IDLE);
        count(&status->apf_idle);
    }
}

void apf_page_ready(struct cpu *c, u32 token) {
    bool found = false;
    if (token == TOKEN_EVERYBODY) {
        count(&status->apf_wake_all);
        apf_wake_all(c);
        return;
    }
    c->apf.ready++;
    for (struct apf_node **at = bucket(c, token); *at;) {
        if ((*at)->token == token && (*at)->kind != APF_DUMMY) {
            release(c, at);
            found = true;
        } else {
            at = &(*at)->next;
        }
    }
    if (!found && insert_spare(c, token, APF_DUMMY))
        count(&status->apf_dummy);
}

/* The fast form of apf_not_present, for the current thread: the caller ends it as current. */
bool apf_try_sleep(struct cpu *c, struct thread *t, u32 token) {
    struct apf_node **at = bucket(c, token);
    if (*at)
        return false;
    c->apf.not_present++;
    t->page_wait.token = token;
    *at = &t->page_wait;
    return true;
}

/* The fast form of apf_page_ready. Returns a thread only if it is alone in its bucket, and no other
 * woken thread waits on this processor. */
struct thread *apf_try_wake(struct cpu *c, u32 token) {
    struct apf_node **at = bucket(c, token), *n = *at;
    if (!n || n->token != token || n->next || n->kind != APF_THREAD || c->woken.head)
        return NULL;
    *at = NULL;
    c->apf.ready++;
    return thread_of(n);
}
