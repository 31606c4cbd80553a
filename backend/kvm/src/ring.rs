//! A vCPU's dirty ring in KVM's format: an array in pages of the vCPU's descriptor.
//!
//! ```text
//! flags of an entry   0 free -> 1 dirty: KVM      1 -> 2 reaped: here      2 -> 0: KVM's reset
//! ```
//! When all entries are dirty, KVM may have wrapped around and overwritten some: it does not stop
//! at a full ring, but warns in the host's log. A reserve of 64 entries (and those of a processor's
//! own log) is meant to prevent this: with only the reserve left, a vCPU does not enter the guest.
//! But each store that KVM emulates makes an entry. One string instruction makes up to a thousand
//! entries between two checks of the reserve (seen on Linux 6.18, `kvm_pvm`). After an overrun the
//! index of KVM's next entry is unknown, so this process refuses such a ring for ever.
//!
//! KVM writes slot and page before it sets `dirty`, so the load of the flags is an acquire. KVM's
//! reset reuses an entry after it has read `reaped`, so the store of that flag is a release.
//!
//! UNSAFETY: a mapping that the kernel writes at any time. No reference to it other than to an
//! atomic is formed, all inside the entries of the mapping, which lives as long as the [`Ring`].

use kvm_bindings::{KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn};
use kvm_ioctls::VcpuFd;
use lacuna_addr::PAGE_SIZE;
use lacuna_slots::{RingSize, SlotId};
use lacuna_sys::Errno;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// `KVM_DIRTY_GFN_F_DIRTY`.
const DIRTY: u32 = 1;
/// `KVM_DIRTY_GFN_F_RESET`.
const RESET: u32 = 2;

const _: () = assert!(size_of::<kvm_dirty_gfn>() == RingSize::ENTRY_BYTES);

/// The consumer's end of a ring.
pub struct Ring {
    entries: NonNull<kvm_dirty_gfn>,
    size: RingSize,
    /// The number of entries reaped so far: the next one has this index, modulo the size.
    fetch: usize,
    /// Entries reaped since the last reset.
    reaped: usize,
}

/// Entries may have been lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overflow;

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
            fetch: 0,
            reaped: 0,
        }
    }

    /// Calls `each` for every page that KVM has pushed so far, in order, and returns their number.
    pub fn reap(&mut self, mut each: impl FnMut(SlotId, usize)) -> Result<usize, Overflow> {
        let first = self.fetch;
        loop {
            if self.reaped == self.size.entries() {
                return Err(Overflow);
            }
            let (flags, slot, page) = self.entry(self.fetch % self.size.entries());
            // Not dirty: the entry is free, or was reaped in the round before and not reset yet.
            if flags.load(Ordering::Acquire) != DIRTY {
                return Ok(self.fetch - first);
            }
            // The upper half is the address space, and this VM has only number 0.
            let id = SlotId(slot.load(Ordering::Relaxed) as u16);
            let page = page.load(Ordering::Relaxed) as usize;
            // First: if it panics, the next reap gives the page again.
            each(id, page);
            flags.store(RESET, Ordering::Release);
            self.fetch += 1;
            self.reaped += 1;
        }
    }

    /// KVM has reset the reaped entries. If the whole ring was reaped, its state stays unknown, and
    /// the ring stays refused.
    pub fn was_reset(&mut self) {
        if self.reaped < self.size.entries() {
            self.reaped = 0;
        }
    }

    fn entry(&self, index: usize) -> (&AtomicU32, &AtomicU32, &AtomicU64) {
        assert!(index < self.size.entries());
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

    fn push(ring: &Ring, index: usize, page: usize) {
        let (flags, slot, at) = ring.entry(index % ring.size.entries());
        slot.store(1, Ordering::Relaxed);
        at.store(page as u64, Ordering::Relaxed);
        flags.store(DIRTY, Ordering::Release);
    }

    /// Resets as KVM does, up to the first entry that was not reaped.
    fn reset(ring: &mut Ring, next: &mut usize) -> usize {
        let first = *next;
        loop {
            let flags = ring.entry(*next % ring.size.entries()).0;
            if flags.load(Ordering::Acquire) & RESET == 0 {
                ring.was_reset();
                return *next - first;
            }
            flags.store(0, Ordering::Release);
            *next += 1;
        }
    }

    #[test]
    fn pages_come_out_once_in_their_order_over_many_rounds() {
        let (mut ring, mut next, mut pushed) = (ring(), 0, 0);
        for round in 0..200 {
            let some = 37 * round % ring.size.soft_limit();
            for _ in 0..some {
                push(&ring, pushed, 3 * pushed);
                pushed += 1;
            }
            let mut expected = pushed - some;
            let order = |id, page| {
                assert_eq!((id, page), (SlotId(1), 3 * expected));
                expected += 1;
            };
            assert_eq!(ring.reap(order), Ok(some));
            assert_eq!(ring.reap(|_, _| panic!("once")), Ok(0));
            assert_eq!(reset(&mut ring, &mut next), some);
        }
        assert!(pushed > 10 * ring.size.entries(), "several times round");
    }

    #[test]
    fn a_ring_that_was_full_to_the_last_entry_is_refused_for_ever() {
        let (mut ring, mut next) = (ring(), 0);
        let all = ring.size.entries();
        (0..all - 1).for_each(|index| push(&ring, index, index));
        assert_eq!(ring.reap(|_, _| ()), Ok(all - 1));
        assert_eq!(reset(&mut ring, &mut next), all - 1);
        (all - 1..2 * all).for_each(|index| push(&ring, index, index));
        assert_eq!(ring.reap(|_, _| ()), Err(Overflow));
        reset(&mut ring, &mut next);
        assert_eq!(ring.reap(|_, _| ()), Err(Overflow));
    }
}
