//! A handler fills memory from outside: a vCPU that waits for a page obeys kicks, its state can be
//! saved, and the handler's end causes an error, not a page of zeros.

use crate::common;

use common::{builder, builder_for, image_for, on_both};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{
    Arch, Builder as _, Ending, Exit, External, Kick as _, Next, PageSource, PlatformDevices,
    Policy, SaveRestore as _, Vcpu as _, VcpuError, Vm as _, WhenGone, dispatch,
};
use lacuna_skip::test;
use lacuna_soft::{MemoryKind, SoftError, Vcpu, Vm, VmBuilder};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

on_both!(
    a_vcpu_that_waits_for_a_page_obeys_every_kick,
    vcpus_that_wait_for_a_handler_that_ends_have_lost_their_pages,
);

const LONG: Duration = Duration::from_secs(60);

/// A handler that fills a number of pages, and holds all later faults.
struct Handler {
    external: Arc<External>,
    may_fill: AtomicU64,
    held: AtomicU64,
    over: AtomicBool,
}

impl Handler {
    fn new(may_fill: u64, when_gone: WhenGone) -> Self {
        let policy = Policy {
            when_gone,
            ..Policy::default()
        };
        let external = match External::threads(&[], policy) {
            Ok(external) => Arc::new(external),
            Err(errno) => lacuna_skip::skip_test(errno),
        };
        Self {
            external,
            may_fill: AtomicU64::new(may_fill),
            held: AtomicU64::new(0),
            over: AtomicBool::new(false),
        }
    }

    fn vm(&self, arch: Arch, vcpus: usize) -> (Arc<Vm>, Vec<Vcpu>) {
        let builder = VmBuilder {
            memory_kind: MemoryKind::Linux,
            source: Some(Arc::clone(&self.external) as Arc<dyn PageSource>),
            ..builder_for(arch, (16, 24), vcpus, "rounds=1")
        };
        let vm = builder.build().unwrap();
        let vcpus = vm.boot(&image_for(arch, "verify"), &builder.full_command_line());
        (vm, vcpus.unwrap())
    }

    fn serve(&self) {
        let uffd = self.external.userfaultfds().next().unwrap();
        let mut faults = Vec::new();
        while !self.over.load(Ordering::Relaxed) {
            uffd.faults(&mut faults).unwrap();
            while self.may_fill.load(Ordering::Relaxed) > 0
                && let Some(fault) = faults.pop()
            {
                self.may_fill.fetch_sub(1, Ordering::Relaxed);
                // The page may be present: a kicked vCPU has faulted twice.
                if uffd.copy(&[0; PAGE_SIZE], fault.page).is_err() {
                    uffd.wake(fault.page).unwrap();
                }
            }
            self.held.store(faults.len() as u64, Ordering::Relaxed);
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// Waits until the vCPU sleeps for a page.
    fn wait_until_held(&self) {
        while self.held.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
    }
}

/// Ends the handler's thread, also after a panic.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn a_vcpu_that_waits_for_a_page_obeys_every_kick(arch: Arch) {
    let handler = Handler::new(800, WhenGone::Poison);
    let devices = PlatformDevices::of(arch, |_: &str| ());
    thread::scope(|scope| {
        scope.spawn(|| handler.serve());
        let _end = End(&handler.over);
        let (vm, mut vcpus) = handler.vm(arch, 1);
        let (sender, kicked) = channel();
        let (devices_of_run, kicks) = (&devices, Arc::clone(&vm));
        let running = scope.spawn(move || {
            let vcpu = &mut vcpus[0];
            loop {
                let exit = vcpu.run();
                if matches!(exit, Ok(Exit::Interrupted)) {
                    kicks.mmu().verify();
                    let _ = sender.send(vcpu.save().is_ok());
                }
                if dispatch(vcpu, exit, devices_of_run, &*kicks) == Next::Stop {
                    return;
                }
            }
        });
        handler.wait_until_held();
        for _ in 0..300 {
            vm.kick(0);
            // The vCPU retries the access after its next entry. Its state is complete meanwhile.
            assert_eq!(kicked.recv_timeout(LONG), Ok(true));
        }
        assert_eq!(devices.ending(), None);
        handler.may_fill.store(u64::MAX, Ordering::Relaxed);
        running.join().unwrap();
        assert_eq!(devices.ending(), Some(Ending::Exited(0)));
        vm.mmu().verify();
        vm.host().verify();
    });
}

/// Two vCPUs wait, and the handler ends. Neither vCPU continues, and each reports why.
fn vcpus_that_wait_for_a_handler_that_ends_have_lost_their_pages(arch: Arch) {
    let killed = Arc::new(AtomicBool::new(false));
    let note = Arc::clone(&killed);
    let kill = WhenGone::Kill(Arc::new(move |_| note.store(true, Ordering::SeqCst)));
    for (when_gone, kills) in [(WhenGone::Poison, false), (kill, true)] {
        let handler = Handler::new(900, when_gone);
        let devices = PlatformDevices::of(arch, |_: &str| ());
        thread::scope(|scope| {
            scope.spawn(|| handler.serve());
            let _end = End(&handler.over);
            let (vm, vcpus) = handler.vm(arch, 2);
            let devices_of_run = &devices;
            let run = |mut vcpu: Vcpu| {
                let vm = Arc::clone(&vm);
                scope.spawn(move || {
                    loop {
                        let exit = vcpu.run();
                        if dispatch(&mut vcpu, exit, devices_of_run, &*vm) == Next::Stop {
                            return;
                        }
                    }
                })
            };
            let threads: Vec<_> = vcpus.into_iter().map(run).collect();
            handler.wait_until_held();
            handler.external.end("the handler has died");
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            let Some(Ending::Failed(VcpuError::PageLost { cause, .. })) = devices.ending() else {
                panic!("{:?}", devices.ending());
            };
            assert!(cause.contains("the handler has died"), "{cause}");
            vm.mmu().verify();
            vm.host().verify();
        });
        assert_eq!(killed.load(Ordering::SeqCst), kills);
    }
}

/// Only Linux memory can be filled from outside.
#[test]
fn memory_of_the_budget_is_refused() {
    let handler = Handler::new(0, WhenGone::Poison);
    let builder = VmBuilder {
        source: Some(Arc::clone(&handler.external) as Arc<dyn PageSource>),
        ..builder(16, 24, 1, "")
    };
    let refused = builder.build().unwrap_err();
    assert!(matches!(refused, SoftError::HandlerMemory), "{refused}");
}
