//! Writes to a named pipe. The process that reads it may open it late, or never.

use crate::signals::{Signal, Signals};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// The time between two checks for a signal.
const LOOK: Duration = Duration::from_millis(100);

/// Whether the file at `path` is a named pipe.
pub fn is_pipe(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|found| found.file_type().is_fifo())
}

/// Writes `bytes` to the named pipe at `path` when a process reads it. Calls `waits` if none does.
///
/// # Errors
/// The pipe cannot be opened or written; or a signal has been caught, and no process reads it.
pub fn write(path: &Path, bytes: &[u8], signals: &Signals, waits: impl FnOnce()) -> io::Result<()> {
    let pipe = open(path, signals, waits)?;
    // A signal that has ended the command does not end the write: a process reads the pipe.
    let before = signals.caught();
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::io::write(&pipe, rest) {
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => look(signals, before)?,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn open(path: &Path, signals: &Signals, waits: impl FnOnce()) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .write(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32);
    let mut waits = Some(waits);
    loop {
        // ENXIO: no process has it open for reading.
        match options.open(path) {
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {}
            opened => return opened,
        }
        look(signals, None)?;
        if let Some(waits) = waits.take() {
            waits();
        }
    }
}

/// Waits a moment.
///
/// # Errors
/// A signal has been caught since the last one was `before`.
fn look(signals: &Signals, before: Option<Signal>) -> io::Result<()> {
    if signals.caught() != before {
        return Err(io::Error::other("no process reads it"));
    }
    sleep(LOOK);
    Ok(())
}
