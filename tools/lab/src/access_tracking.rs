//! `lacuna test access-tracking`: the time of a guest's accesses to memory that was marked idle.
//!
//! It is Linux's `access_tracking_perf_test`. Marking memory idle is the aging of reclaim: for each
//! page, whether it was accessed since it was last marked, and a clear of its A bit. The next
//! access to the page has to walk, and sets the bit again.
//!
//! ```text
//! populate ─► write ─► read ─► mark idle ─► write ─► mark idle ─► read ─► mark idle
//! ```
//! The kvm backend cannot do this: KVM reports accesses to the kernel's reclaim alone.

use crate::experiment::LabResult;
use crate::options::GuestOptions;
use crate::report::{Progress, Verbosity, align};
use crate::size::Size;
use crate::sweeps::program::Variant;
use crate::sweeps::{Sweep, Sweeps};
use clap::Args;
use lacuna::{Backend, soft};
use lacuna_addr::BackingRange;
use serde::Serialize;
use std::fmt;
use std::time::{Duration, Instant};

/// What a test of access tracking does.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct AccessTracking {
    /// The guest
    #[command(flatten)]
    pub guest: GuestOptions,
}

/// One step of the test.
#[derive(Clone, Copy, Debug, Serialize)]
struct Step {
    step: &'static str,
    /// Its time in seconds.
    s: f64,
    /// After a mark: pages that were not accessed since the mark before.
    still_idle: Option<u64>,
}

/// The steps, and the share of the pages that is written. `None`: all pages are marked idle.
const STEPS: [(&str, Option<f64>); 8] = [
    ("populate memory", Some(100.0)),
    ("write to populated memory", Some(100.0)),
    ("read from populated memory", Some(0.0)),
    ("mark memory idle", None),
    ("write to idle memory", Some(100.0)),
    ("mark memory idle", None),
    ("read from idle memory", Some(0.0)),
    ("mark memory idle", None),
];

impl AccessTracking {
    /// Why there is no such test.
    ///
    /// # Errors
    /// The options that exclude each other, and what to do.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.guest.backend == Backend::Kvm {
            return Err(
                "--backend kvm: KVM does not report to VMMs the pages that a guest accesses: give \
                 --backend soft",
            );
        }
        self.guest.check_sweeps()
    }

    /// Runs the test.
    ///
    /// # Errors
    /// The host or the guest cannot do it.
    pub fn run(&self, verbosity: Verbosity) -> LabResult<Outcome> {
        let mut sweeps = Sweeps::new(&self.guest.soft(), &self.guest, Variant::default())?;
        let progress = Progress::new(STEPS.len() as u64, verbosity);
        let mut steps = Vec::new();
        for (what, writes) in STEPS {
            progress.step(what)?;
            let (time, still_idle) = match writes {
                Some(write_percent) => {
                    let random = self.guest.random && !steps.is_empty();
                    let sweep = Sweep {
                        write_percent,
                        random,
                    };
                    (sweeps.sweep(sweep)?.time, None)
                }
                None => {
                    let (time, still_idle) = mark_idle(&sweeps);
                    (time, Some(still_idle))
                }
            };
            steps.push(Step {
                step: what,
                s: time.as_secs_f64(),
                still_idle,
            });
        }
        Ok(Outcome {
            test: "access-tracking",
            vcpus: self.guest.vcpus,
            bytes: self.guest.bytes.0,
            pages: sweeps.area.pages(),
            steps,
        })
    }
}

/// Marks all pages idle; returns the time, and how many were idle already.
fn mark_idle(sweeps: &Sweeps<soft::Vm>) -> (Duration, u64) {
    let mmu = sweeps.vm.mmu();
    let slots = mmu.slots();
    let page = |gfn| {
        let slot = slots.find(gfn).expect("the accessed memory has slots");
        BackingRange::new(slot.backing_of(gfn), 1).expect("one page")
    };
    let pages: Vec<_> = sweeps.area.iter().map(page).collect();
    let mut young = vec![false; pages.len()];
    let notifier = mmu.notifier();
    let start = Instant::now();
    notifier.age(&pages, &mut young);
    notifier.end_of_aging();
    let time = start.elapsed();
    (time, young.iter().filter(|young| !**young).count() as u64)
}

/// The result of a test: its JSON form.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    test: &'static str,
    vcpus: usize,
    bytes: u64,
    pages: u64,
    steps: Vec<Step>,
}

/// For people.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let idle = |idle: u64| format!("{idle} of {}", self.pages);
        let row = |step: &Step| {
            let still_idle = step.still_idle.map(idle).unwrap_or_default();
            [step.step.into(), format!("{:.6} s", step.s), still_idle]
        };
        let header = ["", "time", "still idle"].map(str::to_owned);
        let rows: Vec<_> = std::iter::once(header)
            .chain(self.steps.iter().map(row))
            .collect();
        write!(
            f,
            "{} vCPUs, {} each\n\n{}",
            self.vcpus,
            Size(self.bytes),
            align(&rows)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::options_of;

    #[test]
    fn no_page_stays_idle_that_a_vcpu_accesses() {
        for line in [
            "--random",
            "--overlap",
            "--slots 2",
            "--arch arm64",
            "--memory-kind memfd",
        ] {
            let line = format!("--vcpus 2 --bytes 512K {line}");
            let options: AccessTracking = options_of(&line);
            options.check().unwrap();
            let outcome = options.run(Verbosity::Quiet).unwrap();
            let marks: Vec<_> = outcome
                .steps
                .iter()
                .filter_map(|step| step.still_idle)
                .collect();
            assert_eq!(marks, [0, 0, 0], "{line}");
            assert_eq!(outcome.pages, if options.guest.overlap { 128 } else { 256 });
            assert_eq!(
                serde_json::to_value(&outcome).unwrap()["steps"][3]["still_idle"],
                0
            );
            assert!(
                outcome.to_string().contains("0 of"),
                "{}",
                outcome.to_string()
            );
        }
    }

    #[test]
    fn pages_that_no_vcpu_accesses_stay_idle() {
        let options: AccessTracking = options_of("--bytes 512K");
        let variant = Variant {
            skips: true,
            ..Variant::default()
        };
        let mut sweeps = Sweeps::new(&options.guest.soft(), &options.guest, variant).unwrap();
        let mut still_idle = |write_percent| {
            let sweep = Sweep {
                write_percent,
                random: true,
            };
            let written = sweeps.sweep(sweep).unwrap().written;
            (mark_idle(&sweeps).1, written)
        };
        assert_eq!(still_idle(100.0), (0, 128));
        assert_eq!(still_idle(0.0), (128, 0));
        let (idle, written) = still_idle(50.0);
        assert!(idle + written == 128 && written > 30, "{idle} {written}");
    }

    #[test]
    fn kvm_is_refused_with_the_reason() {
        let options: AccessTracking = options_of("--backend kvm");
        assert!(options.check().unwrap_err().contains("give --backend soft"));
    }
}
