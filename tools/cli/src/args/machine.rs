//! The options of a run whose machine may be given: by a snapshot, or by the source of a migration.

use super::group::{CONTROL, DEBUGGING, DEVICES, GUEST, MEMORY, SECURITY};
use super::{Backend, DirtyArgs, Output, RunArgs, SandboxArgs, SwapSpec, THP, TlsArgs, address};
use crate::size::Size;
use clap::Args;
use lacuna::CpuModel;
use lacuna::memory::{HugePages, MemoryKind};
use lacuna::migrate::MachineConfig;
use lacuna_lab::options::{KINDS, named};
use std::net::SocketAddr;
use std::path::PathBuf;

/// What does not belong to the machine.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct RunOn {
    /// The hypervisor; a guest moves from one to the other if it was started with --cpu common
    #[arg(long, value_enum, value_name = "soft|kvm|auto", default_value_t = Backend::Soft,
          help_heading = GUEST)]
    pub backend: Backend,
    /// Where the guest's memory is: pool (frames of a budget of this process, soft only), anonymous
    /// (private memory of Linux), memfd (a shared memory file, soft only), hugetlbfs or
    /// hugetlbfs-1g (one in reserved huge pages of 2 MiB or 1 GiB, soft only) [default: pool on
    /// soft; anonymous on kvm, and for a handler]
    #[arg(long, value_name = "KIND", value_parser = named(KINDS), hide_possible_values = true,
          help_heading = MEMORY)]
    pub memory_kind: Option<MemoryKind>,
    /// How much of the guest's memory is resident at a time; for anonymous and memfd on soft a
    /// limit that Linux keeps as far as it has a place for the pages [default: all of it, and at
    /// most 512M of the pool and on kvm]
    #[arg(long, value_name = "SIZE", help_heading = MEMORY)]
    pub resident: Option<Size>,
    /// Where pages are swapped out to: file or mem (compressed memory), with ,latency=TIME and
    /// ,dir=PATH if wanted, as in file,dir=/var/tmp,latency=1ms [default: file]
    #[arg(long, value_name = "DEVICE", help_heading = MEMORY)]
    pub swap: Option<SwapSpec>,
    /// Where host memory is allocated in 2 MiB pages; on kvm not if the guest is all resident and
    /// has a page source [default: never]
    #[arg(long, value_name = "never|madvise|always", value_parser = named(THP),
          help_heading = MEMORY)]
    pub thp: Option<HugePages>,
    /// How the guest's writes are tracked
    #[command(flatten)]
    pub dirty: DirtyArgs,
    /// A virtio disk with the bytes of this file, which the guest reads and writes. A guest that
    /// moves or is restored needs the same file there
    #[arg(long, value_name = "FILE", help_heading = DEVICES)]
    pub disk: Option<PathBuf>,
    /// A socket to make, through which other processes pause, save, move and stop the guest while
    /// it runs: docs/control.md, lacuna snapshot save, lacuna migrate
    #[arg(long, value_name = "SOCKET", help_heading = CONTROL)]
    pub control: Option<PathBuf>,
    /// Answer HTTP requests for /metrics at this address with the counters of the guest and its
    /// memory, in the text format of Prometheus. Every process that reaches the port can read them;
    /// port 0 lets the system choose one, which is printed
    #[arg(long, value_name = "IP:PORT", value_parser = address, help_heading = CONTROL)]
    pub metrics: Option<SocketAddr>,
    /// Start the guest paused: its first instruction follows a resume through --control, as by
    /// lacuna ctl SOCKET resume
    #[arg(long, requires = "control", help_heading = CONTROL)]
    pub paused: bool,
    /// Let clients of --control save the guest below this folder, or to this object store, without
    /// passing files to this process, as a script can with socat. lacuna snapshot save passes them,
    /// and needs no such folder
    #[arg(long, value_name = "FOLDER|URL", requires = "control", help_heading = SECURITY)]
    pub allow_save: Vec<PathBuf>,
    /// The limits of this process
    #[command(flatten)]
    pub sandbox: SandboxArgs,
    /// Where the result goes
    #[command(flatten, next_help_heading = CONTROL)]
    pub output: Output,
    /// Write the events of the engine to this file at the end of the run: faults, async page faults
    /// with their tokens, reads, invalidations, aging, exits. Perfetto opens it
    #[arg(long, value_name = "FILE", help_heading = DEBUGGING)]
    pub trace: Option<PathBuf>,
}

impl RunOn {
    /// The run of `machine`, which comes from `from`.
    pub fn machine(&self, from: String, machine: &MachineConfig) -> RunArgs {
        RunArgs {
            image: from,
            incoming: None,
            wait_again: false,
            tls: TlsArgs::default(),
            arch: Some(machine.arch),
            memory: Size(machine.memory),
            vcpus: u32::try_from(machine.vcpus).unwrap_or(u32::MAX),
            apf: machine.apf,
            cpu: match machine.cpu {
                CpuModel::Host => super::Cpu::Host,
                CpuModel::Common { .. } => super::Cpu::Common,
            },
            on: self.clone(),
            pages_from: None,
            patience: None,
            exit_on_missing: false,
            seed: None,
            profile: false,
            pin: None,
            append: String::new(),
        }
    }
}
