//! Draws runs of the lab: one HTML file, pictures in SVG, tables in Markdown.
//!
//! A caller reads a run from the lab's JSON and draws it, alone or beside another run:
//!
//! ```
//! use lacuna_report::{Run, html, markdown};
//!
//! let json = r#"{"host":{"cpu":"Some CPU","cores":2,"kernel":"6.18","memory_bytes":1073741824,
//!     "date":"2026-01-31T00:00:00Z"},"command":"lacuna lab thp.call","results":[
//!     {"id":"thp.call.elsewhere","value":9.1,"min":8.8,"max":9.4,"runs":15,"unit":"x"}]}"#;
//! let run = Run::parse(json)?;
//! assert!(html(&run, None).contains("<b>9.10 x</b>"));
//! assert!(markdown(&run, None).contains("| 9.10 x | 8.80 .. 9.40 |"));
//! # Ok::<(), String>(())
//! ```
//!
//! The crate reads the stable JSON form and imports no other crate of the workspace, so that both
//! the command and `cargo xtask figures` can use it.
//!
//! ```text
//! JSON ─▶ run::Run ─┬▶ page::html          sections of systems, each with plots of its figures
//!                   ├▶ picture::overview   one figure of each system, for the README
//!                   └▶ tables::markdown    for pasting; tables::compared: what differs
//! ```
//! * [`mod@run`]: figures, and the JSON form they are read from.
//! * `scale`: the axis of a plot, and its ticks. `plot`: intervals, bars, published figures, marks.
//!   `rows`: a plot beside the name and the numbers of its figure.
//! * `series`: results that differ in one number, as of vCPUs. `chart`: their curves.
//! * `systems`: the sections of a report. `text`: escaped and formatted text.
#![forbid(unsafe_code)]

mod chart;
mod page;
mod picture;
mod plot;
mod rows;
pub mod run;
mod scale;
mod series;
mod systems;
mod tables;
mod text;

pub use page::html;
pub use picture::{drawings, overview};
pub use run::{Figure, Run, Verdict, repeatable};
pub use tables::{compared, markdown};
pub use text::digits;
