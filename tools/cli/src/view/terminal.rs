//! The terminal on stderr: set up for the view, and restored however the view ends.
//!
//! Lines for stderr are kept meanwhile ([`crate::output::keep_lines`]), and printed afterwards.

use crate::output;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::getpgrp;
use rustix::termios::tcgetpgrp;
use std::io::{self, BufWriter, IsTerminal, Stderr};
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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

/// Waits until a key is pressed, for less than a second. Returns whether one is.
///
/// A closed terminal is found here, because `event::poll` reads from it again and again.
///
/// # Errors
/// The terminal is closed.
pub(super) fn wait_for_key(longest: Duration) -> io::Result<bool> {
    let (stdin, stderr) = (io::stdin(), io::stderr());
    let terminal = match stdin.is_terminal() {
        true => stdin.as_fd(),
        false => stderr.as_fd(),
    };
    let mut polled = [PollFd::from_borrowed_fd(terminal, PollFlags::IN)];
    let longest = Timespec {
        tv_sec: 0,
        tv_nsec: longest.subsec_nanos().into(),
    };
    match poll(&mut polled, Some(&longest)) {
        Ok(0) | Err(Errno::INTR) => Ok(false),
        Ok(_) if polled[0].revents() == PollFlags::IN => Ok(true),
        Ok(_) => Err(io::Error::other("its terminal is closed")),
        Err(error) => Err(error.into()),
    }
}

/// The terminal while a view is shown. A drop restores it, and so does a panic of any thread.
/// stderr has no buffer of its own: without one, each change of a colour is a system call.
/// The drop of [`Terminal`] is left out: on a closed terminal it panics.
pub(super) struct Screen(pub ManuallyDrop<Terminal<CrosstermBackend<BufWriter<Stderr>>>>);

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
        // Some terminals have no alternate screen. A frame does not write over text before it.
        let set_up = || execute!(io::stderr(), EnterAlternateScreen, Clear(ClearType::All));
        let opened = enable_raw_mode()
            .and_then(|()| set_up())
            .and_then(|()| Terminal::new(CrosstermBackend::new(BufWriter::new(io::stderr()))));
        let opened = opened.map(ManuallyDrop::new);
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
