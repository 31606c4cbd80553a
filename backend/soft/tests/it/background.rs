//! A VM from `Builder::build` reclaims memory in the background, without help of the VMM.

use crate::common;

use common::builder;
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_machine::{Builder as _, GuestMemory as _};
use lacuna_skip::test;
use lacuna_soft::{Vm, VmBuilder};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Remaining free frames: fewer than the low watermark, but enough that no write has to reclaim.
const LEFT: u64 = 40;

/// Writes to as many pages as there are frames, minus [`LEFT`].
fn fill(vm: &Vm, builder: &VmBuilder) {
    for page in 0..builder.resident.get() - LEFT {
        let gpa = Gpa::new(page * PAGE_SIZE as u64).unwrap();
        vm.write(gpa, &page.wrapping_add(1).to_le_bytes()).unwrap();
    }
}

#[test]
fn a_built_vm_reclaims_in_the_background() {
    let builder = builder(64, 16, 1, "");
    let vm = builder.build().unwrap();
    fill(&vm, &builder);
    let limit = Instant::now() + Duration::from_secs(60);
    while vm.host().stats().swapped_out == 0 {
        assert!(Instant::now() < limit, "no thread reclaims");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_seeded_vm_reclaims_only_when_it_is_asked_to() {
    let builder = VmBuilder {
        seed: Some(1),
        ..builder(64, 16, 1, "")
    };
    let vm = builder.build().unwrap();
    fill(&vm, &builder);
    assert_eq!(vm.host().stats().swapped_out, 0);
    assert!(
        vm.host().balance().scanned > 0,
        "there is something to reclaim"
    );
}
