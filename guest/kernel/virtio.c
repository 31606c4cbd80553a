/*
 * Virtio-mmio (virtio 1.2): a disk, and a balloon with free page reporting. The command line names
 * each device as it does for Linux, virtio_mmio.device=SIZE@ADDRESS:LINE, and the device says what
 * it is. LINE is a pin of the I/O APIC, or an INTID.
 *
 *   system call: three descriptors of the thread's own, the thread sleeps, notify
 *   interrupt (CPU 0): acknowledge; each used chain has its thread's result, and wakes the thread
 *
 * A thread waits for at most one request. Its slot is the place of the request's descriptors and
 * header, so nothing is allocated. A thread of a higher slot than a queue has room for is refused.
 * Buffers are pages of the arena, which is mapped for ever.
 */
#include "kernel.h"
#include "lacuna/format.h"

/* Registers */
enum { MAGIC = 0x00, VERSION = 0x04, DEVICE = 0x08, FEATURES = 0x10, FEATURES_SELECT = 0x14,
       ACCEPTED = 0x20, ACCEPTED_SELECT = 0x24, QUEUE_SELECT = 0x30, QUEUE_SIZE = 0x38,
       QUEUE_READY = 0x44, NOTIFY = 0x50, INTERRUPT = 0x60, INTERRUPT_ACK = 0x64, STATUS = 0x70,
       TABLE = 0x80, AVAILABLE = 0x90, USED = 0xa0, CONFIG = 0x100 };

#define MAGIC_VALUE 0x74726976 /* "virt" */
#define DRIVER 3u              /* status: the guest knows the device, and drives it */
#define FEATURES_OK 8u
#define DRIVER_OK 4u
#define VERSION_1 1u /* in the second word of features */

#define DISK 2
#define DISK_FEATURES (1u << 9) /* FLUSH: a write is not on the host's disk before a flush */
#define BALLOON 5
#define BALLOON_FEATURES (1u << 5) /* PAGE_REPORTING */
#define BALLOON_QUEUES                                                                             \
    (1u << LACUNA_BALLOON_INFLATE | 1u << LACUNA_BALLOON_DEFLATE | 1u << LACUNA_BALLOON_REPORT)
#define BALLOON_TARGET (CONFIG + 0)
#define BALLOON_ACTUAL (CONFIG + 4)

#define RING 256
#define QUEUES 5
#define PARTS 3 /* the descriptors of a request */
#define WITH_NEXT 1
#define WRITABLE 2

struct descriptor {
    u64 at;
    u32 bytes;
    u16 flags, next;
};

/* One buffer of a request. `bytes` is 0 if it is unused. */
struct part {
    u64 at;
    u32 bytes;
    bool writable; /* by the device */
};

/* What the device reads and writes of a request, beside the buffer. */
struct header {
    u32 type; /* of a disk's request; or a page frame number for the balloon */
    u32 reserved;
    u64 sector;
    u8 status;
};

struct rings { /* a page */
    u16 available_flags, available_index, available[RING], pad[2];
    u16 used_flags, used_index;
    struct {
        u32 head, bytes;
    } used[RING];
    struct header header[LACUNA_VIRTIO_SLOTS];
};

_Static_assert(sizeof(struct descriptor[RING]) <= PAGE, "page_alloc");
_Static_assert(sizeof(struct rings) <= PAGE && offsetof(struct rings, used_flags) % 4 == 0, "");
_Static_assert(PARTS * LACUNA_VIRTIO_SLOTS <= RING, "each thread has its descriptors");

struct queue {
    struct descriptor *table;
    struct rings *rings;
    u16 seen; /* of the used ring */
};

static struct device {
    u64 registers; /* 0: the machine has no such device */
    u32 queues; /* a bit each */
    spinlock lock; /* the queues */
    struct queue queue[QUEUES];
} disk, balloon;

static struct thread *waiting[LACUNA_VIRTIO_SLOTS]; /* by slot: for its request */

