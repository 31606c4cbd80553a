//! A machine: what it is, and its state without memory.

use crate::{MemoryLayout, MigrateError};
use lacuna_machine::{
    Apf, Arch, CpuModel, DevicesState, PausedDevices, PlatformDevices, SaveRestore, SharedState,
    VcpuState, Vm,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The part of a VM's configuration that the guest notices. A VM takes a state only if it has the
/// same.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineConfig {
    /// The architecture.
    pub arch: Arch,
    /// The number of vCPUs.
    pub vcpus: usize,
    /// Memory of the boot layout in bytes ([`VmConfig::memory`](lacuna_machine::VmConfig::memory)).
    pub memory: u64,
    /// Whether the guest was offered asynchronous page faults.
    pub apf: Apf,
    /// The processor that the guest sees, with its TSC's frequency if it is the common one.
    pub cpu: CpuModel,
    /// The memory slots.
    pub layout: MemoryLayout,
}

/// The longest JSON form of a [`MachineState`]: a vCPU's state has up to 30 KiB, and a byte of an
/// VMM's device has two digits.
pub(crate) const JSON_MAX: usize = (16 << 20) + 2 * DevicesState::BYTES_MAX;

/// The state of a machine, without its memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// The vCPUs, in the order of their numbers.
    pub vcpus: Vec<VcpuState>,
    /// The state that they share.
    pub shared: SharedState,
    /// The devices.
    pub devices: DevicesState,
}

impl MachineConfig {
    /// The machine of `vm`, whose vCPUs have these states.
    pub(crate) fn saved(vm: &impl Vm, layout: MemoryLayout, vcpus: &[VcpuState]) -> Self {
        let mut machine = Self::of(vm, layout);
        if let (CpuModel::Common { tsc_khz }, Some(VcpuState::X86(vcpu))) =
            (&mut machine.cpu, vcpus.first())
        {
            *tsc_khz = Some(vcpu.tsc.khz);
        }
        machine
    }

    fn of(vm: &impl Vm, layout: MemoryLayout) -> Self {
        let config = vm.config();
        Self {
            arch: config.arch,
            vcpus: config.vcpus,
            memory: config.memory.bytes(),
            apf: config.apf,
            cpu: config.cpu,
            layout,
        }
    }

    /// Checks that `vm` is such a machine. Its slots may differ: the restore changes them.
    ///
    /// # Errors
    /// [`MigrateError::OtherMachine`].
    pub fn check(&self, vm: &impl Vm) -> Result<(), MigrateError> {
        let is = Self::of(vm, MemoryLayout::of(vm));
        same("architecture", &is.arch, &self.arch)?;
        same("number of vCPUs", &is.vcpus, &self.vcpus)?;
        same("memory in bytes", &is.memory, &self.memory)?;
        same(
            "setting of async page faults",
            &Shown(is.apf),
            &Shown(self.apf),
        )?;
        // Each vCPU checks the frequency of its TSC itself: some take over any.
        let any = |cpu| match cpu {
            CpuModel::Common { .. } => CpuModel::Common { tsc_khz: None },
            CpuModel::Host => CpuModel::Host,
        };
        same("processor", &Shown(any(is.cpu)), &Shown(any(self.cpu)))
    }
}

/// A value as its debug form.
#[derive(PartialEq)]
struct Shown<T>(T);

impl<T: fmt::Debug> fmt::Display for Shown<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn same<T: PartialEq + fmt::Display>(
    what: &'static str,
    is: &T,
    saved: &T,
) -> Result<(), MigrateError> {
    match is == saved {
        true => Ok(()),
        false => Err(MigrateError::OtherMachine {
            what,
            is: is.to_string(),
            saved: saved.to_string(),
        }),
    }
}

/// Checks that the devices are the saved ones, by their names, and accept the versions of their
/// states.
pub(crate) fn check_devices(
    devices: &PlatformDevices,
    saved: &BTreeMap<String, u32>,
) -> Result<(), MigrateError> {
    Ok(devices.check_versions(saved)?)
}

/// The state of a machine whose vCPUs and devices are paused.
pub(crate) fn save_state<V: Vm>(
    vm: &V,
    vcpus: &mut [V::Vcpu],
    devices: &PausedDevices<'_>,
) -> Result<MachineState, MigrateError> {
    let shared = vm.save_shared()?;
    let vcpus = vcpus
        .iter_mut()
        .map(SaveRestore::save)
        .collect::<Result<_, _>>()?;
    Ok(MachineState {
        vcpus,
        shared,
        devices: devices.save()?,
    })
}

/// Puts a VM that has its memory into a state. The VMM's devices stay paused until the guest
/// runs.
pub(crate) fn restore_state<V: Vm>(
    vm: &V,
    vcpus: &mut [V::Vcpu],
    devices: &PlatformDevices,
    state: &MachineState,
) -> Result<(), MigrateError> {
    same("number of vCPUs", &vcpus.len(), &state.vcpus.len())?;
    vm.restore_shared(&state.shared)?;
    let mut pairs = vcpus.iter_mut().zip(&state.vcpus);
    pairs.try_for_each(|(vcpu, state)| vcpu.restore(state))?;
    // A device raises its line of the restored interrupt controller again.
    Ok(devices.restore(&state.devices)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_machine::StateError;
    use lacuna_machine::x86::{IoApic, Shared};

    /// Snapshots of earlier versions have no I/O APIC, and values that no I/O APIC has are refused.
    #[test]
    fn the_shared_state_of_an_x86_vm_is_read() {
        let read = |json: &str| serde_json::from_str::<SharedState>(json).unwrap();
        assert_eq!(read("\"X86\"").x86(), Ok(Shared::default()));
        let io_apic = IoApic::new(1, 0x12, [1 << 15; 24], 5);
        let mut shared = Shared { io_apic };
        let saved = SharedState::X86Shared(Box::new(shared));
        let json = serde_json::to_string(&saved).unwrap();
        assert_eq!(read(&json), saved);
        assert_eq!(saved.x86(), Ok(shared));
        shared.io_apic.high = 1 << 24;
        let (field, value) = ("io_apic.high", 1 << 24);
        let hostile = SharedState::X86Shared(Box::new(shared));
        assert_eq!(hostile.x86(), Err(StateError::Invalid { field, value }));
    }
}
