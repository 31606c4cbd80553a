//! A run whose machine is given: by a snapshot, or by the source of a migration.

use super::{
    Apf, Arch, Backend, Cpu, DirtyArgs, MemoryKind, Output, RunArgs, SwapSpec, Thp, TlsArgs,
};
use crate::size::Size;
use lacuna::CpuModel;
use lacuna::migrate::MachineConfig;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The remaining choices for such a run.
pub(crate) struct RunOn {
    pub backend: Backend,
    pub memory_kind: Option<MemoryKind>,
    pub resident: Option<Size>,
    pub swap: Option<SwapSpec>,
    pub thp: Option<Thp>,
    pub dirty: DirtyArgs,
    pub disk: Option<PathBuf>,
    pub control: Option<PathBuf>,
    pub metrics: Option<SocketAddr>,
    pub paused: bool,
    pub output: Output,
}

impl RunOn {
    /// The run of `machine`, which comes from `from`.
    pub fn machine(self, from: String, machine: &MachineConfig) -> RunArgs {
        RunArgs {
            image: from,
            incoming: None,
            wait_again: false,
            tls: TlsArgs::default(),
            arch: Some(match machine.arch {
                lacuna::Arch::Arm64 => Arch::Arm64,
                _ => Arch::X86_64,
            }),
            backend: self.backend,
            memory: Size(machine.memory),
            memory_kind: self.memory_kind,
            resident: self.resident,
            vcpus: u32::try_from(machine.vcpus).unwrap_or(u32::MAX),
            swap: self.swap,
            apf: match machine.apf {
                lacuna::Apf::On => Apf::On,
                lacuna::Apf::Off => Apf::Off,
            },
            cpu: match machine.cpu {
                CpuModel::Host => Cpu::Host,
                CpuModel::Common { .. } => Cpu::Common,
            },
            thp: self.thp,
            dirty: self.dirty,
            disk: self.disk,
            pages_from: None,
            patience: None,
            exit_on_missing: false,
            seed: None,
            // `Command::trace` has the file.
            trace: None,
            profile: false,
            pin: None,
            append: String::new(),
            control: self.control,
            metrics: self.metrics,
            paused: self.paused,
            output: self.output,
        }
    }
}

impl RunArgs {
    /// As these options, but for `machine`, which comes from `from`.
    pub fn on(&self, from: String, machine: &MachineConfig) -> Self {
        let options = RunOn {
            backend: self.backend,
            memory_kind: self.memory_kind,
            resident: self.resident,
            swap: self.swap.clone(),
            thp: self.thp,
            dirty: self.dirty,
            disk: self.disk.clone(),
            control: self.control.clone(),
            metrics: self.metrics,
            paused: self.paused,
            output: self.output.clone(),
        };
        Self {
            wait_again: self.wait_again,
            ..options.machine(from, machine)
        }
    }
}
