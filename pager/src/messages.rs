//! The messages about one VM.

use crate::config::Report;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a message to the user is about.
#[derive(Clone, Copy)]
pub enum Matter {
    Loss,
    Shortage,
    /// A page that a fill does not bring.
    Fill,
    /// A process that cannot be ended.
    Kill,
    /// An idle VM that stays in memory.
    Cold,
    /// The end of the service.
    Service,
    Oddity,
}

/// Reports the first message about each matter.
pub struct Messages {
    about: String,
    report: Report,
    said: [AtomicBool; Matter::Oddity as usize + 1],
}

impl Messages {
    /// Messages about the VM of `process`.
    pub fn new(process: &impl fmt::Display, report: Report) -> Self {
        Self {
            about: format!("the VM of {process}"),
            report,
            said: std::array::from_fn(|_| AtomicBool::new(false)),
        }
    }

    /// Calls the pager's report, once for each matter.
    pub fn say(&self, matter: Matter, text: &str) {
        let text = format!("{} {text}", self.about);
        tracing::warn!(target: "lacuna::pager", "{text}");
        // A thread does not wait for another one's report.
        if !self.said[matter as usize].swap(true, Ordering::Relaxed) {
            (self.report)(&text);
        }
    }
}
