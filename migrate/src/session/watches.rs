//! Descriptors for event loops that wait for the next stage of a session.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;

/// The eventfds of one session's watchers.
#[derive(Default)]
pub(super) struct Watches(Vec<OwnedFd>);

impl Watches {
    /// A new one, which is readable after the next [`Watches::notify`].
    pub fn add(&mut self) -> io::Result<OwnedFd> {
        let own = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let given = own.try_clone()?;
        self.0.push(own);
        Ok(given)
    }

    /// Makes all of them readable.
    pub fn notify(&self) {
        for eventfd in &self.0 {
            // It fails if its counter is full. Then it is readable.
            let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
        }
    }
}

/// Whether a descriptor was readable. Resets it.
#[cfg(test)]
pub(super) fn was_readable(watch: &OwnedFd) -> bool {
    match rustix::io::read(watch, &mut [0; 8]) {
        Err(rustix::io::Errno::AGAIN) => false,
        read => read.expect("an eventfd") == 8,
    }
}
