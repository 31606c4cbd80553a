//! What a VM counts, by name, as [`Vm::metrics`](crate::Vm::metrics) reads it. Its text is what
//! Prometheus reads.

pub use lacuna_metrics::{Kind, Metric, Metrics, Sample, Summary, Value};
