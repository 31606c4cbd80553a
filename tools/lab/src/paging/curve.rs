//! A curve to 256 vCPUs, simulated with service times from the same run, and the check of the
//! simulation against threads of this machine. The curve is reported only if the check passes.

use super::costs::{Measured, Sample};
use super::sim::{Costs, Setting, Tenths, exits, queue};
use super::threads::{Cores, MOST_AT_ONCE, area, in_place, through_queue};
use super::{SERIES, SOURCE};
use crate::experiment::{LabError, Options};
use crate::report::{Progress, align, figure, short, wrap};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, rounds};
use std::array::from_fn;
use std::thread;

/// The transfer of a cache line between two cores of a large x86 server, in nanoseconds: medians
/// inside one socket (Ice Lake 8375C) and between two (EPYC 7R13).
const LINE_NS: [f64; 2] = [51.0, 197.0];
const LINE_SOURCE: &str = "github.com/nviennot/core-to-core-latency";

/// Measured and simulated numbers of threads.
const CHECKED: [usize; 5] = [1, 2, 4, 8, 16];
/// The largest error of the simulation, in percent.
const BAR: f64 = 15.0;
/// Pages that the simulation counts.
const SIMULATED: u64 = 20_000;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2;
/// Its results.
pub const IDS: &str = "paging.sim.*";
/// The check's results, and the curve's.
const ERRORS: &str = "paging.sim.";
const CURVE: &str = "paging.sim.exit_vs_queue.*";

/// Measures `paging.sim.*`.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    let refused = |error: &LabError| {
        format!("{error}; run it as root, or set vm.unprivileged_userfaultfd to 1")
    };
    if let Err(error) = area(1) {
        report.skip(IDS, refused(&error));
        return Ok(());
    }
    progress.step("threads on a userfaultfd, 1 to 16, and the times of their steps")?;
    let (pages, runs) = if options.quick { (1024, 2) } else { (32768, 5) };
    let measured = check(pages, runs, report)?;
    progress.step("the curve to 256 vCPUs")?;
    match off_by(report) {
        None => curve(&measured, report),
        Some(why) => report.skip(CURVE, why),
    }
    report.detail(service_times(&measured));
    Ok(())
}

/// Which error of the simulation misses its bar.
fn off_by(report: &Report) -> Option<String> {
    let mut missed = report.missed();
    let missed = missed.find(|result| result.id.starts_with(ERRORS))?;
    let Measurement {
        id,
        value,
        min,
        max,
        ..
    } = missed;
    Some(format!(
        "the simulation is {value:.0} % [{min:.0} .. {max:.0}] off what it simulates, more than \
         {BAR} % ({id})"
    ))
}

/// Measures threads on this machine's cores, and simulates them. The service times are measured in
/// the same rounds, because the speed of a machine drifts.
fn check(pages: u64, runs: usize, report: &mut Report) -> Result<Measured, LabError> {
    let memory = area(pages)?;
    let count = CHECKED.len();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let mut samples = Vec::new();
    let rates = rounds(2 * count + 1, runs, |arm| {
        // One more turn of each round measures the service times. It has no rate.
        if arm == 2 * count {
            samples.push(Sample::take(pages)?);
            return Ok(0.0);
        }
        let threads = CHECKED[arm % count];
        // No thread sleeps when threads fill pages in place. So the rate follows from the threads'
        // CPU time, and other programs on the machine count little.
        Ok::<_, LabError>(if arm < count {
            through_queue(&memory, pages, threads, Cores::Across)?.rate()
        } else {
            in_place(&memory, pages, threads)?.rate_on(threads.min(cores))
        })
    })?;
    let measured = Measured::of(&samples);
    let simulated = |arm: usize| {
        let threads = CHECKED[arm % count];
        let line = if threads > 1 { measured.line } else { 0.0 };
        if arm < count {
            queue(&measured.costs, &here(threads), SIMULATED)
        } else {
            exits(measured.fill, line, threads, cores, SIMULATED)
        }
    };
    let summaries: Vec<Summary> = rates.iter().map(|rates| Summary::of(rates)).collect();
    for (name, arms) in [("queue", 0..count), ("exits", count..2 * count)] {
        let errors = arms
            .clone()
            .map(|arm| error(simulated(arm), summaries[arm]));
        let worst = errors.max_by(|a, b| a.median.total_cmp(&b.median));
        let id = format!("paging.sim.{name}_error_percent");
        let result = Measurement::new(id, "%", Better::Lower, worst.expect("five arms"));
        let mut result = result.bar(BAR).simulated().param("cores", cores);
        for arm in arms {
            let threads = CHECKED[arm % count];
            result = result
                .arm(&format!("{threads}_threads_measured"), summaries[arm])
                .arm(&format!("{threads}_threads_simulated"), simulated(arm));
        }
        report.push(result);
    }
    let mut table =
        vec![["threads", "queue", "simulated", "in place", "simulated"].map(str::to_owned)];
    table.extend(CHECKED.iter().enumerate().map(|(i, threads)| {
        [
            threads.to_string(),
            short(summaries[i].median),
            short(simulated(i)),
            short(summaries[count + i].median),
            short(simulated(count + i)),
        ]
    }));
    report.detail(format!(
        "userfaultfd: pages a second of host threads on {cores} cores, one reader\n{}",
        align(&table)
    ));
    Ok(measured)
}

