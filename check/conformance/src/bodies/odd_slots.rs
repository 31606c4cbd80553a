//! Memory slots of any size, logs in odd ranges, and both while other threads use them. Each call
//! succeeds, or is refused with an error that says what to do. None panics or hangs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use lacuna_addr::{Gfn, GfnRange, Gpa};
use lacuna_machine::{
    DirtyError, DirtyTracking as _, ErrorKind, Exit, GuestMemory as _, Kick as _, Logging,
    MemoryError, MemorySlots as _, SlotFlags, SlotId, Vcpu as _, Vm as _, set_logging_everywhere,
};

use super::Outcome;
use super::state::small;
use crate::backend::{Backend, Built, Lacks, Made, harvest, start_tracking};
use crate::program::{Condition, LATER, Reg, assemble, gpa, image};
use crate::running::{guest, within};

/// Ends the loops of other threads, also after a failed assertion.
struct Done<'a>(&'a AtomicBool);

impl Done<'_> {
    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn gfns(first: u64, pages: u64) -> GfnRange {
    let first = Gfn::new(first).expect("a frame number");
    GfnRange::new(first, pages).expect("inside of the address space")
}

/// Slots of any size at any place are added, or refused with nothing changed.
pub fn slots_of_any_size_and_place<B: Backend>(backend: &B) -> Outcome {
    const FRAMES: u64 = 1 << 36;
    let backend = backend.clone();
    within(move || {
        let Made { vm, .. } = backend.make(&small(), &guest(backend.arch(), "hello"))?;
        let before = vm.memory_slots();
        for (first, pages) in [
            (0, FRAMES),
            (1 << 18, FRAMES - (1 << 18)),
            (1 << 20, 1 << 35),
            (1 << 20, 1 << 32),
            (FRAMES - 1, 1),
            (0xf_ffff, 2),
            (0xf_ec00, 1),
            (0xf_ee00, 1),
            (0xf_ffbc, 4),
        ] {
            for id in [SlotId(7), SlotId(u16::MAX)] {
                match vm.add_memory(id, gfns(first, pages), SlotFlags::empty()) {
                    Ok(()) => vm.remove_slot(id).expect("it is there"),
                    Err(error) => {
                        assert!(error.to_string().contains(&id.to_string()), "{error}");
                        // Only the size depends on the host: a number and an address do not.
                        let of_size = error.kind() == ErrorKind::Host && pages > 1 << 31;
                        assert!(of_size || error.kind() == ErrorKind::Request, "{error}");
                    }
                }
                assert_eq!(vm.memory_slots(), before);
            }
        }
        let id = before[0].id;
        for first in [FRAMES - 1, FRAMES - before[0].gfns.pages() + 1] {
            let start = Gfn::new(first).expect("a frame number");
            assert!(vm.move_slot(id, start).is_err());
        }
        vm.move_slot(id, before[0].gfns.start()).expect("its place");
        assert!(vm.set_slot_flags(id, SlotFlags::all()).is_err());
        assert_eq!(vm.memory_slots(), before);
        Ok(())
    })
}

/// If a slot is removed while vCPUs and the VMM use it, its range is a device from then on. No page
/// counts as lost.
pub fn a_slot_goes_while_it_is_used<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = assemble(backend.arch(), |a| {
            a.set(Reg::B, LATER + (64 << 12));
            let again = a.here();
            a.set(Reg::A, LATER);
            let page = a.here();
            a.increment(Reg::A, 0);
            a.add_immediate(Reg::A, 4096);
            a.branch(Condition::Less, Reg::A, Reg::B, page);
            a.report(Reg::A);
            a.jump(again);
        });
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        let done = AtomicBool::new(false);
        let (vm, done) = (&*vm, &done);
        thread::scope(|scope| {
            let end = Done(done);
            scope.spawn(move || {
                let done = Done(done);
                while !done.is_set() {
                    if let Exit::MmioRead { .. } = vcpu.run().expect("a vCPU that can continue") {
                        vcpu.complete_read(0);
                    }
                }
            });
            scope.spawn(move || {
                let (done, mut bytes) = (Done(done), [0; 3 * 4096]);
                while !done.is_set() {
                    for refused in [
                        vm.read(Gpa::truncate(LATER), &mut bytes).err(),
                        vm.write(Gpa::truncate(LATER), &bytes).err(),
                    ] {
                        let gone = matches!(refused, None | Some(MemoryError::NoSlot(_)));
                        assert!(gone, "{refused:?}");
                    }
                }
            });
            for round in 0..20 {
                let id = SlotId(7);
                vm.add_memory(id, gfns(LATER >> 12, 64), SlotFlags::empty())
                    .expect("room");
                (0..round).for_each(|_| thread::yield_now());
                vm.remove_slot(id).expect("it is there");
            }
            drop(end);
            vm.kick_all();
        });
        Ok(())
    })
}

