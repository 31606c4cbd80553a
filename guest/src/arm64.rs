//! The AArch64 images. They are committed; `cargo xtask guest` builds them from their sources.

use crate::image::{Image, Param, param};
use crate::x86;

/// Parameters that the AArch64 kernel reads, for every workload.
pub(crate) const KERNEL_PARAMS: &[Param] = &[
    param(
        "smp",
        "all of the device tree",
        "vCPUs, at most 256; the first starts the others by PSCI",
    ),
    param(
        "lse",
        "1",
        "0: atomic operations by exclusives, even where the processor has LSE",
    ),
    param(
        "apf",
        "by service",
        "async page faults: off, abort (both by data abort, RFCv2), sdei (v1 to v4)",
    ),
    param(
        "apf_always",
        "0",
        "1: page-not-present at EL1 too, with apf=abort; the kernel then halts",
    ),
    param(
        "exit",
        "by device tree",
        "semihosting: the exit code by the debugger's call, for QEMU",
    ),
    param(
        "huge",
        "0",
        "1: map the arena by 2 MiB blocks where memory has whole, aligned ones",
    ),
    param(
        "pcid",
        "1",
        "0: each switch of the address space flushes the TLB, in spite of ASIDs",
    ),
    param(
        "hafdbs",
        "1",
        "0: the arena is mapped accessed and dirty, even where hardware updates both",
    ),
    x86::VIRTIO,
    param("tick_us", "1000", "timer tick, microseconds"),
    param("slice_us", "4000", "time slice, microseconds"),
];

/// The x86-64 image of that name: the purpose and parameters are the same.
const fn same_as_x86(name: &str) -> &'static Image {
    let mut i = 0;
    while i < x86::IMAGES.len() {
        if equal(x86::IMAGES[i].name.as_bytes(), name.as_bytes()) {
            return &x86::IMAGES[i];
        }
        i += 1;
    }
    panic!("x86-64 has no image of that name")
}

const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    a.len() == b.len() && i == a.len()
}

macro_rules! image {
    ($name:literal) => {
        image!($name, same_as_x86($name).about, same_as_x86($name).params)
    };
    ($name:literal, $about:expr, $params:expr) => {
        Image {
            name: $name,
            file: include_bytes!(concat!("../images/arm64/", $name, ".Image")),
            about: $about,
            params: $params,
            is_test: false,
        }
    };
}

pub(crate) static IMAGES: &[Image] = &[
    image!("bm"),
    image!("verify"),
    image!("membound"),
    image!("touch"),
    image!("zipf"),
    image!("churn"),
    image!("paced"),
    image!("diskbusy"),
    image!("gaps"),
    image!("reads"),
    image!(
        "cpubench",
        same_as_x86("cpubench").about,
        &[
            param("test", "all", "alu, mem256k, mem64m, branchy or all"),
            param(
                "iters",
                "by test",
                "loop iterations (branchy: passes of 19203 instructions)"
            ),
        ]
    ),
    image!(
        "litmus",
        "memory-order litmus tests, misaligned and atomic accesses, on two vCPUs",
        &[
            param("iters", "20000", "iterations of each ordering test"),
            param("adds", "20000", "additions of each thread in each way"),
            param(
                "rcsc",
                "1",
                "0: SB with release and acquire may have every outcome, for QEMU"
            ),
            param("aba", "1", "0: leave the ABA test out, for QEMU"),
        ]
    )
    .test(),
    image!("maxpage").test(),
    image!("smc").test(),
    image!(
        "random",
        "random words as code",
        &[
            param(
                "level",
                "0",
                "0: in confined processes; 1: in the kernel, once"
            ),
            param("seed", "1", "of the words; round n uses seed + n"),
            param("count", "100", "rounds at level 0"),
            param("limit_us", "2000", "time limit of a round, microseconds"),
        ]
    )
    .test(),
    image!(
        "msr",
        "nonsense in system registers",
        &[
            param("rounds", "1", "times every register is tried"),
            param("seed", "1", "of the values"),
            param(
                "wild",
                "0",
                "1: last, write those that the kernel needs; the guest may not survive"
            ),
        ]
    )
    .test(),
    image!("apfstorm").test(),
    image!(
        "apfhostile",
        same_as_x86("apfhostile").about,
        &[
            param("case", "0", "how: 0 to 9, see the source"),
            param(
                "form",
                "2",
                "1: the function of RFCv2, which needs a kernel with apf=abort; 2: of v1 to v4"
            ),
            param("bits", "1", "flags of the area when it is enabled"),
            param("accesses", "50000", "of all threads together, then it ends"),
            param("limit_ms", "10000", "or after this time, milliseconds"),
            param("seed", "1", "of places and nonsense"),
        ]
    )
    .test(),
    image!(
        "traps",
        "what exceptions and random translation tables leave in the system registers",
        &[
            param("count", "20000", "random tables, each with one instruction"),
            param("batch", "1000", "of them in each line"),
            param("seed", "1", "of the tables"),
            param(
                "show",
                "none",
                "the first of those that are printed one by one"
            ),
            param("shown", "1", "how many are"),
        ]
    )
    .test(),
    image!("reset", "ends the machine by a reset", &[]).test(),
    image!("hello").test(),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_workloads_have_one_description() {
        assert_eq!(same_as_x86("bm").name, "bm");
        assert!(equal(b"verify", b"verify"));
        assert!(!equal(b"verify", b"verif") && !equal(b"", b"v") && !equal(b"a", b"b"));
    }
}
