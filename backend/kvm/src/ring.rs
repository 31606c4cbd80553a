//! A vCPU's dirty ring in KVM's format: an array in pages of the vCPU's descriptor.
//!
//! ```text
//! flags of an entry   0 free -> 1 dirty: KVM      1 -> 2 reaped: here      2 -> 0: KVM's reset
//!
//!        reset          fetch          KVM's next entry
//!          v              v              v
//!   [0][0] [2][2][2][2][2] [1][1][1][1][1] [0][0]          at most one round from reset to next
//! ```
//! # Overflow
//! KVM does not stop at a full ring: it overwrites entries that are not reset, and warns in the
//! host's log. A reserve of 64 entries, plus the size of a processor's own log, should prevent
//! this: a vCPU does not enter the guest when only the reserve is left. But each store emulated by
//! KVM makes an entry. One string instruction makes a thousand entries or more between two checks
//! of the reserve (seen on Linux 6.18, `kvm_pvm`).
//!
//! The pages of the overwritten entries are unknown, so all pages of logging slots count as written
//! (`dirty.rs`). Then the ring is made usable again:
//!
//! 1. All its entries are marked as reaped, and KVM resets one whole round ([`Ring::abandon`]). KVM
//!    has pushed at least that many. All entries are free then, and KVM's next entry lies an
//!    unknown number of entries after `reset`: [`Ring::reset`] and KVM's next are *adrift*.
//! 2. The first entry that KVM pushes shows that number. The free entries before it are marked as
//!    reaped, so that KVM's next reset passes over them.
//! 3. If that number is as large as the limit, KVM does not enter the vCPU, so it pushes nothing.
//!    The vCPU finds its ring full and empty at once, and passes over KVM's minimum count of
//!    entries in a full ring ([`Ring::pass_over_limit`]).
//!
//! No vCPU is in the guest during any of these calls. Otherwise KVM could overwrite an entry while
//! this process reads it or KVM resets it, without a trace.
//!
//! KVM writes slot and page before it sets `dirty`, so the load of the flags is an acquire. KVM's
//! reset reuses an entry after it has read `reaped`, so the store of that flag is a release.
//!
//! UNSAFETY: a mapping that the kernel writes at any time. All references into it are to atomics,
//! inside the entries. The mapping lives as long as the [`Ring`].

use kvm_bindings::{KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn};
use kvm_ioctls::VcpuFd;
use lacuna_addr::PAGE_SIZE;
use lacuna_slots::{RingSize, SlotId};
use lacuna_sys::Errno;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const FREE: u32 = 0;
/// `KVM_DIRTY_GFN_F_DIRTY`.
const DIRTY: u32 = 1;
/// `KVM_DIRTY_GFN_F_RESET`.
const REAPED: u32 = 2;

const _: () = assert!(size_of::<kvm_dirty_gfn>() == RingSize::ENTRY_BYTES);

/// The consumer's end of a ring. Indices count entries since the ring was made; an entry's place is
/// its index modulo the size.
pub struct Ring {
    entries: NonNull<kvm_dirty_gfn>,
    size: RingSize,
    /// The first entry that KVM has not reset.
    reset: usize,
    /// The next entry to reap.
    fetch: usize,
    /// Whether the index of KVM's next entry is unknown: after an overflow, until KVM pushes an
    /// entry.
    is_adrift: bool,
}

