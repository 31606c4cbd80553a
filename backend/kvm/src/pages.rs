//! The state of each page of the guest: decisions only, no system calls.
//!
//! ```text
//!              first touch                  too many mapped              too many in memory
//!  Untouched --------------> Mapped ------------------------> Probation ------------------> Away
//!                              ^                                  |                           |
//!                              +--------- touched: at once -------+                           |
//!                              +---------- its latency over ------ Coming <----- touched -----+
//! ```
//! Neither KVM nor Linux tells which pages a guest uses, so pages are evicted in the order in which
//! they arrived. A page on probation is not mapped in the guest but still counts as resident. If it
//! is touched then, it comes back without latency and is the youngest again. So a page in constant
//! use (the guest kernel, a worker's stack) costs a short fault now and then, and never a long one.
//! This is segmented FIFO (Turner and Levy, 1981), which needs no accessed bits.

use std::collections::VecDeque;

/// A page of the guest, by its place in the backing.
pub type Page = u32;

/// When a page arrives that was never touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FirstTouch {
    /// At once, as a page of zeros does on any host.
    #[default]
    Immediate,
    /// After the latency, as in a migration after which no page has arrived yet: every page faults,
    /// whatever the budget is.
    Delayed,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Untouched,
    Mapped,
    Probation,
    Away,
    Coming,
}

/// What a touched page needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Need {
    /// A page of zeros; then [`Pages::arrived`].
    Zeros,
    /// Move it back at once; then [`Pages::arrived`].
    Return,
    /// Move it back after the latency; then [`Pages::arrived`].
    Fetch,
    /// Nothing: the page is on its way.
    Patience,
    /// A wake-up: the page arrived while this fault was being reported.
    Wake,
}

/// The state of all pages, within a budget.
#[derive(Debug)]
pub struct Pages {
    places: Vec<Place>,
    /// Every mapped page once, oldest first.
    mapped: VecDeque<Page>,
    /// Every page on probation once, oldest first.
    probation: VecDeque<Page>,
    coming: usize,
    budget: usize,
}

impl Pages {
    /// The smallest useful budget. Half of it is never taken from the guest, so that the pages of
    /// the last few instructions of every vCPU are still there.
    pub const BUDGET_MIN: usize = 512;

    /// `count` untouched pages, of which `budget` may be in memory.
    pub fn new(count: usize, budget: usize, first_touch: FirstTouch) -> Self {
        let place = match first_touch {
            FirstTouch::Immediate => Place::Untouched,
            FirstTouch::Delayed => Place::Away,
        };
        Self {
            places: vec![place; count],
            mapped: VecDeque::new(),
            probation: VecDeque::new(),
            coming: 0,
            budget,
        }
    }

    /// A thread has touched `page` where it is missing.
    pub fn touched(&mut self, page: Page) -> Need {
        let place = &mut self.places[page as usize];
        match *place {
            Place::Untouched => Need::Zeros,
            Place::Probation => Need::Return,
            Place::Away => {
                *place = Place::Coming;
                self.coming += 1;
                Need::Fetch
            }
            Place::Coming => Need::Patience,
            Place::Mapped => Need::Wake,
        }
    }

    /// The source supplies `page`, which [`touched`](Self::touched) asked for, later.
    pub fn delayed(&mut self, page: Page) {
        let place = &mut self.places[page as usize];
        match std::mem::replace(place, Place::Coming) {
            Place::Coming => return,
            Place::Probation => self.probation.retain(|&p| p != page),
            Place::Untouched | Place::Away | Place::Mapped => {}
        }
        self.coming += 1;
    }

    /// `page` is mapped now.
    pub fn arrived(&mut self, page: Page) {
        match self.places[page as usize] {
            Place::Mapped => return,
            Place::Probation => self.probation.retain(|&p| p != page),
            Place::Coming => self.coming -= 1,
            Place::Untouched | Place::Away => {}
        }
        self.places[page as usize] = Place::Mapped;
        self.mapped.push_back(page);
    }

    /// A page to take from the guest; then call [`left`](Self::left) or [`refused`](Self::refused).
    /// Pages on their way are counted already, so that there is room when they arrive.
    pub fn victim(&mut self) -> Option<Page> {
        if self.holds_all() {
            return None;
        }
        let most = (self.budget - self.budget / 8).min(self.budget.saturating_sub(self.coming));
        (self.mapped.len() > most.max(Self::BUDGET_MIN / 2))
            .then(|| self.mapped.pop_front())
            .flatten()
    }

    /// `page` was taken from the guest and is in the store.
    pub fn left(&mut self, page: Page) {
        self.places[page as usize] = Place::Probation;
        self.probation.push_back(page);
    }

