//! The injected page latency from which asynchronous faults pay.
//!
//! The swap device is compressed memory, which takes a few microseconds, with the wanted latency
//! injected. A file takes tens of microseconds by itself, so shorter latencies could not be set. At
//! each latency the arms take turns in a VM, and are judged by these rules:
//!
//! ```text
//! noise(L)      the largest distance from 1 of the nulls' intervals, of workers and of faulters
//! no worse(L)   on / off >= 1 - noise(L), for workers and for faulters; and noise(L) < 0.2,
//!               because with more noise the latency has shown nothing
//! break-even    the smallest L such that "no worse" holds for it and for all longer ones
//! ```
//!
//! The ratios have intervals, so the break-even has one. Its value follows from the medians, its
//! upper end from the lower ends of both ratios, and its lower end from the upper ends. The bar is
//! for the upper end. The break-even is infinite if not even the longest latency qualifies.

use super::device::{Guests, MEMORY, run};
use super::with_params;
use crate::experiment::{LabResult, Options};
use crate::result::{Better, Measurement, Report};
use crate::slices::{Gain, OFF_NULL_ON, PROCESSES, Pace};
use crate::stats::Summary;
use serde_json::{Value, json};
use std::time::Duration;

const LATENCIES_US: [u64; 10] = [10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
const BAR_US: f64 = 100.0;
/// The id of the result.
pub const ID: &str = "apf.break_even_us";
/// If a null's interval reaches farther from 1 than this, its latency is not judged.
const NOISE_MAX: f64 = 0.2;

/// The number of steps that [`measure`] reports as progress.
pub fn steps(options: &Options) -> usize {
    latencies(options).count()
}

fn latencies(options: &Options) -> impl Iterator<Item = u64> + use<> {
    let stride = if options.quick { 3 } else { 1 };
    LATENCIES_US.into_iter().step_by(stride)
}

fn pace(options: &Options, latency: Duration) -> Pace {
    let (rounds, slice) = if options.quick { (2, 50) } else { (9, 80) };
    let pace = Pace::new(rounds, slice, 15);
    Pace {
        // Long enough for some faults, also at a long latency.
        slice: pace.slice.max(25 * latency),
        settle: pace.settle.max(3 * latency),
        ..pace
    }
}

/// The ratios of one latency, of workers and of faulters.
struct Point {
    us: u64,
    ratios: [Summary; 2],
    nulls: [Summary; 2],
}

/// `apf.break_even_us`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let mut points = Vec::new();
    for us in latencies(options) {
        options.step(format!("break-even: {us} us a page (injected)"))?;
        let latency = Duration::from_micros(us);
        let mut device = MEMORY;
        device.latency = latency;
        let pace = pace(options, latency);
        let runs = run(&device, Guests::APF, pace, options, &OFF_NULL_ON)?;
        let [workers, faulters] = [Gain::WORKERS, Gain::FAULTERS];
        points.push(Point {
            us,
            ratios: [runs.ratio(workers)?, runs.ratio(faulters)?],
            nulls: [runs.ratio(workers.null())?, runs.ratio(faulters.null())?],
        });
        report.detail(runs.table(&format!("{us} us a page (injected)"), &PROCESSES));
    }
    report.push(record(&points, pace(options, Duration::ZERO)));
    Ok(())
}

/// The largest distance of the nulls' intervals from 1.
fn noise(nulls: &[Summary]) -> f64 {
    let ends = nulls.iter().flat_map(|null| [null.low, null.high]);
    ends.map(|end| (end - 1.0).abs()).fold(0.0, f64::max)
}

/// The smallest latency from which on `no_worse` holds; infinite if there is none.
fn break_even(points: &[Point], no_worse: impl Fn(&Point) -> bool) -> f64 {
    let good = points.iter().rev().take_while(|point| no_worse(point));
    good.last().map_or(f64::INFINITY, |point| point.us as f64)
}

fn record(points: &[Point], pace: Pace) -> Measurement {
    let by = |end: fn(&Summary) -> f64| {
        break_even(points, |point| {
            let noise = noise(&point.nulls);
            let worse_off = point.ratios.iter().map(end).fold(f64::INFINITY, f64::min);
            noise < NOISE_MAX && worse_off >= 1.0 - noise
        })
    };
    let summary = Summary {
        median: by(|ratio| ratio.median),
        low: by(|ratio| ratio.high),
        high: by(|ratio| ratio.low),
        spread: None,
        ..points[0].ratios[0]
    };
    let result = Measurement::new(ID, "us", Better::Lower, summary).bar(BAR_US);
    let result = with_params(result, pace).param("swap", "compressed memory with injected latency");
    points.iter().fold(result, |result, point| {
        let [workers, faulters] = point.ratios.map(Value::from);
        let nulls = point.nulls.map(Value::from);
        result.arm(
            &format!("{:05}us", point.us),
            json!({"worker_ratio": workers, "faulter_ratio": faulters, "nulls": nulls}),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(us: u64, workers: Summary, faulters: Summary) -> Point {
        Point {
            us,
            ratios: [workers, faulters],
            nulls: [Summary::example(0.98, 1.0, 1.02); 2],
        }
    }

    /// Workers and faulters must both do no worse, at this latency and all longer ones.
    #[test]
    fn break_even_is_where_no_process_loses_any_more() {
        let good = Summary::example(1.1, 1.2, 1.3);
        let points = [
            point(10, good, good),
            point(20, good, Summary::example(0.8, 0.9, 0.95)),
            point(50, Summary::example(0.9, 0.97, 1.0), good),
            point(100, good, Summary::example(0.97, 0.99, 1.1)),
            point(200, Summary::example(0.98, 1.0, 1.1), good),
            point(500, good, good),
        ];
        let result = record(&points, Pace::new(6, 0, 0));
        assert_eq!((result.min, result.value, result.max), (50.0, 100.0, 200.0));
        assert_eq!(result.met, Some(false));
        assert_eq!(result.arms.keys().next().unwrap(), "00010us");
    }

    #[test]
    fn without_a_break_even_the_bar_is_missed() {
        let bad = Summary::example(0.5, 0.6, 0.7);
        let good = Summary::example(1.1, 1.2, 1.3);
        let mut noisy = point(10, good, good);
        noisy.nulls[1].high = 1.3;
        for points in [[point(10, bad, bad)], [noisy]] {
            let result = record(&points, Pace::new(6, 0, 0));
            assert_eq!((result.value, result.met), (f64::INFINITY, Some(false)));
        }
    }

    #[test]
    fn noise_is_the_farthest_end_of_the_nulls() {
        let nulls = [
            Summary::example(0.97, 1.0, 1.01),
            Summary::example(0.99, 1.0, 1.05),
        ];
        assert!((noise(&nulls) - 0.05).abs() < 1e-12);
    }
}
