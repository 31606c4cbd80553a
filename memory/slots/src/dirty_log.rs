//! The types of dirty logging that every backend shares: modes, settings, errors, counts.
//!
//! Dirty logging has two independent settings: how a write is detected ([`Detection`]), and where
//! it is recorded ([`Delivery`]).

use crate::{ClearError, RingSize, SlotError, SlotId};
use lacuna_metrics::counters;

/// How a write is detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Detection {
    /// The first write to a page faults.
    WriteProtect,
    /// Each vCPU logs the pages whose D bit its walks set, as PML does.
    #[default]
    Pml,
}

/// The part of the host that detects the guest's writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DetectedBy {
    /// The backend's MMU, or KVM's, by write protection.
    WriteProtect,
    /// Page-modification logging.
    Pml,
    /// The page table of the process, read by `PAGEMAP_SCAN`.
    PageMap,
}

impl From<Detection> for DetectedBy {
    fn from(detection: Detection) -> Self {
        match detection {
            Detection::WriteProtect => Self::WriteProtect,
            Detection::Pml => Self::Pml,
        }
    }
}

impl std::fmt::Display for DetectedBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::WriteProtect => "write protection",
            Self::Pml => "page-modification logging",
            Self::PageMap => "the page map",
        })
    }
}

/// Where a write is recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Delivery {
    /// In a bitmap for each slot, one bit a page.
    #[default]
    Bitmap,
    /// In a ring for each vCPU.
    Ring {
        /// The size of each ring. A small ring is full more often, and its vCPU leaves the guest
        /// then. On `/dev/kvm` a small ring may also overflow: see `DirtyRings::reap_rings`.
        size: RingSize,
        /// Where writes without a vCPU are recorded: each ring belongs to a vCPU.
        backup: Backup,
    },
}

impl Delivery {
    /// Whether a logging slot has a bitmap. Without a bitmap, `get_dirty` and the VMM's writes to
    /// the slot are refused.
    pub const fn has_bitmaps(self) -> bool {
        !matches!(
            self,
            Self::Ring {
                backup: Backup::None,
                ..
            }
        )
    }
}

/// Where writes without a vCPU are recorded, in a VM with rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backup {
    /// Nowhere. The VMM's writes to a logging slot are refused, and so are the calls on bitmaps.
    None,
    /// In a bitmap for each slot.
    Bitmap,
}

/// Whether a slot logs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logging {
    /// The slot does not log.
    Off,
    /// The slot logs.
    On {
        /// Which pages count as written at first.
        initially: Initially,
        /// When huge leaves are split.
        huge: HugeLeaves,
    },
}

impl Logging {
    /// No page counts as written at first; the first write to a huge leaf splits it.
    pub const LAZY: Self = Self::On {
        initially: Initially::Clean,
        huge: HugeLeaves::Lazy,
    };
}

/// Which pages count as written when logging begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Initially {
    /// None. Logging begins by write-protecting all pages, or by clearing their D.
    Clean,
    /// All. A page is write-protected, or loses D, when its bit is first cleared. This needs a
    /// bitmap.
    AllSet,
}

/// When the huge leaves of a logging slot are split. On `/dev/kvm` the kernel decides (module
/// parameter `eager_page_split`), so the kvm backend ignores this choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HugeLeaves {
    /// Split each at the first write to it.
    Lazy,
    /// Split it before its pages are first write-protected or lose D: when logging begins, or with
    /// [`Initially::AllSet`] when their bits are first cleared. If no table page is free, the first
    /// write splits the leaf.
    Eager,
}

/// Why a call on dirty pages is refused. Nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirtyError {
    /// There is no such slot.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The range breaks KVM's rules for clearing.
    #[error(transparent)]
    Clear(#[from] ClearError),
    /// The slot does not log.
    #[error("{0} does not log its writes: turn logging on first")]
    NotLogging(SlotId),
    /// The VM records writes only in rings.
    #[error(
        "this VM records written pages in rings without a backup bitmap: reap the rings, or choose \
         rings with a bitmap"
    )]
    NoBitmap,
    /// The VM has no rings.
    #[error("this VM records written pages in bitmaps and has no rings: harvest the bitmaps")]
    NoRings,
    /// A delivery was chosen already, or there is a vCPU, or a slot has logged.
    #[error(
        "where written pages are recorded cannot change any more: choose it once, before the first \
         vCPU and the first log"
    )]
    TooLate,
    /// The dirty log of this VM cannot be read without clearing it.
    #[error("only KVM's own bitmap can be read and cleared in two steps: use `get_dirty`")]
    OneStep,
    /// The backend has no such mode.
    #[error("this backend does not support {0}: choose another mode")]
    Unsupported(&'static str),
    /// The buffer does not have the size of the slot's bitmap.
    #[error("{id} has {needed} words of dirty bits, not {given}: pass a buffer of {needed} words")]
    Words {
        /// The slot.
        id: SlotId,
        /// Words of its bitmap.
        needed: usize,
        /// Words of the buffer.
        given: usize,
    },
    /// Another reader was added to the log later, or was there before and the VM has rings alone.
    #[error(
        "another copy of this VM's memory reads the log of writes: wait until it has ended, or end \
         it, and try again"
    )]
    InUse,
    /// The kernel refused a step.
    #[error("dirty logging: cannot {step}: {}", std::io::Error::from_raw_os_error(*errno))]
    Kernel {
        /// What the backend was doing.
        step: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

counters! {
    /// Costs of dirty logging for one vCPU.
    pub struct DirtyStats as "lacuna_dirty" {
        /// Write faults that marked a page under its range lock.
        counter faults,
        /// Write faults that the fast page fault handled, without a lock.
        counter fast_page_faults,
        /// Walks that ended because the log was full.
        counter log_full,
        /// Flushes of the vCPU's log when it was not empty.
        counter flushes,
        /// Pages logged.
        counter logged,
    }
}
