//! The cache of intermediate entries of stage 1 (SDM vol 3 4.10.3: paging-structure caches; Arm ARM
//! D8.14).

/// The cache of intermediate entries of one address space.
pub struct WalkCache {
    slots: Box<[Slot; Self::SLOTS]>,
    generation: u64,
    wrote_code: bool,
}

/// `tag` is va[55:21] below the generation; `table` is the last level's table, with the rights or
/// limits of the levels above.
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

impl WalkCache {
    /// One slot for each table of the last level: 2 GiB of address space.
    const SLOTS: usize = 1024;
    const TAG_BITS: u32 = 35;

    /// Forgets every table.
    pub fn flush(&mut self) {
        self.generation += 1;
        if self.generation >> (u64::BITS - Self::TAG_BITS) != 0 {
            let wrote_code = self.wrote_code;
            *self = Self {
                wrote_code,
                ..Self::default()
            };
        }
    }

    /// Records that a walk has written to a page with decoded instructions: it has set an access
    /// flag or a dirty state there.
    pub fn note_written_code(&mut self) {
        self.wrote_code = true;
    }

    /// Whether a walk since the last [`Self::take_wrote_code`] has written to a page with decoded
    /// instructions.
    pub fn wrote_code(&self) -> bool {
        self.wrote_code
    }

    /// As [`Self::wrote_code`], and forgets it. The bus has notified the other vCPUs; the caller
    /// drops its own decoded instructions.
    pub fn take_wrote_code(&mut self) -> bool {
        std::mem::take(&mut self.wrote_code)
    }

    #[inline(always)]
    fn tag(&self, va: u64) -> u64 {
        (va << 8 >> 29) | self.generation << Self::TAG_BITS
    }

    #[inline(always)]
    fn slot(va: u64) -> usize {
        (va >> 21) as usize % Self::SLOTS
    }

    /// The table for `va`, whose bits 63 to 56 equal bit 55.
    #[inline(always)]
    pub fn find(&self, va: u64) -> Option<u64> {
        let slot = self.slots[Self::slot(va)];
        (slot.tag == self.tag(va)).then_some(slot.table)
    }

    /// Keeps the table for `va`.
    pub fn fill(&mut self, va: u64, table: u64) {
        self.slots[Self::slot(va)] = Slot {
            tag: self.tag(va),
            table,
        };
    }

    /// Forgets the table for `va`.
    pub fn drop_one(&mut self, va: u64) {
        self.slots[Self::slot(va)].tag = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flush of the last possible generation starts over, and still forgets.
    #[test]
    fn a_flush_forgets_in_every_generation() {
        let (mut cache, va) = (WalkCache::default(), 5 << 21);
        for generation in [1, (1 << (64 - WalkCache::TAG_BITS)) - 1] {
            cache.generation = generation;
            cache.fill(va, 7);
            assert_eq!(cache.find(va), Some(7));
            assert_eq!(cache.find(va | !0 << 47), None, "the upper half");
            cache.flush();
            assert_eq!(cache.find(va), None);
        }
        assert_eq!(cache.generation, 1);
    }
}
