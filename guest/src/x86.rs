//! The x86-64 images, which the build script makes.

use crate::image::{Image, Param, param};

/// Parameters that the x86-64 kernel reads, for every workload.
pub const KERNEL_PARAMS: &[Param] = &[
    param("smp", "1", "vCPUs, at most 256, APIC ids 0 to smp - 1"),
    param(
        "ap",
        "sipi",
        "direct: all vCPUs start at e_entry; sipi: the first starts the others",
    ),
    param(
        "syscall",
        "syscall",
        "ud2: programs call the kernel by ud2, for kvm_pvm hosts",
    ),
    param(
        "apf",
        "by CPUID",
        "async page faults: off, int (page ready by interrupt), pf (both by #PF, 2010)",
    ),
    param(
        "apf_always",
        "0",
        "1: page-not-present at CPL 0 too; there only idle can get it",
    ),
    param(
        "huge",
        "0",
        "1: map the arena by 2 MiB pages where memory has whole, aligned ones",
    ),
    param(
        "pcid",
        "1",
        "0: no process-context identifiers, even where CPUID has them",
    ),
    VIRTIO,
    param("tick_us", "1000", "timer tick, microseconds"),
    param("slice_us", "4000", "time slice, microseconds"),
];

pub(crate) const VIRTIO: Param = param(
    "virtio_mmio.device",
    "none",
    "SIZE@ADDRESS:LINE, a virtio disk or balloon; once for each",
);
const THREADS: Param = param(
    "threads",
    "smp, at most 59",
    "threads, each with its own part",
);
const LOOK_MS: Param = param(
    "look_ms",
    "20",
    "how often a paused thread checks whether it may run, ms",
);

macro_rules! image {
    ($name:literal, $about:literal, $params:expr) => {
        Image {
            name: $name,
            file: include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".elf")),
            about: $about,
            params: $params,
            is_test: false,
        }
    };
}

