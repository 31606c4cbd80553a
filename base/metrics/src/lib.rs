//! What a VM counts, by name, at one moment.
//!
//! Each layer declares its counters by [`counters!`], which makes their documentation the help
//! text too. Their `fill` puts a reading of them into [`Metrics`]. Its [`Display`] is the
//! text format of Prometheus, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>); [`Metrics::iter`] is for other
//! exporters.
//!
//! Names begin with `lacuna_` and the layer's name. A counter that only grows ends with `_total`.
//! Times are in seconds, except where the name says otherwise.
//!
//! [`Display`]: std::fmt::Display
#![forbid(unsafe_code)]

mod declare;
mod reading;
mod text;

pub use reading::{Kind, Metric, Metrics, Sample, Summary, Value};
