//! Memory of each kind: guests run in it, its pages arrive from a source, and can be discarded.

use crate::common;

use common::{builder, can_run, pass};
use lacuna_addr::{Gfn, GfnRange, Gpa, PAGE_SIZE};
use lacuna_kvm::{KvmError, MemoryKind, VmBuilder};
use lacuna_machine::{
    Builder as _, Exit, GuestMemory as _, Logging, MemoryFaultFlags, MemorySlots as _,
    MissingMemory as _, PageSource, SlotFlags, Vcpu as _, Vm as _, harvest, set_logging_everywhere,
};
use lacuna_skip::{HugePages, test};
use lacuna_source::Zeros;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

const KINDS: [MemoryKind; 3] = [MemoryKind::Linux, MemoryKind::Shared, MemoryKind::Hugetlbfs];

/// 32 MiB of this kind. None of it may be evicted, whatever the budget.
fn of(kind: MemoryKind) -> VmBuilder {
    VmBuilder {
        memory_kind: kind,
        ..builder(32, 2, 2, "rounds=1")
    }
}

/// `None` if this machine has no huge pages for it; the skip is recorded then.
fn built(builder: &VmBuilder) -> Option<Arc<lacuna_kvm::Vm>> {
    match builder.build() {
        Ok(vm) => Some(vm),
        Err(KvmError::Memory(why)) if builder.memory_kind == MemoryKind::Hugetlbfs => {
            lacuna_skip::skip(why);
            None
        }
        Err(why) => panic!("{why}"),
    }
}

#[test]
fn guests_run_in_memory_of_each_kind() {
    if !can_run() {
        return;
    }
    let _reserved = HugePages::reserve(16);
    for kind in KINDS {
        let source = Some(Arc::new(Zeros) as Arc<dyn PageSource>);
        for source in [None, source] {
            let builder = VmBuilder { source, ..of(kind) };
            if built(&builder).is_some() {
                let (end, _) = pass(&builder, "verify");
                let stats = end.vm.stats();
                assert!(stats.resident.bytes() > 16 << 20, "{kind:?} {stats:?}");
                assert_eq!(stats.pages_out, 0);
            }
        }
    }
}

/// The bytes of a shared file are the guest's memory, in both directions.
#[test]
fn another_process_sees_a_shared_file() {
    if !can_run() {
        return;
    }
    let _reserved = HugePages::reserve(16);
    for kind in [MemoryKind::Shared, MemoryKind::Hugetlbfs] {
        let Some(vm) = built(&of(kind)) else { return };
        let file = vm.shared_file().expect("it is in a file").file;
        let file = File::from(file.try_clone_to_owned().unwrap());
        let at = Gpa::new(5 << 20).unwrap();
        vm.write(at, b"from the VMM").unwrap();
        let mut bytes = [0; 12];
        if kind == MemoryKind::Shared {
            file.read_exact_at(&mut bytes, at.get()).unwrap();
            assert_eq!(&bytes, b"from the VMM");
            // The VMM has not touched this page, and its content counts.
            file.write_all_at(b"from outside", at.get() + (1 << 20))
                .unwrap();
            let there = at.checked_add(1 << 20).unwrap();
            let mut page = vec![0; 8 * PAGE_SIZE];
            vm.read(there, &mut page).unwrap();
            assert_eq!(&page[..12], b"from outside");
        }
    }
    assert!(built(&of(MemoryKind::Linux)).is_some_and(|vm| vm.shared_file().is_none()));
}

