//! The run loop: one thread per vCPU until the guest ends.

use crate::{
    Ending, Exit, FaultToken, GuestMemory, Kick, Observed, Pause, PlatformDevices, Vcpu, VcpuError,
    Vm,
};
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_source::FailureKind;
use lacuna_sync::Clock;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, Scope, ScopedJoinHandle, Thread};
use std::time::Duration;

/// How long a vCPU with a full dirty ring sleeps, so that another thread gets its core.
const RING_FULL_NAP: Duration = Duration::from_micros(100);

/// The time between two calls of a run's watcher.
const WATCH: Duration = Duration::from_millis(100);

/// Whether a vCPU continues after [`dispatch`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Next {
    /// Enter it again.
    Enter,
    /// The run is over.
    Stop,
}

/// Handles one exit.
pub fn dispatch(
    vcpu: &mut impl Vcpu,
    exit: Result<Exit, VcpuError>,
    devices: &PlatformDevices,
    kick: &impl Kick,
) -> Next {
    let index = vcpu.index();
    match exit {
        Ok(Exit::IoOut { port, width, value }) => devices.write(port, width, value, index, kick),
        Ok(Exit::IoIn { port, width }) => {
            vcpu.complete_read(devices.read(port, width, index, kick));
        }
        Ok(Exit::MmioRead { gpa, width }) => {
            vcpu.complete_read(devices.mmio_read(gpa, width, index, kick));
        }
        Ok(Exit::MmioWrite { gpa, width, value }) => {
            devices.mmio_write(gpa, width, value, index, kick);
        }
        Ok(Exit::Interrupted) => {}
        // Another thread harvests, and needs the core. Until the ring has room, each entry ends
        // with this exit again.
        Ok(Exit::DirtyRingFull) => thread::sleep(RING_FULL_NAP),
        Ok(Exit::MemoryFault { gpa, token, .. }) => {
            if let Err(error) = fetch(vcpu, gpa, token) {
                devices.end(Ending::Failed(error), kick);
            }
        }
        Ok(Exit::Shutdown(text)) => devices.end(Ending::Shutdown(text), kick),
        Ok(Exit::PoweredOff) => devices.end(Ending::PoweredOff, kick),
        Ok(Exit::Reset) => devices.end(Ending::Reset, kick),
        Err(error) => devices.end(Ending::Failed(error), kick),
    }
    if devices.ending().is_some() {
        Next::Stop
    } else {
        Next::Enter
    }
}

/// Asks the VM's page source for the page of an exit. If the guest can take the event, it runs
/// meanwhile; otherwise the next run of the vCPU waits for the page.
fn fetch(vcpu: &mut impl Vcpu, gpa: Gpa, token: FaultToken) -> Result<(), VcpuError> {
    let accepted = vcpu.accept(token).is_ok();
    let lost = |kind, cause| VcpuError::no_page(vcpu.index(), gpa, kind, cause);
    let none = || lost(FailureKind::Lost, "the VM has no page source".into());
    let memory = vcpu.missing_memory().ok_or_else(none)?;
    let asked = memory.fetch(gpa, accepted.then_some(token));
    asked.map_err(|error| lost(error.failure_kind(), error.to_string()))
}

/// Ends the run if a thread of it panics. Otherwise the other threads would run for ever, and the
/// caller would never see the panic.
struct EndOnPanic<'a, K: Kick> {
    devices: &'a PlatformDevices,
    kick: &'a K,
}

impl<K: Kick> Drop for EndOnPanic<'_, K> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.devices.end(Ending::Stopped, self.kick);
        }
    }
}

/// Reports the end of a vCPU's thread, also after a panic.
struct LeaveOnDrop<'a, V: Vcpu>(&'a Pause<V>);

impl<V: Vcpu> Drop for LeaveOnDrop<'_, V> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Runs every vCPU on a thread of its own until the run has an ending, and returns the vCPUs.
///
/// If a thread cannot be started, the run ends, because the guest would wait for that vCPU. That
/// vCPU is not returned.
pub fn run<V: Vcpu>(vcpus: Vec<V>, devices: &PlatformDevices, kick: &impl Kick) -> Vec<V> {
    run_pausable(vcpus, devices, kick, &Pause::default())
}