/// Several threads add and remove slots with the same numbers. An existing slot has its memory.
pub fn slots_with_one_number_are_added_and_removed_by_all<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let Built { vm, .. } = backend.build(&small())?;
        let before = vm.memory_slots();
        let work = |seed| {
            let (vm, mut rng) = (&*vm, fastrand::Rng::with_seed(seed));
            move || {
                for _ in 0..3000 {
                    let number = rng.u16(5..8);
                    let (id, at) = (SlotId(number), LATER + (u64::from(number) << 24));
                    let change = match rng.u8(..3) {
                        0 => vm.remove_slot(id).err(),
                        _ => vm
                            .add_memory(id, gfns(at >> 12, 4), SlotFlags::empty())
                            .err(),
                    };
                    let refused = change.map(|error| error.kind());
                    assert!(matches!(refused, None | Some(ErrorKind::Request)));
                    let written = vm.write(Gpa::truncate(at), &[1]);
                    let there = matches!(written, Ok(()) | Err(MemoryError::NoSlot(_)));
                    assert!(there, "{written:?}");
                }
            }
        };
        thread::scope(|scope| (1..=3).for_each(|seed| drop(scope.spawn(work(seed)))));
        for number in 5..8 {
            let _ = vm.remove_slot(SlotId(number));
        }
        assert_eq!(vm.memory_slots(), before);
        Ok(())
    })
}

/// A log begins, is harvested and ends while slots are added and removed.
pub fn logs_are_switched_while_slots_come_and_go<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let Built { vm, .. } = backend.build(&small())?;
        let done = AtomicBool::new(false);
        let (vm, done) = (&*vm, &done);
        thread::scope(|scope| {
            let _end = Done(done);
            scope.spawn(move || {
                let done = Done(done);
                while !done.is_set() {
                    start_tracking(vm);
                    harvest(vm);
                    set_logging_everywhere(vm, Logging::Off).expect("slots of this VM");
                }
            });
            for _ in 0..500 {
                let id = SlotId(7);
                vm.add_memory(id, gfns(LATER >> 12, 64), SlotFlags::empty())
                    .expect("room");
                vm.remove_slot(id).expect("it is there");
            }
        });
        Ok(())
    })
}

/// Ranges outside of a two-step log are refused. An empty range changes nothing.
pub fn odd_ranges_of_a_log<B: Backend>(backend: &B) -> Outcome {
    let Built { vm, .. } = backend.build(&small())?;
    let (id, mut words) = (vm.memory_slots()[0].id, vec![0; 64]);
    let log = vm.two_step_log();
    let log = log.ok_or_else(|| Lacks::because("no log that is read first"))?;
    start_tracking(&*vm);
    vm.write(gpa(backend.arch(), 0), &[1])
        .expect("guest memory");
    for (first, pages, mask) in [
        (usize::MAX, usize::MAX, 0),
        (usize::MAX & !63, 64, 1),
        (0, usize::MAX, 1),
        (64, usize::MAX & !63, 1),
        (0, 64, 0),
        (0, 64, 2),
        (4096, 64, 1),
        (1, 1, 1),
    ] {
        let refused = log.clear_dirty(id, first, pages, &mut vec![u64::MAX; mask]);
        assert!(matches!(refused, Err(DirtyError::Clear(_))), "{refused:?}");
    }
    for first in [0, 64, 4096] {
        assert_eq!(log.clear_dirty(id, first, 0, &mut []), Ok(()), "{first}");
    }
    assert!(log.peek_dirty(id, &mut []).is_err());
    log.peek_dirty(id, &mut words).expect("a slot that logs");
    assert_eq!(words[0], 1);
    Ok(())
}

/// A call allows huge pages in a range without a disallowance, or after the slot has moved away.
pub fn huge_pages_are_allowed_more_often_than_disallowed<B: Backend>(backend: &B) -> Outcome {
    let Built { vm, .. } = backend.build(&small())?;
    let policy = vm.huge_page_policy();
    let policy = policy.ok_or_else(|| Lacks::because("kvm: huge pages are Linux's choice"))?;
    let slot = vm.memory_slots()[0];
    let everywhere = gfns(0, 1 << 36);
    policy.allow_huge(everywhere);
    policy
        .disallow_huge(everywhere)
        .expect("no table is needed");
    vm.move_slot(slot.id, gfns(LATER >> 12, 1).start())
        .expect("room");
    policy.allow_huge(everywhere);
    policy.disallow_huge(slot.gfns).expect("no slot is there");
    vm.move_slot(slot.id, slot.gfns.start()).expect("room");
    policy.allow_huge(slot.gfns);
    vm.write(gpa(backend.arch(), 0), &[1])
        .expect("guest memory");
    assert_eq!(vm.memory_slots(), [slot]);
    Ok(())
}
