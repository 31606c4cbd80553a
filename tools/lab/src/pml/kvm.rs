//! Dirty tracking on `/dev/kvm`: the speed that `churn` keeps while a monitor asks once a second
//! for the written pages. KVM's bitmap, KVM's rings, or Linux's page table (userfaultfd's
//! asynchronous write protection and `PAGEMAP_SCAN`) answer.
//!
//! The detection of writes is chosen when a VM is made, so each of the three has a VM of its own.
//! Each VM is compared with itself while no slot logs: *off*, *off again* and *on* are slices of
//! one run ([`super::monitor`]). The monitor uses only the backend interface, so the experiment
//! runs on soft as well.
//!
//! Every transaction goes to the cold part of the heap, so a slice dirties about as many pages as
//! there are. Pages still write-protected at the end of logging are written while the next slice
//! settles.
//!
//! There is one vCPU: the monitor works on another core, and no page waits for KVM's one lock over
//! all shadow pages. The score is by the wall clock. A page's cost is by the processor time of the
//! vCPU's thread: the additional time of a transaction, times transactions, over pages.
//!
//! A KVM without hardware support (`kvm_pvm`: shadow paging, no PML) cannot be compared with VMX,
//! so the results have no bar.

use super::monitor::{DIRTIED, HARVEST, PER_CPU_S, PER_S, Pace, slice};
use crate::experiment::{LabError, LabResult, Options};
use crate::fixture::{code, on_kvm, run_to_port};
use crate::native::thread_cpu_ns;
use crate::options::Recorder;
use crate::result::{Better, Measurement, Report};
use crate::session::{image, on};
use crate::stats::{Summary, measures, paired, rounds};
use lacuna::dirty::{Backup, Delivery, DirtyError};
use lacuna::kvm::{KvmError, Tracker, VmBuilder};
use lacuna::{Arch, Builder, PageCount, Vm};
use rustix::io::Errno;
use std::path::Path;
use std::time::Duration;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 3;

