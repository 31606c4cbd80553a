//! Each vCPU's stalls, for results and for people.

use crate::report::time;
use lacuna::soft::Stalls;
use serde_json::{Value, json};

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

/// Each vCPU's stalls for results, in nanoseconds.
pub fn stalls_json(stalls: &[Stalls]) -> Value {
    let one = |(vcpu, stalls): (usize, &Stalls)| {
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|q| stalls.quantile_ns(q));
        json!({"vcpu": vcpu, "count": stalls.count(),
               "p50_ns": p50, "p99_ns": p99, "p999_ns": p999})
    };
    stalls.iter().enumerate().map(one).collect()
}
