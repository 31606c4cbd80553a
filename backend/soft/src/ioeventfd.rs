//! Writes of a guest that signal an eventfd. A vCPU's thread signals it where it would return the
//! write to its VMM.

use lacuna_machine::{GuestWrite, IoAddress, IoEventFdError, Width};
use lacuna_sync::{RwLock, lock_order};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The eventfds of one VM. No write is of two of them. A vCPU holds the lock while it signals, so
/// after a removal no vCPU does.
#[derive(Default)]
pub(crate) struct IoEventFds(RwLock<Vec<(GuestWrite, Arc<OwnedFd>)>, lock_order::IoEventFds>);

impl IoEventFds {
    pub(crate) fn assign(
        &self,
        write: GuestWrite,
        eventfd: &Arc<OwnedFd>,
    ) -> Result<(), IoEventFdError> {
        let mut all = self.0.write().expect("no panic under this lock");
        if all.iter().any(|(other, _)| other.overlaps(&write)) {
            return Err(IoEventFdError::InUse(write));
        }
        all.push((write, Arc::clone(eventfd)));
        Ok(())
    }

    pub(crate) fn deassign(&self, write: GuestWrite) {
        let mut all = self.0.write().expect("no panic under this lock");
        all.retain(|(other, _)| *other != write);
    }

    /// Signals the eventfd of this write. Returns whether there is one.
    pub(crate) fn signal(&self, address: IoAddress, width: Width, value: u64) -> bool {
        let all = self.0.read().expect("no panic under this lock");
        let mut all = all.iter();
        let found = all.find(|(write, _)| write.contains(address, width, value));
        found.map(|(_, eventfd)| add_one(eventfd)).is_some()
    }
}

/// Adds 1, unless the counter is full: its reader is notified then anyway, and KVM drops the signal
/// as well. A write to a full blocking eventfd would wait for a reader, so this looks before. Only
/// a process that fills the counter between the look and the write can still make the vCPU wait.
fn add_one(eventfd: &OwnedFd) {
    let mut look = [PollFd::new(eventfd, PollFlags::OUT)];
    if poll(&mut look, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
        // It fails if the eventfd is not blocking, and was filled after the look.
        let _ = write(eventfd, &1_u64.to_ne_bytes());
    }
}
