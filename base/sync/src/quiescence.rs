//! Which vCPUs may still use what was unmapped: the shoot-down protocol.
//!
//! A software vCPU holds host pointers in its TLB and uses them without a lock. It passes a
//! *quiescent point* between basic blocks, when it flushes its TLB if it was asked to, and it is
//! *offline* whenever it is not executing guest code (halted, waiting for a page, in the run loop).
//!
//! ```text
//! remover                                vCPU
//! unmap the leaves                       online():  seen = epoch; fence; epoch again (until equal)
//! e = request(): epoch += 1, fence,                 flush the TLB if last flushed before seen
//!    poke every vCPU with seen < e       poked:     flush the TLB, seen = epoch
//! until passed(e): every seen >= e       offline(): seen = OFFLINE
//! reuse the frames
//! ```
//!
//! The two fences make it a Dekker exchange: either the remover sees the vCPU online and waits for
//! it, or the vCPU, coming online, sees the new epoch and flushes before its first access.

use crate::shim::{AtomicU32, AtomicU64, Ordering, fence};

/// A moment in the order of shoot-downs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Epoch(u64);

const OFFLINE: u64 = u64::MAX;

/// One vCPU's side, alone on its cache line.
#[repr(align(64))]
pub struct VcpuSlot {
    seen: AtomicU64,
    poke: AtomicU32,
}

/// The vCPUs of one VM.
pub struct Quiescence {
    epoch: AtomicU64,
    vcpus: Box<[VcpuSlot]>,
}

impl Quiescence {
    /// All vCPUs start offline.
    pub fn new(vcpus: usize) -> Self {
        let slot = || VcpuSlot {
            seen: AtomicU64::new(OFFLINE),
            poke: AtomicU32::new(0),
        };
        Self {
            epoch: AtomicU64::new(0),
            vcpus: (0..vcpus).map(|_| slot()).collect(),
        }
    }

    /// vCPU `index`'s slot.
    pub fn vcpu(&self, index: usize) -> &VcpuSlot {
        &self.vcpus[index]
    }

    /// How many vCPUs there are.
    pub fn len(&self) -> usize {
        self.vcpus.len()
    }

    /// Whether there is no vCPU.
    pub fn is_empty(&self) -> bool {
        self.vcpus.is_empty()
    }

    /// Asks every vCPU to flush; call after the entries are gone. Does not wait.
    pub fn request(&self) -> Epoch {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        fence(Ordering::SeqCst);
        for vcpu in &self.vcpus {
            if vcpu.seen.load(Ordering::SeqCst) < epoch {
                vcpu.poke(VcpuSlot::FLUSH);
            }
        }
        Epoch(epoch)
    }

    /// Whether every vCPU has flushed, or has been offline, since `epoch` was requested.
    pub fn passed(&self, epoch: Epoch) -> bool {
        self.vcpus
            .iter()
            .all(|vcpu| vcpu.seen.load(Ordering::Acquire) >= epoch.0)
    }

    /// Whether every vCPU but `index` is offline: nobody else executes guest code.
    ///
    /// Meaningful to a caller that keeps the others from coming online, by a flag that they test
    /// after [`Quiescence::online`]; the fences on both sides are SeqCst.
    pub fn alone(&self, index: usize) -> bool {
        fence(Ordering::SeqCst);
        let offline = |vcpu: &VcpuSlot| vcpu.seen.load(Ordering::SeqCst) == OFFLINE;
        self.vcpus
            .iter()
            .enumerate()
            .all(|(i, vcpu)| i == index || offline(vcpu))
    }

    /// The vCPU is about to run guest code. Returns the epoch that its TLB must have been flushed
    /// at or after.
    pub fn online(&self, index: usize) -> Epoch {
        let slot = &self.vcpus[index];
        let mut epoch = self.epoch.load(Ordering::Acquire);
        loop {
            slot.seen.store(epoch, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let again = self.epoch.load(Ordering::SeqCst);
            if again == epoch {
                return Epoch(epoch);
            }
            epoch = again;
        }
    }

    /// The vCPU will not touch guest memory until it is online again.
    pub fn offline(&self, index: usize) {
        self.vcpus[index].seen.store(OFFLINE, Ordering::Release);
    }
}

impl VcpuSlot {
    /// A TLB flush is asked for.
    pub const FLUSH: u32 = 1;
    /// An interrupt, a stop request: whatever makes the vCPU leave its block loop and look.
    pub const KICK: u32 = 2;
    /// Guest code was changed by another vCPU.
    pub const CODE: u32 = 4;

    /// Makes the vCPU leave its block loop at the next block boundary.
    pub fn poke(&self, why: u32) {
        self.poke.fetch_or(why, Ordering::SeqCst);
    }

    /// The flag word that the block loop tests: nonzero means leave.
    #[inline]
    pub fn poked(&self) -> bool {
        self.poke.load(Ordering::Relaxed) != 0
    }

    /// Takes the reasons, clearing them.
    pub fn take(&self) -> u32 {
        self.poke.swap(0, Ordering::SeqCst)
    }
}