// SAFETY: 1. the mapping belongs to no thread; 2. its content is accessed only by atomics.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the ring of a vCPU. Its VM was made with rings of `size`.
    pub fn map(vcpu: &VcpuFd, size: RingSize) -> Result<Self, Errno> {
        // SAFETY: 1. the descriptor is open as long as `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let offset = u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE as u64;
        let (any, shared) = (ptr::null_mut(), MapFlags::SHARED);
        // SAFETY: 1. a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { mmap(any, bytes(size), prot, shared, fd, offset) }?;
        let entries = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        // SAFETY: 1. a mapping of that many bytes, shared with the kernel alone.
        Ok(unsafe { Self::new(entries, size) })
    }

    /// # Safety
    /// `entries` is a mapping of a ring of that size, zero at first, which is the result's, and
    /// touched by atomics only.
    unsafe fn new(entries: NonNull<kvm_dirty_gfn>, size: RingSize) -> Self {
        Self {
            entries,
            size,
            reset: 0,
            fetch: 0,
            is_adrift: false,
        }
    }

    /// Whether KVM may have overwritten entries that are not reset. A ring with only dirty entries
    /// counts too: KVM's next entry is its first one or a later one.
    pub fn has_overflowed(&self) -> bool {
        let last = self.reset + self.size.entries() - 1;
        let is_dirty = |index| self.flags(index) == DIRTY;
        is_dirty(self.reset) && (self.reset < self.fetch || is_dirty(last))
    }

    /// After an overflow: marks one round of entries as reaped, although `reap` has not passed on
    /// their pages.
    pub fn abandon(&mut self) {
        self.fetch = self.reset;
        self.pass_over(self.size.entries());
    }

    /// If this process sees no entry in use, marks KVM's minimum count of entries in a full ring.
    /// Returns whether it did.
    pub fn pass_over_limit(&mut self) -> bool {
        let mut all = self.reset..self.reset + self.size.entries();
        let is_empty = self.is_reset() && all.all(|index| self.flags(index) == FREE);
        if is_empty {
            self.pass_over(self.size.soft_limit());
        }
        is_empty
    }

    /// Marks `count` entries as reaped. After that, the index of KVM's next entry is unknown.
    fn pass_over(&mut self, count: usize) {
        for index in self.fetch..self.fetch + count {
            self.entry(index).0.store(REAPED, Ordering::Release);
        }
        self.fetch += count;
        self.is_adrift = true;
    }

    /// Calls `each` for every page that KVM has pushed so far, in order, and returns their number.
    pub fn reap(&mut self, mut each: impl FnMut(SlotId, usize)) -> usize {
        if self.is_adrift && self.is_reset() {
            let mut round = 0..self.size.entries();
            let pushed = round.find(|count| self.flags(self.fetch + count) == DIRTY);
            let Some(before) = pushed else {
                return 0;
            };
            self.pass_over(before);
            self.is_adrift = false;
        }
        let first = self.fetch;
        while self.fetch < self.reset + self.size.entries() {
            let (flags, slot, page) = self.entry(self.fetch);
            if flags.load(Ordering::Acquire) != DIRTY {
                break;
            }
            // The upper half is the address space, and this VM has only number 0.
            let id = SlotId(slot.load(Ordering::Relaxed) as u16);
            let page = page.load(Ordering::Relaxed) as usize;
            // If this panics, the next reap gives the page again.
            each(id, page);
            flags.store(REAPED, Ordering::Release);
            self.fetch += 1;
        }
        self.fetch - first
    }

    /// Counts the entries that KVM has reset.
    pub fn was_reset(&mut self) {
        while !self.is_reset() && self.flags(self.reset) == FREE {
            self.reset += 1;
        }
    }

    /// Whether KVM has reset all reaped entries.
    pub fn is_reset(&self) -> bool {
        self.reset == self.fetch
    }

    fn flags(&self, index: usize) -> u32 {
        self.entry(index).0.load(Ordering::Acquire)
    }

    fn entry(&self, index: usize) -> (&AtomicU32, &AtomicU32, &AtomicU64) {
        let index = index % self.size.entries();
        // SAFETY: 1. the mapping has that many entries, page-aligned. 2. It lives as long as
        // `self`. 3. Kernel and this process touch them by atomics only.
        unsafe {
            let entry = self.entries.add(index).as_ptr();
            (
                AtomicU32::from_ptr(&raw mut (*entry).flags),
                AtomicU32::from_ptr(&raw mut (*entry).slot),
                AtomicU64::from_ptr(&raw mut (*entry).offset),
            )
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: 1. the range is this mapping, whole, and unmapped only here.
        let unmapped = unsafe { munmap(self.entries.as_ptr().cast(), bytes(self.size)) };
        debug_assert!(unmapped.is_ok(), "the range is a mapping");
    }
}

