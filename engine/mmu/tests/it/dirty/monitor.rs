//! Monitors harvest written pages, and keep copies of them.

use super::fixture::{Fixture, PAGES, SLOT, Words};
use lacuna_mmu::{Delivery, DirtyError, HugeLeaves, Initially, Logging};

const WORDS: usize = PAGES.div_ceil(64) as usize;

/// A thread that harvests. There may be several: each has copies of its harvested pages, and only
/// together they have all pages.
pub struct Monitor {
    copies: Vec<Words>,
}

/// The state of the copies after a log has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Begun {
    /// All pages were copied.
    Copied,
    /// All pages will be reported, so the earlier copies are not needed.
    AllSet,
}

impl Monitor {
    /// A monitor of zero-filled memory.
    pub fn new() -> Self {
        Self {
            copies: vec![Words::default(); PAGES as usize],
        }
    }

    /// Turns logging on, and copies all pages that do not count as written.
    pub fn begin(&mut self, fixture: &Fixture, initially: Initially, huge: HugeLeaves) -> Begun {
        let on = Logging::On { initially, huge };
        let refused = fixture.mmu.set_logging(SLOT, on);
        if let Err(error) = refused {
            assert_eq!(error, DirtyError::NoBitmap);
            fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
        }
        if initially == Initially::AllSet && refused.is_ok() {
            return Begun::AllSet;
        }
        (0..PAGES).for_each(|page| self.copy(fixture, page));
        Begun::Copied
    }

    pub fn forget(&mut self) {
        self.copies.fill(Words::default());
    }

    fn copy(&mut self, fixture: &Fixture, page: u64) {
        merge(&mut self.copies[page as usize], &fixture.words(page));
    }

    fn replay(&mut self, fixture: &Fixture, words: &[u64]) {
        for page in 0..PAGES {
            if words[(page / 64) as usize] >> (page % 64) & 1 == 1 {
                self.copy(fixture, page);
            }
        }
    }

    /// Copies all written pages, by the calls that clear at once.
    pub fn harvest(&mut self, fixture: &Fixture) {
        let mut words = vec![0; WORDS];
        if fixture.mmu.delivery() != Delivery::Bitmap {
            let _copying = fixture.collecting.read().unwrap();
            fixture.mmu.reap_rings(|id, page| {
                assert_eq!(id, SLOT);
                words[page / 64] |= 1 << (page % 64);
            });
            fixture.mmu.reset_rings();
            self.replay(fixture, &words);
        }
        match fixture.mmu.get_dirty(SLOT, &mut words) {
            Ok(()) => self.replay(fixture, &words),
            Err(error) => assert_is_no_log(fixture, error),
        }
    }

    /// Copies one part of the slot, by the calls that read and then clear.
    pub fn clear_some(&mut self, fixture: &Fixture, from: usize, count: usize) {
        let mut words = vec![0; WORDS];
        if let Err(error) = fixture.mmu.peek_dirty(SLOT, &mut words) {
            return assert_is_no_log(fixture, error);
        }
        let end = (from + count).min(WORDS);
        let pages = (end - from) * 64;
        let part = &mut words[from..end];
        if let Err(error) = fixture.mmu.clear_dirty(SLOT, from * 64, pages, part) {
            return assert_is_no_log(fixture, error);
        }
        words[..from].fill(0);
        words[end..].fill(0);
        self.replay(fixture, &words);
    }

    /// Harvests, and loses the result.
    pub fn lose(&self, fixture: &Fixture) {
        if fixture.mmu.delivery() != Delivery::Bitmap {
            let _alone = fixture.collecting.write().unwrap();
            fixture.mmu.reap_rings(|_, _| {});
            fixture.mmu.put_back_rings();
        }
        let mut words = vec![0; WORDS];
        let lost = fixture.mmu.get_dirty(SLOT, &mut words);
        if let Err(error) = lost.and_then(|()| fixture.mmu.put_back_dirty(SLOT, &words)) {
            assert_is_no_log(fixture, error);
        }
    }

    /// Merges the copies of another monitor into its own.
    pub fn join(&mut self, other: &Self) {
        for (copy, other) in self.copies.iter_mut().zip(&other.copies) {
            merge(copy, other);
        }
    }

    /// Its copy of a page.
    pub fn page(&self, page: u64) -> &Words {
        &self.copies[page as usize]
    }
}

/// Takes the newer of each word.
fn merge(copy: &mut Words, other: &Words) {
    for (word, other) in copy.iter_mut().zip(other) {
        *word = (*word).max(*other);
    }
}

/// The valid refusals: there is no bitmap, or another monitor is about to begin the log again.
fn assert_is_no_log(fixture: &Fixture, error: DirtyError) {
    match error {
        DirtyError::NotLogging(SLOT) => {}
        DirtyError::NoBitmap => assert_eq!(fixture.mmu.delivery(), super::steps::bare_ring()),
        error => panic!("{error}"),
    }
}
