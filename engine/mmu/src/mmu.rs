//! One VM's slots, tables and host memory, together.

use crate::dirty::Tracking;
use crate::rmap::Rmap;
use lacuna_addr::Gfn;
use lacuna_host::Host;
use lacuna_slots::{Limits, Slots, Snapshot};
use lacuna_stage2::{Arena, ArenaError, Counts, Exhausted, Stage2};
use lacuna_sync::Qsbr;
use std::sync::{Arc, Mutex};

/// Why an [`Mmu`] cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MmuError {
    /// No address space for tables.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Not one table.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
}

/// One VM's memory-management unit.
pub struct Mmu {
    pub(crate) slots: Slots<Rmap>,
    pub(crate) stage2: Stage2,
    pub(crate) host: Arc<Host>,
    pub(crate) qsbr: Arc<Qsbr>,
    /// One change of the layout, of the disallow counts or of logging, or one harvest, at a time.
    pub(crate) layout: Mutex<()>,
    pub(crate) dirty: Tracking,
}

impl Mmu {
    /// No slots yet. `tables` is the most table pages it may use; `qsbr` knows every vCPU
    /// that will translate through it.
    pub fn new(host: Arc<Host>, qsbr: Arc<Qsbr>, tables: u32) -> Result<Arc<Self>, MmuError> {
        let stage2 = Stage2::new(Arena::new(tables)?)?;
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

    /// How many leaves there are. Exact when nobody changes any.
    pub fn counts(&self) -> Counts {
        self.stage2.counts()
    }

    /// Whether a leaf maps `gfn`, a moment ago.
    pub fn is_mapped(&self, gfn: Gfn) -> bool {
        self.stage2.find(gfn).is_some()
    }

    /// The slots now. They are changed by [`Mmu::add_slot`] and its like alone, which see to it
    /// that nothing of the old layout stays mapped.
    pub fn slots(&self) -> Arc<Snapshot<Rmap>> {
        self.slots.snapshot()
    }

    /// Where pages come from.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }
}