/// The bytes of a ring.
pub fn bytes(size: RingSize) -> usize {
    size.entries() * RingSize::ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring in which the test acts as the kernel.
    fn ring() -> Ring {
        let size = RingSize::from_bytes(RingSize::BYTES_MIN).unwrap();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let (any, private) = (ptr::null_mut(), MapFlags::PRIVATE);
        // SAFETY: 1. a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap_anonymous(any, bytes(size), prot, private) }.unwrap();
        // SAFETY: 1. the mapping just made, all zeros.
        unsafe { Ring::new(NonNull::new(base.cast()).unwrap(), size) }
    }

    /// KVM's end of the ring.
    #[derive(Default)]
    struct Kernel {
        reset: usize,
        next: usize,
    }

    impl Kernel {
        /// Pushes entries. Like KVM, it overwrites entries if the ring is full.
        fn push(&mut self, ring: &Ring, pages: usize) {
            for _ in 0..pages {
                let (flags, slot, at) = ring.entry(self.next);
                slot.store(1, Ordering::Relaxed);
                at.store(self.next as u64, Ordering::Relaxed);
                flags.store(DIRTY, Ordering::Release);
                self.next += 1;
            }
        }

        /// Resets as KVM does, up to the first unreaped entry.
        fn reset(&mut self, ring: &mut Ring) -> usize {
            let first = self.reset;
            loop {
                let flags = ring.entry(self.reset).0;
                if flags.load(Ordering::Acquire) & REAPED == 0 {
                    ring.was_reset();
                    assert!(
                        self.reset <= self.next,
                        "KVM counts a negative number in use"
                    );
                    return self.reset - first;
                }
                flags.store(FREE, Ordering::Release);
                self.reset += 1;
            }
        }

        /// Whether KVM refuses to enter the vCPU.
        fn is_full(&self, ring: &Ring) -> bool {
            self.next - self.reset >= ring.size.entries() - 64
        }

        fn reap(&self, ring: &mut Ring, from: usize) {
            let mut pages = Vec::new();
            ring.reap(|id, page| {
                assert_eq!(id, SlotId(1));
                pages.push(page);
            });
            assert_eq!(pages, (from..self.next).collect::<Vec<_>>());
        }
    }

    #[test]
    fn pages_come_out_once_in_their_order_over_many_rounds() {
        let (mut ring, mut kernel) = (ring(), Kernel::default());
        for round in 0..200 {
            let (some, from) = (37 * round % ring.size.soft_limit(), kernel.next);
            kernel.push(&ring, some);
            kernel.reap(&mut ring, from);
            assert_eq!(ring.reap(|_, _| panic!("once")), 0);
            assert!(!ring.has_overflowed());
            assert_eq!(kernel.reset(&mut ring), some);
            assert!(ring.is_reset());
        }
        assert!(
            kernel.next > 10 * ring.size.entries(),
            "several times round"
        );
    }

    #[test]
    fn a_ring_whose_last_entry_is_reaped_has_not_overflowed() {
        let (mut ring, mut kernel) = (ring(), Kernel::default());
        let all = ring.size.entries();
        kernel.push(&ring, 7);
        kernel.reap(&mut ring, 0);
        kernel.push(&ring, all - 7);
        assert!(!ring.has_overflowed());
        kernel.reap(&mut ring, 7);
        assert!(!ring.has_overflowed());
        assert_eq!(kernel.reset(&mut ring), all);
        assert!(ring.is_reset());
    }

    /// Tests every number of overwritten entries, from several states of the ring: the overflow is
    /// found, and later pages are reaped once and in order again.
    #[test]
    fn a_ring_that_has_overflowed_is_used_again() {
        let all = ring().size.entries();
        for over in (0..3 * all).step_by(61) {
            for reaped in [0, 1, 100, all - 64] {
                let (mut ring, mut kernel) = (ring(), Kernel::default());
                kernel.push(&ring, 300);
                kernel.reap(&mut ring, 0);
                kernel.reset(&mut ring);
                kernel.push(&ring, reaped);
                kernel.reap(&mut ring, 300);
                let is_exact = over == 0 && reaped > 0;
                kernel.push(&ring, all - reaped + over);
                assert_eq!(ring.has_overflowed(), !is_exact, "{over} {reaped}");
                if is_exact {
                    continue;
                }
                ring.abandon();
                assert_eq!(ring.reap(|_, _| panic!("unknown pages")), 0);
                assert_eq!(kernel.reset(&mut ring), all);
                assert!(ring.is_reset() && !ring.has_overflowed());
                used_again(&mut ring, &mut kernel);
            }
        }
    }

    fn used_again(ring: &mut Ring, kernel: &mut Kernel) {
        assert_eq!(ring.reap(|_, _| panic!("nothing was pushed")), 0);
        while kernel.is_full(ring) {
            assert!(ring.pass_over_limit());
            kernel.reset(ring);
            assert!(ring.is_reset());
        }
        for round in 0..100 {
            let from = kernel.next;
            let room = ring.size.entries() - 64 - (kernel.next - kernel.reset);
            kernel.push(ring, room.min(1 + 17 * round));
            assert!(!ring.has_overflowed());
            assert!(!ring.pass_over_limit(), "pages are in it");
            kernel.reap(ring, from);
            kernel.reset(ring);
            assert!(ring.is_reset());
            assert_eq!(kernel.reset, kernel.next, "all that KVM counts is known");
        }
    }

    /// KVM pushes an entry although the ring is full, more than a round after the overflow. The
    /// computed index of KVM's next entry is one round too low, and the full ring shows that.
    #[test]
    fn an_entry_pushed_into_a_full_ring_does_not_stop_it() {
        let (mut ring, mut kernel) = (ring(), Kernel::default());
        let all = ring.size.entries();
        kernel.push(&ring, 2 * all + 5);
        ring.abandon();
        kernel.reset(&mut ring);
        kernel.push(&ring, 1);
        kernel.reap(&mut ring, 2 * all + 5);
        kernel.reset(&mut ring);
        assert!(ring.is_reset() && kernel.is_full(&ring));
        used_again(&mut ring, &mut kernel);
    }
}
