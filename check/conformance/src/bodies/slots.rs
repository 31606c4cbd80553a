//! Memory slots are added, moved and removed while there are vCPUs.

use std::thread;
use std::time::Duration;

use lacuna_addr::{Gfn, GfnRange, Gpa, PAGE_SIZE};
use lacuna_machine::{
    Arch, Exit, GuestMemory as _, MemoryError, MemorySlotError, MemorySlots, SlotError, SlotFlags,
    SlotId, Vcpu, Vm as _, Width, mmio,
};

use super::Outcome;
use crate::backend::{Backend, Made, Request};
use crate::program::{Assembler, Code, LATER, Reg, assemble, image, ram, reported};
use crate::running::{Start, beside, guest, within};

/// Another place beyond the VM's first memory.
const ELSEWHERE: u64 = 0x6000_0000;
const SLOT: SlotId = SlotId(7);
/// 4 MiB.
const PAGES: u64 = 1024;

fn gfns(at: u64) -> GfnRange {
    let start = Gfn::new(at >> 12).expect("a frame number");
    GfnRange::new(start, PAGES).expect("inside of the address space")
}

fn gpa(at: u64) -> Gpa {
    Gpa::truncate(at)
}

/// Reports the word at [`LATER`], then adds one to it, again and again.
fn counter(arch: Arch) -> Code {
    reports_later(arch, |a| a.increment(Reg::A, 0))
}

/// Reports the word at [`LATER`], then does `what` with it, again and again. A has its address.
fn reports_later(arch: Arch, what: impl FnOnce(&mut Assembler)) -> Code {
    assemble(arch, |a| {
        a.set(Reg::A, LATER);
        let again = a.here();
        a.load(Width::Long, Reg::B, Reg::A, 0);
        a.report(Reg::B);
        what(a);
        a.jump(again);
    })
}

/// The next value that a vCPU reports. A read without memory gets `device`, and a write there is
/// ignored.
fn next_told(vcpu: &mut impl Vcpu, device: u64) -> u32 {
    loop {
        let exit = vcpu.run().expect("a vCPU that can continue");
        if let Some(value) = reported(&exit) {
            return value;
        }
        match exit {
            Exit::MmioRead { width, .. } => vcpu.complete_read(device & width.ones()),
            Exit::MmioWrite { .. } | Exit::Interrupted => {}
            exit => panic!("{exit:?}"),
        }
    }
}

fn word<M: lacuna_machine::GuestMemory>(vm: &M, at: u64) -> u32 {
    let mut word = [0; 4];
    vm.read(gpa(at), &mut word).expect("guest memory");
    u32::from_le_bytes(word)
}

fn small() -> Request {
    Request::new(16, 16, 1, "")
}

/// An address is a device until a slot is added there. The slot's content moves with it. A removed
/// slot's range is a device again, and a new slot in its place is zero.
pub fn a_slot_comes_moves_and_goes<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = counter(backend.arch());
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        assert_eq!(
            [next_told(vcpu, 7), next_told(vcpu, 8)],
            [7, 8],
            "no memory"
        );

        vm.add_memory(SLOT, gfns(LATER), SlotFlags::empty())
            .expect("room");
        // The device may have answered the first read of the increment already.
        let first = next_told(vcpu, 9);
        assert!([0, 1, 9].contains(&first), "{first}");
        let first = next_told(vcpu, 9);
        assert_eq!(
            [next_told(vcpu, 9), next_told(vcpu, 9)],
            [first + 1, first + 2]
        );
        vm.write(gpa(LATER), &100_u32.to_le_bytes())
            .expect("guest memory");
        assert_eq!(next_told(vcpu, 9), 101);

        vm.move_slot(SLOT, gfns(ELSEWHERE).start()).expect("room");
        let moved = word(&*vm, ELSEWHERE);
        assert!((101..=102).contains(&moved), "{moved}");
        next_told(vcpu, 11);
        assert_eq!(next_told(vcpu, 12), 12, "it has left");
        let refused = vm.read(gpa(LATER), &mut [0]);
        assert!(
            matches!(refused, Err(MemoryError::NoSlot(_))),
            "{refused:?}"
        );

        vm.remove_slot(SLOT).expect("it is there");
        let refused = vm.write(gpa(ELSEWHERE), &[0]);
        assert!(
            matches!(refused, Err(MemoryError::NoSlot(_))),
            "{refused:?}"
        );
        vm.add_memory(SLOT, gfns(LATER), SlotFlags::empty())
            .expect("room");
        assert_eq!(word(&*vm, LATER), 0, "nothing of the old memory");
        next_told(vcpu, 13);
        assert!(next_told(vcpu, 13) <= 2);
        Ok(())
    })
}

