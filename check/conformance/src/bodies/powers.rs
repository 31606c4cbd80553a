//! Optional features of a backend, beyond the common interface.

use std::thread;
use std::time::Duration;

use lacuna_addr::{GfnRange, PAGE_SIZE, PageCount, PageStates};
use lacuna_machine::settings::SettingsChange;
use lacuna_machine::{
    Apf, Detection, DirtyError, DirtyTracking as _, GuestMemory as _, MemorySlots as _, SlotId,
    Vcpu as _, Vm as _, Width,
};

use super::Outcome;
use crate::backend::{Backend, Lacks, Made, Request, Unit, VcpuOf, harvest, start_tracking};
use crate::program::{Reg, assemble, gpa, image, ram, reported};
use crate::running::{Running, Start, beside, guest, within};

fn lacks<T>(power: Option<T>, why: &str) -> Result<T, Lacks> {
    power.ok_or_else(|| Lacks::because(why))
}

/// Runs `verify` with late pages, and calls `monitor` until the guest has ended.
fn beside_verify<B: Backend>(
    backend: &B,
    apf: Apf,
    mut monitor: impl FnMut(&Running<'_, B>, usize) -> Outcome,
) -> Outcome {
    let request = Request {
        apf,
        latency: Duration::from_micros(200),
        ..Request::new(24, 12, 2, "rounds=1")
    };
    let (finished, found) = beside(
        backend,
        &request,
        &guest(backend.arch(), "verify"),
        Start::Free,
        |running| {
            let mut rounds = (0..).take_while(|_| !running.is_over());
            rounds.try_for_each(|round| {
                monitor(running, round)?;
                thread::sleep(Duration::from_millis(2));
                Ok(())
            })
        },
    )?;
    drop(finished.passed());
    found
}

/// Huge leaves of a running guest are disallowed and allowed, again and again.
pub fn huge_pages_are_disallowed_and_allowed<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        beside_verify(&backend, Apf::Off, |running, _| {
            let why = "kvm: the size of pages is Linux's choice";
            let policy = lacks(running.vm.huge_page_policy(), why)?;
            let gfns = running.vm.memory_slots()[0].gfns;
            policy.disallow_huge(gfns).expect("room for tables");
            thread::sleep(Duration::from_millis(1));
            policy.allow_huge(gfns);
            Ok(())
        })
    })
}

/// Asynchronous page faults of a running guest are switched off and on, again and again.
pub fn async_faults_are_switched<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        beside_verify(&backend, Apf::On, |running, round| {
            let why = "kvm: whether a guest gets events is fixed with its CPUID";
            let switch = lacks(running.vm.apf_switch(), why)?;
            switch.set_apf([Apf::Off, Apf::On][round % 2]);
            Ok(())
        })
    })
}

/// Every setting that this VM can change changes at random while the guest runs. The guest finds
/// each of its pages as it has written it.
pub fn settings_change_at_random<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    let mut random = fastrand::Rng::with_seed(29);
    within(move || {
        beside_verify(&backend, Apf::On, |running, round| {
            let vm = running.vm;
            let now = vm.settings();
            let mut pick = |is_fixed: bool| !is_fixed && random.bool();
            let change = SettingsChange {
                async_faults: pick(now.async_faults.fixed.is_some()).then_some(round % 2 == 0),
                huge_pages: pick(now.huge_pages.fixed.is_some()).then_some(round % 3 == 0),
                detection: pick(now.detection.fixed.is_some())
                    .then_some([Detection::WriteProtect, Detection::Pml][round / 2 % 2]),
                resident: pick(now.resident.fixed.is_some()).then_some(PageCount::from_bytes(
                    [4 << 20, 7 << 20, 12 << 20][round % 3],
                )),
                source_delay: pick(now.source_delay.fixed.is_some())
                    .then_some(Duration::from_micros([0, 300][round % 2])),
            };
            let changed = vm.change_settings(&change).expect("no setting is fixed");
            if change.huge_pages.is_some() {
                assert_eq!(changed.huge_pages.value, change.huge_pages);
            }
            let map = vm.page_map(100);
            let pages =
                |cell: &PageStates| cell.resident + cell.swapped + cell.missing + cell.untouched;
            let counted: u64 = map.cells.iter().map(pages).sum();
            assert_eq!(counted, PageCount::from_bytes(24 << 20).get());
            assert!(map.cells.len() <= 100 && map.pages_per_cell >= 61);
            Ok(())
        })
    })
}

/// A setting that a VM cannot change is refused with its name, and nothing else changes.
pub fn fixed_settings_are_refused<B: Backend>(backend: &B) -> Outcome {
    let request = Request::new(16, 16, 1, "");
    let Made { vm, .. } = backend.make(&request, &guest(backend.arch(), "hello"))?;
    let before = vm.settings();
    let change = SettingsChange {
        async_faults: Some(true),
        source_delay: before.source_delay.value.map(|_| Duration::from_secs(1)),
        ..SettingsChange::default()
    };
    let refused = vm.change_settings(&change).expect_err("not offered");
    assert_eq!(refused.setting, "async_faults");
    let change = SettingsChange {
        resident: Some(PageCount::new(3)),
        ..change
    };
    let change = SettingsChange {
        async_faults: None,
        ..change
    };
    let refused = vm.change_settings(&change).expect_err("too small");
    assert_eq!(refused.setting, "resident");
    assert_eq!(vm.settings(), before);
    Ok(())
}

