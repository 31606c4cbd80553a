//! The simulation's service times, measured on this machine.
//!
//! | time | measured as |
//! |---|---|
//! | `copy` | a fill while no thread sleeps |
//! | `read`, `read_each` | the reader's calls without a fault, and for each fault of a full batch |
//! | `scan`, `scan_each` | a wake-up call for another page, with 1 to 256 threads asleep |
//! | `wake`, `switch` | the reader's CPU time for a page, all threads on one core, less the above |
//! | `fault` | the CPU time of the faulting thread in the same run, less a wake-up and a switch |
//! | `wake_idle`, `idle` | the same run with threads on any core: what it takes longer |
//!
//! All but the last row are CPU time of a thread, so other programs on the machine count little.
//! The lock is held for `enqueue` as long as for `read_each`: both change one list by one entry. A
//! wake-up and a switch are measured together, and half of the time is attributed to each.

use super::sim::Costs;
use super::threads::{
    Cores, MOST_AT_ONCE, Took, area, copy, in_place, queue_costs, refused, through_queue,
};
use crate::experiment::LabError;
use crate::interrupt;
use crate::native::thread_cpu_ns;
use crate::stats::Summary;

/// Numbers of sleeping threads for the length of a scan.
const SLEEPERS: [u64; 6] = [1, 4, 16, 64, 128, 256];
/// Wake-up calls for one of them.
const CALLS: u32 = 400;
/// Pages of a fill while no thread sleeps.
const FILLS: u64 = 4096;

/// One set of measurements; each is nanoseconds.
#[derive(Clone, Debug)]
struct Sample {
    copy: f64,
    fill: f64,
    read_none: f64,
    read_each: f64,
    no_scan: f64,
    scans: Vec<f64>,
    same: Took,
    any: Took,
}

/// The service times of this machine.
#[derive(Clone, Debug)]
pub struct Measured {
    /// For the simulation.
    pub costs: Costs,
    /// Filling a page and touching it, without a fault.
    pub fill: f64,
    /// Numbers of sleeping threads, and the length of a call that looks at all of them.
    pub scans: Vec<(u64, f64)>,
}

impl Sample {
    fn take(pages: u64) -> Result<Self, LabError> {
        interrupt::check()?;
        let fills = area(FILLS)?;
        let began = thread_cpu_ns();
        (0..FILLS).try_for_each(|page| copy(&fills, page))?;
        let copy = (thread_cpu_ns() - began) as f64 / FILLS as f64;
        let scans = SLEEPERS
            .iter()
            .map(|&sleepers| queue_costs(sleepers, CALLS));
        let scans = scans.collect::<Result<Vec<_>, _>>()?;
        let most = scans.last().expect("several numbers");
        let touched = area(pages)?;
        Ok(Self {
            copy,
            fill: in_place(&fills, FILLS, 1)?.touchers,
            read_none: most.read_none,
            read_each: most.read_each,
            no_scan: empty_call()?,
            scans: scans.iter().map(|costs| costs.scan).collect(),
            same: through_queue(&touched, pages, 1, Cores::Same)?,
            any: through_queue(&touched, pages, 1, Cores::Any)?,
        })
    }
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
    /// The medians of `runs` measurements, each over `pages` pages.
    ///
    /// # Errors
    /// The system refused something.
    pub fn take(runs: usize, pages: u64) -> Result<Self, LabError> {
        let samples = (0..runs).map(|_| Sample::take(pages));
        let samples = samples.collect::<Result<Vec<_>, _>>()?;
        Ok(Self::of(&samples))
    }

    fn of(samples: &[Sample]) -> Self {
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
        let one = read + read_each;
        let reader = median(&|s| s.same.reader);
        let wake_and_switch = (reader - one - copy - scan - scan_each).max(0.0);
        let fault = (median(&|s| s.same.touchers) - wake_and_switch - read_each).max(0.0);
        let cpu = |took: &Took| took.reader + took.touchers;
        let longer = median(&|s| s.any.wall - s.same.wall).max(0.0) / 2.0;
        let wake_idle = median(&|s| cpu(&s.any) - cpu(&s.same)).max(0.0) / 2.0;
        let wake_idle = wake_idle.min(longer);
        let half = wake_and_switch / 2.0;
        Self {
            costs: Costs {
                fault,
                enqueue: read_each,
                read,
                read_each,
                copy,
                scan,
                scan_each,
                wake: half,
                wake_idle,
                idle: longer - wake_idle + half,
                switch: half,
                line: 0.0,
            },
            fill: median(&|s| s.fill),
            scans,
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

    /// From times that the model makes, the parts come back, and the model of one thread and one
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
            fill: 2500.0,
            read_none: 400.0,
            read_each: 106.25,
            no_scan: 200.0,
            scans: SLEEPERS.iter().map(|&n| 290.0 + 10.0 * n as f64).collect(),
            same: took(6000.0, 2500.0, 3500.0),
            any: took(46_000.0, 4500.0, 5500.0),
        };
        let measured = Measured::of(&[sample]);
        let costs = measured.costs;
        assert!((costs.scan_each - 10.0).abs() < 1e-6, "{costs:?}");
        assert!((costs.scan - 90.0).abs() < 1e-6, "{costs:?}");
        assert!((costs.wake - 450.0).abs() < 1e-6, "{costs:?}");
        assert!((costs.wake_idle - 2000.0).abs() < 1e-6, "{costs:?}");
        let setting = Setting {
            threads: 1,
            readers: 1,
            cores: 2,
            batch: 64,
        };
        let wall = 1e9 / queue(&costs, &setting, 1000);
        assert!((wall / 46_000.0 - 1.0).abs() < 0.001, "{wall}");
    }
}
