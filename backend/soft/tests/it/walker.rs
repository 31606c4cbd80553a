//! The guest's page walker sets accessed and dirty bits in the guest's page tables, without a store
//! instruction. The log must have the pages of these tables.
//!
//! A walk accesses every table page as a write, even if it sets no bit. Processors with A and D
//! bits in stage 2 do the same. So the log may also have tables that were only read.
//!
//! ```text
//! PML4 --1--> PDPT --0--> PD --0--> PT --0,1,2--> pages        all A = D = 0 at first
//!                            --1--> 2 MiB
//! ```

use crate::common;

use common::program::{self, CODE, Piece, assemble, tell, words};
use common::shadow::{DETECTIONS, Shadow, has_bitmaps, named, pages_of, ring};
use common::{boot_image, builder};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_machine::{DirtyRings as _, DirtyTracking as _, Exit, GuestMemory as _};
use lacuna_soft::{
    Backup, Delivery, Detection, HugePages, SlotId, Step, Vcpu, Vm, VmBuilder, Wait,
};
use lacuna_sync::{Clock, VirtualClock};
use std::collections::BTreeSet;
use std::sync::Arc;

const PML4: u64 = 0x40_0000;
const PDPT: u64 = 0x40_1000;
const PD: u64 = 0x40_2000;
const PT: u64 = 0x40_3000;
/// The pages mapped by the table's first three entries, and the 2 MiB beside them.
const PAGES: u64 = 0x60_0000;
const BIG: u64 = 0x80_0000;
/// The virtual address of these pages.
const VA: u64 = 1 << 39;
const BIG_VA: u64 = VA + (2 << 20);
/// The boot's tables for everything below, which the code needs.
const BOOT_PDPT: u64 = 0x5000;
const BOOT_PD: u64 = 0x6000;
const TABLES: [u64; 6] = [PML4, PDPT, PD, PT, BOOT_PDPT, BOOT_PD];

const PRESENT_WRITABLE: u64 = 0b11;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;

/// Each access uses an entry that no TLB has. After it the guest reports to the host.
fn body(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, PML4)?;
    a.mov(cr3, rax)?;
    a.mov(rbx, VA)?;
    a.mov(rsi, BIG_VA)?;
    tell(a, 0)?;
    a.mov(rdx, qword_ptr(rbx))?;
    tell(a, 1)?;
    a.mov(rdx, qword_ptr(rbx + 0x1000))?;
    tell(a, 2)?;
    a.mov(qword_ptr(rbx), rbx)?;
    tell(a, 3)?;
    a.lock().xadd(qword_ptr(rbx + 0x2008), rdx)?;
    tell(a, 4)?;
    a.mov(rdx, qword_ptr(rsi + 0x7000))?;
    tell(a, 5)?;
    a.mov(byte_ptr(rsi + 0x5000), al)?;
    tell(a, 6)?;
    a.mov(qword_ptr(rbx), rsi)?;
    tell(a, 7)
}

/// The pages written by each access of [`body`]. Besides them only tables are logged.
const WRITTEN: [&[u64]; 7] = [
    &[PML4, PDPT, PD, PT],
    &[PT],
    &[PT, PAGES],
    &[PT, PAGES + 0x2000],
    &[PD],
    &[PD, BIG + 0x5000],
    &[PAGES],
];

fn guest() -> Vec<Piece> {
    let page = |at: u64| (PAGES + at * PAGE_SIZE as u64) | PRESENT_WRITABLE;
    vec![
        assemble(CODE, body),
        words(
            PML4,
            &[BOOT_PDPT | PRESENT_WRITABLE, PDPT | PRESENT_WRITABLE],
        ),
        words(PDPT, &[PD | PRESENT_WRITABLE]),
        words(PD, &[PT | PRESENT_WRITABLE, BIG | PRESENT_WRITABLE | LARGE]),
        words(PT, &[page(0), page(1), page(2)]),
        // No access is a first touch.
        words(PAGES, &[1; 3 * PAGE_SIZE / 8]),
        words(BIG, &[1; 8 * PAGE_SIZE / 8]),
    ]
}

fn run_until(vcpu: &mut Vcpu, said: u32) {
    for _ in 0..1000 {
        match vcpu.step(1000) {
            Step::Ran | Step::Wait(Wait::Busy) => {}
            Step::Exit(Exit::IoOut {
                port: 0x80, value, ..
            }) => return assert_eq!(value, said),
            _ => panic!("before {said}"),
        }
    }
    panic!("{said} is never said");
}

fn written(vm: &Vm) -> BTreeSet<u64> {
    let mut names = Vec::new();
    if vm.mmu().delivery() != Delivery::Bitmap {
        vm.reap_rings(&mut |id, page| names.push((id, page)))
            .unwrap();
        vm.reset_rings().unwrap();
    }
    if has_bitmaps(vm) {
        let id = SlotId(0);
        let mut bits = vec![0; pages_of(vm, id).div_ceil(64)];
        vm.get_dirty(id, &mut bits).unwrap();
        names.extend(named(id, 0, &bits));
    }
    let gpa = |(_, page): (SlotId, usize)| (page * PAGE_SIZE) as u64;
    names.into_iter().map(gpa).collect()
}

fn walk(huge: HugePages, detection: Detection, delivery: Delivery) {
    let builder = VmBuilder {
        seed: Some(1),
        huge,
        ..builder(16, 32, 1, "")
    };
    let clock = Arc::new(VirtualClock::default());
    let time = || Arc::clone(&clock) as Arc<dyn Clock>;
    let host = builder.host(time()).unwrap();
    let pieces = guest();
    let (vm, mut vcpus, ..) = boot_image(&builder, &host, time(), &program::image(&pieces), |vm| {
        vm.set_delivery(delivery).unwrap();
    });
    vm.set_detection(detection);
    let vcpu = &mut vcpus[0];
    run_until(vcpu, 0);
    let mut copy = Shadow::begin(&vm);
    for (said, expected) in (1..).zip(WRITTEN) {
        run_until(vcpu, said);
        let dirty = written(&vm);
        let what = format!("access {said}: {huge:?} {detection:?} {delivery:?}: {dirty:x?}");
        assert!(expected.iter().all(|page| dirty.contains(page)), "{what}");
        let is_known = |page: &u64| expected.contains(page) || TABLES.contains(page);
        assert!(dirty.iter().all(is_known), "{what}");
        let name = |gpa: &u64| (SlotId(0), *gpa as usize / PAGE_SIZE);
        let pages: Vec<_> = dirty.iter().map(name).collect();
        copy.replay(&vm, &pages);
        copy.compare(&vm);
    }
    let entry = |at: u64| {
        let mut bytes = [0; 8];
        vm.read(Gpa::new(at).unwrap(), &mut bytes).unwrap();
        u64::from_le_bytes(bytes) & (ACCESSED | DIRTY)
    };
    assert_eq!([PML4 + 8, PDPT, PD, PT + 8].map(entry), [ACCESSED; 4]);
    assert_eq!([PT, PT + 16, PD + 8].map(entry), [ACCESSED | DIRTY; 3]);
}

#[test]
fn accessed_and_dirty_bits_that_the_walker_sets_are_logged() {
    for huge in [HugePages::Never, HugePages::Always] {
        for detection in DETECTIONS {
            for delivery in [Delivery::Bitmap, ring(Backup::None), ring(Backup::Bitmap)] {
                walk(huge, detection, delivery);
            }
        }
    }
}
