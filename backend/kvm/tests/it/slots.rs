//! Added, moved and removed memory slots, and kicks; each without a running guest and beside one.

use crate::common;

use common::{builder, can_run, image, within};
use lacuna_addr::{Gfn, GfnRange, Gpa};
use lacuna_kvm::SlotId;
use lacuna_machine::{
    Builder as _, Ending, Exit, GuestMemory as _, Kick as _, Logging, Machine, MemorySlotError,
    MemorySlots as _, PlatformDevices, SlotError, SlotFlags, Vcpu as _, Vm as _, harvest,
    set_logging_everywhere,
};
use lacuna_skip::test;
use std::sync::Arc;
use std::time::Duration;

const LATER: SlotId = SlotId(7);

fn gfns(first: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn::new(first).unwrap(), pages).unwrap()
}

/// Exits on missing memory are refused for read-only slots and for memory without missing pages,
/// and nothing changes.
#[test]
fn exits_where_no_page_is_missing_are_refused() {
    if !can_run() {
        return;
    }
    let vm = builder(16, 16, 1, "").build().unwrap();
    let flags = SlotFlags::EXIT_ON_MISSING;
    let both = flags | SlotFlags::READONLY;
    let none = MemorySlotError::Slot(SlotError::NoSource { id: LATER });
    let read_only = MemorySlotError::Slot(SlotError::ReadOnlyExits { id: LATER });
    let before = vm.memory_slots();
    let add = |flags| vm.add_memory(LATER, gfns(0x10_0000, 16), flags);
    assert_eq!(add(flags), Err(none.clone()));
    assert_eq!(add(both), Err(read_only.clone()));
    assert_eq!(vm.memory_slots(), before);
    add(SlotFlags::empty()).unwrap();
    let before = vm.memory_slots();
    assert_eq!(vm.set_slot_flags(LATER, flags), Err(none));
    assert_eq!(vm.set_slot_flags(LATER, both), Err(read_only));
    let id = before[0].id;
    let boot = MemorySlotError::Slot(SlotError::NoSource { id });
    assert_eq!(vm.set_slot_flags(id, flags), Err(boot));
    assert_eq!(vm.memory_slots(), before);
}

/// The harvest has both writes of the VMM, although KVM makes a new slot between them.
#[test]
fn a_log_survives_a_move_and_new_flags() {
    if !can_run() {
        return;
    }
    let vm = builder(16, 16, 1, "").build().unwrap();
    vm.add_memory(LATER, gfns(0x10_0000, 16), SlotFlags::empty())
        .unwrap();
    set_logging_everywhere(&*vm, Logging::LAZY).unwrap();
    vm.write(Gpa::truncate(0x1_0000_3000), &[1]).unwrap();
    vm.move_slot(LATER, Gfn::new(0x20_0000).unwrap()).unwrap();
    vm.set_slot_flags(LATER, SlotFlags::READONLY).unwrap();
    vm.set_slot_flags(LATER, SlotFlags::empty()).unwrap();
    vm.write(Gpa::truncate(0x2_0000_5000), &[1]).unwrap();
    let mut pages = Vec::new();
    harvest(&*vm, |id, page| pages.push((id, page))).unwrap();
    assert_eq!(pages, [(LATER, 3), (LATER, 5)]);
}

/// Flags change while the guest runs. During each change all vCPUs are out of the guest.
#[test]
fn flags_change_beside_a_running_guest() {
    if !can_run() {
        return;
    }
    let builder = builder(32, 32, 2, "rounds=1");
    let ending = within(120, move || {
        let vm = builder.build().unwrap();
        let vcpus = vm
            .boot(&image("verify"), &builder.full_command_line())
            .unwrap();
        let devices = PlatformDevices::new(|_: &str| ());
        let running = Machine::new(Arc::clone(&vm), devices).unwrap().start(vcpus);
        vm.add_memory(LATER, gfns(0x10_0000, 16), SlotFlags::empty())
            .unwrap();
        let mut flags = SlotFlags::READONLY;
        // A change keeps every vCPU out of the guest for a moment.
        while !running.wait_timeout(Duration::from_millis(1)) {
            vm.set_slot_flags(LATER, flags).unwrap();
            flags.toggle(SlotFlags::READONLY);
        }
        running.wait().ending
    });
    assert!(matches!(ending, Ending::Exited(0)), "{ending:?}");
}

#[test]
fn a_kick_waits_for_the_run_that_takes_it() {
    if !can_run() {
        return;
    }
    let builder = builder(16, 16, 2, "");
    let vm = builder.build().unwrap();
    let mut vcpus = vm
        .boot(&image("hello"), &builder.full_command_line())
        .unwrap();
    vm.kick(1);
    vm.kick(1);
    vm.kick(9);
    assert_eq!(vcpus[1].run().unwrap(), Exit::Interrupted, "before the run");
    assert_ne!(vcpus[0].run().unwrap(), Exit::Interrupted, "another vCPU's");
    vm.kick_all();
    assert_eq!(vcpus[0].run().unwrap(), Exit::Interrupted, "all of them");
    drop(vcpus);
    vm.kick_all();
}

/// The VMM reads untouched memory, and no page of it takes memory. Its writes are found again.
#[test]
fn untouched_pages_are_read_without_a_touch() {
    if !can_run() {
        return;
    }
    let vm = builder(16, 16, 1, "").build().unwrap();
    let from = Gpa::new(8 << 20).unwrap();
    let mut all = vec![1; 512 << 12];
    let resident = || vm.stats().resident;
    let before = resident();
    vm.read(from, &mut all).unwrap();
    assert!(all.iter().all(|byte| *byte == 0));
    assert_eq!(resident(), before, "nothing was touched");
    // The test touches page 3, writes pages 1 to 5, then parts of pages 5 and 6.
    let page = |n: u64| Gpa::new(from.get() + n * 4096).unwrap();
    vm.write(page(3), &[7; 8]).unwrap();
    let content: Vec<u8> = (0..5 * 4096).map(|at| (at / 64) as u8 | 1).collect();
    vm.write(page(1), &content).unwrap();
    assert_eq!(resident().get(), before.get() + 5);
    assert_eq!(vm.faults(), 0, "no page of this memory is ever missing");
    let across = Gpa::new(page(6).get() - 100).unwrap();
    vm.write(across, &[9; 200]).unwrap();
    vm.read(from, &mut all).unwrap();
    let mut expected = vec![0; 512 << 12];
    expected[4096..6 * 4096].copy_from_slice(&content);
    expected[6 * 4096 - 100..6 * 4096 + 100].fill(9);
    assert!(all == expected);
    // Unaligned reads find the same.
    let mut part = vec![1; 7 * 4096];
    vm.read(Gpa::new(page(0).get() + 5).unwrap(), &mut part)
        .unwrap();
    assert!(part == expected[5..5 + 7 * 4096]);
}
