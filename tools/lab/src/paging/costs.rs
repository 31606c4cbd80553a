//! The simulation's service times, measured on this machine.
//!
//! | time | measured as |
//! |---|---|
//! | `copy` | a fill while no thread sleeps |
//! | `varies` | single fills against their mean |
//! | `read`, `read_each` | the reader's calls without a fault, and for each fault of a full batch |
//! | `scan`, `scan_each` | a wake-up call for another page, with 1 to 256 threads asleep |
//! | `switch` | the reader's CPU time for a page, all threads on one core, less the above, halved |
//! | `wake` | the reader's CPU time, 16 threads on another core, less the above |
//! | `fault` | the CPU time of those threads, less a switch and the lock |
//! | `wake_idle` | the CPU time of a call that wakes a thread on an idle core, less `wake` |
//! | `idle` | what else one thread takes longer beside a reader on another core; see below |
//! | `line` | two threads on two cores that write to one cache line in turns |
//!
//! `idle` changes with the idle time, and varies, as it does for a thread that sleeps in an
//! eventfd.
//!
//! All but `varies` and the last two rows are CPU time of a thread, so other programs on the
//! machine count little.
//!
//! The lock is assumed to be held for `enqueue` as long as for `read_each`: both change one list by
//! one entry. On one core a wake-up and a switch are measured together, and a half is assumed to be
//! the switch.

use super::sim::{Costs, GAPS, Idle, Tenths};
use super::threads::{
    Cores, IdleWake, MOST_AT_ONCE, Took, area, copy, idle_wake, in_place, line_ns, queue_costs,
    refused, through_queue,
};
use crate::experiment::LabError;
use crate::interrupt;
use crate::native::thread_cpu_ns;
use crate::stats::Summary;
use std::array::from_fn;
use std::time::{Duration, Instant};

/// Numbers of sleeping threads for the length of a scan.
const SLEEPERS: [u64; 6] = [1, 4, 16, 64, 128, 256];
/// Wake-up calls for one of them.
const CALLS: u32 = 400;
/// Pages of a fill while no thread sleeps.
const FILLS: u64 = 4096;
/// Threads that touch on another core than the reader's: so many that the reader rarely sleeps.
const MANY: u64 = 16;

/// How long a core is idle before a thread is woken there. The one in the middle is about as long
/// as for one thread and its reader.
const IDLE_NS: [f64; GAPS] = [2e3, 8e3, 25e3, 60e3, 200e3];

fn idle_wakes() -> Result<[IdleWake; GAPS], LabError> {
    let wakes = IDLE_NS.map(|gap| idle_wake(Duration::from_nanos(gap as u64)));
    let wakes: Result<Vec<_>, _> = wakes.into_iter().collect();
    Ok(wakes?.try_into().expect("as many"))
}

/// One set of measurements; each is nanoseconds.
#[derive(Clone, Debug)]
pub struct Sample {
    copy: f64,
    varies: Tenths,
    fill: f64,
    read_none: f64,
    read_each: f64,
    no_scan: f64,
    scans: Vec<f64>,
    same: Took,
    many: Took,
    alone: Took,
    line: f64,
    idle_wakes: [IdleWake; GAPS],
}

/// The service times of this machine.
#[derive(Clone, Debug)]
pub struct Measured {
    /// For the simulation.
    pub costs: Costs,
    /// Filling a page and touching it, without a fault.
    pub fill: f64,
    /// The transfer of a cache line between two cores of this machine.
    pub line: f64,
    /// Numbers of sleeping threads, and the length of a call that looks at all of them.
    pub scans: Vec<(u64, f64)>,
}

impl Sample {
    /// Measures, with `pages` pages where threads touch.
    ///
    /// # Errors
    /// The system refused a call.
    pub fn take(pages: u64) -> Result<Self, LabError> {
        interrupt::check()?;
        let fills = area(FILLS)?;
        let began = thread_cpu_ns();
        (0..FILLS).try_for_each(|page| copy(&fills, page))?;
        let copy = (thread_cpu_ns() - began) as f64 / FILLS as f64;
        let varies = single_fills()?;
        let scans = SLEEPERS
            .iter()
            .map(|&sleepers| queue_costs(sleepers, CALLS));
        let scans = scans.collect::<Result<Vec<_>, _>>()?;
        let most = scans.last().expect("several numbers");
        let touched = area(pages)?;
        Ok(Self {
            copy,
            varies,
            fill: in_place(&touched, pages, 1)?.touchers,
            read_none: most.read_none,
            read_each: most.read_each,
            no_scan: empty_call()?,
            scans: scans.iter().map(|costs| costs.scan).collect(),
            same: through_queue(&touched, pages, 1, Cores::Same)?,
            many: through_queue(&touched, pages, MANY as usize, Cores::Across)?,
            alone: through_queue(&touched, pages, 1, Cores::Across)?,
            line: line_ns(),
            idle_wakes: idle_wakes()?,
        })
    }
}

/// The times of single fills, as multiples of their mean.
fn single_fills() -> Result<Tenths, LabError> {
    let area = area(FILLS)?;
    let one = |page| {
        let began = Instant::now();
        copy(&area, page)?;
        Ok(began.elapsed().as_nanos() as f64)
    };
    let times = Tenths::of((0..FILLS).map(one).collect::<Result<_, LabError>>()?);
    Ok(times.map(|time| time / times.mean()))
}

