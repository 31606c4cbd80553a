//! `lacuna lab base`: what overcommit costs in memory, a fault in time, an instruction in software.
//!
//! | id | what is compared |
//! |---|---|
//! | `run.memory_overhead_percent` | a process's highest resident memory against its budget |
//! | `fault.soft_vs_host` | CPU time of a guest's first touch / a host anonymous fault |
//! | `fault.soft_vs_host.cold` | the same, caches flushed before each batch |
//! | `fault.scaling_2vcpu` | pages a second, two vCPUs on their own shares / one |
//! | `cpu.x86.minstr_per_s.*` | guest instructions a second, beside native and QEMU (TCG) |
//! | `cpu.x86.vs_qemu_tcg.mem64m` | ours / QEMU's, same program, same run |
//!
//! Zeroing is in both arms of the fault figures. The memory figure counts all that the process has
//! (frames, tables, program) and the swap page cache: `bm` with 2 GiB in 512 MiB.

mod cpu;
mod fault;
mod memory;
mod micro;

use crate::report::{Progress, Verbosity};
use crate::result::Report;
use std::path::PathBuf;

pub use micro::{Playground, Touch, touch_together};

/// Why an experiment could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A VM could not be started.
    #[error(transparent)]
    Soft(#[from] lacuna_soft::SoftError),
    /// The host's memory manager refused.
    #[error(transparent)]
    Host(#[from] lacuna_soft::HostError),
    /// A slot could not be had.
    #[error(transparent)]
    Slot(#[from] lacuna_soft::SlotError),
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
}

impl Options {
    const fn rounds(&self) -> usize {
        if self.quick { 2 } else { 10 }
    }
}

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The first experiment that could not be carried out. What a machine lacks (QEMU) is skipped.
pub fn run(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let progress = Progress::new(8, options.verbosity);
    progress.step("memory overhead: bm, 2 GiB in 512 MiB");
    memory::overhead(options, report)?;
    progress.step("fault, warm caches");
    fault::hot(options, report)?;
    progress.step("fault, cold caches");
    fault::cold(options, report)?;
    progress.step("fault, 1 and 2 vCPUs");
    fault::scaling(options, report)?;
    cpu::rates(options, report, &progress)
}