/// The threads on one core, and their reader on another: there are no preemptions, as on a machine
/// with a core for each thread.
const fn here(threads: usize) -> Setting {
    Setting {
        threads,
        readers: 1,
        cores: 1,
        batch: MOST_AT_ONCE,
    }
}

/// The distance of `simulated` from the measured rate, in percent. The ends are the errors against
/// the ends of the interval.
fn error(simulated: f64, measured: Summary) -> Summary {
    let off = |rate: f64| 100.0 * (simulated / rate - 1.0).abs();
    let [low, high] = [measured.low, measured.high].map(off);
    Summary {
        median: off(measured.median),
        low: low.min(high).min(off(measured.median)),
        high: low.max(high),
        ..measured
    }
}

/// The simulated rates of one number of vCPUs on a core each, for both ends of [`LINE_NS`].
#[derive(Clone, Copy, PartialEq, Debug)]
struct Band {
    one_reader: [f64; 2],
    reader_each: [f64; 2],
    exits: [f64; 2],
}

impl Band {
    fn of(measured: &Measured, vcpus: usize) -> Self {
        let through = |readers: usize, line: f64| {
            let costs = Costs {
                line,
                ..measured.costs
            };
            let setting = Setting {
                threads: vcpus,
                readers,
                cores: vcpus,
                batch: 1,
            };
            queue(&costs, &setting, SIMULATED)
        };
        Self {
            one_reader: LINE_NS.map(|line| through(1, line)),
            reader_each: LINE_NS.map(|line| through(vcpus, line)),
            exits: LINE_NS.map(|line| exits(measured.fill, line, vcpus, vcpus, SIMULATED)),
        }
    }

    /// Exits against one queue with one reader.
    fn ratio(&self) -> Summary {
        let ratios: [f64; 2] = from_fn(|i| self.exits[i] / self.one_reader[i]);
        let [low, high] = [ratios[0].min(ratios[1]), ratios[0].max(ratios[1])];
        Summary {
            median: (low * high).sqrt(),
            low,
            high,
            runs: 1,
            coverage: 0.0,
        }
    }
}

fn curve(measured: &Measured, report: &mut Report) {
    let mut table = vec![
        [
            "vCPUs",
            "1 reader",
            "a reader each",
            "exits",
            "ratio",
            "series: queue",
            "exits",
            "ratio",
        ]
        .map(str::to_owned),
    ];
    for (vcpus, without, with) in SERIES {
        let band = Band::of(measured, vcpus);
        let id = format!("paging.sim.exit_vs_queue.{vcpus}vcpu");
        report.push(
            Measurement::new(id, "x", Better::Higher, band.ratio())
                .simulated()
                .reference(with / without, SOURCE)
                .param("line_ns", LINE_NS.to_vec())
                .param("line_source", LINE_SOURCE)
                .arm("queue_1_readers_pages_per_s", band.one_reader.to_vec())
                .arm("queue_reader_each_pages_per_s", band.reader_each.to_vec())
                .arm("exits_pages_per_s", band.exits.to_vec()),
        );
        let thousands = |band: [f64; 2]| {
            let [low, high] = [band[0].min(band[1]), band[0].max(band[1])];
            format!("{} .. {}", short(low), short(high))
        };
        let ratio = band.ratio();
        table.push([
            vcpus.to_string(),
            thousands(band.one_reader),
            thousands(band.reader_each),
            thousands(band.exits),
            format!("{} .. {}", figure(ratio.low), figure(ratio.high)),
            short(without * 1e3),
            short(with * 1e3),
            figure(with / without),
        ]);
    }
    let [low, high] = LINE_NS;
    let heading = format!(
        "SIMULATED: pages a second with a core for each thread. The band is a cache line's \
         transfer of {low} to {high} ns ({LINE_SOURCE}). The last three columns were measured: \
         {SOURCE}."
    );
    report.detail(format!("{}\n{}", wrap(&heading), align(&table)));
}