/// The detection of writes changes while slots log and the guest writes.
pub fn detection_is_switched<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        beside_verify(&backend, Apf::Off, |running, round| {
            let why = "kvm: how writes are detected is the host kernel's choice";
            let choice = lacks(running.vm.detection(), why)?;
            start_tracking(running.vm);
            choice.choose([Detection::WriteProtect, Detection::Pml][round % 2]);
            harvest(running.vm);
            Ok(())
        })
    })
}

/// Dirty bits are read without being taken, and cleared by whole words.
pub fn a_bitmap_is_read_and_cleared_in_two_steps<B: Backend>(backend: &B) -> Outcome {
    let Made { vm, .. } = backend.make(
        &Request::new(16, 16, 1, ""),
        &guest(backend.arch(), "hello"),
    )?;
    let (id, mut words) = (vm.memory_slots()[0].id, vec![0; 64]);
    let log = lacks(
        vm.two_step_log(),
        "no log that is read first and cleared later",
    )?;
    let not_logging = vm.get_dirty(id, &mut words);
    assert_eq!(not_logging, Err(DirtyError::NotLogging(id)));
    start_tracking(&*vm);
    for page in [0, 70, 4095] {
        let at = gpa(backend.arch(), page * PAGE_SIZE as u64);
        vm.write(at, &[1]).expect("guest memory");
    }
    for _ in 0..2 {
        log.peek_dirty(id, &mut words).expect("a slot that logs");
        assert_eq!((words[0], words[1], words[63]), (1, 1 << 6, 1 << 63));
    }
    log.clear_dirty(id, 64, 64, &mut words[1..2])
        .expect("a whole word");
    log.peek_dirty(id, &mut words).expect("a slot that logs");
    assert_eq!((words[0], words[1], words[63]), (1, 0, 1 << 63));
    for (first, pages) in [(1, 64), (4096, 64)] {
        let refused = log.clear_dirty(id, first, pages, &mut [1]);
        assert!(matches!(refused, Err(DirtyError::Clear(_))), "{refused:?}");
    }
    vm.get_dirty(id, &mut words).expect("a slot that logs");
    assert_eq!((words[0], words[1], words[63]), (1, 0, 1 << 63));
    assert!(vm.get_dirty(SlotId(9), &mut words).is_err());
    assert!(
        vm.get_dirty(id, &mut words[1..]).is_err(),
        "a buffer that is too short"
    );
    Ok(())
}

/// The offset of the page that the program below reads.
const TAKEN_BACK: u64 = 4 << 20;

fn next_told<B: Backend>(vcpu: &mut VcpuOf<B>) -> u32 {
    match vcpu.run() {
        Ok(exit) => reported(&exit).unwrap_or_else(|| panic!("{exit:?}")),
        other => panic!("{other:?}"),
    }
}

/// A discarded page is dirty and reads as zeros, also for a vCPU that has it in its TLB.
pub fn discarded_pages_are_zeros<B: Backend>(backend: &B) -> Outcome {
    let arch = backend.arch();
    let code = assemble(arch, |a| {
        a.set(Reg::A, ram(arch, TAKEN_BACK));
        let again = a.here();
        a.load(Width::Long, Reg::B, Reg::A, 0);
        a.increment(Reg::A, 0);
        a.report(Reg::B);
        a.jump(again);
    });
    let backend = backend.clone();
    within(move || {
        let request = Request {
            unit: Unit::Page,
            ..Request::new(16, 16, 1, "")
        };
        let Made { vm, mut vcpus, .. } = backend.make(&request, &image(&code))?;
        let balloon = lacks(vm.balloon(), "this VM's pages cannot be discarded")?;
        let at = gpa(arch, TAKEN_BACK);
        let vcpu = &mut vcpus[0];
        vm.write(at, &77u32.to_le_bytes()).expect("guest memory");
        assert_eq!([0; 2].map(|_| next_told::<B>(vcpu)), [77, 78]);
        let pages = GfnRange::new(at.gfn(), 700).expect("two pages");
        balloon.discard(pages).expect("pages of a slot");
        assert_eq!([0; 2].map(|_| next_told::<B>(vcpu)), [0, 1]);
        vm.write(at, &5u32.to_le_bytes()).expect("guest memory");
        assert_eq!(next_told::<B>(vcpu), 5);
        start_tracking(&*vm);
        drop(harvest(&*vm));
        let one = GfnRange::new(at.gfn(), 1).expect("a page");
        balloon.discard(one).expect("a page of a slot");
        let index = TAKEN_BACK as usize / PAGE_SIZE;
        let dirty = harvest(&*vm);
        assert!(dirty.iter().any(|&(_, page)| page == index), "{dirty:?}");
        assert_eq!(next_told::<B>(vcpu), 0);
        let beyond = GfnRange::new(gpa(arch, 15 << 20).gfn(), 600).expect("pages");
        assert!(balloon.discard(beyond).is_err());
        Ok(())
    })
}
