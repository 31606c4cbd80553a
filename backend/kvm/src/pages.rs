//! The state of each page of the guest: decisions only, no system calls.
//!
//! ```text
//!              first touch                  too many mapped              over the budget
//!  Untouched --------------> Mapped ------------------------> Probation ---------> SwappedOut
//!                              ^                                  |                    |
//!                              +--------- touched: at once -------+                    | touched
//!                              +------- after its latency ------ InFlight <------------+
//! ```
//! Neither KVM nor Linux reports which pages a guest uses, so pages are evicted in the order of
//! their arrival. A page on probation is not mapped in the guest, but still counts as resident. If
//! the guest touches it, the page is mapped without latency and is the youngest again. So a page in
//! constant use, such as the guest kernel's, costs a short fault now and then and never a long one.
//! This is segmented FIFO (Turner and Levy, 1981), which needs no accessed bits.

use std::collections::VecDeque;

/// A page of the guest, by its index in the guest's mapping.
pub type Page = u32;

/// The time of a page's arrival at its first touch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FirstTouch {
    /// At once, as a page of zeros does on any host.
    #[default]
    Immediate,
    /// After the latency, as after a migration that has sent no page yet. Every page faults,
    /// whatever the budget is.
    Delayed,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PagePlace {
    Untouched,
    Mapped,
    Probation,
    SwappedOut,
    InFlight,
}

/// The next step for a touched page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Need {
    /// A page of zeros; then [`Pages::arrived`].
    Zeros,
    /// Move it back at once; then [`Pages::arrived`].
    Return,
    /// Move it back after the latency; then [`Pages::arrived`].
    Fetch,
    /// Nothing: the page is in flight.
    InFlight,
    /// A wake-up: the page arrived while this fault was being reported.
    Wake,
}

/// The state of all pages, within a budget.
#[derive(Debug)]
pub struct Pages {
    places: Vec<PagePlace>,
    /// Every mapped page once, oldest first.
    mapped: VecDeque<Page>,
    /// Every page on probation once, oldest first.
    probation: VecDeque<Page>,
    in_flight: usize,
    /// Pages of the budget that the swap device has.
    charged: usize,
    budget: usize,
}

impl Pages {
    /// The smallest useful budget. Half of it is never evicted, so the pages of every vCPU's last
    /// few instructions stay mapped.
    pub const BUDGET_MIN: usize = 512;

    /// `count` untouched pages; `budget` of them may be resident.
    pub fn new(count: usize, budget: usize, first_touch: FirstTouch) -> Self {
        let place = match first_touch {
            FirstTouch::Immediate => PagePlace::Untouched,
            FirstTouch::Delayed => PagePlace::SwappedOut,
        };
        Self {
            places: vec![place; count],
            mapped: VecDeque::new(),
            probation: VecDeque::new(),
            in_flight: 0,
            charged: 0,
            budget,
        }
    }

    /// A thread has touched the unmapped `page`.
    pub fn touched(&mut self, page: Page) -> Need {
        let place = &mut self.places[page as usize];
        match *place {
            PagePlace::Untouched => Need::Zeros,
            PagePlace::Probation => Need::Return,
            PagePlace::SwappedOut => {
                *place = PagePlace::InFlight;
                self.in_flight += 1;
                Need::Fetch
            }
            PagePlace::InFlight => Need::InFlight,
            PagePlace::Mapped => Need::Wake,
        }
    }

    /// The source cannot supply `page` at once after [`touched`](Self::touched). The page is in
    /// flight until it has [`arrived`](Self::arrived).
    pub fn delayed(&mut self, page: Page) {
        let place = &mut self.places[page as usize];
        match std::mem::replace(place, PagePlace::InFlight) {
            PagePlace::InFlight => return,
            PagePlace::Probation => self.probation.retain(|&p| p != page),
            PagePlace::Untouched | PagePlace::SwappedOut | PagePlace::Mapped => {}
        }
        self.in_flight += 1;
    }

    /// `page` is mapped now.
    pub fn arrived(&mut self, page: Page) {
        match self.places[page as usize] {
            PagePlace::Mapped => return,
            PagePlace::Probation => self.probation.retain(|&p| p != page),
            PagePlace::InFlight => self.in_flight -= 1,
            PagePlace::Untouched | PagePlace::SwappedOut => {}
        }
        self.places[page as usize] = PagePlace::Mapped;
        self.mapped.push_back(page);
    }

    /// Another thread has put `page` in place. A repeated notice has no effect.
    pub fn provided(&mut self, page: Page) {
        if self.places[page as usize] == PagePlace::Untouched {
            self.arrived(page);
        }
    }

    /// The next page to evict. The caller then calls [`evicted`](Self::evicted) or
    /// [`refused`](Self::refused). Pages in flight count as resident, so that there is room when
    /// they arrive.
    pub fn victim(&mut self) -> Option<Page> {
        if self.has_all() {
            return None;
        }
        let budget = self.budget - self.charged;
        let max = (budget - budget / 8).min(budget.saturating_sub(self.in_flight));
        (self.mapped.len() > max.max(Self::BUDGET_MIN / 2))
            .then(|| self.mapped.pop_front())
            .flatten()
    }

    /// `page` was moved from the guest to the store.
    pub fn evicted(&mut self, page: Page) {
        self.places[page as usize] = PagePlace::Probation;
        self.probation.push_back(page);
    }

    /// The kernel refused to move `page` now: it is the youngest again.
    pub fn refused(&mut self, page: Page) {
        self.mapped.push_back(page);
    }