static void queue_init(struct device *d, u32 i) {
    struct queue *q = &d->queue[i];
    q->table = page_alloc();
    q->rings = page_alloc();
    if (!q->table || !q->rings)
        panic("no memory for a virtio device: give more memory");
    u64 places[] = {TABLE, to_phys(q->table), AVAILABLE, to_phys(&q->rings->available_flags),
                    USED, to_phys(&q->rings->used_flags)};
    write32(d->registers + QUEUE_SELECT, i);
    write32(d->registers + QUEUE_SIZE, RING);
    for (u32 n = 0; n < 6; n += 2) {
        write32(d->registers + places[n], (u32)places[n + 1]);
        write32(d->registers + places[n] + 4, (u32)(places[n + 1] >> 32));
    }
    write32(d->registers + QUEUE_READY, 1);
}

static void device_init(struct device *d, u64 registers, u32 queues, u32 wanted) {
    d->registers = registers;
    d->queues = queues;
    write32(registers + STATUS, 0);
    write32(registers + STATUS, DRIVER);
    write32(registers + FEATURES_SELECT, 0);
    write32(registers + ACCEPTED_SELECT, 0);
    write32(registers + ACCEPTED, read32(registers + FEATURES) & wanted);
    write32(registers + ACCEPTED_SELECT, 1);
    write32(registers + ACCEPTED, VERSION_1);
    write32(registers + STATUS, DRIVER | FEATURES_OK);
    for (u32 i = 0; i < QUEUES; i++) {
        if (queues >> i & 1)
            queue_init(d, i);
    }
    write32(registers + STATUS, DRIVER | FEATURES_OK | DRIVER_OK);
}

static const char *skip_past(const char *word, char end) {
    while (*word && *word != ' ' && *word != end)
        word++;
    return *word == end ? word + 1 : word;
}

/* The machine's devices; those of other kinds stay as they are. */
void virtio_init(void) {
    const char *name = "virtio_mmio.device", *word = info->cmdline;
    while ((word = lacuna_find_param(word, name))) {
        const char *address = skip_past(word, '@');
        u64 pa = lacuna_parse_number(address), registers = map_device(pa, PAGE);
        if (!registers || read32(registers + MAGIC) != MAGIC_VALUE ||
            read32(registers + VERSION) != 2)
            panic("%s=: there is no virtio-mmio device of version 2 at %lx", name, pa);
        u32 kind = read32(registers + DEVICE);
        if (kind == DISK)
            device_init(&disk, registers, 1, DISK_FEATURES);
        if (kind == BALLOON)
            device_init(&balloon, registers, BALLOON_QUEUES, BALLOON_FEATURES);
        if (kind == DISK || kind == BALLOON)
            interrupt_route((u32)lacuna_parse_number(skip_past(address, ':')));
    }
}

