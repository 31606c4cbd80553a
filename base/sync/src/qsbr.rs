//! Which vCPUs may still use an unmapped page: the shoot-down protocol.
//!
//! A software vCPU holds host pointers in its TLB and uses them without a lock. It passes a
//! *quiescent point* between basic blocks, where it flushes its TLB if a flush was requested. It is
//! *offline* while it does not execute guest code (halted, waiting for a page, in the run loop).
//!
//! ```text
//! remover                                vCPU
//! unmap the leaves                       online():  seen = wanted; fence; has wanted changed?
//! e = request_for(blocks):                          flush the TLB if last flushed before seen,
//!    fence; which vCPUs noted a block?              then flushed(): the filter is empty
//!    their wanted = e; fence;            request:   online() again
//!    request where seen < e             walk:      note(block), then read the tables
//! until passed(e):                       offline(): seen = OFFLINE
//!    every wanted < e or seen >= e
//! reuse the frames
//! ```
//!
//! There are two Dekker exchanges. Filter: either the remover sees that the vCPU has noted the
//! block, or the vCPU's walk sees that the leaf is gone. Online: either the remover sees the vCPU
//! online and waits for it, or the vCPU, when it goes online, sees the new `wanted` and flushes
//! before its first access. An offline vCPU keeps its TLB, so the remover sets its `wanted` too,
//! but does not wait for it.
//!
//! A vCPU that has noted none of the blocks gets no request and does not flush, and the remover
//! does not wait for it. If a caller needs only that each vCPU leaves guest code once, it uses a
//! [`KickAll`]: the online exchange without a flush.
//!
//! A filter starts with *every block*, so a vCPU that does not use its filter is always requested.
//! A vCPU uses its filter from its first [`VcpuSlot::flushed`] on.

use crate::shim::{AtomicU32, AtomicU64, Ordering, fence};
use crate::tlb_filter::{Blocks, TlbFilter};

/// A point in the order of shoot-downs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct GracePeriod(u64);

const OFFLINE: u64 = u64::MAX;

/// The vCPUs that were online at a [`Qsbr::kick_all`], each with its count of offline transitions.
#[must_use = "it has to be waited for"]
pub struct KickAll(Box<[Option<u64>]>);

/// One vCPU's state, alone on its cache lines and on the pairs in which processors fetch them.
#[repr(align(128))]
pub struct VcpuSlot {
    /// The value of `wanted` when the vCPU last went online or passed a quiescent point.
    seen: AtomicU64,
    /// The last shoot-down that concerns the vCPU.
    wanted: AtomicU64,
    /// How often it went offline.
    stays: AtomicU64,
    requests: AtomicU32,
    filter: TlbFilter,
}

/// The vCPUs of one VM.
pub struct Qsbr {
    grace: AtomicU64,
    vcpus: Box<[VcpuSlot]>,
}

impl Qsbr {
    /// All vCPUs start offline, with a filter of every block.
    pub fn new(vcpus: usize) -> Self {
        let slot = || VcpuSlot {
            seen: AtomicU64::new(OFFLINE),
            wanted: AtomicU64::new(0),
            stays: AtomicU64::new(0),
            requests: AtomicU32::new(0),
            filter: TlbFilter::everything(),
        };
        Self {
            grace: AtomicU64::new(0),
            vcpus: (0..vcpus).map(|_| slot()).collect(),
        }
    }

    /// vCPU `index`'s slot.
    pub fn vcpu(&self, index: usize) -> &VcpuSlot {
        &self.vcpus[index]
    }

    /// The number of vCPUs.
    pub fn len(&self) -> usize {
        self.vcpus.len()
    }

    /// Whether there is no vCPU.
    pub fn is_empty(&self) -> bool {
        self.vcpus.is_empty()
    }

    /// Requests a flush from every vCPU. Call it after the entries are gone. Does not wait.
    pub fn request(&self) -> GracePeriod {
        self.address(|_| true)
    }

    /// Requests a flush from the vCPUs that may hold a translation of `blocks`. Call it after the
    /// entries are gone. Does not wait. If there are no such vCPUs, the grace period has passed
    /// already.
    pub fn request_for(&self, blocks: &Blocks) -> GracePeriod {
        // Pairs with the fence in `note`.
        fence(Ordering::SeqCst);
        self.address(|vcpu| vcpu.filter.meets(blocks))
    }

    /// Starts a grace period for every vCPU that `concerns` selects. If it selects none, returns
    /// grace period zero, which counts as passed.
    fn address(&self, mut concerns: impl FnMut(&VcpuSlot) -> bool) -> GracePeriod {
        let mut grace = 0;
        for vcpu in self.vcpus.iter().filter(|vcpu| concerns(vcpu)) {
            if grace == 0 {
                grace = self.grace.fetch_add(1, Ordering::SeqCst) + 1;
            }
            // Keep the greatest value: two removers may arrive here in the opposite order.
            vcpu.wanted.fetch_max(grace, Ordering::SeqCst);
        }
        if grace != 0 {
            fence(Ordering::SeqCst);
            for vcpu in self.vcpus.iter().filter(|vcpu| !vcpu.passed(grace)) {
                vcpu.request(VcpuSlot::FLUSH);
            }
        }
        GracePeriod(grace)
    }

