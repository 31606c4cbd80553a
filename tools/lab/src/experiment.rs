//! What all experiments have in common: their options, and why one could not be carried out.

use crate::report::Verbosity;
use crate::result::Report;
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
    /// A slot was refused.
    #[error(transparent)]
    Slot(#[from] lacuna_soft::SlotError),
    /// A change of memory slots was refused.
    #[error(transparent)]
    MemorySlot(#[from] lacuna_machine::MemorySlotError),
    /// A guest's memory could not be read or written.
    #[error(transparent)]
    Memory(#[from] lacuna_machine::MemoryError),
    /// Another program failed.
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
    /// Other programs took the processors, so that what is to be measured did not happen. The
    /// function `skip_if_busy` skips the result then.
    #[error("{0}: leave this machine's processors to the lab")]
    Busy(String),
    /// The user asked for the end: see [`crate::interrupt`].
    #[error("interrupted")]
    Interrupted,
}

impl LabError {
    /// Where the cause lies. The lab chooses sizes and images itself, so a refusal of them is due
    /// to this host.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Guest(_) => ErrorKind::Guest,
            Self::Busy(_)
            | Self::Soft(_)
            | Self::Kvm(_)
            | Self::Host(_)
            | Self::Dirty(_)
            | Self::Mmu(_)
            | Self::Slot(_)
            | Self::MemorySlot(_)
            | Self::Memory(_)
            | Self::External(_)
            | Self::Io { .. }
            | Self::Interrupted => ErrorKind::Host,
        }
    }
}

/// What an experiment is to measure, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// Fewer and shorter rounds: for CI, not for figures to quote.
    pub quick: bool,
    /// The path of the `lacuna` program, for measurements that need a process of their own.
    pub lacuna: PathBuf,
    /// The folder for swap files.
    pub swap_dir: PathBuf,
    /// Whether progress is shown.
    pub verbosity: Verbosity,
    /// The chosen parts of the experiment, out of its `PARTS`; all if empty.
    pub parts: Vec<&'static str>,
}

impl Options {
    /// Whether `part` is to be measured.
    pub(crate) fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }
}

/// The result of an experiment, where a busy machine is no error: then `ids` are skipped.
pub(crate) fn skip_if_busy<I: Into<String>>(
    report: &mut Report,
    ids: impl IntoIterator<Item = I>,
    done: Result<(), LabError>,
) -> Result<(), LabError> {
    match done {
        Err(busy @ LabError::Busy(_)) => {
            ids.into_iter().for_each(|id| report.skip(id, &busy));
            Ok(())
        }
        other => other,
    }
}

/// One vCPU for each core, 16 at most.
pub(crate) fn vcpus() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_skips_and_other_errors_stay() {
        let mut report = Report::new("lacuna lab");
        let ids = || ["a.b", "a.c"];
        let busy = LabError::Busy("the range was not touched".into());
        skip_if_busy(&mut report, ids(), Err(busy)).unwrap();
        let skipped: Vec<_> = report.skipped.iter().map(|s| s.id.as_str()).collect();
        assert_eq!(skipped, ids());
        assert!(report.skipped[0].why.contains("not touched: leave"));
        let guest = LabError::Guest("a panic".into());
        skip_if_busy(&mut report, ids(), Err(guest)).unwrap_err();
        assert_eq!(report.skipped.len(), 2);
    }
}