pub(crate) const IMAGES: &[Image] = &[
    image!(
        "bm",
        "faulting processes beside counting ones (the 2010 talk's benchmark)",
        &[
            param(
                "faulters",
                "smp, at most 29",
                "processes that access the arena at random, half writes"
            ),
            param("workers", "smp, at most 29", "processes that count"),
            param(
                "processes",
                "1",
                "0: threads of one process instead, one address space"
            ),
            LOOK_MS,
            param("seconds", "10", "how long, seconds"),
            param(
                "accesses",
                "0",
                "above 0: end when each faulter has made so many, not by time"
            ),
            param("bytes", "all", "how much of the arena, bytes"),
            param("populate", "0", "1: write to every page first"),
            param("seed", "1", "of the random places"),
        ]
    ),
    image!(
        "verify",
        "writes and re-reads keyed patterns: finds any lost, stale or torn page",
        &[
            THREADS,
            param("rounds", "3", "times every page is checked and rewritten"),
            param("pages", "all", "how many pages"),
            param(
                "pattern",
                "keyed",
                "keyed: lz4 packs it 12:1; random: incompressible"
            ),
            param("seed", "1", "of patterns, page classes and order"),
            param(
                "gate",
                "0",
                "1: waits before the last check until the host sets the setting"
            ),
            param(
                "clear",
                "0",
                "1: zero all pages first, because the VMM's firmware writes to them"
            ),
        ]
    ),
    image!(
        "membound",
        "allocates all memory, touches every page, frees all; again",
        &[
            param("rounds", "3", "how often"),
            param(
                "threads",
                "1",
                "memory-bound threads, each with its own part"
            ),
            param(
                "work",
                "0",
                "steps of computing after each page; the host's setting replaces it"
            ),
            param("nop", "0", "1: a counting process runs beside each"),
            param("bytes", "all", "how much of the arena, bytes"),
        ]
    ),
    image!(
        "touch",
        "first touch of every page: cycles and nanoseconds a page",
        &[
            param("order", "seq", "seq or random"),
            THREADS,
            param("bytes", "all", "how much of the arena, bytes"),
            param("seed", "1", "of the random order"),
            param("overlap", "0", "1: all threads touch the same pages"),
            param("gate", "0", "1: waits until the host sets the setting"),
        ]
    ),
    image!(
        "zipf",
        "skewed reads and writes: a small part of memory is hot, most is rarely used",
        &[
            param(
                "processes",
                "smp, at most 59",
                "processes, each with its own part"
            ),
            param(
                "skew",
                "99",
                "exponent of the law in hundredths; 0: all pages alike"
            ),
            param("writes", "50", "accesses that write, percent"),
            param(
                "scatter",
                "0",
                "1: hot pages lie anywhere, not side by side"
            ),
            LOOK_MS,
            param("seconds", "10", "how long, seconds"),
            param(
                "accesses",
                "0",
                "above 0: end when each process has made so many, not by time"
            ),
            param("bytes", "all", "how much of the arena, bytes"),
            param("seed", "1", "of the places"),
            param(
                "gate",
                "0",
                "1: waits when prepared until the host sets the setting, the seed from then on"
            ),
            param(
                "set",
                "all",
                "how many pages each process uses behind the gate"
            ),
        ]
    ),
    image!(
        "churn",
        "transactions on a heap of objects: dirties pages at a chosen rate",
        &[
            param(
                "processes",
                "smp, at most 59",
                "processes, each with its own heap"
            ),
            param(
                "hot",
                "bytes / 8",
                "bytes of all heaps that most transactions stay in; 0: none"
            ),
            param(
                "cold",
                "1000",
                "transactions of 10000 that go to the rest, which dirties new pages"
            ),
            param("writes", "50", "objects updated of those read, percent"),
            param(
                "frees",
                "5",
                "transactions that free and make an object, percent"
            ),
            param(
                "window_ms",
                "1000",
                "how often latencies go to the status page, milliseconds"
            ),
            LOOK_MS,
            param("seconds", "10", "how long, seconds"),
            param(
                "transactions",
                "0",
                "above 0: end after so many each, not by time"
            ),
            param("bytes", "all", "how much of the arena, bytes"),
            param("seed", "1", "of objects and transactions"),
        ]
    ),
    image!(
        "paced",
        "writes pages at a given pace, checks them, and prints a line at short intervals",
        &[
            param(
                "processes",
                "smp, at most 59",
                "threads, each with its own part"
            ),
            param("rate", "10000", "pages that all write in a second"),
            param("hot", "1/8", "what they write to again and again, bytes"),
            param("bytes", "all", "how much of the arena is filled, bytes"),
            param("period_us", "2000", "how often each writes, microseconds"),
            param("beat_us", "2000", "how often each prints, microseconds"),
            param("seconds", "10", "how long, seconds"),
            param("writes", "0", "above 0: each ends after so many pages"),
            param("seed", "1", "of the words that fill the memory"),
        ]
    ),
    image!(
        "diskbusy",
        "random writes and reads of a virtio disk: finds any lost, stale or repeated write",
        &[
            param(
                "threads",
                "4",
                "threads, each with its own blocks of the disk"
            ),
            param(
                "requests",
                "10000",
                "of each thread; 0: until the host sets the setting"
            ),
            param("pool", "16", "pages of each thread as buffers, at most 64"),
            param(
                "balloon",
                "0",
                "1: pages go through the balloon, and are reported as free"
            ),
            param("seed", "1", "of patterns and places"),
        ]
    ),
    image!(
        "gaps",
        "how much time a guest loses between two instructions because of its host",
        &[
            param(
                "threads",
                "smp, at most 59",
                "threads that write, all of them everywhere"
            ),
            param(
                "limit_ns",
                "2000",
                "an interval longer than this is a gap, nanoseconds"
            ),
            param(
                "most_us",
                "1000",
                "an interval longer than this is the scheduler's, microseconds"
            ),
            LOOK_MS,
            param("seconds", "10", "how long, seconds"),
            param("bytes", "all", "how much of the arena, bytes"),
            param("seed", "1", "of the places"),
        ]
    ),
    image!(
        "reads",
        "random reads of 8 bytes over much memory",
        &[
            param(
                "threads",
                "smp, at most 59",
                "threads that read, all of them everywhere"
            ),
            LOOK_MS,
            param("seconds", "10", "how long, seconds"),
            param(
                "reads",
                "0",
                "above 0: end when each thread has made so many, not by time"
            ),
            param("bytes", "all", "how much of the arena, bytes"),
            param("seed", "1", "of the places"),
        ]
    ),
    image!(
        "cpubench",
        "instructions a second: alu, mem256k, mem64m, branchy",
        &[
            param("test", "all", "alu, mem256k, mem64m, branchy or all"),
            param(
                "iters",
                "by test",
                "loop iterations (branchy: passes of 21604 instructions)"
            ),
        ]
    ),
    image!(
        "litmus",
        "x86 memory-order litmus tests, misaligned and locked accesses, on two vCPUs",
        &[
            param("iters", "20000", "iterations of each ordering test"),
            param("adds", "20000", "locked additions of each thread and place"),
        ]
    )
    .test(),
    image!(
        "maxpage",
        "instructions that touch the most pages, in a loop",
        &[param("iters", "1000", "times each instruction runs")]
    )
    .test(),
    image!(
        "smc",
        "self- and cross-modifying code",
        &[param("iters", "2000", "modifications of each kind")]
    )
    .test(),
    image!(
        "random",
        "random bytes as code",
        &[
            param(
                "level",
                "3",
                "3: in confined processes; 0: in the kernel, once"
            ),
            param("seed", "1", "of the bytes; round n uses seed + n"),
            param("count", "100", "rounds at level 3"),
            param("limit_us", "2000", "time limit of a round, microseconds"),
        ]
    )
    .test(),
    image!(
        "msr",
        "nonsense in model-specific registers",
        &[
            param("count", "2000", "random indexes beside the usual ranges"),
            param("seed", "1", "of indexes and values"),
            param(
                "wild",
                "0",
                "1: last, write those that the kernel needs; the guest may not survive"
            ),
        ]
    )
    .test(),
    image!(
        "apfstorm",
        "checked accesses while async page faults go off and on and vCPUs offline",
        &[
            param("threads", "2 x smp", "threads that touch pages"),
            param("accesses", "20000", "of each thread, at least"),
            param(
                "switches",
                "100",
                "off, on or offline, of all vCPUs together, at least"
            ),
            param("every_us", "2000", "longest time between two switches, us"),
            param(
                "offline",
                "64",
                "one switch in so many takes a vCPU offline; 0: never"
            ),
            param("bytes", "all", "how much of the arena, bytes"),
            param("seed", "1", "of places and switches"),
        ]
    )
    .test(),
    image!(
        "apfhostile",
        "checked accesses while the rules of async page faults are broken",
        &[
            param("case", "0", "how: 0 to 8, see the source"),
            param(
                "bits",
                "9",
                "low bits of the enabling register; 1: original delivery"
            ),
            param("accesses", "50000", "of all threads together, then it ends"),
            param("limit_ms", "10000", "or after this time, milliseconds"),
            param("seed", "1", "of places and nonsense"),
        ]
    )
    .test(),
    image!("triple", "a deliberate triple fault", &[]).test(),
    image!("hello", "prints a line and ends", &[]).test(),
];