    /// Whether every vCPU of `grace` has flushed or has been offline since its request.
    ///
    /// A vCPU that only a later grace period concerns has to pass too, because it has a request as
    /// well.
    pub fn passed(&self, grace: GracePeriod) -> bool {
        self.vcpus.iter().all(|vcpu| vcpu.passed(grace.0))
    }

    /// Makes every online vCPU go offline once. Does not wait.
    pub fn kick_all(&self) -> KickAll {
        // Pairs with the fence in `online`: if this thread does not see a vCPU online, that vCPU
        // sees all stores before this fence.
        fence(Ordering::SeqCst);
        let stay = |vcpu: &VcpuSlot| {
            (vcpu.seen.load(Ordering::SeqCst) != OFFLINE).then(|| {
                let stay = vcpu.stays.load(Ordering::SeqCst);
                vcpu.request(VcpuSlot::KICK);
                stay
            })
        };
        KickAll(self.vcpus.iter().map(stay).collect())
    }

    /// Whether each of these vCPUs has been offline since the kick.
    pub fn all_left(&self, kick: &KickAll) -> bool {
        let over = |(vcpu, stay): (&VcpuSlot, &Option<u64>)| {
            // Acquire: the caller then sees what the vCPU did before it went offline. It may have
            // gone offline while its count was read.
            stay.is_none_or(|stay| {
                vcpu.stays.load(Ordering::Acquire) != stay
                    || vcpu.seen.load(Ordering::Acquire) == OFFLINE
            })
        };
        self.vcpus.iter().zip(&kick.0).all(over)
    }

    /// Whether every vCPU but `index` is offline, so that no other one executes guest code.
    ///
    /// The answer is stable only if the caller keeps the others from coming online, by a flag that
    /// they test after [`Qsbr::online`]; the fences on both sides are SeqCst.
    pub fn alone(&self, index: usize) -> bool {
        fence(Ordering::SeqCst);
        let offline = |vcpu: &VcpuSlot| vcpu.seen.load(Ordering::SeqCst) == OFFLINE;
        self.vcpus
            .iter()
            .enumerate()
            .all(|(i, vcpu)| i == index || offline(vcpu))
    }

    /// The vCPU is about to run guest code. Returns the grace period at or after which its TLB must
    /// have been flushed.
    pub fn online(&self, index: usize) -> GracePeriod {
        let slot = &self.vcpus[index];
        let mut wanted = slot.wanted.load(Ordering::Acquire);
        loop {
            slot.seen.store(wanted, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let again = slot.wanted.load(Ordering::SeqCst);
            if again == wanted {
                return GracePeriod(wanted);
            }
            wanted = again;
        }
    }

    /// The vCPU does not access guest memory until it is online again.
    pub fn offline(&self, index: usize) {
        let slot = &self.vcpus[index];
        slot.seen.store(OFFLINE, Ordering::Release);
        // A load and a store suffice, because there is one writer.
        let stays = slot.stays.load(Ordering::Relaxed);
        slot.stays.store(stays + 1, Ordering::Release);
    }
}

impl VcpuSlot {
    /// A TLB flush is requested.
    pub const FLUSH: u32 = 1;
    /// An interrupt, a stop request, or another reason to leave the dispatch loop and check.
    pub const KICK: u32 = 2;
    /// Guest code was changed by another vCPU.
    pub const CODE: u32 = 4;

    /// Makes the vCPU leave its dispatch loop at the end of the basic block.
    pub fn request(&self, why: u32) {
        self.requests.fetch_or(why, Ordering::SeqCst);
    }

    /// The request word that the dispatch loop tests: nonzero means leave.
    #[inline]
    pub fn has_request(&self) -> bool {
        self.requests.load(Ordering::Relaxed) != 0
    }

    /// Takes the requests and clears them.
    pub fn take(&self) -> u32 {
        self.requests.swap(0, Ordering::SeqCst)
    }

    /// The vCPU is about to walk to a frame of `block` (gfn >> 9), and may keep the translation.
    /// The vCPU itself calls this, online, *before* the walk, and before a fault that may follow
    /// it.
    #[inline]
    pub fn note(&self, block: u64) {
        self.filter.note(block);
    }

    /// Empties the filter, because the vCPU's TLB is empty. The vCPU itself calls this at a
    /// quiescent point, right after the flush, and only if it notes every walk from now on.
    pub fn flushed(&self) {
        self.filter.clear();
    }

    /// Acquire: a caller that sees the new value also sees all that the vCPU did before.
    fn passed(&self, grace: u64) -> bool {
        self.seen.load(Ordering::SeqCst) >= grace || self.wanted.load(Ordering::SeqCst) < grace
    }
}
