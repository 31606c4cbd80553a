//! The pages in EL1's TLB that programs may access (PSTATE.PAN, Arm ARM D8.4.2).
//!
//! With PAN set, EL1 may not access such pages. A kernel clears PAN for a few accesses and sets it
//! again, so a flush of EL1's whole TLB each time would cost too much. The pages that enter the TLB
//! meanwhile are recorded, and dropped when PAN is set.

use lacuna_cpu::{Privilege, Translations};

/// The most pages recorded by their addresses; more cost a flush of EL1's TLB.
const NOTED: usize = 16;

/// The pages recorded so far.
#[derive(Default)]
pub(crate) struct UserPages {
    pages: [u64; NOTED],
    count: usize,
}

impl UserPages {
    /// Records that EL1's TLB may have the page of `va` from now on.
    pub(crate) fn note(&mut self, va: u64) {
        if let Some(page) = self.pages.get_mut(self.count) {
            *page = va;
        }
        self.count = (self.count + 1).min(NOTED + 1);
    }

    /// Drops the pages from EL1's TLB, while code of privilege `running` runs.
    #[inline]
    pub(crate) fn forget(&mut self, translations: &mut Translations, running: Privilege) {
        if self.count == 0 {
            return;
        }
        let kernel = translations.of(Privilege::Supervisor, running);
        match self.pages.get(..self.count) {
            Some(pages) => pages.iter().for_each(|va| kernel.forget(*va)),
            None => kernel.flush(),
        }
        self.count = 0;
    }
}
