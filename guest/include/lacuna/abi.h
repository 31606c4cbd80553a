/*
 * The interface between the guest kernel, user programs and the host: the status page, the info
 * page, the user address map and the system calls. C code on both sides of the system call includes
 * this file. src/status.rs mirrors the status page for the host; a test compiles this file and
 * compares the two.
 */
#ifndef LACUNA_ABI_H
#define LACUNA_ABI_H

#ifndef __ASSEMBLER__
#include <stddef.h>
#include <stdint.h>
#endif

/* ---- user address map: a top-level entry (512 GiB) for private memory, one for the arena ---- */
#define LACUNA_IMAGE_BASE 0x8000000000 /* entry 1: the program; text shared, data private */
#define LACUNA_STACK_BASE 0x8080000000 /* a window for each thread, the stack at its upper end */
#define LACUNA_STACK_WINDOW 0x20000
#define LACUNA_STACK_BYTES 0x10000
#define LACUNA_STATUS_VA 0x80c0000000 /* status pages, user-writable */
#define LACUNA_INFO_VA 0x80c0010000   /* info page, read-only */
#define LACUNA_ARENA_BASE 0x10000000000 /* entry 2: nearly all guest memory, shared by all */
#define LACUNA_ALIAS_BASE 0x18000000000 /* entry 3 and up: lacuna_alias() may map here */
#define LACUNA_USER_END 0x7ffffffff000

/* ---- x86's ports (all the devices there are, beside the local APIC) ---- */
#define LACUNA_PORT_COM1 0x3f8
#define LACUNA_PORT_EXIT 0xf4     /* long out: exit code; the port of QEMU's isa-debug-exit */
#define LACUNA_PORT_STATUS 0x5c0  /* long out: page frame number of the status page */

/*
 * ---- arm64: the host's two registers, 32 bits each. The device tree has their place, in the node
 * that is compatible with "lacuna,host"; a machine without that node has no such registers. ----
 */
#define LACUNA_HOST_EXIT 0   /* write: exit code; the machine ends */
#define LACUNA_HOST_STATUS 4 /* write: page frame number of the status page */

/*
 * ---- status pages: progress that the host reads while the guest runs. In guest-physical memory
 * the info page follows the first one, and the others follow the info page. ----
 */
#define LACUNA_STATUS_MAGIC 0x5453414e5543414c /* "LACUNAST" in memory order */
#define LACUNA_STATUS_VERSION 2
#define LACUNA_STATUS_PAGES 5
#define LACUNA_MAX_THREADS 319

/* ---- the kernel's limits ---- */
#define LACUNA_MAX_CPUS 256
#define LACUNA_VIRTIO_SLOTS 60 /* the threads that may use a virtio device: slots below this */
/* The end of memory. The kernel has one table for it, and the arena ends where aliases begin. */
#define LACUNA_MEMORY_END_GIB 512

#define LACUNA_STATE_BOOTING 0
#define LACUNA_STATE_RUNNING 1
#define LACUNA_STATE_DONE 2

#define LACUNA_KIND_WORKER 1
#define LACUNA_KIND_FAULTER 2
#define LACUNA_KIND_OTHER 3

/* ---- system calls: a number, up to four arguments, one result. The processor's instruction and
 * registers are in user/arch/ARCH/library.h. ---- */
#define LACUNA_SYSCALL_BY_UD2 1 /* x86: lacuna_info.processor */
#define LACUNA_UD2_MARK 0x4c414355ull
#define LACUNA_HAS_LSE 1  /* arm64: lacuna_info.processor; atomics by one instruction */
#define LACUNA_HAS_RCPC 2 /* arm64: ldapr */
#define LACUNA_SYS_EXIT 0    /* (status) */
#define LACUNA_SYS_WRITE 1   /* (buffer, bytes) -> bytes or -1 */
#define LACUNA_SYS_YIELD 2   /* () */
#define LACUNA_SYS_SLEEP 3   /* (nanoseconds) */
#define LACUNA_SYS_NOW 4     /* () -> nanoseconds since the clock was zero */
#define LACUNA_SYS_THREAD 5  /* (entry, a0, a1, cpu or -1) -> slot or -1; same address space */
#define LACUNA_SYS_SPAWN 6   /* the same in a new address space, data as the image has them */
#define LACUNA_SYS_WAIT 7    /* () -> worst status of all children since the last wait */
#define LACUNA_SYS_SELF 8    /* () -> own slot, the index of the status entry */
#define LACUNA_SYS_GPA 9     /* (address) -> its guest-physical address, or -1 */
#define LACUNA_SYS_ALIAS 10  /* (address >= ALIAS_BASE, arena address): map the page again */
#define LACUNA_SYS_CONFINE 11 /* (nanoseconds): killed after that; no privileged calls; inherited */
#define LACUNA_SYS_RDMSR 12  /* (index, u64 *value) -> 0, or -1: refused */
#define LACUNA_SYS_WRMSR 13  /* (index, value) -> 0, or -1: refused */
#define LACUNA_SYS_KCALL 14  /* (function): call it in the kernel. Anything may follow */
#define LACUNA_SYS_APF_ENABLE 15  /* () -> 0: async page faults on here; -1: the host has none */
#define LACUNA_SYS_APF_DISABLE 16 /* () -> 0; threads that wait for a page here try again */
#define LACUNA_SYS_CPU_OFFLINE 17 /* () -> 0: its threads go to CPU 0; -1 on CPU 0 itself */
#define LACUNA_SYS_HYPERCALL 18 /* arm64: (u64 x[4]): SMCCC by HVC; results in x -> 0 or -1 */
#define LACUNA_SYS_DISK 19    /* (operation, sector, arena address, bytes) -> 0 or -1; SECTORS: n */
#define LACUNA_SYS_BALLOON 20 /* (operation, arena page; ACTUAL: pages) -> 0 or -1; TARGET: pages */

