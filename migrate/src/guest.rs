//! A guest, running and paused.

use crate::MigrateError;
use crate::state::{MachineState, save_state};
use lacuna_machine::{
    Pause, Paused, PausedDevices, PlatformDevices, SaveRestore as _, StateError, VcpuState, Vm,
};
use std::thread;
use std::time::{Duration, Instant};

/// A running guest: its VM, its devices, and the pauses of its run
/// ([`lacuna_machine::run_pausable`]).
///
/// A pause holds the vCPUs and the devices ([`lacuna_machine::Device::pause`]). The VMM itself must
/// hold its other threads that write guest memory: while the guest is paused ([`PausedGuest`]), a
/// page that they write may have been copied already.
pub struct Guest<'a, V: Vm> {
    /// The VM.
    pub vm: &'a V,
    /// Its devices.
    pub devices: &'a PlatformDevices,
    /// Pauses its vCPUs.
    pub pause: &'a Pause<V::Vcpu>,
}

impl<V: Vm> Clone for Guest<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V: Vm> Copy for Guest<'_, V> {}

/// A paused guest, with no vCPU in the middle of an instruction, and its state. The guest resumes
/// when this is dropped.
pub struct PausedGuest<'a, V: Vm> {
    state: MachineState,
    since: Instant,
    /// Holds the devices, which resume before the vCPUs.
    _devices: PausedDevices<'a>,
    /// Holds the vCPUs.
    _paused: Paused<'a, V::Vcpu>,
}

impl<V: Vm> PausedGuest<'_, V> {
    /// Its state without memory.
    pub fn state(&self) -> &MachineState {
        &self.state
    }

    /// When its pause began.
    pub fn since(&self) -> Instant {
        self.since
    }
}

/// How often a pause is tried again.
const TRIES: usize = 100;
/// The time between two tries.
const PAUSE: Duration = Duration::from_millis(1);

/// What a pause leads to: its begin, the vCPUs, and a state.
type Saved<'a, V, T> = (Instant, Paused<'a, <V as Vm>::Vcpu>, T);

impl<'a, V: Vm> Guest<'a, V> {
    /// Pauses the guest. Waits for another thread that has paused it.
    ///
    /// # Errors
    /// [`MigrateError::NotRunning`], [`MigrateError::Busy`], [`MigrateError::State`].
    pub fn pause(&self) -> Result<PausedGuest<'a, V>, MigrateError> {
        self.pause_between(&mut || Ok(()))
    }

    /// As [`Guest::pause`], and calls `between` before each further try.
    pub(crate) fn pause_between(
        &self,
        between: &mut dyn FnMut() -> Result<(), MigrateError>,
    ) -> Result<PausedGuest<'a, V>, MigrateError> {
        let (since, paused, (state, devices)) = self.stop(between, |vcpus| {
            // A device that completes its requests may interrupt a vCPU, so it is paused before the
            // vCPUs are saved.
            let devices = self.devices.pause()?;
            Ok((save_state(self.vm, vcpus, &devices)?, devices))
        })?;
        Ok(PausedGuest {
            state,
            since,
            _devices: devices,
            _paused: paused,
        })
    }

    /// The states of the vCPUs, for which the guest is stopped for a moment. The devices continue.
    pub(crate) fn vcpus(&self) -> Result<Vec<VcpuState>, MigrateError> {
        let save = |vcpus: &mut [V::Vcpu]| vcpus.iter_mut().map(|vcpu| vcpu.save()).collect();
        let (_, _, states) = self.stop(&mut || Ok(()), save)?;
        Ok(states)
    }

    /// Stops the vCPUs, and saves something that needs them outside of an instruction.
    fn stop<T>(
        &self,
        between: &mut dyn FnMut() -> Result<(), MigrateError>,
        mut save: impl FnMut(&mut [V::Vcpu]) -> Result<T, StateError>,
    ) -> Result<Saved<'a, V, T>, MigrateError> {
        let mut tries = 0;
        loop {
            let since = Instant::now();
            let paused = self.pause.begin(self.vm);
            let mut paused = paused.ok_or(MigrateError::NotRunning)?;
            // The guest ends: other vCPUs' threads have left.
            if paused.vcpus().len() < self.vm.config().vcpus {
                return Err(MigrateError::NotRunning);
            }
            match save(paused.vcpus()) {
                Ok(saved) => return Ok((since, paused, saved)),
                Err(error @ StateError::MidInstruction { .. }) if tries == TRIES => {
                    return Err(MigrateError::Busy(error));
                }
                Err(StateError::MidInstruction { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            // The guest resumes, and completes its instruction.
            drop(paused);
            between()?;
            thread::sleep(PAUSE);
            tries += 1;
        }
    }
}
