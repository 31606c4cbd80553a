//! One VM's slots, tables and host memory, together.

use crate::MmuFormat;
use crate::dirty::Tracking;
use crate::rmap::Rmap;
use lacuna_addr::{Access, Gfn};
use lacuna_host::Host;
use lacuna_slots::{CurrentSlots, Limits, Slots, Snapshot};
use lacuna_stage2::{Arena, ArenaError, Counts, Ept, Exhausted, LookupLevel, Stage2, Violation};
use lacuna_sync::{Mutex, Qsbr, lock_order};
use std::sync::Arc;

/// Why an [`Mmu`] cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MmuError {
    /// The arena of table pages cannot be made.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The arena has no table for the root.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
}

/// One VM's memory-management unit, over tables in the format `F`.
pub struct Mmu<F = Ept> {
    /// The layout of guest memory. Each slot has its reverse map.
    pub(crate) slots: Slots<Rmap>,
    /// The VM's tables.
    pub(crate) stage2: Stage2<F>,
    /// Supplies the pages.
    pub(crate) host: Arc<Host>,
    /// The states of all vCPUs that translate through this MMU: online, flush requested.
    pub(crate) qsbr: Arc<Qsbr>,
    /// Serialises changes of the layout, of the disallow counts and of logging, and harvests.
    pub(crate) layout: Mutex<(), lock_order::MmuLayout>,
    /// How the VM tracks written pages.
    pub(crate) dirty: Tracking,
}

impl<F: MmuFormat> Mmu<F> {
    /// An MMU without slots, with at most `tables` table pages. `qsbr` has every vCPU that will
    /// translate through the MMU.
    pub fn new(host: Arc<Host>, qsbr: Arc<Qsbr>, tables: u32) -> Result<Arc<Self>, MmuError> {
        let stage2 = Stage2::with_format(Arena::new(tables)?)?;
        let slots = Slots::new(Limits::default());
        Ok(Arc::new(Self {
            slots,
            stage2,
            host,
            qsbr,
            layout: Mutex::new(()),
            dirty: Tracking::default(),
        }))
    }

    /// The number of leaves. Exact if no thread changes leaves.
    pub fn counts(&self) -> Counts {
        self.stage2.counts()
    }

    /// Whether a leaf mapped `gfn` a moment ago.
    pub fn is_mapped(&self, gfn: Gfn) -> bool {
        self.stage2.find(gfn).is_some()
    }

    /// As [`Stage2::violation`].
    pub fn violation(&self, gfn: Gfn, access: Access) -> Option<(Violation, LookupLevel)> {
        self.stage2.violation(gfn, access)
    }

    /// The current slots. Only methods such as [`Mmu::add_slot`] change them: these ensure that no
    /// page of the old layout stays mapped.
    pub fn slots(&self) -> Arc<Snapshot<Rmap>> {
        self.slots.snapshot()
    }

    /// The current slots, for a moment, without a change of a shared count: for an operation on
    /// each page. See [`lacuna_slots::Slots::read`].
    pub fn read_slots(&self) -> CurrentSlots<Rmap> {
        self.slots.read()
    }

    /// The host, which supplies the pages.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }
}
