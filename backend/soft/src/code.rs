//! Write tracking of guest code. If a vCPU has decoded instructions of a page, a store to that page
//! makes every vCPU drop them.
//!
//! ```text
//! decode   is_settled(gfn)?  yes: read the bytes
//!                            no:  track(gfn), shoot down all TLBs, settle(gfn), ask again
//! store    the page is write-tracked, so the store takes the slow path:
//!          the writer drops its own decoded instructions and calls written(gfn)
//!          written(gfn) puts the page into the inbox of each other vCPU
//! inbox    its vCPU empties it at its next quiescent point
//! ```
//! A page has two bits, *tracked* and *settled*. With one bit, a second vCPU could decode the page
//! while the shoot-down of the first is still in progress. A third vCPU could then write the page
//! through an old TLB entry, and no vCPU would be notified.
//!
//! Bits are never cleared, so each store to a page that once held code takes the slow path. This is
//! cheap because most guests keep code and data in different pages.

use crate::frame_set::FrameSet;
use lacuna_addr::{Gfn, NoRoom, room_for};
use lacuna_sync::{Mutex, Qsbr, VcpuSlot, lock_order};
use std::sync::atomic::AtomicU64;

/// The largest number of pages in an inbox. One page more turns the inbox into [`Stale::All`].
const INBOX_MAX: usize = 64;

/// The decoded instructions that a vCPU must drop.
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
    inboxes: Box<[Mutex<Stale, lock_order::SoftInbox>]>,
}

impl CodeMap {
    /// Asks the allocator for room for the two bitmaps of [`CodeMap::new`].
    pub(crate) fn check_room(frames: u64) -> Result<(), NoRoom> {
        room_for::<AtomicU64>(2 * FrameSet::words(frames))
    }

    /// A map for this number of vCPUs. `boot` is one past the last frame of the VM's boot memory.
    pub(crate) fn new(boot: u64, vcpus: usize) -> Self {
        let inbox = || Mutex::new(Stale::Pages(Vec::with_capacity(INBOX_MAX)));
        Self {
            tracked: FrameSet::new(boot),
            settled: FrameSet::new(boot),
            inboxes: (0..vcpus).map(|_| inbox()).collect(),
        }
    }

    /// Whether some vCPU has ever decoded code in `gfn`, or is about to.
    #[inline]
    pub(crate) fn is_write_tracked(&self, gfn: Gfn) -> bool {
        self.tracked.contains(gfn)
    }

    /// Whether any page of the 2 MiB block of `gfn` is write-tracked.
    #[inline]
    pub(crate) fn is_block_write_tracked(&self, gfn: Gfn) -> bool {
        self.tracked.meets_block(gfn)
    }

    /// Whether a vCPU may decode `gfn`: no TLB has a writable entry for it any more, so every store
    /// takes the slow path.
    pub(crate) fn is_settled(&self, gfn: Gfn) -> bool {
        self.settled.contains(gfn)
    }

    /// Makes `gfn` write-tracked: from now on no TLB gets a writable entry for it. TLBs may still
    /// have one from before, so the caller shoots down all TLBs next.
    pub(crate) fn track(&self, gfn: Gfn) {
        self.tracked.insert(gfn);
    }

    /// Allows vCPUs to decode `gfn`. The caller has shot down all TLBs after [`CodeMap::track`].
    pub(crate) fn settle(&self, gfn: Gfn) {
        self.settled.insert(gfn);
    }

    /// Notifies all vCPUs except `writer` that `writer` has stored to `gfn`.
    pub(crate) fn written(&self, gfn: Gfn, writer: usize, qsbr: &Qsbr) {
        self.notify(gfn, qsbr, |index| index != writer);
    }

    /// Notifies every vCPU that the VMM has written to `gfn`.
    pub(crate) fn written_by_host(&self, gfn: Gfn, qsbr: &Qsbr) {
        self.notify(gfn, qsbr, |_| true);
    }

    fn notify(&self, gfn: Gfn, qsbr: &Qsbr, whom: impl Fn(usize) -> bool) {
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

    /// Makes every vCPU drop all decoded instructions. For changes of memory slots.
    pub(crate) fn forget_all(&self, qsbr: &Qsbr) {
        for (index, inbox) in self.inboxes.iter().enumerate() {
            *inbox.lock().expect("no panic under this lock") = Stale::All;
            qsbr.vcpu(index).request(VcpuSlot::CODE);
        }
    }

    /// Empties the inbox of vCPU `index`, and returns its content.
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
