//! The loop of a vCPU until the guest ends.

use crate::pause::Pause;
use crate::{Ending, Exit, FaultToken, Kick, PlatformDevices, Vcpu, VcpuError};
use lacuna_addr::Gpa;
use lacuna_source::FailureKind;
use std::cell::Cell;
use std::fmt::Debug;
use std::thread;
use std::time::Duration;
use tracing::trace;

/// How long a vCPU with a full dirty ring sleeps, so that another thread gets its core.
const RING_FULL_NAP: Duration = Duration::from_micros(100);

thread_local! {
    /// The address of the [`Pause`] of the machine whose vCPU this thread runs; 0 on other threads.
    static MACHINE: Cell<usize> = const { Cell::new(0) };
}

/// Whether this thread runs a vCPU of the machine with this `pause`.
pub(crate) fn is_on_a_vcpu_of<V>(pause: &Pause<V>) -> bool {
    MACHINE.get() == std::ptr::from_ref(pause).addr()
}

/// Panics on the thread of a vCPU of this machine: `call` would wait for the vCPU.
#[track_caller]
pub(crate) fn refuse_on_a_vcpu<V>(call: &str, pause: &Pause<V>) {
    assert!(
        !is_on_a_vcpu_of(pause),
        "{call} waits for the vCPU that called this device: let another thread call it"
    );
}

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
    let reason = || -> &dyn Debug {
        match &exit {
            Ok(exit) => exit,
            Err(error) => error,
        }
    };
    trace!(target: "lacuna::exit", vcpu = index, reason = ?reason(), "exit");
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

/// Ends the run if a vCPU's thread panics. Otherwise the other threads would run for ever, and the
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

/// Runs a vCPU that has [entered](Pause::enter) `pause`, until the run has an ending. `None`: a
/// controller has kept the vCPU.
pub(crate) fn run_one<V: Vcpu>(
    mut vcpu: V,
    devices: &PlatformDevices,
    kick: &impl Kick,
    pause: &Pause<V>,
) -> Option<V> {
    let _left = LeaveOnDrop(pause);
    let _guard = EndOnPanic { devices, kick };
    MACHINE.set(std::ptr::from_ref(pause).addr());
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
