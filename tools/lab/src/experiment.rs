//! What all experiments have in common: how much of it, and why it could not be done.

use crate::report::Verbosity;
use lacuna_soft::ErrorKind;
use std::path::PathBuf;

/// Why an experiment could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A VM could not be started.
    #[error(transparent)]
    Soft(#[from] lacuna_soft::SoftError),
    /// A VM could not be started on `/dev/kvm`.
    #[error(transparent)]
    Kvm(#[from] lacuna_kvm::KvmError),
    /// The host's memory manager refused.
    #[error(transparent)]
    Host(#[from] lacuna_soft::HostError),
    /// A call about dirty pages was refused.
    #[error(transparent)]
    Dirty(#[from] lacuna_soft::DirtyError),
    /// An MMU could not be made.
    #[error(transparent)]
    Mmu(#[from] lacuna_soft::MmuError),
    /// A slot could not be had.
    #[error(transparent)]
    Slot(#[from] lacuna_soft::SlotError),
    /// A guest's memory could not be read or written.
    #[error(transparent)]
    Memory(#[from] lacuna_machine::MemoryError),
    /// A program beside us failed.
    #[error(transparent)]
    External(#[from] crate::external::ExternalError),
    /// The system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's words.
        source: std::io::Error,
    },
    /// A guest did not do what the experiment needs.
    #[error("{0}")]
    Guest(String),
    /// The end was requested: see [`crate::interrupt`].
    #[error("interrupted")]
    Interrupted,
}

impl LabError {
    /// Where the cause lies. Sizes and images are the lab's own choice, so that what is refused
    /// for them is refused by this host.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Guest(_) => ErrorKind::Guest,
            Self::Soft(_)
            | Self::Kvm(_)
            | Self::Host(_)
            | Self::Dirty(_)
            | Self::Mmu(_)
            | Self::Slot(_)
            | Self::Memory(_)
            | Self::External(_)
            | Self::Io { .. }
            | Self::Interrupted => ErrorKind::Host,
        }
    }
}

/// How much of it.
#[derive(Clone, Debug)]
pub struct Options {
    /// Fewer and shorter runs: for CI, not for figures to quote.
    pub quick: bool,
    /// The `lacuna` program itself, for what must be measured in a process of its own.
    pub lacuna: PathBuf,
    /// Where swap files go.
    pub swap_dir: PathBuf,
    /// Whether to show progress.
    pub verbosity: Verbosity,
    /// Which parts of the experiment, of those that its `PARTS` names; all if empty.
    pub parts: Vec<&'static str>,
}

impl Options {
    /// Whether a part is to be measured.
    pub(crate) fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }
}

/// As many vCPUs as the host has cores for.
pub(crate) fn vcpus() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(16))
}
