//! Behaviour of this backend alone: pages that are late from the first touch on, and its refusals.
//! The behaviour common to all backends is in `check/conformance`.

use crate::common;

use common::{builder, can_run, image, pass, within};
use lacuna_addr::PAGE_SIZE;
use lacuna_kvm::{KvmError, Vm, VmBuilder};
use lacuna_machine::{
    Builder as _, Kick as _, Next, PageRequest, PageSource, PlatformDevices, Vcpu as _, Vm as _,
    dispatch,
};
use lacuna_skip::test;
use lacuna_source::{Faults, Injected, Measured, Zeros};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Even the boot data arrive late: nothing may depend on the time.
#[test]
fn all_pages_may_be_missing_at_first() {
    if !can_run() {
        return;
    }
    let latency = Duration::from_millis(1);
    let late = Injected::new(Zeros, Faults::latency(latency)).unwrap();
    let source = Arc::new(Measured::new(late));
    let builder = VmBuilder {
        source: Some(Arc::clone(&source) as Arc<dyn PageSource>),
        ..builder(16, 16, 1, "")
    };
    pass(&builder, "hello");
    let stats = source.stats();
    assert!(stats.provided > 0 && stats.p50 >= latency, "{stats:?}");
}

#[test]
fn bad_input_is_refused_with_a_reason() {
    if !can_run() {
        return;
    }
    let fails = |builder: VmBuilder| {
        let devices = PlatformDevices::new(|_: &str| ());
        builder
            .start(&image("hello"), devices)
            .map(drop)
            .unwrap_err()
    };
    let few = fails(builder(16, 16, 0, ""));
    assert!(matches!(few, KvmError::Vcpus { asked: 0, .. }), "{few}");
    let many = fails(builder(16, 16, 5000, ""));
    assert!(many.to_string().contains("5000 vCPUs: give 1 to"), "{many}");
    let resident = fails(builder(16, 1, 1, ""));
    assert!(matches!(resident, KvmError::Resident { .. }), "{resident}");
    let size = fails(builder(0, 16, 1, ""));
    assert!(matches!(size, KvmError::Resident { .. }), "{size}");
    let line = fails(builder(16, 16, 1, &"x".repeat(5000)));
    assert!(matches!(line, KvmError::Boot(_)), "{line}");
}

/// Provides zeros for `left` pages, and drops a VM at the next request.
struct DropsVm {
    vm: Mutex<Option<Arc<Vm>>>,
    left: AtomicUsize,
    asked: Mutex<Sender<()>>,
    is_last: Mutex<Receiver<()>>,
}

impl PageSource for DropsVm {
    fn describe(&self) -> String {
        "drops its VM".into()
    }

    fn fetch(&self, request: PageRequest) {
        let mut vm = self.vm.lock().unwrap();
        if vm.is_none() || self.left.fetch_sub(1, Ordering::Relaxed) > 0 {
            let _ = request.provide(&[0; PAGE_SIZE]);
            return;
        }
        self.asked.lock().unwrap().send(()).unwrap();
        self.is_last.lock().unwrap().recv().unwrap();
        drop(vm.take());
        self.asked.lock().unwrap().send(()).unwrap();
    }
}

/// A page source drops the last reference to its VM during a request for a page. A worker of KVM
/// may wait for that page, and the close of KVM's descriptor waits for the worker.
#[test]
fn a_page_source_may_drop_the_last_vm() {
    if !can_run() {
        return;
    }
    within(120, || {
        let ((asked, was_asked), (last, is_last)) = (channel(), channel());
        let source = Arc::new(DropsVm {
            vm: Mutex::default(),
            left: AtomicUsize::new(800),
            asked: Mutex::new(asked),
            is_last: Mutex::new(is_last),
        });
        let builder = VmBuilder {
            source: Some(Arc::clone(&source) as Arc<dyn PageSource>),
            ..builder(16, 16, 1, "rounds=1 threads=6")
        };
        let vm = builder.build().unwrap();
        let image = image("verify");
        let mut vcpus = vm.boot(&image, &builder.full_command_line()).unwrap();
        *source.vm.lock().unwrap() = Some(Arc::clone(&vm));
        let devices = PlatformDevices::new(|_: &str| ());
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let vcpu = &mut vcpus[0];
                while !is_over.load(Ordering::SeqCst) {
                    let exit = vcpu.run();
                    assert_eq!(dispatch(vcpu, exit, &devices, &*vm), Next::Enter);
                }
            });
            was_asked.recv().unwrap();
            is_over.store(true, Ordering::SeqCst);
            vm.kick(0);
        });
        drop(vcpus);
        let left = Arc::downgrade(&vm);
        drop(vm);
        assert_eq!(left.strong_count(), 1);
        last.send(()).unwrap();
        was_asked.recv().unwrap();
        assert_eq!(left.strong_count(), 0);
    });
}