    /// The oldest pages on probation, if the budget is exceeded; otherwise none. Usually one page
    /// exceeds it. To write more than one at once, this returns up to `cluster` pages, but then at
    /// most half of those on probation. The caller swaps them out, and then calls
    /// [`swapped_out`](Self::swapped_out).
    pub fn excess(&self, cluster: usize) -> Vec<Page> {
        let wanted = match self.resident().saturating_sub(self.budget) {
            0 => 0,
            excess => excess.max(cluster.min(self.probation.len() / 2)),
        };
        self.probation.iter().take(wanted).copied().collect()
    }

    /// The `count` oldest pages on probation are swapped out.
    pub fn swapped_out(&mut self, count: usize) {
        for page in self.probation.drain(..count) {
            self.places[page as usize] = PagePlace::SwappedOut;
        }
    }

    /// The swap device has `pages` pages of the budget.
    pub fn charge(&mut self, pages: usize) {
        self.charged = pages;
    }

    /// Whether the budget suffices for all pages, so that none is evicted.
    fn has_all(&self) -> bool {
        self.budget >= self.places.len()
    }

    /// Pages that count against the budget.
    pub fn resident(&self) -> usize {
        self.mapped.len() + self.probation.len() + self.in_flight + self.charged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_probation(pages: &mut Pages) {
        let excess = pages.excess(0);
        pages.swapped_out(excess.len());
    }

    /// Touches `page` as the source does, with a latency of zero.
    fn touch(pages: &mut Pages, page: Page) -> Need {
        let need = pages.touched(page);
        while let Some(victim) = pages.victim() {
            pages.evicted(victim);
        }
        end_probation(pages);
        pages.arrived(page);
        need
    }

    #[test]
    fn all_pages_fit_and_none_is_evicted() {
        let mut pages = Pages::new(400, 1024, FirstTouch::Immediate);
        for page in (0..400).chain(0..400) {
            assert!(matches!(touch(&mut pages, page), Need::Zeros | Need::Wake));
        }
        assert_eq!(pages.resident(), 400);
    }

    #[test]
    fn a_budget_of_all_pages_evicts_none() {
        let mut pages = Pages::new(1024, 1024, FirstTouch::Immediate);
        for page in (0..1024).chain(0..1024) {
            assert!(matches!(touch(&mut pages, page), Need::Zeros | Need::Wake));
        }
    }

    #[test]
    fn the_budget_holds_and_the_oldest_are_evicted_first() {
        let mut pages = Pages::new(4096, 1024, FirstTouch::Immediate);
        for page in 0..4096 {
            assert_eq!(touch(&mut pages, page), Need::Zeros);
            assert!(pages.resident() <= 1024 + 1, "{}", pages.resident());
        }
        assert_eq!(touch(&mut pages, 0), Need::Fetch);
        assert_eq!(touch(&mut pages, 4095), Need::Wake);
    }

    #[test]
    fn a_page_in_constant_use_is_never_swapped_out() {
        let mut pages = Pages::new(10_000, 1024, FirstTouch::Immediate);
        let _ = touch(&mut pages, 0);
        for page in 1..10_000 {
            assert_eq!(touch(&mut pages, page), Need::Zeros);
            assert_ne!(touch(&mut pages, 0), Need::Fetch);
        }
    }

    #[test]
    fn a_page_is_fetched_once_for_all_its_faults() {
        let mut pages = Pages::new(4096, 1024, FirstTouch::Immediate);
        for page in 0..4096 {
            let _ = touch(&mut pages, page);
        }
        assert_eq!(pages.touched(7), Need::Fetch);
        assert_eq!(pages.touched(7), Need::InFlight);
        pages.arrived(7);
        assert_eq!(pages.touched(7), Need::Wake);
    }

    #[test]
    fn a_page_that_cannot_arrive_at_once_is_in_flight() {
        let mut pages = Pages::new(4096, 1024, FirstTouch::Immediate);
        for page in 0..4095 {
            let _ = touch(&mut pages, page);
        }
        let on_probation = pages.probation[3];
        for (page, need) in [(4095, Need::Zeros), (on_probation, Need::Return)] {
            let before = pages.in_flight;
            assert_eq!(pages.touched(page), need);
            pages.delayed(page);
            pages.delayed(page);
            assert_eq!(
                (pages.touched(page), pages.in_flight),
                (Need::InFlight, before + 1)
            );
            pages.arrived(page);
            assert_eq!((pages.touched(page), pages.in_flight), (Need::Wake, before));
        }
    }

    #[test]
    fn pages_in_flight_have_room_and_half_the_minimum_stays_mapped() {
        let mut pages = Pages::new(8192, 1024, FirstTouch::Immediate);
        for page in 0..8192 {
            let _ = touch(&mut pages, page);
        }
        for page in 0..4096 {
            let _ = pages.touched(page);
            while let Some(victim) = pages.victim() {
                pages.evicted(victim);
            }
            end_probation(&mut pages);
        }
        assert_eq!(pages.mapped.len(), Pages::BUDGET_MIN / 2);
    }

    #[test]
    fn a_late_notice_of_a_page_changes_nothing() {
        let mut pages = Pages::new(4096, 1024, FirstTouch::Immediate);
        pages.provided(7);
        pages.provided(7);
        assert_eq!((pages.touched(7), pages.resident()), (Need::Wake, 1));
        for page in 100..1100 {
            let _ = touch(&mut pages, page);
        }
        assert_eq!(pages.places[7], PagePlace::Probation);
        pages.provided(7);
        assert_eq!(pages.touched(7), Need::Return);
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
