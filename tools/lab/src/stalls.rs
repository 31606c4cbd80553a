//! Each vCPU's stalls, for results and for people.

use crate::report::time;
use lacuna::soft::Stalls;
use serde::Serialize;

/// The stalls between two readings, vCPU by vCPU.
pub fn since(before: &[Stalls], after: &[Stalls]) -> Vec<Stalls> {
    let pairs = before.iter().zip(after);
    pairs.map(|(before, after)| after.since(before)).collect()
}

/// Adds `more` to `sum`, vCPU by vCPU.
pub fn add_stalls(sum: &mut Vec<Stalls>, more: &[Stalls]) {
    sum.resize_with(more.len(), Stalls::default);
    sum.iter_mut()
        .zip(more)
        .for_each(|(sum, more)| sum.add(more));
}

/// The header of a column of [`stalls_text`].
pub const STALLS: &str = "stalls of each vCPU: p50 / p99 / p99.9";

/// Each vCPU's stalls, for people.
pub fn stalls_text(stalls: &[Stalls]) -> String {
    let one = |stalls: &Stalls| match stalls.count() {
        0 => "none".to_owned(),
        _ => [0.5, 0.99, 0.999]
            .map(|q| time(stalls.quantile_ns(q)))
            .join(" / "),
    };
    if stalls.is_empty() {
        return "not measured".into();
    }
    stalls.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The stalls of one vCPU, in results.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct VcpuStalls {
    /// Index of the vCPU.
    pub vcpu: u32,
    /// How many.
    pub count: u64,
    /// Half of them were at most this long, in nanoseconds.
    pub p50_ns: u64,
    /// 99 of 100 were at most this long.
    pub p99_ns: u64,
    /// 999 of 1000 were at most this long.
    pub p999_ns: u64,
}

impl VcpuStalls {
    /// The stalls of all vCPUs.
    pub fn of_all(stalls: &[Stalls]) -> Vec<Self> {
        let one = |(vcpu, stalls): (u32, &Stalls)| {
            let [p50_ns, p99_ns, p999_ns] = [0.5, 0.99, 0.999].map(|q| stalls.quantile_ns(q));
            Self {
                vcpu,
                count: stalls.count(),
                p50_ns,
                p99_ns,
                p999_ns,
            }
        };
        (0..).zip(stalls).map(one).collect()
    }
}
