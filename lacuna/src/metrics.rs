//! What a VM counts, by name, as [`Vm::metrics`](crate::Vm::metrics) reads it. Its text is what
//! Prometheus reads. What happens, rather than how often, are events of the crate `tracing`, with
//! targets such as `lacuna::fault`: `docs/metrics.md` has a table of them.

pub use lacuna_machine::VcpuTimes;
pub use lacuna_metrics::{Kind, Metric, Metrics, Sample, Summary, Value};
