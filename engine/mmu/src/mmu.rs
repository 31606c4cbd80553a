//! One VM's slots, tables and host memory, together.

use crate::dirty::Tracking;
use crate::rmap::Rmap;
use lacuna_host::Host;
use lacuna_slots::{Limits, Slots};
use lacuna_stage2::{Arena, ArenaError, Exhausted, Stage2};
use lacuna_sync::Quiescence;
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
    pub(crate) quiescence: Arc<Quiescence>,
    /// One change of the layout, of the disallow counts or of logging, or one harvest, at a time.
    pub(crate) layout: Mutex<()>,
    pub(crate) dirty: Tracking,
}

impl Mmu {
    /// No slots yet. `tables` is the most table pages it may use; `quiescence` knows every vCPU
    /// that will translate through it.
    pub fn new(
        host: Arc<Host>,
        quiescence: Arc<Quiescence>,
        tables: u32,
    ) -> Result<Arc<Self>, MmuError> {
        let stage2 = Stage2::new(Arena::new(tables)?)?;
        let slots = Slots::new(Limits::default());
        Ok(Arc::new(Self {
            slots,
            stage2,
            host,
            quiescence,
            layout: Mutex::new(()),
            dirty: Tracking::default(),
        }))
    }

    /// The tables, for the walker.
    pub fn stage2(&self) -> &Stage2 {
        &self.stage2
    }

    /// The slots.
    pub fn slots(&self) -> &Slots<Rmap> {
        &self.slots
    }

    /// Where pages come from.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }
}
