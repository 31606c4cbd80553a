//! The cache of intermediate entries (Arm ARM D8.14).

/// The cache of intermediate entries of one address space.
pub(crate) struct WalkCache {
    slots: Box<[Slot; Self::SLOTS]>,
    generation: u64,
    wrote_code: bool,
}

/// `tag` is va[55] and va[47:21] below the generation; `table` is the L3 table's address, with the
/// limits of the tables above.
#[derive(Clone, Copy)]
struct Slot {
    tag: u64,
    table: u64,
}

impl Default for WalkCache {
    fn default() -> Self {
        let empty = Slot { tag: 0, table: 0 };
        Self {
            slots: Box::new([empty; Self::SLOTS]),
            generation: 1,
            wrote_code: false,
        }
    }
}

impl lacuna_cpu::WalkCache for WalkCache {
    fn flush(&mut self) {
        self.generation += 1;
        if self.generation >> (u64::BITS - Self::TAG_BITS) != 0 {
            let wrote_code = self.wrote_code;
            *self = Self {
                wrote_code,
                ..Self::default()
            };
        }
    }
}

impl WalkCache {
    /// One slot for each L3 table: 2 GiB of address space.
    const SLOTS: usize = 1024;
    const TAG_BITS: u32 = 28;

    /// Records that a walk has written to a page with decoded instructions.
    pub(super) fn note_written_code(&mut self) {
        self.wrote_code = true;
    }

    /// Whether a walk since the last [`Self::take_wrote_code`] has set an access flag or a dirty
    /// state in a page with decoded instructions.
    pub(crate) fn wrote_code(&self) -> bool {
        self.wrote_code
    }

    /// As [`Self::wrote_code`], and forgets it. The bus has notified the other vCPUs; the caller
    /// drops its own decoded instructions.
    pub(crate) fn take_wrote_code(&mut self) -> bool {
        std::mem::take(&mut self.wrote_code)
    }

    #[inline(always)]
    fn tag(&self, va: u64) -> u64 {
        (va << 16 >> 37) | (va >> 55 & 1) << 27 | self.generation << Self::TAG_BITS
    }

    #[inline(always)]
    fn slot(va: u64) -> usize {
        (va >> 21) as usize % Self::SLOTS
    }

    #[inline(always)]
    pub(super) fn find(&self, va: u64) -> Option<u64> {
        let slot = self.slots[Self::slot(va)];
        (slot.tag == self.tag(va)).then_some(slot.table)
    }

    pub(super) fn fill(&mut self, va: u64, table: u64) {
        self.slots[Self::slot(va)] = Slot {
            tag: self.tag(va),
            table,
        };
    }

    pub(super) fn drop_one(&mut self, va: u64) {
        self.slots[Self::slot(va)].tag = 0;
    }
}
