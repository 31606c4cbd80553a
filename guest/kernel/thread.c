/* How threads are made, waited for and ended: a tree of threads, under one lock. */
#include "kernel.h"

static struct thread threads[LACUNA_MAX_THREADS];
static spinlock tree_lock;
static u32 next_cpu;

static struct thread *claim(struct thread *parent) {
    struct thread *found = NULL;
    lock(&tree_lock);
    for (u32 i = 0; i < LACUNA_MAX_THREADS && !found; i++) {
        if (threads[i].state != FREE)
            continue;
        found = &threads[i];
        __builtin_memset(found, 0, sizeof *found);
        found->state = ALIVE; /* no wake-up can find it before sched_start */
        found->slot = i;
        found->page_wait.kind = APF_THREAD;
        found->parent = parent;
        if (parent) {
            parent->children++;
            found->kill_at = parent->kill_at;
        }
        if (i >= status->nthreads)
            status->nthreads = i + 1;
    }
    unlock(&tree_lock);
    return found;
}

static void unclaim(struct thread *t) {
    lock(&tree_lock);
    if (t->parent)
        t->parent->children--;
    t->state = FREE;
    unlock(&tree_lock);
}

static struct cpu *choose_cpu(u64 hint) {
    if (hint < ncpus)
        return cpu_at((u32)hint);
    return cpu_at(__atomic_fetch_add(&next_cpu, 1, __ATOMIC_RELAXED) % ncpus);
}

/* Makes a thread in `space`. The space's count of threads includes it already. args: see
 * frame_start. */
int thread_create(struct thread *parent, struct space *space, const u64 args[3], u64 cpu) {
    u64 stack_top;
    struct thread *t = claim(parent);
    if (!t)
        return -1;
    if (!space_add_stack(space, t->slot, &stack_top)) {
        unclaim(t);
        return -1;
    }
    t->space = space;
    t->cpu = choose_cpu(cpu);
    frame_start(&t->frame, args, stack_top);
    struct lacuna_status_entry *e = status_entry(t->slot);
    __builtin_memset(e, 0, sizeof *e);
    e->kind = LACUNA_KIND_OTHER;
    e->cpu = t->cpu->hardware_id;
    int slot = (int)t->slot; /* once started, t may end before this function returns */
    sched_start(parent ? parent->cpu : cpu_at(0), t);
    return slot;
}

/* Children may outlive their parent. No thread waits for their exit status then. */
static void orphan_children(struct thread *t) {
    for (u32 i = 0; i < LACUNA_MAX_THREADS && t->children; i++) {
        if (threads[i].state != FREE && threads[i].parent == t) {
            threads[i].parent = NULL;
            t->children--;
        }
    }
}

static void tell_parent(struct cpu *c, struct thread *parent, u32 status_code) {
    if (status_code > parent->worst_status)
        parent->worst_status = status_code;
    if (--parent->children || parent->state != WAITING)
        return;
    frame_set_result(&parent->frame, parent->worst_status);
    parent->worst_status = 0;
    parent->state = ALIVE;
    sched_wake(c, parent);
}

/* Ends the processor's current thread. If it is the first thread, the machine ends too. */
void thread_exit(struct thread *t, u32 status_code) {
    struct cpu *c = t->cpu;
    if (t->slot == 0)
        shutdown(status_code);
    c->current = NULL;
    space_leave(c);
    space_release(t->space);
    lock(&tree_lock);
    orphan_children(t);
    if (t->parent)
        tell_parent(c, t->parent, status_code);
    t->state = FREE;
    unlock(&tree_lock);
}

void thread_wait(struct cpu *c) {
    struct thread *t = c->current;
    lock(&tree_lock);
    if (t->children) {
        sched_block(c, WAITING);
    } else {
        frame_set_result(&t->frame, t->worst_status);
        t->worst_status = 0;
    }
    unlock(&tree_lock);
}
