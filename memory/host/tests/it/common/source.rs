//! A page source for tests: it keeps its requests until the test answers them.

use lacuna_addr::{BackingAddr, BackingRange, PAGE_SIZE};
use lacuna_host::{Answer, Page, PageRequest, PageSource};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

#[derive(Default)]
pub struct TestSource {
    state: Mutex<Requests>,
    asked: Condvar,
    /// The region, whose first page is page 0 of the source.
    region: OnceLock<BackingRange>,
}

#[derive(Default)]
struct Requests {
    open: BTreeMap<u64, PageRequest>,
    seen: BTreeSet<u64>,
}

/// The word that a page of the source contains, repeated.
pub fn word_of(addr: BackingAddr) -> u64 {
    // Every fourth page is all zeros.
    let page = addr.get() >> 12;
    if page.is_multiple_of(4) {
        0
    } else {
        page.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// The source's page at `addr`.
pub fn page_of(addr: BackingAddr) -> Page {
    page_with(word_of(addr))
}

/// A page that contains `word`, repeated.
pub fn page_with(word: u64) -> Page {
    let mut page = Page::ZERO;
    page.0
        .copy_from_slice(&word.to_le_bytes().repeat(PAGE_SIZE / 8));
    page
}

impl TestSource {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Sets the region whose pages the source provides.
    pub fn provides(&self, region: BackingRange) {
        self.region.set(region).unwrap();
    }

    /// A copy of the request for the page at `addr`, which stays open.
    pub fn request(&self, addr: BackingAddr) -> Option<PageRequest> {
        self.state.lock().unwrap().open.get(&addr.get()).cloned()
    }

    /// Forgets the request for the page at `addr`, without an answer unless `request` gave a copy.
    pub fn forget(&self, addr: BackingAddr) {
        let request = self.state.lock().unwrap().open.remove(&addr.get());
        assert!(request.is_some(), "no request for {addr}");
    }

    /// Provides the page at `addr`.
    pub fn answer(&self, addr: BackingAddr) -> Answer {
        let request = self.state.lock().unwrap().open.remove(&addr.get());
        request.expect("asked").provide(&page_of(addr).0)
    }

    /// Provides some requested page; false if no request is open. The order depends on `pick` only.
    pub fn answer_one(&self, pick: u64) -> bool {
        let mut state = self.state.lock().unwrap();
        let count = state.open.len() as u64;
        let Some(at) = pick.checked_rem(count) else {
            return false;
        };
        let addr = *state.open.keys().nth(at as usize).unwrap();
        let request = state.open.remove(&addr).unwrap();
        drop(state);
        // The answer is late: the region was removed, and the source was not notified.
        let _ = request.provide(&page_of(BackingAddr::new(addr)).0);
        true
    }

    /// The pages of `range` are missing again: there may be a second request for each.
    pub fn lacks_again(&self, range: BackingRange) {
        let pages = range.start().get()..range.end().get();
        let mut state = self.state.lock().unwrap();
        state.seen.retain(|addr| !pages.contains(addr));
    }

    /// Waits until a page is requested.
    pub fn wait(&self) {
        let state = self.state.lock().unwrap();
        drop(self.asked.wait_while(state, |state| state.open.is_empty()));
    }

    /// The number of requested pages so far.
    pub fn asked(&self) -> usize {
        self.state.lock().unwrap().seen.len()
    }
}

impl PageSource for TestSource {
    fn describe(&self) -> String {
        "test source".into()
    }

    fn fetch(&self, request: PageRequest) {
        let mut state = self.state.lock().unwrap();
        let first = self.region.get().unwrap().start();
        let addr = first.checked_add_pages(request.page().0).unwrap().get();
        assert!(state.seen.insert(addr), "{addr:#x} was asked for twice");
        state.open.insert(addr, request);
        self.asked.notify_all();
    }
}
