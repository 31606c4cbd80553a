//! The terminal on stderr: set up for the view, and restored however the view ends.
//!
//! Lines for stderr are kept meanwhile ([`crate::output::keep_lines`]), and printed afterwards.

use crate::output;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use rustix::process::getpgrp;
use rustix::termios::tcgetpgrp;
use std::io::{self, IsTerminal, Stderr};
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a view has the terminal.
static IS_OURS: AtomicBool = AtomicBool::new(false);

/// Whether a view can be shown: stderr is a terminal, and this process is in its foreground. The
/// kernel stops a background process that changes the terminal's mode.
pub(super) fn is_usable() -> bool {
    io::stderr().is_terminal() && tcgetpgrp(io::stderr()).is_ok_and(|group| group == getpgrp())
}

/// Whether the terminal is still the view's. A panic has restored it otherwise.
pub(super) fn is_ours() -> bool {
    IS_OURS.load(Ordering::Acquire)
}

/// The terminal while a view is shown. A drop restores it, and so does a panic of any thread.
pub(super) struct Screen(pub Terminal<CrosstermBackend<Stderr>>);

impl Screen {
    /// Sets the terminal up.
    ///
    /// # Errors
    /// The terminal refuses it, and is as before.
    pub fn open() -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                restore();
                before(info);
            }));
        });
        output::keep_lines();
        IS_OURS.store(true, Ordering::Release);
        let opened = enable_raw_mode()
            .and_then(|()| execute!(io::stderr(), EnterAlternateScreen))
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stderr())));
        opened.map(Self).inspect_err(|_| restore())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal, once.
fn restore() {
    if IS_OURS.swap(false, Ordering::AcqRel) {
        // An error says that the terminal has gone.
        let _ = execute!(io::stderr(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
        output::print_kept_lines();
    }
}