    /// The kernel refused to move `page` now: it is the youngest again.
    pub fn refused(&mut self, page: Page) {
        self.mapped.push_back(page);
    }

    /// Ends the probation of pages beyond the budget.
    pub fn settle(&mut self) {
        let excess = self.in_memory().saturating_sub(self.budget);
        let gone = excess.min(self.probation.len());
        for page in self.probation.drain(..gone) {
            self.places[page as usize] = Place::Away;
        }
    }

    /// Whether no page ever has to leave.
    fn holds_all(&self) -> bool {
        self.budget >= self.places.len()
    }

    /// Pages that count against the budget.
    pub fn in_memory(&self) -> usize {
        self.mapped.len() + self.probation.len() + self.coming
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Touches `page` as the source does, with its latency over at once.
    fn touch(pages: &mut Pages, page: Page) -> Need {
        let need = pages.touched(page);
        while let Some(victim) = pages.victim() {
            pages.left(victim);
        }
        pages.settle();
        pages.arrived(page);
        need
    }

    #[test]
    fn all_pages_fit_and_nothing_leaves() {
        let mut pages = Pages::new(400, 1024, FirstTouch::Immediate);
        for page in (0..400).chain(0..400) {
            assert!(matches!(touch(&mut pages, page), Need::Zeros | Need::Wake));
        }
        assert_eq!(pages.in_memory(), 400);
    }

    #[test]
    fn nothing_leaves_a_budget_of_all_pages() {
        let mut pages = Pages::new(1024, 1024, FirstTouch::Immediate);
        for page in (0..1024).chain(0..1024) {
            assert!(matches!(touch(&mut pages, page), Need::Zeros | Need::Wake));
        }
    }

    #[test]
    fn the_budget_holds_and_the_oldest_leave_first() {
        let mut pages = Pages::new(4096, 1024, FirstTouch::Immediate);
        for page in 0..4096 {
            assert_eq!(touch(&mut pages, page), Need::Zeros);
            assert!(pages.in_memory() <= 1024 + 1, "{}", pages.in_memory());
        }
        assert_eq!(touch(&mut pages, 0), Need::Fetch);
        assert_eq!(touch(&mut pages, 4095), Need::Wake);
    }

    #[test]
    fn a_page_in_constant_use_never_goes_away() {
        let mut pages = Pages::new(10_000, 1024, FirstTouch::Immediate);
        let _ = touch(&mut pages, 0);
        for page in 1..10_000 {
            assert_eq!(touch(&mut pages, page), Need::Zeros);
            assert_ne!(touch(&mut pages, 0), Need::Fetch);
        }
    }

    #[test]
    fn a_page_is_fetched_once_for_all_who_want_it() {
        let mut pages = Pages::new(4096, 1024, FirstTouch::Immediate);
        for page in 0..4096 {
            let _ = touch(&mut pages, page);
        }
        assert_eq!(pages.touched(7), Need::Fetch);
        assert_eq!(pages.touched(7), Need::Patience);
        pages.arrived(7);
        assert_eq!(pages.touched(7), Need::Wake);
    }

    #[test]
    fn a_page_that_cannot_come_at_once_is_on_its_way() {
        let mut pages = Pages::new(4096, 1024, FirstTouch::Immediate);
        for page in 0..4095 {
            let _ = touch(&mut pages, page);
        }
        let on_probation = pages.probation[3];
        for (page, need) in [(4095, Need::Zeros), (on_probation, Need::Return)] {
            let before = pages.coming;
            assert_eq!(pages.touched(page), need);
            pages.delayed(page);
            pages.delayed(page);
            assert_eq!(
                (pages.touched(page), pages.coming),
                (Need::Patience, before + 1)
            );
            pages.arrived(page);
            assert_eq!((pages.touched(page), pages.coming), (Need::Wake, before));
        }
    }

    #[test]
    fn what_is_coming_has_its_room_and_some_always_stays() {
        let mut pages = Pages::new(8192, 1024, FirstTouch::Immediate);
        for page in 0..8192 {
            let _ = touch(&mut pages, page);
        }
        for page in 0..4096 {
            let _ = pages.touched(page);
            while let Some(victim) = pages.victim() {
                pages.left(victim);
            }
            pages.settle();
        }
        assert_eq!(pages.mapped.len(), Pages::BUDGET_MIN / 2);
    }

    #[test]
    fn a_refused_victim_stays() {
        let mut pages = Pages::new(4096, 1024, FirstTouch::Immediate);
        (0..1024).for_each(|page| pages.arrived(page));
        let victim = pages.victim().expect("more than seven eighths are mapped");
        pages.refused(victim);
        assert_eq!(pages.touched(victim), Need::Wake);
    }
}
