//! Exits on missing memory: what only this backend does.

mod common;

use common::{boot_with, builder};
use lacuna_machine::{
    Apf, Exit, FaultToken, MemoryFaultFlags, MemorySlots as _, MissingMemory as _, PageRequest,
    PageSource, SlotFlags, TokenError, Told, Vcpu as _, dispatch,
};
use lacuna_skip::test;
use lacuna_soft::VmBuilder;
use lacuna_sync::{Clock, HostClock};
use std::sync::Arc;

/// Provides zeros at once.
struct Zeros;

impl PageSource for Zeros {
    fn describe(&self) -> String {
        "zeros".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = request.provide(&[0; 4096]);
    }
}

/// A reset forgets a token that is accepted, and one that is pending. What the VMM says about them
/// later has one outcome each.
#[test]
fn tokens_are_forgotten_at_a_reset() {
    let builder = VmBuilder {
        apf: Apf::On,
        source: Some(Arc::new(Zeros)),
        ..builder(16, 24, 1, "faulters=4 workers=1 accesses=100")
    };
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let (vm, mut vcpus, devices, _) = boot_with(&builder, &host, clock, "bm", |_| ());
    for slot in vm.memory_slots() {
        let set = vm.set_slot_flags(slot.id, SlotFlags::EXIT_ON_MISSING);
        set.unwrap();
    }
    let vcpu = &mut vcpus[0];
    let next = |vcpu: &mut lacuna_soft::Vcpu, flag: MemoryFaultFlags| -> FaultToken {
        loop {
            match vcpu.run() {
                Ok(Exit::MemoryFault { flags, token, .. }) if flags.contains(flag) => return token,
                Ok(Exit::MemoryFault { gpa, .. }) => {
                    vm.provide(gpa, &[0; 4096]).unwrap();
                }
                exit => _ = dispatch(vcpu, exit, &devices, &*vm),
            }
            assert_eq!(devices.ending(), None);
        }
    };
    let accepted = next(vcpu, MemoryFaultFlags::CAN_TELL);
    assert_eq!(vcpu.accept(accepted), Ok(()));
    vcpu.reset();
    assert_eq!(vm.ready(accepted), Ok(Told::Cancelled));
    assert_eq!(vm.ready(accepted), Err(TokenError::Unknown));
    vcpu.verify();
    // The guest starts again.
    let pending = next(vcpu, MemoryFaultFlags::empty());
    vcpu.reset();
    assert_eq!(vm.ready(pending), Err(TokenError::Unknown));
    assert_eq!(vcpu.accept(pending), Err(TokenError::Unknown));
    let again = next(vcpu, MemoryFaultFlags::empty());
    assert_ne!(again, pending);
    assert_eq!(vm.ready(again), Ok(Told::Early));
    host.verify();
}

/// A VM drops its source, and the requests that nothing has answered end with it.
#[test]
fn a_vm_ends_with_requests_unanswered() {
    struct Never(std::sync::Mutex<Vec<PageRequest>>);
    impl PageSource for Never {
        fn describe(&self) -> String {
            "never".into()
        }

        fn fetch(&self, request: PageRequest) {
            self.0.lock().unwrap().push(request);
        }
    }
    let source = Arc::new(Never(std::sync::Mutex::default()));
    let builder = VmBuilder {
        source: Some(Arc::clone(&source) as Arc<dyn PageSource>),
        ..builder(16, 24, 1, "")
    };
    let vm = lacuna_machine::Builder::build(&builder).unwrap();
    let gpa = |page: u64| lacuna_addr::Gpa::new(page << 12).unwrap();
    for page in 0..10 {
        vm.fetch(gpa(page), None).unwrap();
        vm.fetch(gpa(page), None).unwrap();
    }
    let asked = source.0.lock().unwrap().len();
    assert_eq!(asked, 10, "each page once");
    vm.provide(gpa(3), &[7; 4096]).unwrap();
    drop(vm);
    for request in source.0.lock().unwrap().drain(..) {
        let answer = request.provide(&[1; 4096]);
        assert_eq!(answer, lacuna_machine::Answer::Late);
    }
    assert_eq!(Arc::strong_count(&source), 2, "the builder's, and this one");
}
