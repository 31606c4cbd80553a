//! Which vCPUs may still use what was unmapped: the shoot-down protocol.
//!
//! A software vCPU holds host pointers in its TLB and uses them without a lock. It passes a
//! *quiescent point* between basic blocks, when it flushes its TLB if it was asked to, and it is
//! *offline* whenever it is not executing guest code (halted, waiting for a page, in the run loop).
//!
//! ```text
//! remover                                vCPU
//! unmap the leaves                       online():  seen = wanted; fence; wanted still the same?
//! e = request_for(blocks):                          flush the TLB if last flushed before seen,
//!    fence; who has noted a block?                  then flushed(): the filter is empty
//!    their wanted = e; fence;            request:   online() again
//!    request where seen < e             walk:      note(block), then read the tables
//! until passed(e):                       offline(): seen = OFFLINE
//!    every wanted < e or seen >= e
//! reuse the frames
//! ```
//!
//! Two Dekker exchanges. Filter: either the remover sees that the vCPU has noted the block, or
//! the vCPU's walk sees that the leaf is gone. Online: either the remover sees the vCPU online and
//! waits for it, or the vCPU, coming online, sees what is wanted and flushes before its first
//! access. A vCPU that is offline keeps its TLB, so it is addressed too; only nobody waits for it.
//!
//! A vCPU that has noted none of the blocks gets no request, is not waited for and not flushed.
//! Who only has to know that each vCPU has left guest code once asks for a [`KickAll`]: the online
//! exchange again, but no TLB loses anything.
//!
//! Filters start as *everything*, so a vCPU that keeps none is always addressed: keeping one
//! begins with the first [`VcpuSlot::flushed`].

use crate::shim::{AtomicU32, AtomicU64, Ordering, fence};
use crate::tlb_filter::{Blocks, TlbFilter};

/// A moment in the order of shoot-downs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct GracePeriod(u64);

const OFFLINE: u64 = u64::MAX;

/// The stays of the vCPUs that were online at the time of a [`Qsbr::kick_all`].
#[must_use = "it has to be waited for"]
pub struct KickAll(Box<[Option<u64>]>);

/// One vCPU's side, alone on its cache lines, and on the pairs in which they are fetched.
#[repr(align(128))]
pub struct VcpuSlot {
    /// When it last came online or passed a quiescent point, as the `wanted` of that moment.
    seen: AtomicU64,
    /// The last shoot-down that addressed it.
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
    /// All vCPUs start offline, with a filter of everything.
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

    /// How many vCPUs there are.
    pub fn len(&self) -> usize {
        self.vcpus.len()
    }

    /// Whether there is no vCPU.
    pub fn is_empty(&self) -> bool {
        self.vcpus.is_empty()
    }

    /// Asks every vCPU to flush; call after the entries are gone. Does not wait.
    pub fn request(&self) -> GracePeriod {
        self.address(|_| true)
    }

    /// Asks those vCPUs to flush that may hold something of `blocks`; call after the entries are
    /// gone. Does not wait, and has passed at once when there are none.
    pub fn request_for(&self, blocks: &Blocks) -> GracePeriod {
        // Against the fence in `note`.
        fence(Ordering::SeqCst);
        self.address(|vcpu| vcpu.filter.meets(blocks))
    }

    /// A new grace period, wanted of every vCPU that `whom` names; grace period zero, which has
    /// always passed, when it names none.
    fn address(&self, mut whom: impl FnMut(&VcpuSlot) -> bool) -> GracePeriod {
        let mut grace = 0;
        for vcpu in self.vcpus.iter().filter(|vcpu| whom(vcpu)) {
            if grace == 0 {
                grace = self.grace.fetch_add(1, Ordering::SeqCst) + 1;
            }
            // The greatest wins: two removers may arrive here in the other order.
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

    /// Whether every vCPU that `grace` addressed has flushed, or has been offline, since.
    ///
    /// One that only a later grace period addressed is waited for too: it has a request as well.
    pub fn passed(&self, grace: GracePeriod) -> bool {
        self.vcpus.iter().all(|vcpu| vcpu.passed(grace.0))
    }

    /// Makes every vCPU that is online go offline once. Does not wait.
    pub fn kick_all(&self) -> KickAll {
        // Against the fence in `online`: who is not seen online sees what was stored before this.
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

    /// Whether every vCPU has been offline since.
    pub fn all_left(&self, kick: &KickAll) -> bool {
        let over = |(vcpu, stay): (&VcpuSlot, &Option<u64>)| {
            // Acquire: what it did before it went offline is seen. It may have gone while its stay
            // was being read.
            stay.is_none_or(|stay| {
                vcpu.stays.load(Ordering::Acquire) != stay
                    || vcpu.seen.load(Ordering::Acquire) == OFFLINE
            })
        };
        self.vcpus.iter().zip(&kick.0).all(over)
    }

    /// Whether every vCPU but `index` is offline: nobody else executes guest code.
    ///
    /// Meaningful to a caller that keeps the others from coming online, by a flag that they test
    /// after [`Qsbr::online`]; the fences on both sides are SeqCst.
    pub fn alone(&self, index: usize) -> bool {
        fence(Ordering::SeqCst);
        let offline = |vcpu: &VcpuSlot| vcpu.seen.load(Ordering::SeqCst) == OFFLINE;
        self.vcpus
            .iter()
            .enumerate()
            .all(|(i, vcpu)| i == index || offline(vcpu))
    }

    /// The vCPU is about to run guest code. Returns the grace period that its TLB must have been
    /// flushed at or after.
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

    /// The vCPU will not touch guest memory until it is online again.
    pub fn offline(&self, index: usize) {
        let slot = &self.vcpus[index];
        slot.seen.store(OFFLINE, Ordering::Release);
        // A load and a store: one writer.
        let stays = slot.stays.load(Ordering::Relaxed);
        slot.stays.store(stays + 1, Ordering::Release);
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
    pub fn request(&self, why: u32) {
        self.requests.fetch_or(why, Ordering::SeqCst);
    }

    /// The flag word that the block loop tests: nonzero means leave.
    #[inline]
    pub fn has_request(&self) -> bool {
        self.requests.load(Ordering::Relaxed) != 0
    }

    /// Takes the reasons, clearing them.
    pub fn take(&self) -> u32 {
        self.requests.swap(0, Ordering::SeqCst)
    }

    /// The vCPU is about to walk to a frame of `block` (gfn >> 9) and may keep what it finds. For
    /// the vCPU itself, online, *before* the walk, and before a fault that may follow it.
    #[inline]
    pub fn note(&self, block: u64) {
        self.filter.note(block);
    }

    /// The vCPU's TLB is empty: nothing is noted any more. For the vCPU itself, at a quiescent
    /// point, right after the flush, and only if it notes every walk from now on.
    pub fn flushed(&self) {
        self.filter.clear();
    }

    /// Acquire: whoever sees it comes after all that the vCPU did before.
    fn passed(&self, grace: u64) -> bool {
        self.seen.load(Ordering::SeqCst) >= grace || self.wanted.load(Ordering::SeqCst) < grace
    }
}
