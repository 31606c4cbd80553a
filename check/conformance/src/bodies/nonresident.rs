//! Slots that exit for every page without a frame: missing pages, and evicted ones.

use lacuna_addr::GfnRange;
use lacuna_machine::{
    Apf, Exit, GuestMemory as _, MemoryFaultFlags, Provided, TokenError, Vcpu as _, Vm as _,
};

use super::Outcome;
use super::missing::{
    READ, WRITTEN, Words, fault, page_of, places, program, request, source_page, value, with_exits,
};
use crate::backend::{Backend, Made, Missing, Request, VcpuOf};
use crate::program::{Interrupts, image, reported};
use crate::running::within;

/// The first byte and the length of a range that has more pages than may be resident.
const PRESSURE: (u64, usize) = (4 << 20, 6 << 20);

/// Runs the vCPU, between writes to `PRESSURE`, until it exits for an evicted page. Returns the
/// exit.
fn evicted<B: Backend>(backend: &B, vm: &B::Vm, vcpu: &mut VcpuOf<B>) -> Exit {
    let at = places(backend);
    loop {
        vm.write(at(PRESSURE.0), &vec![1; PRESSURE.1]).unwrap();
        match vcpu.run().expect("a vCPU that can continue") {
            exit @ Exit::MemoryFault { .. } => return exit,
            other => assert!(reported(&other).is_some() || other == Exit::Interrupted),
        }
    }
}

/// Provided pages that reclaim evicts cause exits again. The exit has the flag `EVICTED`; `provide`
/// leaves the page as it is, and `populate` brings it back. A refused token makes the vCPU wait for
/// one read, and no longer.
pub fn a_vcpu_exits_for_evicted_pages<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let source = Words::at_once();
        let code = program(backend.arch(), Interrupts::Off);
        let request = Request {
            resident: 4,
            ..request(&source, Missing::ExitsIfNonresident)
        };
        let Made { vm, mut vcpus, .. } = backend.make(&request, &image(&code))?;
        let vcpu = &mut vcpus[0];
        let memory = vm.missing_memory().expect("it has a source");
        for (page, word) in [(READ, 77), (WRITTEN, 9)] {
            let (gpa, flags, _) = fault::<B>(vcpu);
            assert_eq!(gpa, at(page));
            assert!(!flags.contains(MemoryFaultFlags::EVICTED), "{flags:?}");
            memory.provide(gpa, &page_of(word)).unwrap();
        }
        assert_eq!(value::<B>(vcpu), 77);
        for _ in 0..3 {
            let Exit::MemoryFault {
                gpa, flags, token, ..
            } = evicted(&backend, &vm, vcpu)
            else {
                unreachable!("`evicted` returns only these")
            };
            assert!(flags.contains(MemoryFaultFlags::EVICTED), "{flags:?}");
            let late = memory.provide(gpa, &page_of(78));
            assert_eq!(late, Ok(Provided { taken: 0, late: 1 }));
            assert_eq!(vcpu.accept(token), Err(TokenError::CannotNotify));
            // The next run waits for the read, which it begins itself. Other pages may be evicted,
            // too, such as the guest's page tables.
            loop {
                match vcpu.run().expect("a vCPU that can continue") {
                    Exit::MemoryFault { gpa: next, .. } => {
                        assert_ne!(next, gpa, "a second exit for one wait");
                        memory.populate(GfnRange::page(next.gfn())).unwrap();
                    }
                    Exit::Interrupted => {}
                    other => break assert_eq!(reported(&other), Some(77)),
                }
            }
        }
        let asked = source.asked();
        assert!(
            [READ, WRITTEN]
                .iter()
                .all(|page| !asked.contains(&source_page(*page)))
        );
        Ok(())
    })
}

/// `verify`, whose pages are evicted and exit, with two vCPUs and async faults.
pub fn nothing_is_lost_with_exits_for_evicted_pages<B: Backend>(backend: &B) -> Outcome {
    with_exits(backend, Apf::On, Missing::ExitsIfNonresident)
}
