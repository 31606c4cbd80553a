//! The pages of idle VMs go to the host's swap.
//!
//! The pager sees no access to a page that is in place. It sees the processor time of the VMM's
//! process, with the time of its vCPUs. A VM that has used less than a hundredth of one processor,
//! for as long as the setting says, is idle: all of its pages go to swap, once. They return one by
//! one at their next access, without the pager, and after some activity the VM may be idle again.

use crate::messages::{Matter, Messages};
use crate::peer_process::PeerProcess;
use crate::regions::Regions;
use lacuna_addr::HvaRange;
use lacuna_sys::Errno;
use std::time::{Duration, Instant};

/// An idle VM uses less than one processor divided by this.
const IDLE: u32 = 100;
/// The pages that one call moves: 16 MiB. Events of the VM are read between two calls.
const PIECE: u64 = 4096;

/// Watches one VM.
pub struct ColdPages {
    after: Duration,
    /// The processor time of the process, and when it was read.
    last: (Duration, Instant),
    /// What is left to move. The last is the next.
    left: Vec<HvaRange>,
    /// All was moved since the last activity.
    is_out: bool,
    has_failed: bool,
}

impl ColdPages {
    /// Watches a VM for which `after` is the time until it is idle.
    pub fn new(after: Duration, process: &PeerProcess) -> Self {
        let now = Instant::now();
        Self {
            // In a shorter time, the clock's tick is more than an idle VM's share.
            after: after.max(Duration::from_secs(1)),
            last: (process.processor_time().unwrap_or_default(), now),
            left: Vec::new(),
            is_out: false,
            has_failed: false,
        }
    }

    /// The time until the next [`ColdPages::look`]; `None` if there is none.
    pub fn due(&self) -> Option<Duration> {
        match (self.has_failed, self.left.is_empty()) {
            (true, _) => None,
            (false, false) => Some(Duration::ZERO),
            (false, true) => Some(self.after.saturating_sub(self.last.1.elapsed())),
        }
    }

    /// Ends the current page-out: the VM has had a fault.
    pub fn note_activity(&mut self) {
        self.left.clear();
        self.is_out = false;
    }

    /// Moves the next pages, if the VM is idle. Returns the moved bytes, with those that another
    /// thread has moved meanwhile.
    pub fn look(&mut self, regions: &Regions, process: &PeerProcess, messages: &Messages) -> u64 {
        if self.due() != Some(Duration::ZERO) {
            return 0;
        }
        let moved = match self.left.pop() {
            None => self.decide(regions, process).map(|()| 0),
            Some(range) => page_out(process, range),
        };
        moved.unwrap_or_else(|reason| {
            self.has_failed = true;
            let text = format!("stays in memory while it is idle: {reason}");
            messages.say(Matter::Cold, &text);
            0
        })
    }

    /// Decides whether the VM was idle since the last decision.
    fn decide(&mut self, regions: &Regions, process: &PeerProcess) -> Result<(), String> {
        if !has_swap() {
            return Err("the host has no swap; add some, or zram".into());
        }
        let (before, at) = self.last;
        let now = process.processor_time();
        let now = now.ok_or("its processor time cannot be read; mount /proc without hidepid")?;
        self.last = (now, Instant::now());
        if now.saturating_sub(before) * IDLE >= at.elapsed() {
            self.is_out = false;
        } else if !self.is_out {
            self.is_out = true;
            self.left = regions.pieces(PIECE).collect();
        }
        Ok(())
    }
}

/// Moves the pages, and returns the bytes by which the process's part of the swap has grown.
fn page_out(process: &PeerProcess, range: HvaRange) -> Result<u64, String> {
    let before = process.swapped().unwrap_or(0);
    match process.page_out(range) {
        // The process has ended, or has unmapped a part.
        Ok(()) | Err(Errno::SRCH | Errno::NOMEM) => {}
        Err(Errno::PERM) => return Err("give the pager CAP_SYS_NICE and CAP_SYS_PTRACE".into()),
        Err(Errno::INVAL) => return Err("its memory is locked, or in huge pages".into()),
        Err(errno) => return Err(format!("process_madvise(2) fails ({errno})")),
    }
    Ok(process.swapped().unwrap_or(0).saturating_sub(before))
}

/// Whether the host has swap. The first line of the file has the names of the columns.
fn has_swap() -> bool {
    std::fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}