/// Discarded pages read as zeros, take no memory, and are dirty.
#[test]
fn pages_of_each_kind_are_discarded() {
    if !can_run() {
        return;
    }
    let _reserved = HugePages::reserve(16);
    for kind in KINDS {
        let Some(vm) = built(&of(kind)) else { continue };
        let first = Gfn::new(512).unwrap();
        let pages = GfnRange::new(first, 1024).unwrap();
        vm.write(first.gpa(), &vec![7; 1024 * PAGE_SIZE]).unwrap();
        set_logging_everywhere(&*vm, Logging::LAZY).unwrap();
        let before = vm.stats().resident.get();
        vm.balloon().expect("Linux memory").discard(pages).unwrap();
        assert_eq!(vm.stats().resident.get(), before - 1024, "{kind:?}");
        let mut read = vec![1; 1024 * PAGE_SIZE];
        vm.read(first.gpa(), &mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 0), "{kind:?}");
        let mut dirty = 0;
        harvest(&*vm, |_, page| {
            dirty += usize::from((512..1536).contains(&page))
        })
        .unwrap();
        assert_eq!(dirty, 1024, "{kind:?}");
        let part = GfnRange::new(first, 1).unwrap();
        let refused = vm.balloon().unwrap().discard(part);
        assert_eq!(refused.is_err(), kind == MemoryKind::Hugetlbfs);
    }
}

/// A guest's memory is in huge pages where they are wanted and possible, and is discarded in small
/// ones.
#[test]
fn private_memory_may_have_huge_pages() {
    if !can_run() {
        return;
    }
    let wanted = |huge| VmBuilder {
        huge,
        ..of(MemoryKind::Linux)
    };
    let (end, _) = pass(&wanted(lacuna_kvm::HugePages::Always), "verify");
    let first = Gfn::new(513).unwrap();
    let pages = GfnRange::new(first, 3).unwrap();
    end.vm.write(first.gpa(), &[1; 3 * PAGE_SIZE]).unwrap();
    let before = end.vm.stats().resident.get();
    end.vm.balloon().unwrap().discard(pages).unwrap();
    assert_eq!(end.vm.stats().resident.get(), before - 3);
    let source = Some(Arc::new(Zeros) as Arc<dyn PageSource>);
    for refused in [
        VmBuilder {
            source,
            ..wanted(lacuna_kvm::HugePages::Always)
        },
        VmBuilder {
            memory_kind: MemoryKind::Shared,
            ..wanted(lacuna_kvm::HugePages::Madvise)
        },
    ] {
        let error = refused.build().map(drop).unwrap_err();
        assert!(matches!(error, KvmError::HugePages), "{error}");
    }
}

/// A vCPU exits for a huge page as a whole, and gets it when its last part is provided.
#[test]
fn a_huge_page_is_in_place_when_all_parts_are_provided() {
    if !can_run() {
        return;
    }
    let _reserved = HugePages::reserve(16);
    let builder = VmBuilder {
        source: Some(Arc::new(Zeros) as Arc<dyn PageSource>),
        vcpus: 1,
        ..of(MemoryKind::Hugetlbfs)
    };
    let Some(vm) = built(&builder) else { return };
    let mut vcpus = vm
        .boot(&common::image("verify"), &builder.full_command_line())
        .unwrap();
    for slot in vm.memory_slots() {
        vm.set_slot_flags(slot.id, SlotFlags::EXIT_ON_MISSING)
            .unwrap();
    }
    for _ in 0..100 {
        let Exit::MemoryFault {
            gpa, size, flags, ..
        } = vcpus[0].run().unwrap()
        else {
            continue;
        };
        assert_eq!((gpa.get() % size, size), (0, 2 << 20));
        assert!(flags.intersects(MemoryFaultFlags::READ | MemoryFaultFlags::WRITE));
        assert_eq!(vm.unit().get(), 512);
        let all = vec![0; size as usize];
        assert_eq!(vm.provide(gpa, &all[PAGE_SIZE..]).unwrap().taken, 511);
        let Exit::MemoryFault { gpa: again, .. } = vcpus[0].run().unwrap() else {
            panic!("a part of it is missing");
        };
        assert_eq!(again, gpa);
        assert_eq!(vm.provide(gpa, &all).unwrap().taken, 1);
        return;
    }
    panic!("it does not exit for a missing page");
}
