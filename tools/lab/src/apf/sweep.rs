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
use super::slices::{Arm, Gain, OFF_NULL_ON, Pace, Role};
use super::with_params;
use crate::experiment::{LabResult, Options};
use crate::report::{Progress, align, figure};
use crate::result::{Better, Measurement, Report};
use crate::stalls::{STALLS, stalls_text};
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

/// The figures of one latency.
struct Point {
    us: u64,
    workers: Summary,
    faulters: Summary,
    noise: f64,
    /// Each vCPU's stalls, off and on, for people.
    stalls: [String; 2],
    arms: Value,
}

/// `apf.break_even_us`.
pub fn measure(options: &Options, report: &mut Report, progress: &Progress) -> LabResult {
    let points = latencies(options).map(|us| {
        progress.step(format!("break-even: {us} us a page (injected)"))?;
        point(us, options)
    });
    let points = points.collect::<Result<Vec<_>, _>>()?;
    report.detail(table(&points));
    report.push(record(&points, pace(options, Duration::ZERO)));
    Ok(())
}

fn point(us: u64, options: &Options) -> LabResult<Point> {
    let latency = Duration::from_micros(us);
    let mut device = MEMORY;
    device.latency = latency;
    let pace = pace(options, latency);
    let runs = run(&device, Guests::APF, pace, options, &OFF_NULL_ON)?;
    let (workers, faulters) = (runs.ratio(Gain::WORKERS)?, runs.ratio(Gain::FAULTERS)?);
    let nulls = [
        runs.ratio(Gain::WORKERS.null())?,
        runs.ratio(Gain::FAULTERS.null())?,
    ];
    let both = |of: &dyn Fn(Role) -> Value| {
        let (workers, faulters) = (of(Role::Workers), of(Role::Faulters));
        json!({"workers": workers, "faulters": faulters})
    };
    Ok(Point {
        us,
        workers,
        faulters,
        noise: noise(&nulls),
        stalls: [Arm::OFF, Arm::ON].map(|arm| stalls_text(runs.stalls(arm))),
        arms: json!({
            "worker_ratio": Value::from(workers),
            "faulter_ratio": Value::from(faulters),
            "null": both(&|role| nulls[role as usize].into()),
            "off": both(&|role| runs.arm(Arm::OFF, role)),
            "on": both(&|role| runs.arm(Arm::ON, role)),
        }),
    })
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

/// The sweep for people.
fn table(points: &[Point]) -> String {
    let header = [
        "injected latency",
        "workers on/off",
        "faulters on/off",
        "noise",
        STALLS,
    ];
    let mut rows = vec![header.map(str::to_owned)];
    let range = |ratio: &Summary| {
        let [median, low, high] = [ratio.median, ratio.low, ratio.high].map(figure);
        format!("{median} ({low} .. {high})")
    };
    for point in points {
        let [off, on] = &point.stalls;
        rows.push([
            format!("  {} us", point.us),
            range(&point.workers),
            range(&point.faulters),
            figure(point.noise),
            format!("off  {off}"),
        ]);
        let [a, b, c, d] = <[String; 4]>::default();
        rows.push([a, b, c, d, format!("on   {on}")]);
    }
    align(&rows)
}

fn record(points: &[Point], pace: Pace) -> Measurement {
    let by = |end: fn(&Summary) -> f64| {
        break_even(points, |point| {
            let worse_off = end(&point.workers).min(end(&point.faulters));
            point.noise < NOISE_MAX && worse_off >= 1.0 - point.noise
        })
    };
    let summary = Summary {
        median: by(|ratio| ratio.median),
        low: by(|ratio| ratio.high),
        high: by(|ratio| ratio.low),
        ..points[0].workers
    };
    let result = Measurement::new(ID, "us", Better::Lower, summary).bar(BAR_US);
    let latencies: Vec<u64> = points.iter().map(|point| point.us).collect();
    let result = with_params(result, pace)
        .param("swap", "compressed memory with injected latency")
        .param("latencies_us", latencies);
    points.iter().fold(result, |result, point| {
        result.arm(&format!("{:05}us", point.us), point.arms.clone())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(us: u64, workers: Summary, faulters: Summary) -> Point {
        Point {
            us,
            workers,
            faulters,
            noise: 0.02,
            stalls: Default::default(),
            arms: Value::Null,
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
        noisy.noise = 0.3;
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
