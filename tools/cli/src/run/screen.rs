//! The guest's lines while it runs.

use crate::output::{complain, print_guest_line};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

/// Lines of the guest that may wait to be shown.
const LINES: usize = 10_000;

/// The guest's lines.
pub(super) struct Screen {
    lines: mpsc::SyncSender<String>,
    printed: mpsc::Receiver<String>,
    dropped: Arc<AtomicU64>,
}

impl Screen {
    pub fn new() -> Self {
        // The channel is bounded, because a guest may print faster than a terminal scrolls. Lines
        // beyond the bound are counted.
        let (lines, printed) = mpsc::sync_channel(LINES);
        Self {
            lines,
            printed,
            dropped: Arc::default(),
        }
    }

    /// Where the guest's lines go.
    pub fn console(&self) -> impl Fn(&str) + Send + use<> {
        let (lines, dropped) = (self.lines.clone(), Arc::clone(&self.dropped));
        move |line: &str| {
            if lines.try_send(line.to_owned()).is_err() {
                dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Prints the lines so far.
    pub fn show(&self) {
        for line in self.printed.try_iter().take(LINES) {
            print_guest_line(&line);
        }
    }

    pub fn finish(self) {
        self.show();
        match self.dropped.load(Ordering::Relaxed) {
            0 => {}
            lines => complain(&format!(
                "{lines} lines of the guest's output came too fast to show"
            )),
        }
    }
}