/// Reads of a read-only slot are memory; writes leave as device writes and change nothing, until
/// the slot is made writable.
pub fn writes_to_a_read_only_slot_exit<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = reports_later(backend.arch(), |a| {
            a.set(Reg::C, 5);
            a.store(Width::Long, Reg::A, 0, Reg::C);
        });
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        vm.add_memory(SLOT, gfns(LATER), SlotFlags::READONLY)
            .expect("room");
        vm.write(gpa(LATER), &77_u32.to_le_bytes())
            .expect("the VMM may write");
        for _ in 0..2 {
            assert_eq!(next_told(vcpu, 0), 77);
            match vcpu.run().expect("a vCPU that can continue") {
                Exit::MmioWrite { gpa, width, value } => {
                    let expected = (LATER, Width::Long, 5);
                    assert_eq!((gpa.get(), width, value & width.ones()), expected);
                }
                exit => panic!("{exit:?}"),
            }
            assert_eq!(word(&*vm, LATER), 77);
        }
        vm.set_slot_flags(SLOT, SlotFlags::empty())
            .expect("it is there");
        // A backend may execute an instruction again after the exit for its write.
        let first = next_told(vcpu, 0);
        assert!([77, 5].contains(&first), "{first}");
        assert_eq!(next_told(vcpu, 0), 5, "the guest may write now");
        Ok(())
    })
}

/// An impossible slot is refused with its reason, and changes nothing.
pub fn slots_that_cannot_be_are_refused<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let Made { vm, .. } = backend.make(&small(), &guest(backend.arch(), "hello"))?;
        let before = vm.memory_slots();
        let add = |id, at| vm.add_memory(id, gfns(at), SlotFlags::empty());
        let overlap = add(SLOT, ram(backend.arch(), 0));
        let overlaps = matches!(
            overlap,
            Err(MemorySlotError::Slot(SlotError::Overlap { .. }))
        );
        assert!(overlaps, "{overlap:?}");
        let controllers = match backend.arch() {
            Arch::X86_64 => [0xfec0_0000, 0xfee0_0000],
            _ => [mmio::DISTRIBUTOR.get(), mmio::REDISTRIBUTORS.get()],
        };
        for at in controllers {
            let ends_there = at - (PAGES - 1) * PAGE_SIZE as u64;
            let over = [
                add(SLOT, at),
                add(SLOT, ends_there),
                vm.move_slot(before[0].id, gfns(at).start()),
            ];
            for over in over {
                let over = over.expect_err("the controller's place");
                let is_reserved = matches!(over, MemorySlotError::Slot(SlotError::Reserved { .. }));
                assert!(is_reserved, "{at:#x}: {over}");
            }
        }
        let taken = add(before[0].id, LATER);
        assert!(matches!(taken, Err(MemorySlotError::Slot(_))), "{taken:?}");
        for unknown in [
            vm.remove_slot(SLOT),
            vm.move_slot(SLOT, gfns(LATER).start()),
            vm.set_slot_flags(SLOT, SlotFlags::READONLY),
        ] {
            let is_unknown = matches!(
                unknown,
                Err(MemorySlotError::Slot(SlotError::Unknown { .. }))
            );
            assert!(is_unknown, "{unknown:?}");
        }
        assert_eq!(vm.memory_slots(), before);
        Ok(())
    })
}

/// Slots are added, moved and removed beside an overcommitted guest that checks its memory.
pub fn slots_change_beside_a_guest<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request::new(16, 8, 2, "rounds=1");
        let (finished, ()) = beside(
            &backend,
            &request,
            &guest(backend.arch(), "verify"),
            Start::Free,
            |running| {
                let vm = running.vm;
                for round in 0..20_u32 {
                    vm.add_memory(SLOT, gfns(LATER), SlotFlags::empty())
                        .expect("room");
                    vm.write(gpa(LATER), &round.to_le_bytes())
                        .expect("guest memory");
                    vm.move_slot(SLOT, gfns(ELSEWHERE).start()).expect("room");
                    thread::sleep(Duration::from_millis(1));
                    assert_eq!(word(vm, ELSEWHERE), round);
                    vm.remove_slot(SLOT).expect("it is there");
                }
            },
        )?;
        let pages_in = finished.passed().vm.stats().pages_in;
        assert!(pages_in > 100, "{pages_in}");
        Ok(())
    })
}