/// The end of an id, where writes are recorded, and what detects them. Rings are as large as they
/// can be: where KVM emulates the guest's kernel, each store of the kernel makes an entry.
fn ways() -> [(&'static str, Delivery, Tracker); STEPS as usize] {
    [
        ("bitmap", Delivery::Bitmap, Tracker::Kvm),
        (
            "ring",
            Recorder::Ring.delivery(Backup::Bitmap),
            Tracker::Kvm,
        ),
        ("wp_async", Delivery::Bitmap, Tracker::Pagemap),
    ]
}

const VCPUS: usize = 1;
/// The guest's timer tick, in microseconds. It is long, because a wake-up is expensive where KVM
/// emulates the guest's kernel.
const TICK_US: u64 = 100_000;

/// A score and the cost of a dirtied page.
fn ids(way: &str) -> [String; 2] {
    ["score_percent", "ns_per_dirty_page"].map(|name| format!("pml.kvm.{name}.{way}"))
}

/// The ids of all ways.
pub fn all_ids() -> impl Iterator<Item = String> {
    ways().into_iter().flat_map(|(way, ..)| ids(way))
}

/// Sizes, times and rounds.
#[derive(Clone, Copy)]
struct Size {
    mib: u64,
    pace: Pace,
    rounds: usize,
}

impl Size {
    fn of(options: &Options) -> Self {
        let (mib, period, periods, settle, rounds) = match options.quick {
            true => (32, 100, 2, 100, 1),
            false => (128, 1000, 1, 400, 8),
        };
        let [period, settle] = [period, settle].map(Duration::from_millis);
        let pace = Pace {
            period,
            periods,
            settle,
        };
        Self { mib, pace, rounds }
    }
}

/// The arms: off, off again as the null, and on.
const OFF: usize = 0;
const NULL: usize = 1;
const ON: usize = 2;

/// `pml.kvm.*`. Results that this host cannot measure are skipped.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let size = Size::of(options);
    for (way, delivery, tracker) in ways() {
        options.step(format!("dirty tracking on /dev/kvm: {way}"))?;
        let memory = PageCount::from_bytes(size.mib << 20);
        let builder = VmBuilder {
            delivery,
            tracker,
            command_line: words(size),
            ..on_kvm(memory, VCPUS)
        };
        match run(&builder, size) {
            Ok(runs) => record(report, size, way, &runs),
            Err(why) if is_lacking(&why) => {
                ids(way).into_iter().for_each(|id| report.skip(id, &why));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether this host lacks a need of the experiment. Any other refusal is a failure.
pub fn is_lacking(why: &LabError) -> bool {
    match why {
        LabError::Kvm(why) => matches!(
            why,
            KvmError::Unavailable(_)
                | KvmError::NoRing
                | KvmError::Ring { .. }
                | KvmError::Userfaultfd { .. }
        ),
        LabError::Dirty(DirtyError::Kernel { errno, .. }) => {
            [Errno::NOTTY, Errno::INVAL, Errno::OPNOTSUPP]
                .iter()
                .any(|lacks| lacks.raw_os_error() == *errno)
        }
        _ => false,
    }
}

/// The slices of one VM, for each arm and round.
struct Runs(Vec<[Vec<f64>; 4]>);

impl Runs {
    fn of(&self, arm: usize, what: usize) -> &[f64] {
        &self.0[arm][what]
    }

    fn percent(&self, arm: usize) -> Summary {
        paired(self.of(OFF, PER_S), self.of(arm, PER_S)).scaled(100.0)
    }

    /// The cost of a dirtied page to the vCPU, in nanoseconds.
    fn cost_ns(&self) -> Summary {
        let rounds = 0..self.of(ON, PER_S).len();
        let cost = |round: usize| {
            let at = |arm, what| self.of(arm, what)[round];
            let more_ns = 1e9 / at(ON, PER_CPU_S) - 1e9 / at(OFF, PER_CPU_S);
            more_ns * at(ON, PER_S) / at(ON, DIRTIED)
        };
        let costs: Vec<f64> = rounds.map(cost).collect();
        Summary::of(&costs)
    }
}

/// The command line of `churn`.
fn words(size: Size) -> String {
    format!(
        "hot={}M cold=10000 writes=100 frees=0 seconds=1000000 tick_us={TICK_US}",
        size.mib / 32
    )
}

/// The arms in turns, in a VM of `builder`.
fn run<B: Builder>(builder: &B, size: Size) -> LabResult<Runs>
where
    LabError: From<<B::Vm as Vm>::Error>,
{
    on(builder, &image(Arch::X86_64, "churn")?, |session| {
        session.guest.prepared()?;
        measures(3, size.rounds, |arm| slice(session, size.pace, arm == ON)).map(Runs)
    })
}

/// The folder `kvm_pvm` exists where KVM has no hardware support.
fn record(report: &mut Report, size: Size, way: &str, runs: &Runs) {
    let host = if Path::new("/sys/module/kvm_pvm").exists() {
        "kvm_pvm: shadow paging, no PML; not comparable with VMX or SVM"
    } else {
        "KVM"
    };
    let of = |arm, what| Summary::of(runs.of(arm, what));
    let [score, cost] = ids(way);
    for result in [
        Measurement::new(score, "%", Better::Higher, runs.percent(ON)),
        Measurement::new(cost, "ns", Better::Lower, runs.cost_ns()),
    ] {
        let result = result
            .param("host_kvm", host)
            .param("memory_mib", size.mib)
            .param("vcpus", VCPUS)
            .param("harvest_ms", size.pace.period.as_millis() as u64)
            .param("settle_ms", size.pace.settle.as_millis() as u64)
            .param("guest_tick_us", TICK_US)
            .param("cold_of_10000", 10_000)
            .arm("none_per_s", of(OFF, PER_S))
            .arm("watched_per_s", of(ON, PER_S))
            .arm("none_per_cpu_s", of(OFF, PER_CPU_S))
            .arm("watched_per_cpu_s", of(ON, PER_CPU_S))
            .arm("pages_dirtied_per_s", of(ON, DIRTIED))
            .arm("ms_per_harvest", of(ON, HARVEST))
            .arm("null_percent", runs.percent(NULL));
        report.push(result);
    }
}

/// Exits of a slice of [`measure_exit`].
const EXITS: u32 = 2000;

/// Measures `pml.kvm.exit_ns`: the time of an exit to the VMM, and of the entry after it, on this
/// host's KVM. A guest of two instructions writes to a port again and again. The scores are charged
/// with it as well, beside the published constant ([`crate::exit_cost`]).
///
/// This time is an upper bound for the cost of detection: a write fault and a full log are handled
/// in the kernel. Where KVM has no hardware support (`kvm_pvm`), it includes the emulation of the
/// guest's instructions. Returns nothing if this host has no KVM.
pub fn measure_exit(options: &Options, report: &mut Report) -> LabResult<Option<f64>> {
    let id = "pml.kvm.exit_ns";
    match exit_ns(options) {
        Ok(ns) => {
            let result = Measurement::new(id, "ns", Better::Lower, ns);
            report.push(result.param("exits", EXITS));
            Ok(Some(ns.median))
        }
        Err(why) if is_lacking(&why) => {
            report.skip(id, why);
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Processor time of the vCPU's thread for each exit, in nanoseconds.
fn exit_ns(options: &Options) -> LabResult<Summary> {
    let vm = on_kvm(PageCount::from_bytes(32 << 20), 1).build()?;
    // again: out 0xf4, al; jmp again
    let program = [0xe6, 0xf4, 0xeb, 0xfc];
    let mut vcpus = vm.boot(&code(Arch::X86_64, &[(0x10_0000, &program)]), "")?;
    let vcpu = vcpus.first_mut().expect("one vCPU");
    let runs = rounds(1, if options.quick { 2 } else { 15 }, |_| {
        let before = thread_cpu_ns();
        (0..EXITS).try_for_each(|_| run_to_port(vcpu))?;
        Ok((thread_cpu_ns() - before) as f64 / f64::from(EXITS))
    })?;
    Ok(Summary::of(&runs[0]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    #[test]
    fn a_page_costs_what_its_transactions_take_more() {
        let arm = |rate: f64, cpu: f64, dirtied: f64| [rate, cpu, dirtied, 0.1].map(|v| vec![v; 3]);
        // Other programs have half of each second.
        let off = || arm(100.0, 200.0, 0.0);
        let runs = Runs(vec![off(), off(), arm(92.0, 184.0, 1000.0)]);
        assert!((runs.percent(ON).median - 92.0).abs() < 1e-9);
        assert!((runs.percent(NULL).median - 100.0).abs() < 1e-9);
        // Eight hundredths of half a second, and a thousandth of that for each page.
        let expected = 0.5 * 0.08 * 1e9 / 1000.0;
        assert!((runs.cost_ns().median - expected).abs() < 1e-3);
    }

    #[test]
    fn what_a_host_lacks_is_no_failure_of_the_experiment() {
        assert!(is_lacking(&KvmError::NoRing.into()));
        assert!(is_lacking(&KvmError::Ring { bytes: 2, max: 1 }.into()));
        assert!(!is_lacking(&KvmError::NoApf.into()));
        let kernel = |errno: Errno| DirtyError::Kernel {
            step: "read the log",
            errno: errno.raw_os_error(),
        };
        assert!(is_lacking(&kernel(Errno::NOTTY).into()));
        assert!(!is_lacking(&kernel(Errno::NOMEM).into()));
    }

    #[test]
    fn the_experiment_is_the_same_on_soft() {
        needs_guests();
        let ms = Duration::from_millis;
        let size = Size {
            mib: 64,
            pace: Pace {
                period: ms(50),
                periods: 2,
                settle: ms(20),
            },
            rounds: 1,
        };
        let builder = lacuna::soft::VmBuilder {
            command_line: words(size),
            ..crate::fixture::resident(size.mib, VCPUS)
        };
        let runs = run(&builder, size).unwrap();
        for arm in [OFF, NULL, ON] {
            assert!(runs.of(arm, PER_S)[0] > 0.0 && runs.of(arm, PER_CPU_S)[0] > 0.0);
            assert_eq!(runs.of(arm, DIRTIED)[0] > 0.0, arm == ON);
        }
    }
}