/// As [`run`], and another thread can pause the vCPUs by `pause`. If that thread keeps a vCPU too
/// long after the run's ending, the vCPU is not returned: see [`Paused`](crate::Paused).
pub fn run_pausable<V: Vcpu>(
    vcpus: Vec<V>,
    devices: &PlatformDevices,
    kick: &impl Kick,
    pause: &Pause<V>,
) -> Vec<V> {
    devices.resume();
    pause.enter(vcpus.len());
    thread::scope(|scope| {
        let start = |vcpu: V| {
            let index = vcpu.index();
            let body = move || run_one(vcpu, devices, kick, pause);
            let named = thread::Builder::new().name(format!("vcpu{index}"));
            let spawned = named.spawn_scoped(scope, body);
            let failed = |error| {
                pause.leave();
                devices.end(Ending::Failed(no_thread(index, &error)), kick);
            };
            spawned.map_err(failed).ok()
        };
        let threads: Vec<_> = vcpus.into_iter().filter_map(start).collect();
        let vcpus = threads.into_iter().filter_map(join).collect();
        devices.flush();
        vcpus
    })
}

/// Runs a vCPU that has [entered](Pause::enter) `pause`, until the run has an ending. `None`: a
/// controller has kept the vCPU.
fn run_one<V: Vcpu>(
    mut vcpu: V,
    devices: &PlatformDevices,
    kick: &impl Kick,
    pause: &Pause<V>,
) -> Option<V> {
    let _guard = EndOnPanic { devices, kick };
    let _left = LeaveOnDrop(pause);
    while devices.ending().is_none() {
        let exit = vcpu.run();
        let is_wanted = pause.wants(&exit);
        if dispatch(&mut vcpu, exit, devices, kick) == Next::Stop {
            break;
        }
        if is_wanted {
            vcpu = pause.hand_over(vcpu, || devices.ending().is_some())?;
        }
    }
    Some(vcpu)
}

/// The thread's result. Its panic continues here.
fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    let joined = thread.join();
    joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn no_thread(vcpu: usize, error: &io::Error) -> VcpuError {
    VcpuError::Host {
        vcpu,
        cause: format!(
            "cannot start its thread: {error}; give the guest fewer vCPUs, or raise the limit on \
             processes (ulimit -u)"
        ),
    }
}

/// The threads of a run that does not have its vCPUs yet.
///
/// The host may refuse a thread. Therefore the destination of a migration starts its threads before
/// the source hands over the guest, and runs the vCPUs on them afterwards. If this value is dropped
/// before [`VcpuThreads::run_watched`], the threads end.
pub struct VcpuThreads<'scope, V: Vm> {
    vm: &'scope V,
    devices: &'scope PlatformDevices,
    pause: &'scope Pause<V::Vcpu>,
    threads: Vec<Waiting<'scope, V::Vcpu>>,
}

/// A thread that waits for its vCPU.
struct Waiting<'scope, V> {
    /// Takes the vCPU, and the thread to wake when the vCPU has ended.
    gate: Sender<(V, Thread)>,
    /// Returns its vCPU; `None`: it got none.
    thread: ScopedJoinHandle<'scope, Option<V>>,
}

