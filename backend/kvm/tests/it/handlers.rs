//! Memory that a handler fills: vCPUs wait for it in the kernel.

use crate::common;

use common::{builder, can_run, image, within};
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_kvm::{KvmError, VmBuilder};
use lacuna_machine::{
    Builder as _, Ending, External, GuestMemory as _, Machine, PageSource, PlatformDevices, Policy,
    Vm as _,
};
use lacuna_skip::test;
use lacuna_virtio::{Balloon, Mmio};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// A handler thread that fills a number of pages.
#[derive(Clone)]
struct Handler {
    external: Arc<External>,
    may_fill: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Handler {
    fn new(may_fill: u64) -> Self {
        let external = External::threads(&[], Policy::default());
        let external = match external.and_then(External::for_kernel) {
            Ok(external) => Arc::new(external),
            Err(errno) => lacuna_skip::skip_test(errno),
        };
        Self {
            external,
            may_fill: Arc::new(AtomicU64::new(may_fill)),
            over: Arc::default(),
        }
    }

    fn builder(&self) -> VmBuilder {
        VmBuilder {
            source: Some(Arc::clone(&self.external) as Arc<dyn PageSource>),
            ..builder(32, 32, 2, "rounds=1")
        }
    }

    /// Fills pages with zeros. Without a page left, it is gone.
    fn serve(&self) {
        let uffd = self.external.userfaultfds().next().unwrap();
        let mut faults = Vec::new();
        while !self.over.load(Ordering::Relaxed) {
            faults.clear();
            uffd.faults(&mut faults).unwrap();
            for fault in &faults {
                if self.may_fill.fetch_sub(1, Ordering::Relaxed) == 0 {
                    self.external.end("the handler has had enough");
                    return;
                }
                // The page may be present: a kicked vCPU has faulted twice.
                if uffd.copy(&[0; PAGE_SIZE], fault.page).is_err() {
                    uffd.wake(fault.page).unwrap();
                }
            }
            thread::sleep(Duration::from_micros(20));
        }
    }

    /// Runs `verify` to its end.
    fn run(&self) -> Ending {
        let handler = self.clone();
        within(120, move || {
            let serving = handler.clone();
            let served = thread::spawn(move || serving.serve());
            let builder = handler.builder();
            let vm = builder.build().unwrap();
            assert!(vm.balloon().is_none() && vm.missing_memory().is_none());
            let line = vm.interrupts().line(5).unwrap();
            let refused = Mmio::new(&vm, line, Balloon::new()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
            let machine = Machine::new(vm, PlatformDevices::new(|_: &str| ())).unwrap();
            let line = builder.full_command_line();
            let vcpus = machine.vm().boot(&image("verify"), &line).unwrap();
            let ending = machine.start(vcpus).wait().ending;
            handler.over.store(true, Ordering::Relaxed);
            served.join().unwrap();
            ending
        })
    }
}

#[test]
fn a_guest_runs_on_a_handlers_pages() {
    if !can_run() {
        return;
    }
    let handler = Handler::new(u64::MAX);
    assert!(matches!(handler.run(), Ending::Exited(0)));
    assert!(u64::MAX - handler.may_fill.load(Ordering::Relaxed) > 1000);
}

/// The run ends with the handler's reason. The end also wakes threads of the VMM that wait for a
/// page.
#[test]
fn a_handler_that_ends_ends_the_run() {
    if !can_run() {
        return;
    }
    match Handler::new(800).run() {
        Ending::Failed(error) => {
            let error = error.to_string();
            assert!(error.contains("has had enough"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    let handler = Handler::new(0);
    within(60, move || {
        let vm = handler.builder().build().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| handler.serve());
            let at = Gpa::new(1 << 20).unwrap();
            assert!(vm.read(at, &mut [0; 8]).is_err());
        });
    });
}

#[test]
fn a_handler_that_kvm_does_not_wait_for_is_refused() {
    if !can_run() {
        return;
    }
    let Ok(external) = External::threads(&[], Policy::default()) else {
        lacuna_skip::skip_test("no userfaultfd");
    };
    let of_user_space = VmBuilder {
        source: Some(Arc::new(external)),
        ..builder(32, 32, 1, "")
    };
    let refused = of_user_space.build().map(drop).unwrap_err();
    assert!(matches!(refused, KvmError::HandlerOfUserSpace), "{refused}");
    let in_part = VmBuilder {
        resident: lacuna_addr::PageCount::from_bytes(8 << 20),
        ..Handler::new(0).builder()
    };
    let refused = in_part.build().map(drop).unwrap_err();
    assert!(matches!(refused, KvmError::HandlerMemory), "{refused}");
}