/* Operations of the disk; the first three are virtio's. A buffer lies inside of a page. */
#define LACUNA_DISK_READ 0
#define LACUNA_DISK_WRITE 1
#define LACUNA_DISK_FLUSH 4
#define LACUNA_DISK_SECTORS 5 /* how many of 512 bytes the disk has; 0: there is no disk */

/* Operations of the balloon; the first three are the numbers of their queues. */
#define LACUNA_BALLOON_INFLATE 0 /* the host takes the page */
#define LACUNA_BALLOON_DEFLATE 1 /* the page is zero, or unchanged, and the program's again */
#define LACUNA_BALLOON_REPORT 4  /* the page is free: zero or unchanged at its next use */
#define LACUNA_BALLOON_TARGET 5  /* the pages that the host wants in the balloon */
#define LACUNA_BALLOON_ACTUAL 6  /* tells the host the pages in the balloon */

/* Exit statuses that the kernel itself gives. */
#define LACUNA_EXIT_TIMEOUT 124 /* a confined thread outlived its time */
#define LACUNA_EXIT_PANIC 125   /* kernel panic; the reason is on the console */
#define LACUNA_EXIT_FAULT 128   /* + exception vector or class: killed by that */

#ifndef __ASSEMBLER__
/* The progress of one thread, in one cache line. The thread itself writes it. */
struct lacuna_status_entry {
    volatile uint64_t counter; /* what the thread counts; only grows */
    uint64_t goal;             /* counter's final value, 0 if not known */
    uint32_t kind;
    uint32_t cpu;
    char name[24];             /* NUL-padded */
    volatile uint32_t latency_ns[4]; /* last window: median, 99 %, 99.9 %, worst; or 0 */
};

struct lacuna_status {
    uint64_t magic;
    uint32_t version;
    uint32_t nthreads; /* entries in use: indexes below this one */
    uint32_t state;
    uint32_t exit_code; /* valid when state is LACUNA_STATE_DONE */
    /* Async page faults, summed over all processors; they wrap around. */
    uint32_t apf_not_present; /* page-not-present events */
    uint32_t apf_ready;       /* page-ready events for one token */
    uint32_t apf_wake_all;    /* page-ready events for all waiting threads */
    uint32_t apf_dummy;       /* of apf_ready: events for which no thread waited yet */
    uint32_t apf_idle;        /* of apf_not_present: events in the idle loop */
    uint32_t apf_lost;        /* events without a meaning for the kernel: a bug of the host */
    volatile uint32_t paused; /* written by the host: bit 1 << KIND holds threads of that kind */
    volatile uint32_t setting; /* written by the host; the workload defines it; 0: not set */
    uint32_t pad[2];
    struct lacuna_status_entry entry[LACUNA_MAX_THREADS];
};

_Static_assert(sizeof(struct lacuna_status_entry) == 64, "status entry is a cache line");
_Static_assert(offsetof(struct lacuna_status, entry) == 64, "entries follow the header");
_Static_assert(sizeof(struct lacuna_status) == LACUNA_STATUS_PAGES * 4096, "all of the pages");

/* Facts about the machine that a program can read without a system call. */
struct lacuna_info {
    uint64_t arena_bytes;
    uint64_t tsc_khz;
    uint32_t ncpus;
    uint32_t processor; /* what the library must know of it, for each architecture its own */
    char cmdline[2048];
};
#endif
#endif