impl<'scope, V: Vm> VcpuThreads<'scope, V> {
    /// Starts a thread for each of `count` vCPUs of `vm`. Another thread can pause the vCPUs by
    /// `pause` when they run.
    ///
    /// # Errors
    /// A device lies over the guest's memory ([`PlatformDevices::check_memory`]), or a thread
    /// cannot be started.
    pub fn start(
        scope: &'scope Scope<'scope, '_>,
        count: usize,
        vm: &'scope V,
        devices: &'scope PlatformDevices,
        pause: &'scope Pause<V::Vcpu>,
    ) -> io::Result<Self> {
        let over = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        devices.check_memory(&vm.memory_slots()).map_err(over)?;
        let start = |index: usize| -> io::Result<Waiting<'scope, V::Vcpu>> {
            let (gate, vcpus) = channel::<(V::Vcpu, Thread)>();
            let body = move || {
                // An error means that the value was dropped.
                let (vcpu, watcher) = vcpus.recv().ok()?;
                let vcpu = run_one(vcpu, devices, vm, pause);
                watcher.unpark();
                vcpu
            };
            let named = thread::Builder::new().name(format!("vcpu{index}"));
            let refused = |error: io::Error| io::Error::new(error.kind(), no_thread(index, &error));
            let thread = named.spawn_scoped(scope, body).map_err(refused)?;
            Ok(Waiting { gate, thread })
        };
        let threads = (0..count).map(start).collect::<io::Result<Vec<_>>>()?;
        Ok(Self {
            vm,
            devices,
            pause,
            threads,
        })
    }

    /// Runs these vCPUs, while the calling thread calls `watch` about ten times a second until the
    /// guest ends. [`PlatformDevices::ending`] then has the reason.
    ///
    /// # Panics
    /// If there are not as many vCPUs as threads.
    pub fn run_watched(
        self,
        vcpus: Vec<V::Vcpu>,
        clock: &dyn Clock,
        watch: &mut dyn FnMut(&Observed<'_, V>),
    ) {
        let (vm, devices) = (self.vm, self.devices);
        assert_eq!(vcpus.len(), self.threads.len(), "a thread for each vCPU");
        devices.resume();
        self.pause.enter(vcpus.len());
        let enter = |(waiting, vcpu): (Waiting<'scope, V::Vcpu>, V::Vcpu)| {
            // The thread has not ended: it waits for this vCPU.
            let _ = waiting.gate.send((vcpu, thread::current()));
            waiting.thread
        };
        let threads: Vec<_> = self.threads.into_iter().zip(vcpus).map(enter).collect();
        let _guard = EndOnPanic { devices, kick: vm };
        while threads.iter().any(|thread| !thread.is_finished()) && devices.ending().is_none() {
            watch(&Observed {
                vm,
                devices,
                now: clock.now(),
            });
            thread::park_timeout(WATCH);
        }
        let vcpus: Vec<_> = threads.into_iter().map(join).collect();
        devices.flush();
        drop(vcpus);
    }
}

/// Runs every vCPU of `vm` as [`run`] does, on threads of their own, while the calling thread calls
/// `watch` about ten times a second until the guest ends. [`PlatformDevices::ending`] then has the
/// reason.
///
/// # Errors
/// As [`VcpuThreads::start`].
pub fn run_watched<V: Vm>(
    vm: &Arc<V>,
    vcpus: Vec<V::Vcpu>,
    devices: &PlatformDevices,
    clock: &dyn Clock,
    watch: &mut dyn FnMut(&Observed<'_, V>),
) -> io::Result<()> {
    run_watched_pausable(&**vm, vcpus, devices, clock, &Pause::default(), watch)
}

/// As [`run_watched`], and another thread can pause the vCPUs by `pause`. A pause delays the end of
/// the run, for 60 s at most: the controller looks for [`PlatformDevices::ending`], and drops its
/// [`Paused`](crate::Paused) then.
///
/// # Errors
/// As [`run_watched`].
pub fn run_watched_pausable<V: Vm>(
    vm: &V,
    vcpus: Vec<V::Vcpu>,
    devices: &PlatformDevices,
    clock: &dyn Clock,
    pause: &Pause<V::Vcpu>,
    watch: &mut dyn FnMut(&Observed<'_, V>),
) -> io::Result<()> {
    thread::scope(|scope| {
        let threads = VcpuThreads::start(scope, vcpus.len(), vm, devices, pause)?;
        threads.run_watched(vcpus, clock, watch);
        Ok(())
    })
}

/// A copy of the announced status page. If the page is swapped out, it is read back first.
pub fn status_page(memory: &impl GuestMemory, devices: &PlatformDevices) -> Option<Vec<u8>> {
    let mut page = vec![0; PAGE_SIZE];
    memory.read(devices.status_page()?.gpa(), &mut page).ok()?;
    Some(page)
}