/// A wake-up call while no thread sleeps: it takes no lock.
fn empty_call() -> Result<f64, LabError> {
    let area = area(1)?;
    let began = thread_cpu_ns();
    for _ in 0..CALLS {
        let woken = area.userfaultfd().wake(area.page(0));
        woken.map_err(refused("UFFDIO_WAKE"))?;
    }
    Ok((thread_cpu_ns() - began) as f64 / f64::from(CALLS))
}

impl Measured {
    /// The medians of the measurements.
    ///
    /// # Panics
    /// If there is none.
    pub fn of(samples: &[Sample]) -> Self {
        let median = |of: &dyn Fn(&Sample) -> f64| {
            let all: Vec<f64> = samples.iter().map(of).collect();
            Summary::of(&all).median
        };
        let scans = SLEEPERS.iter().enumerate();
        let scans: Vec<(u64, f64)> = scans
            .map(|(i, &sleepers)| (sleepers, median(&|s| s.scans[i])))
            .collect();
        let scan_each = slope(&scans);
        let scan = (scans[0].1 - scan_each - median(&|s| s.no_scan)).max(0.0);
        let (read, copy) = (median(&|s| s.read_none), median(&|s| s.copy));
        let batch = MOST_AT_ONCE as f64;
        let read_each = (median(&|s| s.read_each) - read / batch).max(0.0);
        let wake_and_switch =
            median(&|s| s.same.reader) - (read + read_each + copy + scan + scan_each);
        let switch = (wake_and_switch / 2.0).max(0.0);
        let scan_many = scan + scan_each * (MANY - 1) as f64;
        let others = read / MANY as f64 + read_each + copy + scan_many;
        let wake = (median(&|s| s.many.reader) - others).max(0.0);
        let fault = (median(&|s| s.many.touchers) - read_each - switch).max(0.0);
        // One thread: two wake-ups of an idle core a page, and all other steps once.
        let steps = fault + read + 2.0 * read_each + copy + scan + scan_each + 2.0 * wake;
        let longer = (median(&|s| s.alone.wall) - steps).max(0.0) / 2.0;
        let call = median(&|s| s.idle_wakes[GAPS / 2].call);
        let wake_idle = (call - wake).clamp(0.0, longer);
        // The thread of `alone` sleeps and wakes by other calls than `idle_wakes`. Its additional
        // time at the gap of `alone` is assumed for all gaps.
        let tenths = |of: &dyn Fn(&Sample) -> Tenths| Tenths(from_fn(|i| median(&|s| of(s).0[i])));
        let runs = |gap: usize| tenths(&|s| s.idle_wakes[gap].until_it_runs);
        let beside = longer - wake_idle - runs(GAPS / 2).mean();
        let runs_beside = |gap| runs(gap).map(|ns| (ns + beside).max(0.0));
        let idle = Idle(from_fn(|i| (IDLE_NS[i], runs_beside(i))));
        Self {
            costs: Costs {
                varies: tenths(&|s| s.varies),
                fault,
                enqueue: read_each,
                read,
                read_each,
                copy,
                scan,
                scan_each,
                wake,
                wake_idle,
                idle,
                switch,
                line: 0.0,
            },
            fill: median(&|s| s.fill),
            scans,
            line: median(&|s| s.line),
        }
    }
}

/// The slope of the line through `points` with the least squares.
fn slope(points: &[(u64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean_x = points.iter().map(|p| p.0 as f64).sum::<f64>() / count;
    let mean_y = points.iter().map(|p| p.1).sum::<f64>() / count;
    let products = points
        .iter()
        .map(|p| (p.0 as f64 - mean_x) * (p.1 - mean_y));
    let squares = points.iter().map(|p| (p.0 as f64 - mean_x).powi(2));
    (products.sum::<f64>() / squares.sum::<f64>()).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paging::sim::{Setting, queue};

    /// From times of the model, the parts are found again, and the model of one thread and one
    /// reader takes the measured time.
    #[test]
    fn the_parts_of_a_cycle_add_up_to_it() {
        let took = |wall, touchers, reader| Took {
            wall,
            touchers,
            reader,
        };
        let sample = Sample {
            copy: 2000.0,
            varies: Tenths::always(1.0),
            fill: 2500.0,
            read_none: 400.0,
            read_each: 106.25,
            no_scan: 200.0,
            scans: SLEEPERS.iter().map(|&n| 290.0 + 10.0 * n as f64).collect(),
            same: took(6000.0, 2500.0, 3500.0),
            many: took(3565.0, 2050.0, 3565.0),
            alone: took(46_000.0, 5000.0, 6500.0),
            line: 100.0,
            idle_wakes: [IdleWake {
                call: 3200.0,
                until_it_runs: Tenths::always(20_000.0),
            }; GAPS],
        };
        let measured = Measured::of(&[sample]);
        let costs = measured.costs;
        assert!((costs.scan_each - 10.0).abs() < 1e-6, "{costs:?}");
        assert!((costs.scan - 90.0).abs() < 1e-6, "{costs:?}");
        assert!((costs.switch - 450.0).abs() < 1e-6, "{costs:?}");
        assert!((costs.wake - 1200.0).abs() < 1e-6, "{costs:?}");
        assert!((costs.fault - 1500.0).abs() < 1e-6, "{costs:?}");
        assert!((costs.wake_idle - 2000.0).abs() < 1e-6, "{costs:?}");
        let setting = Setting {
            threads: 1,
            readers: 1,
            cores: 1,
            batch: 64,
        };
        let wall = 1e9 / queue(&costs, &setting, 1000);
        assert!((wall / 46_000.0 - 1.0).abs() < 0.001, "{wall}");
    }
}
