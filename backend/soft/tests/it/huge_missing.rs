//! A source or the VMM provides guest memory in huge pages of hugetlbfs, 2 MiB at a time.

use crate::common;

use common::{Lines, builder_for, image_for, on_both, start};
use lacuna_machine::{
    Apf, Arch, Builder as _, Ending, Exit, MemorySlots as _, MissingMemory as _, Next, PageRequest,
    PageSource, PlatformDevices, SlotFlags, Vcpu as _, Vm as _, dispatch,
};
use lacuna_skip::HugePages;
use lacuna_soft::{HostError, LinuxError, MemoryKind, SoftError, Vcpu, Vm, VmBuilder};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

on_both!(exits_name_what_comes_together, the_run_loop_fetches_units);

/// 2 MiB.
const UNIT: u64 = 2 << 20;
/// The guest's memory in MiB.
const MEMORY: u64 = 16;

/// Provides zeros at once, and counts the requests.
#[derive(Default)]
struct Zeros(AtomicU64);

impl PageSource for Zeros {
    fn describe(&self) -> String {
        "zeros".into()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.fetch_add(1, Ordering::Relaxed);
        let _ = request.provide(&[0; 4096]);
    }
}

/// A guest with slots that exit. Ends the test if there is no reserve, or no userfaultfd.
fn boot(arch: Arch, apf: Apf, source: &Arc<Zeros>) -> (HugePages, Arc<Vm>, Vec<Vcpu>) {
    let image = image_for(arch, "bm");
    let reserved = HugePages::reserve(MEMORY / 2);
    let builder = VmBuilder {
        memory_kind: MemoryKind::Hugetlbfs,
        apf,
        source: Some(Arc::clone(source) as Arc<dyn PageSource>),
        ..builder_for(arch, (MEMORY, 24), 2, "faulters=2 workers=1 accesses=500")
    };
    let vm = match builder.build() {
        Err(SoftError::Host(refused @ HostError::Linux(LinuxError::Userfaultfd(_)))) => {
            lacuna_skip::skip_test(refused)
        }
        made => made.unwrap(),
    };
    let vcpus = vm.boot(&image, &builder.full_command_line()).unwrap();
    for slot in vm.memory_slots() {
        vm.set_slot_flags(slot.id, SlotFlags::EXIT_ON_MISSING)
            .unwrap();
    }
    (reserved, vm, vcpus)
}

/// Each exit names 2 MiB, which the VMM provides.
fn exits_name_what_comes_together(arch: Arch) {
    let source = Arc::default();
    let (_reserved, vm, vcpus) = boot(arch, Apf::Off, &source);
    let before = source.0.load(Ordering::Relaxed);
    let devices = PlatformDevices::of(arch, Lines::default().sink());
    let exits = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for mut vcpu in vcpus {
            let (vm, devices, exits) = (&vm, &devices, &exits);
            scope.spawn(move || {
                loop {
                    let exit = vcpu.run();
                    if let Ok(Exit::MemoryFault { gpa, size, .. }) = exit {
                        assert_eq!((gpa.get() % UNIT, size), (0, UNIT));
                        let part = vm.provide(gpa, &[0; 4096]).unwrap();
                        assert_eq!(part.taken + part.late, 1);
                        let provided = vm.provide(gpa, &vec![0; size as usize]).unwrap();
                        assert_eq!(provided.taken + provided.late, 512);
                        exits.fetch_add(u64::from(provided.taken > 0), Ordering::Relaxed);
                    } else if dispatch(&mut vcpu, exit, devices, &**vm) == Next::Stop {
                        break;
                    }
                }
            });
        }
    });
    assert_eq!(devices.ending(), Some(Ending::Exited(0)));
    let exits = exits.into_inner();
    assert!((1..=MEMORY / 2).contains(&exits), "{exits} units");
    let asked = source.0.load(Ordering::Relaxed) - before;
    assert_eq!(asked, 0, "every access was a vCPU's, or found its unit");
    vm.mmu().verify();
    vm.host().verify();
}

/// The run loop accepts the exits, and asks the source for the units.
fn the_run_loop_fetches_units(arch: Arch) {
    for apf in [Apf::Off, Apf::On] {
        let source = Arc::default();
        let (_reserved, vm, vcpus) = boot(arch, apf, &source);
        let lines = Lines::default();
        let devices = Arc::new(PlatformDevices::of(arch, lines.sink()));
        start(&vm, vcpus, &devices).wait();
        assert_eq!(
            devices.ending(),
            Some(Ending::Exited(0)),
            "{}",
            lines.text()
        );
        let asked = source.0.load(Ordering::Relaxed);
        assert_eq!(asked % 512, 0, "{asked} pages");
        assert!(asked <= MEMORY * 256, "each unit once: {asked} pages");
        vm.mmu().verify();
        vm.host().verify();
    }
}
