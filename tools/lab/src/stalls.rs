//! Each vCPU's stalls, for results and for people.

use crate::report::time;
use lacuna::soft::Stalls;
use serde_json::{Value, json};

/// Adds to `sum` the stalls between two readings, vCPU by vCPU.
pub fn add_stalls(sum: &mut Vec<Stalls>, before: &[Stalls], after: &[Stalls]) {
    sum.resize_with(after.len(), Stalls::default);
    for (sum, (before, after)) in sum.iter_mut().zip(before.iter().zip(after)) {
        sum.add(&after.since(before));
    }
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
