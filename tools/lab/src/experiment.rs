//! The options of all experiments, and their errors.

use crate::report::Progress;
use crate::result::Report;
use lacuna::{Arch, ErrorKind};
use std::borrow::Cow;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why an experiment could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A VM could not be started on `/dev/kvm`.
    #[error(transparent)]
    Kvm(#[from] lacuna::kvm::KvmError),
    /// A call about dirty pages was refused.
    #[error(transparent)]
    Dirty(#[from] lacuna::dirty::DirtyError),
    /// Another call of the library was refused, or another program failed.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// The system refused something.
    #[error("{what}: {source}")]
    Io {
        /// The attempted operation.
        what: String,
        /// The system's words.
        source: io::Error,
    },
    /// A guest did not do what the experiment needs.
    #[error("{0}")]
    Guest(String),
    /// Other programs took the processors, so the event to be measured did not happen. The function
    /// `skip_if_busy` skips the result then.
    #[error("{0}: leave this machine's processors to the lab")]
    Busy(String),
    /// The user asked for the end: see [`crate::interrupt`].
    #[error("interrupted")]
    Interrupted,
}

/// The result of an experiment, or of a part of one.
pub type LabResult<T = ()> = Result<T, LabError>;

impl LabError {
    /// Where the cause lies. The lab chooses sizes and images itself, so a refusal of them is due
    /// to this host.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Guest(_) => ErrorKind::Guest,
            _ => ErrorKind::Host,
        }
    }

    /// [`LabError::Io`] for an attempt to do `what`.
    pub fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl Fn(E) -> Self {
        let what = what.into();
        move |source| Self::Io {
            what: what.clone(),
            source: source.into(),
        }
    }
}

macro_rules! from_others {
    ($($error:ty)*) => {
        $(impl From<$error> for LabError {
            fn from(error: $error) -> Self {
                Self::Other(Box::new(error))
            }
        })*
    };
}

from_others! {
    lacuna::MachineError
    lacuna::memory::MemoryError
    lacuna::memory::MemorySlotError
    lacuna::migrate::MigrateError
    lacuna::memory::HostError
    lacuna::soft::SoftError
    crate::external::ExternalError
}

/// What an experiment is to measure, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// Fewer and shorter rounds: for CI, not for figures to quote.
    pub quick: bool,
    /// Divides the published memory, processes and time of [`crate::letters`], for small hosts.
    pub scale: u32,
    /// The architecture of the guests.
    pub arch: Arch,
    /// The path of the `lacuna` program, for measurements in a process of their own.
    pub lacuna: PathBuf,
    /// The folder for swap files.
    pub swap_dir: PathBuf,
    /// Where progress is shown.
    pub progress: Arc<Progress>,
    /// The chosen parts of the experiment, out of its `PARTS`; all if empty.
    pub parts: Vec<&'static str>,
}

impl Options {
    /// Begins an experiment of so many steps.
    pub(crate) fn begin(&self, steps: u64) {
        self.progress.begin(steps);
    }

    /// Begins a step.
    pub(crate) fn step(&self, what: impl Into<Cow<'static, str>>) -> LabResult {
        self.progress.step(what)
    }

    /// Whether `part` is to be measured.
    pub(crate) fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }

    /// Whether `part`, with x86-64 guests only, is to be measured. If it is wanted with other
    /// guests, its results `ids` are skipped.
    pub(crate) fn wants_x86<I: Into<String>>(
        &self,
        part: &str,
        ids: impl IntoIterator<Item = I>,
        report: &mut Report,
    ) -> bool {
        if !self.wants(part) || self.arch == Arch::X86_64 {
            return self.wants(part);
        }
        let why = format!("part {part} is measured with x86-64 guests only: leave --arch out");
        ids.into_iter().for_each(|id| report.skip(id, &why));
        false
    }
}

/// The result of an experiment. A busy machine is no error here: `ids` are skipped.
pub(crate) fn skip_if_busy<I: Into<String>>(
    report: &mut Report,
    ids: impl IntoIterator<Item = I>,
    done: LabResult,
) -> LabResult {
    match done {
        Err(busy @ LabError::Busy(_)) => {
            ids.into_iter().for_each(|id| report.skip(id, &busy));
            Ok(())
        }
        other => other,
    }
}

/// The number of cores.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// One vCPU for each core, 16 at most.
pub(crate) fn vcpus() -> usize {
    cores().min(16)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::report::Verbosity;

    /// Quick options.
    pub(crate) fn options(arch: Arch, parts: Vec<&'static str>) -> Options {
        Options {
            quick: true,
            scale: 1,
            arch,
            lacuna: PathBuf::new(),
            swap_dir: PathBuf::new(),
            progress: Arc::new(Progress::new(0, Verbosity::Quiet)),
            parts,
        }
    }

    /// A part that is wanted and cannot run is reported as skipped.
    #[test]
    fn parts_for_x86_guests_are_skipped_with_other_guests() {
        for (arch, parts, wanted, skips) in [
            (Arch::X86_64, vec![], true, 0),
            (Arch::X86_64, vec!["cpu"], false, 0),
            (Arch::Arm64, vec![], false, 2),
            (Arch::Arm64, vec!["fault", "cpu"], false, 2),
            (Arch::Arm64, vec!["cpu"], false, 0),
        ] {
            let mut report = Report::new("lacuna lab");
            report.begin(arch);
            let options = options(arch, parts);
            let ids = ["fault.soft_vs_host", "fault.soft_vs_host.cold"];
            assert_eq!(options.wants_x86("fault", ids, &mut report), wanted);
            let skipped: Vec<_> = report.skipped.iter().map(|s| s.id.as_str()).collect();
            assert_eq!(skipped, ids.map(|id| format!("arm64.{id}"))[..skips]);
        }
    }

    #[test]
    fn whole_experiments_with_arm64_guests_say_what_they_leave_out() {
        type Run = fn(&Options, &mut Report) -> LabResult;
        let left_out = |run: Run, x86: &[&'static str]| {
            let mut report = Report::new("lacuna lab");
            run(&options(Arch::Arm64, x86.to_vec()), &mut report).unwrap();
            assert!(report.results.is_empty());
            report.skipped.into_iter().map(|s| s.id).collect::<Vec<_>>()
        };
        assert_eq!(
            left_out(crate::base::run, &["fault", "scaling"]),
            [
                "fault.soft_vs_host",
                "fault.soft_vs_host.cold",
                "fault.host_ns",
                "fault.host_ns.cold",
                "fault.scaling_2vcpu"
            ]
        );
        let paging = left_out(crate::paging::run, &["crowd", "kvm"]);
        for id in [
            "paging.pool.scaling_2vcpu",
            "paging.pool.crowd_loss_points.16vcpu",
            "paging.kvm.exit_vs_queue.2vcpu_batch",
        ] {
            assert!(paging.iter().any(|left| left == id), "{paging:?}");
        }
        let apf = left_out(crate::apf::run, &["kvm", "source"]);
        assert_eq!(
            apf[2..],
            ["apf.kvm.faults", "apf.kvm.source_share_percent.1ms"]
        );
        assert_eq!(left_out(crate::apf::run, &["kvm"]), apf[..3]);
        for (run, id) in [
            (crate::thp::run as Run, "thp.kvm.slots_growth_512.huge"),
            (crate::pml::run, "pml.kvm.score_percent.ring"),
        ] {
            let left = left_out(run, &["kvm"]);
            assert!(left.iter().any(|left| left == id), "{left:?}");
        }
    }

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