fn service_times(measured: &Measured) -> String {
    let costs = measured.costs;
    let times = [
        ("fault", costs.fault),
        ("read", costs.read),
        ("read_each", costs.read_each),
        ("copy", costs.copy),
        ("scan", costs.scan),
        ("scan_each", costs.scan_each),
        ("wake", costs.wake),
        ("wake_idle", costs.wake_idle),
        ("switch", costs.switch),
        ("fill in place", measured.fill),
        ("line", measured.line),
    ];
    let mut rows = vec![["service time", "ns"].map(str::to_owned)];
    rows.extend(times.map(|(name, ns)| [name.to_owned(), figure(ns)]));
    let ends = |Tenths(tenths): Tenths, unit: f64| {
        let [low, high] = [tenths[0], tenths[9]].map(|value| figure(value * unit));
        format!("{low} .. {high}")
    };
    rows.push([
        "a step takes, percent of it".into(),
        ends(costs.varies, 100.0),
    ]);
    let idle = costs.idle.0.iter();
    rows.extend(idle.map(|(gap, takes)| {
        let gap = figure(gap / 1e3);
        [format!("wakes after {gap} us"), ends(*takes, 1.0)]
    }));
    let scans = measured.scans.iter();
    rows.extend(scans.map(|(sleepers, ns)| [format!("a call, {sleepers} asleep"), figure(*ns)]));
    align(&rows)
}

#[cfg(test)]
mod tests {
    use super::super::sim::{GAPS, Idle};
    use super::*;

    fn measured() -> Measured {
        Measured {
            costs: Costs {
                varies: Tenths::always(1.0),
                fault: 1500.0,
                enqueue: 100.0,
                read: 400.0,
                read_each: 100.0,
                copy: 1500.0,
                scan: 100.0,
                scan_each: 5.0,
                wake: 500.0,
                wake_idle: 1500.0,
                idle: Idle([(0.0, Tenths::always(3000.0)); GAPS]),
                switch: 500.0,
                line: 0.0,
            },
            fill: 2900.0,
            scans: vec![(1, 100.0)],
            line: 100.0,
        }
    }

    /// The shape of the published curve: the queue falls with the vCPUs, the exits rise, and the
    /// ratio is two orders of magnitude.
    #[test]
    fn the_queue_collapses_and_the_exits_scale() {
        let [few, many] = [8, 256].map(|vcpus| Band::of(&measured(), vcpus));
        for end in 0..2 {
            assert!(many.one_reader[end] < few.one_reader[end] / 2.0, "{many:?}");
            assert!(many.reader_each[end] < few.reader_each[end], "{many:?}");
            assert!(many.exits[end] > few.exits[end], "{many:?}");
        }
        let ratio = many.ratio();
        assert!(ratio.low > 50.0 && ratio.low <= ratio.median && ratio.median <= ratio.high);
    }

    #[test]
    fn the_error_is_against_the_interval() {
        let measured = Summary {
            median: 100.0,
            low: 80.0,
            high: 110.0,
            runs: 9,
            coverage: 0.96,
        };
        let found = error(120.0, measured);
        assert!((found.median - 20.0).abs() < 1e-9);
        assert!((found.high - 50.0).abs() < 1e-9);
        assert!((found.low - 100.0 / 11.0).abs() < 1e-9);
        assert_eq!(found.runs, 9);
    }

    /// There is no curve if the simulation is off by more than its bar.
    #[test]
    fn a_missed_error_bar_is_the_reason_for_no_curve() {
        for (error, missed) in [(BAR - 1.0, false), (BAR + 1.0, true)] {
            let mut report = Report::new("lacuna lab paging");
            let summary = Summary::of(&[error; 6]);
            let id = "paging.sim.queue_error_percent";
            report.push(Measurement::new(id, "%", Better::Lower, summary).bar(BAR));
            let why = off_by(&report);
            assert_eq!(why.is_some_and(|why| why.contains(id)), missed);
        }
    }

    /// All ids of the curve, marked as simulated, with the published figure beside.
    #[test]
    fn the_curve_is_marked_as_simulated() {
        let mut report = Report::new("lacuna lab paging");
        curve(&measured(), &mut report);
        assert_eq!(report.results.len(), SERIES.len());
        assert!(report.results.iter().all(|result| result.simulated));
        let last = report.results.last().unwrap();
        assert_eq!(last.id, "paging.sim.exit_vs_queue.256vcpu");
        assert!((last.reference.unwrap() - 4012.0 / 36.0).abs() < 1e-9);
        assert!(report.details[0].starts_with("SIMULATED"));
    }
}
