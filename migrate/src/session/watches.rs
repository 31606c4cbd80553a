//! Descriptors for event loops that wait for the next stage of a session.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;

/// The eventfd of one session, if a watcher has asked for it.
#[derive(Default)]
pub(super) struct Watches(Option<OwnedFd>);

impl Watches {
    /// A descriptor of the eventfd. At first it is readable, because the stage may have changed
    /// before this call.
    pub fn watch(&mut self) -> io::Result<OwnedFd> {
        let own = match self.0.take() {
            Some(own) => own,
            None => eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        let given = own.try_clone();
        self.0 = Some(own);
        self.notify();
        given
    }

    /// Makes it readable.
    pub fn notify(&self) {
        if let Some(eventfd) = &self.0 {
            // It fails if the counter is full. Then the eventfd is readable.
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