/* The current thread sleeps until the device has used these parts. */
static void request(struct cpu *c, struct device *d, u32 i, const struct part parts[PARTS]) {
    struct thread *t = c->current;
    struct queue *q = &d->queue[i];
    u16 first = (u16)(PARTS * t->slot), n = 0;
    struct descriptor *chain = &q->table[first];
    lock(&d->lock);
    for (const struct part *p = parts; p < parts + PARTS; p++) {
        if (p->bytes) {
            u16 flags = WITH_NEXT | (p->writable ? WRITABLE : 0);
            chain[n] = (struct descriptor){p->at, p->bytes, flags, (u16)(first + n + 1)};
            n++;
        }
    }
    chain[n - 1].flags &= (u16)~WITH_NEXT;
    sched_block(c, ALIVE); /* before another processor can find the request used */
    waiting[t->slot] = t;
    q->rings->available[q->rings->available_index % RING] = first;
    __atomic_store_n(&q->rings->available_index, q->rings->available_index + 1, __ATOMIC_RELEASE);
    unlock(&d->lock);
    /* The device sees the request before the notification. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    write32(d->registers + NOTIFY, i);
}

static void wake_used(struct cpu *c, struct queue *q) {
    while (q->seen != __atomic_load_n(&q->rings->used_index, __ATOMIC_ACQUIRE)) {
        u32 slot = q->rings->used[q->seen++ % RING].head / PARTS;
        struct thread *t = waiting[slot];
        frame_set_result(&t->frame, q->rings->header[slot].status ? ~0ull : 0);
        sched_wake(c, t);
    }
}

/* All devices have one handler. A configuration change is acknowledged and ignored: programs read
 * the balloon's target themselves. */
void virtio_interrupt(struct cpu *c) {
    for (struct device *devices[] = {&disk, &balloon}, **at = devices; at < devices + 2; at++) {
        struct device *d = *at;
        u32 why = d->registers ? read32(d->registers + INTERRUPT) : 0;
        if (!why)
            continue;
        write32(d->registers + INTERRUPT_ACK, why);
        __atomic_thread_fence(__ATOMIC_SEQ_CST); /* chains used later interrupt again */
        lock(&d->lock);
        for (u32 i = 0; i < QUEUES; i++) {
            if (d->queues >> i & 1)
                wake_used(c, &d->queue[i]);
        }
        unlock(&d->lock);
    }
}

/* The physical address of a buffer of the arena inside of a page; ~0 if it is none. */
static u64 buffer(struct thread *t, u64 va, u64 bytes) {
    if (va - LACUNA_ARENA_BASE >= info->arena_bytes || !bytes || bytes > PAGE - va % PAGE)
        return NEVER;
    return translate(t->space, va);
}

/* Returns the result; a request is on its way if `*waits`. */
u64 virtio_disk(struct cpu *c, const u64 args[4], bool *waits) {
    u64 operation = args[0], sector = args[1], bytes = args[3], at = 0;
    if (!disk.registers)
        return operation == LACUNA_DISK_SECTORS ? 0 : NEVER;
    if (operation == LACUNA_DISK_SECTORS)
        return read32(disk.registers + CONFIG) | (u64)read32(disk.registers + CONFIG + 4) << 32;
    bool moves = operation == LACUNA_DISK_READ || operation == LACUNA_DISK_WRITE;
    if (moves)
        at = buffer(c->current, args[2], bytes);
    if (at == NEVER || (!moves && operation != LACUNA_DISK_FLUSH) ||
        c->current->slot >= LACUNA_VIRTIO_SLOTS)
        return NEVER;
    struct header *h = &disk.queue[0].rings->header[c->current->slot];
    *h = (struct header){(u32)operation, 0, sector, 0xff};
    const struct part parts[PARTS] = {{to_phys(h), offsetof(struct header, status), false},
                                      {at, moves ? (u32)bytes : 0, operation == LACUNA_DISK_READ},
                                      {to_phys(&h->status), 1, true}};
    request(c, &disk, 0, parts);
    *waits = true;
    return 0;
}

u64 virtio_balloon(struct cpu *c, const u64 args[4], bool *waits) {
    u64 operation = args[0], at;
    if (!balloon.registers)
        return NEVER;
    if (operation == LACUNA_BALLOON_TARGET)
        return read32(balloon.registers + BALLOON_TARGET);
    if (operation == LACUNA_BALLOON_ACTUAL) {
        write32(balloon.registers + BALLOON_ACTUAL, (u32)args[1]);
        return 0;
    }
    if (operation >= QUEUES || !(BALLOON_QUEUES >> operation & 1) ||
        (at = buffer(c->current, args[1], PAGE)) == NEVER ||
        c->current->slot >= LACUNA_VIRTIO_SLOTS)
        return NEVER;
    bool reports = operation == LACUNA_BALLOON_REPORT;
    struct header *h = &balloon.queue[operation].rings->header[c->current->slot];
    h->type = (u32)(at / PAGE);
    const struct part parts[PARTS] = {{to_phys(h), reports ? 0 : sizeof h->type, false},
                                      {at, reports ? (u32)PAGE : 0, true}};
    request(c, &balloon, (u32)operation, parts);
    *waits = true;
    return 0;
}
