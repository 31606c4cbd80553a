//! The cost of a resident stage-2 fault, and whether the faults of two vCPUs delay each other.

use crate::base::{Fixture, touch_together};
use crate::experiment::{LabError, LabResult, Options, cores};
use crate::first_look::{Found, Row};
use crate::native::{COLD_PAGES, CacheFlush, HOT_PAGES, fault_ns};
use crate::report::time;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Comparison, Rounds, Summary, compare, paired, rounds};

/// Pages of a warm touch, as many as in the host's arm: the frames stay in the last-level cache.
const HOT: u64 = HOT_PAGES as u64;
/// Faults of one slice.
const SLICE: u64 = 16 * HOT;
/// Pages of all vCPUs together in the scaling runs. One vCPU or two do the same work with the same
/// frames in the same caches. It is long against the start of two threads.
const SCALING_PAGES: u64 = 65536;
/// Touches of one slice.
const SCALING_TOUCHES: u64 = 8;
/// Many, because the differences are a few percent, and the machine's two cores may share one core
/// of its host.
const SCALING_ROUNDS: usize = 40;

/// The results of a fault's cost, with warm caches and with cold ones: the ratio, and the cost of
/// the host's own fault in the same run, on which the ratio depends.
pub const IDS: [&str; 4] = [
    "fault.soft_vs_host",
    "fault.soft_vs_host.cold",
    "fault.host_ns",
    "fault.host_ns.cold",
];
/// The result of two vCPUs beside one.
pub const SCALING: &str = "fault.scaling_2vcpu";

/// `fault.soft_vs_host` and `fault.host_ns`, with warm caches or with cold ones.
pub fn measure(options: &Options, report: &mut Report, is_cold: bool) -> LabResult {
    let found = compare_faults(super::rounds(options).into(), is_cold)?;
    report.push(ratio(&found, is_cold));
    let id = IDS[2 + usize::from(is_cold)];
    report.push(Measurement::new(id, "ns", Better::Lower, found.a));
    Ok(())
}

/// The row of the first look, from `fault.soft_vs_host`.
pub fn first_look(_: &Options, rounds: Rounds) -> LabResult<Found> {
    let found = compare_faults(rounds, false)?;
    let ns = |cost: Summary| time(cost.median as u64);
    let row = Row {
        system: "resident fault",
        what: "CPU time of a first touch, with zeroing; without, a fault of the host's kernel",
        without: ns(found.a),
        with: ns(found.b),
        ratio: found.ratio.inverse(),
        null: found.null.inverse(),
        published: "none",
    };
    let results = vec![ratio(&found, false)];
    Ok(Found { row, results })
}

/// CPU nanoseconds a page, of the host's fault and of a guest's touch.
fn compare_faults(rounds: Rounds, is_cold: bool) -> LabResult<Comparison> {
    let pages = pages(is_cold);
    let touches = if is_cold { 16 } else { SLICE / pages };
    let mut fixtures = [Fixture::new(1, pages)?];
    let flush = is_cold.then(CacheFlush::default);
    let host = || {
        let ns = fault_ns((touches * pages) as usize, flush.as_ref());
        ns.map_err(LabError::io("map anonymous memory"))
    };
    let soft = || {
        let mut cpu_ns = 0;
        for _ in 0..touches {
            let before = || flush.iter().for_each(CacheFlush::run);
            cpu_ns += touch_together(&mut fixtures, before)?.cpu_ns;
        }
        Ok(cpu_ns as f64 / (touches * pages) as f64)
    };
    compare(rounds, host, soft)
}

const fn pages(is_cold: bool) -> u64 {
    if is_cold { COLD_PAGES as u64 } else { HOT }
}

fn ratio(found: &Comparison, is_cold: bool) -> Measurement {
    let result = Measurement::new(IDS[usize::from(is_cold)], "x", Better::Lower, found.ratio)
        .param("pages_per_touch", pages(is_cold))
        .arm("host_ns", found.a)
        .arm("soft_ns", found.b)
        .arm("null", found.null);
    if is_cold {
        result
    } else {
        result.bar(0.5).wanted(0.4)
    }
}

/// `fault.scaling_2vcpu`, and beside it the same with two VMs that share nothing but the machine. A
/// loss that two VMs have as well is not a cost of the engine.
pub fn scaling(options: &Options, report: &mut Report) -> LabResult {
    let id = SCALING;
    if cores() < 2 {
        report.skip(id, "this machine has one core");
        return Ok(());
    }
    let half = SCALING_PAGES / 2;
    let mut arms = [
        vec![Fixture::new(1, SCALING_PAGES)?],
        vec![Fixture::new(2, half)?],
        vec![Fixture::new(1, half)?, Fixture::new(1, half)?],
    ];
    // Pages a second of all vCPUs; the second arm again is the null.
    let times = if options.quick { 2 } else { SCALING_ROUNDS };
    let rates = rounds(4, times, |index| {
        let fixtures = &mut arms[if index == 3 { 1 } else { index }];
        let mut touches = (0..SCALING_TOUCHES)
            .map(|_| Ok(touch_together(fixtures, || ())?.wall_ns))
            .collect::<LabResult<Vec<u64>>>()?;
        touches.sort_unstable();
        // The median, because a preemption is not a cost of the engine, and two threads are
        // preempted more often than one.
        let wall_ns = touches[touches.len() / 2];
        Ok::<_, LabError>(SCALING_PAGES as f64 * 1e9 / wall_ns as f64)
    })?;
    let measured = |id, of: usize| {
        Measurement::new(id, "x", Better::Higher, paired(&rates[of], &rates[1]))
            .param("pages", SCALING_PAGES)
            .arm("null", paired(&rates[1], &rates[3]))
    };
    report.push(
        measured(id, 0)
            .bar(1.8)
            .arm("one_vcpu_pages_per_s", Summary::of(&rates[0]))
            .arm("two_vcpus_pages_per_s", Summary::of(&rates[1])),
    );
    report.push(
        measured("fault.scaling_2vcpu.vs_two_vms", 2)
            .arm("two_vms_pages_per_s", Summary::of(&rates[2]))
            .arm("two_vms_scaling", paired(&rates[0], &rates[2])),
    );
    Ok(())
}
