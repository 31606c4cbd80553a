//! The guest pages that hold instructions which some vCPU has decoded.
//!
//! ```text
//! decode:  settled? then read the bytes. Otherwise track(gfn), shoot down every TLB, so that no
//!          vCPU keeps a writable entry for the page, settle(gfn), and ask again. Two bits, because
//!          a second vCPU must not read while the first one's shoot-down is still under way
//! write:   the page is write-tracked, so the store takes the slow path and calls written(gfn): the
//!          page goes into every other vCPU's inbox, emptied at its next quiescent point
//! ```
//! Bits are never cleared: a page that once held code stays on the slow path for writers. Guests
//! keep code and data apart; one that does not pays some 100 ns a store.

use crate::frame_set::FrameSet;
use lacuna_addr::{Gfn, NoRoom, room_for};
use lacuna_sync::{Qsbr, VcpuSlot};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

/// An inbox longer than this is replaced by "all".
const INBOX_MAX: usize = 64;

/// What a vCPU must drop.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Stale {
    /// Decoded instructions of these pages.
    Pages(Vec<Gfn>),
    /// All decoded instructions.
    All,
}

/// The write-tracked pages of one VM.
pub(crate) struct CodeMap {
    tracked: FrameSet,
    settled: FrameSet,
    inboxes: Box<[Mutex<Stale>]>,
}

impl CodeMap {
    /// Whether there is room for two bitmaps of this number of frames.
    pub(crate) fn check_room(frames: u64) -> Result<(), NoRoom> {
        room_for::<AtomicU64>(2 * frames.div_ceil(64))
    }

    /// A map for this number of vCPUs, and for boot memory below frame `boot`.
    pub(crate) fn new(boot: u64, vcpus: usize) -> Self {
        let inbox = || Mutex::new(Stale::Pages(Vec::with_capacity(INBOX_MAX)));
        Self {
            tracked: FrameSet::new(boot),
            settled: FrameSet::new(boot),
            inboxes: (0..vcpus).map(|_| inbox()).collect(),
        }
    }

    /// Whether `gfn` holds decoded code, or is about to.
    #[inline]
    pub(crate) fn is_write_tracked(&self, gfn: Gfn) -> bool {
        self.tracked.contains(gfn)
    }

    /// Whether any page of the 2 MiB block of `gfn` holds decoded code, or is about to.
    #[inline]
    pub(crate) fn is_block_write_tracked(&self, gfn: Gfn) -> bool {
        self.tracked.meets_block(gfn)
    }

    /// Whether `gfn` may be decoded, because every writer takes the slow path.
    pub(crate) fn is_settled(&self, gfn: Gfn) -> bool {
        self.settled.contains(gfn)
    }

    /// From now on no TLB gets `gfn` as writable. The caller must shoot down the TLBs that have it
    /// next.
    pub(crate) fn track(&self, gfn: Gfn) {
        self.tracked.insert(gfn);
    }

    /// The TLBs were shot down.
    pub(crate) fn settle(&self, gfn: Gfn) {
        self.settled.insert(gfn);
    }

    /// vCPU `writer` has changed code in `gfn`: tells the others.
    pub(crate) fn written(&self, gfn: Gfn, writer: usize, qsbr: &Qsbr) {
        self.tell(gfn, qsbr, |index| index != writer);
    }

    /// The VMM has changed code in `gfn`: tells every vCPU.
    pub(crate) fn written_by_host(&self, gfn: Gfn, qsbr: &Qsbr) {
        self.tell(gfn, qsbr, |_| true);
    }

    fn tell(&self, gfn: Gfn, qsbr: &Qsbr, whom: impl Fn(usize) -> bool) {
        for (index, inbox) in self.inboxes.iter().enumerate().filter(|(i, _)| whom(*i)) {
            let mut inbox = inbox.lock().expect("no panic under this lock");
            match &mut *inbox {
                Stale::All => {}
                Stale::Pages(pages) if pages.contains(&gfn) => {}
                Stale::Pages(pages) if pages.len() < INBOX_MAX => pages.push(gfn),
                full => *full = Stale::All,
            }
            drop(inbox);
            qsbr.vcpu(index).request(VcpuSlot::CODE);
        }
    }

    /// Memory slots have changed: every vCPU drops all decoded instructions.
    pub(crate) fn forget_all(&self, qsbr: &Qsbr) {
        for (index, inbox) in self.inboxes.iter().enumerate() {
            *inbox.lock().expect("no panic under this lock") = Stale::All;
            qsbr.vcpu(index).request(VcpuSlot::CODE);
        }
    }

    /// Empties vCPU `index`'s inbox.
    pub(crate) fn take(&self, index: usize) -> Stale {
        let mut inbox = self.inboxes[index]
            .lock()
            .expect("no panic under this lock");
        std::mem::replace(&mut *inbox, Stale::Pages(Vec::new()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gfn(n: u64) -> Gfn {
        Gfn::new(n).unwrap()
    }

    #[test]
    fn a_write_reaches_every_other_vcpu_once() {
        let qsbr = Qsbr::new(3);
        let map = CodeMap::new(128, 3);
        map.track(gfn(100));
        assert!(map.is_write_tracked(gfn(100)) && !map.is_write_tracked(gfn(99)));
        assert!(!map.is_settled(gfn(100)));
        map.settle(gfn(100));
        assert!(map.is_settled(gfn(100)));
        map.written(gfn(100), 1, &qsbr);
        map.written(gfn(100), 1, &qsbr);
        assert_eq!(map.take(0), Stale::Pages(vec![gfn(100)]));
        assert_eq!(map.take(0), Stale::Pages(vec![]));
        assert_eq!(map.take(1), Stale::Pages(vec![]));
        assert_eq!(map.take(2), Stale::Pages(vec![gfn(100)]));
        assert_eq!(qsbr.vcpu(0).take(), VcpuSlot::CODE);
    }

    #[test]
    fn an_overfull_inbox_means_everything() {
        let qsbr = Qsbr::new(2);
        let map = CodeMap::new(4096, 2);
        (0..=INBOX_MAX as u64).for_each(|n| map.written(gfn(n), 0, &qsbr));
        assert_eq!(map.take(1), Stale::All);
    }
}
