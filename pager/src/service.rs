//! The event thread of one VM.

use crate::cold::ColdPages;
use crate::vm::Vm;
use lacuna_sys::{Errno, Userfaultfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// The pause before a placement is repeated, at first and at most. It doubles from one to the next.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(64);

/// The descriptor that reports the end of a VM by these events: its connection, or its process.
pub type EndOfVm<'a> = (BorrowedFd<'a>, PollFlags);

/// Answers the faults of `vm` until the VMM closes its connection, or its process ends. An error of
/// the pager ends the answers, but not this call: if the userfaultfd were closed, missing pages
/// would become zeros.
///
/// If `cold` watches the VM, its pages go to swap while it is idle.
pub fn serve(vm: &Arc<Vm>, (uffd, end): (&Userfaultfd, EndOfVm<'_>), mut cold: Option<ColdPages>) {
    let (mut faults, mut pause) = (Vec::new(), None);
    let mut error = None;
    while !vm.has_ended() {
        let due = cold.as_ref().and_then(ColdPages::due);
        let wait = pause.into_iter().chain(due).min();
        let ready = match Ready::wait(uffd, end, vm, (error.is_some(), wait)) {
            Ok(ready) => ready,
            Err(Errno::INTR) => continue,
            // The host has no memory for the call.
            Err(_) => {
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        if ready.is_over {
            return;
        }
        if error.is_some() {
            continue;
        }
        let read = match ready.has_failed {
            true => Err(Errno::IO),
            false => vm.read_events(&mut faults),
        };
        match read {
            Ok(false) => {}
            // What the kernel has refused because of an unread event is repeated at once.
            Ok(true) => pause = None,
            // The event of a fork has a descriptor, and stays until there is room for it.
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => std::thread::sleep(PAUSE),
            Err(errno) => {
                (error, cold) = (Some(errno), None);
                vm.hold(&format!("its events cannot be read ({errno})"));
            }
        }
        if let (Some(cold), false) = (&mut cold, faults.is_empty()) {
            cold.note_activity();
        }
        faults.drain(..).for_each(|address| vm.fault(address));
        vm.send_requests();
        pause = match (vm.repeat(), pause) {
            (false, _) => None,
            (true, None) => Some(PAUSE),
            (true, Some(pause)) => Some(PAUSE_MAX.min(pause * 2)),
        };
        if let Some(cold) = &mut cold {
            vm.page_out(cold);
        }
    }
}

/// What there is to do.
struct Ready {
    /// The VMM has closed its connection, or has ended.
    is_over: bool,
    /// The descriptor has no events any more.
    has_failed: bool,
}

impl Ready {
    /// Waits for an event, for the bell, or for the end of the pause. Without a descriptor that
    /// works, only for the end of the connection.
    fn wait(
        uffd: &Userfaultfd,
        (end, ended): EndOfVm<'_>,
        vm: &Vm,
        (has_failed, pause): (bool, Option<Duration>),
    ) -> Result<Self, Errno> {
        let mut fds = [
            PollFd::from_borrowed_fd(end, ended),
            PollFd::from_borrowed_fd(vm.bell(), PollFlags::IN),
            PollFd::from_borrowed_fd(uffd.as_fd(), PollFlags::IN),
        ];
        let polled = if has_failed { 1 } else { fds.len() };
        let pause = pause.and_then(|pause| Timespec::try_from(pause).ok());
        poll(&mut fds[..polled], pause.as_ref())?;
        let is_ready = |at: usize, flags| fds[at].revents().intersects(flags);
        if is_ready(1, PollFlags::IN) {
            // Empty: another thread cannot have read it, so it is full again soon.
            let _ = rustix::io::read(vm.bell(), &mut [0; 8]);
        }
        let ended = ended | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        Ok(Self {
            is_over: is_ready(0, ended),
            has_failed: is_ready(2, PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL),
        })
    }
}
