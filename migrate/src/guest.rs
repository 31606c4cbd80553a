//! A paused guest.

use crate::MigrateError;
use crate::state::{MachineState, save_state};
use lacuna_machine::{Paused, PausedDevices, Running, SaveRestore as _, StateError, VcpuState, Vm};
use std::thread;
use std::time::{Duration, Instant};

/// A paused guest, with no vCPU in the middle of an instruction, and its state. The guest resumes
/// when this is dropped.
///
/// A pause holds the vCPUs and the devices ([`Device::pause`](lacuna_machine::Device::pause)). The
/// VMM itself must hold its other threads that write guest memory: while the guest is paused, a
/// page that they write may have been copied already.
pub struct PausedGuest<'a, V: Vm> {
    state: MachineState,
    since: Instant,
    /// Holds the devices, which resume before the vCPUs.
    _devices: PausedDevices<'a>,
    /// Holds the vCPUs.
    _paused: Paused<'a, V::Vcpu>,
}

impl<'a, V: Vm> PausedGuest<'a, V> {
    /// Pauses a guest. Waits for another thread that has paused it.
    ///
    /// # Errors
    /// [`MigrateError::NotRunning`], [`MigrateError::Busy`], [`MigrateError::State`].
    pub fn pause(guest: &'a Running<V>) -> Result<Self, MigrateError> {
        Self::pause_between(guest, &mut || Ok(()))
    }

    /// As [`PausedGuest::pause`], and calls `between` before each further try.
    pub(crate) fn pause_between(
        guest: &'a Running<V>,
        between: &mut dyn FnMut() -> Result<(), MigrateError>,
    ) -> Result<Self, MigrateError> {
        let (since, paused, (state, devices)) = stop(guest, between, |vcpus| {
            // A device that completes its requests may interrupt a vCPU, so it is paused before the
            // vCPUs are saved.
            let devices = guest.devices().pause()?;
            Ok((save_state(&**guest.vm(), vcpus, &devices)?, devices))
        })?;
        Ok(Self {
            state,
            since,
            _devices: devices,
            _paused: paused,
        })
    }

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

/// The states of the vCPUs, for which the guest is stopped for a moment. The devices continue.
pub(crate) fn vcpus<V: Vm>(guest: &Running<V>) -> Result<Vec<VcpuState>, MigrateError> {
    let save = |vcpus: &mut [V::Vcpu]| {
        Ok(vcpus
            .iter_mut()
            .map(|vcpu| vcpu.save())
            .collect::<Result<_, _>>()?)
    };
    let (_, _, states) = stop(guest, &mut || Ok(()), save)?;
    Ok(states)
}

/// Stops the vCPUs, and saves something that needs them outside of an instruction.
fn stop<'a, V: Vm, T>(
    guest: &'a Running<V>,
    between: &mut dyn FnMut() -> Result<(), MigrateError>,
    mut save: impl FnMut(&mut [V::Vcpu]) -> Result<T, MigrateError>,
) -> Result<Saved<'a, V, T>, MigrateError> {
    let mut tries = 0;
    loop {
        let since = Instant::now();
        let mut paused = guest.pause().ok_or(MigrateError::NotRunning)?;
        // The guest ends: other vCPUs' threads have left.
        if paused.vcpus().len() < guest.vm().config().vcpus {
            return Err(MigrateError::NotRunning);
        }
        match save(paused.vcpus()) {
            Ok(saved) => return Ok((since, paused, saved)),
            Err(MigrateError::State(error @ StateError::MidInstruction { .. })) => {
                if tries == TRIES {
                    return Err(MigrateError::Busy(error));
                }
            }
            Err(error) => return Err(error),
        }
        // The guest resumes, and completes its instruction.
        drop(paused);
        between()?;
        thread::sleep(PAUSE);
        tries += 1;
    }
}
