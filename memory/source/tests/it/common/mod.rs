//! An requester that records the answers.
#![allow(dead_code, reason = "no test program uses all of it")]

use lacuna_source::{Answer, Failure, PageRequest, PageRequester, PageSource, SourcePage};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};

pub const PAGE: usize = 4096;
pub type Page = [u8; PAGE];

/// A page, short in messages.
#[derive(Clone, PartialEq, Eq)]
pub struct Bytes(Box<[u8]>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}..", &self.0[..16])
    }
}

impl From<&Page> for Bytes {
    fn from(page: &Page) -> Self {
        Self(page.as_slice().into())
    }
}

/// The first answer to each page. A later answer is late, as for the memory manager.
#[derive(Default)]
pub struct Answers {
    taken: Mutex<BTreeMap<u64, Result<Bytes, String>>>,
    arrived: Condvar,
}

impl PageRequester for Answers {
    fn answer(&self, key: u64, content: Result<&Page, Failure<'_>>) -> Answer {
        let mut taken = self.taken.lock().unwrap();
        if taken.contains_key(&key) {
            return Answer::Late;
        }
        let content = content
            .map(Bytes::from)
            .map_err(|failure| failure.to_string());
        taken.insert(key, content);
        self.arrived.notify_all();
        Answer::Taken
    }
}

impl Answers {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub fn ask(self: &Arc<Self>, source: &dyn PageSource, page: u64) {
        let requester = Arc::clone(self) as Arc<dyn PageRequester>;
        source.fetch(PageRequest::new(requester, page, SourcePage(page)));
    }

    /// Waits for the answer to `page`.
    pub fn of(&self, page: u64) -> Result<Bytes, String> {
        let taken = self.taken.lock().unwrap();
        let missing = |taken: &mut BTreeMap<_, _>| !taken.contains_key(&page);
        let taken = self.arrived.wait_while(taken, missing).unwrap();
        taken[&page].clone()
    }

    /// Asks for `page` and waits for it.
    pub fn fetch(source: &dyn PageSource, page: u64) -> Result<Bytes, String> {
        let answers = Self::new();
        answers.ask(source, page);
        answers.of(page)
    }

    pub fn count(&self) -> usize {
        self.taken.lock().unwrap().len()
    }
}

/// A page with its number in it, as it is provided.
pub fn page(number: u64) -> Page {
    let bytes = (number + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .to_le_bytes();
    bytes.repeat(PAGE / 8).try_into().unwrap()
}

/// A page with its number in it, as it arrives.
pub fn bytes_of(number: u64) -> Bytes {
    Bytes::from(&page(number))
}
