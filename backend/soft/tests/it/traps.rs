//! Exceptions and translation of AArch64 guests: the workload `traps` prints the same lines as on
//! QEMU's `virt` machine (`guest/tests/it/qemu/arm64.rs`).

use crate::common;

use common::{Lines, builder_for};
use lacuna_machine::{Arch, Ending, Image};
use lacuna_skip::test;

fn printed(memory_mib: u64, resident_mib: u64, vcpus: usize) -> String {
    let image = lacuna_guest::Arch::Arm64.image("traps");
    let image = Image::parse(image.expect("it is committed").file).unwrap();
    let lines = Lines::default();
    let builder = builder_for(Arch::Arm64, (memory_mib, resident_mib), vcpus, "count=4000");
    let done = builder.run_to_summary(&image, lines.sink()).unwrap();
    assert!(
        matches!(done.ending, Ending::Exited(0)),
        "{:?}",
        done.ending
    );
    lines.text()
}

#[test]
fn they_are_those_of_qemu() {
    let expected = include_str!("../../../../guest/tests/traps.txt");
    for vcpus in [1, 2] {
        assert_eq!(printed(64, 64, vcpus).trim_end(), expected.trim_end());
    }
}
