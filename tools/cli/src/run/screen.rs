//! The output while a guest runs: its lines, and the live view on a terminal.

use crate::args::Output;
use crate::live::Live;
use crate::output::{complain, print_guest_line, visible};
use crate::sample::RunSample;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

/// Lines of the guest that may wait to be shown.
const LINES: usize = 10_000;

/// The guest's lines, and the live view on a terminal.
pub(super) struct Screen {
    live: Option<Live>,
    lines: mpsc::SyncSender<String>,
    printed: mpsc::Receiver<String>,
    dropped: Arc<AtomicU64>,
}

impl Screen {
    pub fn new(output: &Output) -> Self {
        // The channel is bounded, because a guest may print faster than a terminal scrolls. Lines
        // beyond the bound are counted.
        let (lines, printed) = mpsc::sync_channel(LINES);
        Self {
            live: (!output.quiet).then(Live::on_stderr).flatten(),
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

    pub fn show(&mut self, now: &RunSample) {
        self.show_lines();
        if let Some(live) = &mut self.live {
            live.update(now);
        }
    }

    fn show_lines(&self) {
        for line in self.printed.try_iter().take(LINES) {
            match &self.live {
                Some(live) => live.println(&visible(&line)),
                None => print_guest_line(&line),
            }
        }
    }

    pub fn finish(self) {
        self.show_lines();
        if let Some(live) = self.live {
            live.finish();
        }
        match self.dropped.load(Ordering::Relaxed) {
            0 => {}
            lines => complain(&format!(
                "{lines} lines of the guest's output came too fast to show"
            )),
        }
    }
}
