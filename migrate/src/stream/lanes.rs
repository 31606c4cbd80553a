//! The connections on which the source sends pages before the guest goes.
//!
//! They take pages at the same time, each on a thread. Each round sends a page once, and ends when
//! the destination has all of the round's pages. So a page may go on any lane.

use super::frame::Kind;
use super::frames::Frames;
use crate::copy::PageSink;
use crate::{MigrateError, PageSet};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::SourcePage;
use lacuna_sync::{Mutex, lock_order};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// One of these connections.
pub(super) struct Lane {
    pub frames: Frames,
    there: Arc<There>,
    /// Rounds that have ended.
    rounds: u32,
}

/// The destination's pages, as far as all lanes together know.
pub(super) struct There {
    /// Pages ever sent with content. All others are zeros at the destination.
    pages: Mutex<PageSet, lock_order::PagesThere>,
    /// Hashes of the pages sent after the first round: a guest often writes a page without a
    /// change. Pages of the first round have no hash, because most are never written again.
    hashes: Mutex<HashMap<u64, u128>, lock_order::HashesThere>,
    /// Makes it unlikely that two contents have one hash, whatever a guest writes.
    seed: u64,
    /// Sent pages with content.
    sent: AtomicU64,
    /// Pages written without a change, and so not sent.
    unchanged: AtomicU64,
}

impl There {
    /// The destination has none of this many pages.
    pub fn new(pages: u64, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            pages: Mutex::new(PageSet::empty(pages)),
            hashes: Mutex::new(HashMap::new()),
            seed,
            sent: AtomicU64::new(0),
            unchanged: AtomicU64::new(0),
        })
    }

    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    pub fn unchanged(&self) -> u64 {
        self.unchanged.load(Ordering::Relaxed)
    }

    /// Whether the destination may have content in one of these pages.
    fn has_content(&self, first: SourcePage, count: u64) -> bool {
        let pages = self.pages.lock().expect("no panic under this lock");
        (first.0..first.0 + count).any(|page| pages.contains(SourcePage(page)))
    }

    fn gets_content(&self, first: SourcePage, count: u64) {
        let mut pages = self.pages.lock().expect("no panic under this lock");
        (first.0..first.0 + count).for_each(|page| pages.insert(SourcePage(page)));
    }

    /// These pages are zeros from now on.
    fn gets_zeros(&self, first: SourcePage, count: u64) {
        let mut hashes = self.hashes.lock().expect("no panic under this lock");
        if !hashes.is_empty() {
            (first.0..first.0 + count).for_each(|page| _ = hashes.remove(&page));
        }
    }

    /// Records pages before they are sent, and returns for each whether it has changed.
    fn changed(&self, first: SourcePage, bytes: &[u8]) -> Vec<bool> {
        let pages = bytes.chunks_exact(PAGE_SIZE);
        let new: Vec<u128> = pages
            .map(|page| xxh3_128_with_seed(page, self.seed))
            .collect();
        let mut hashes = self.hashes.lock().expect("no panic under this lock");
        let numbered = (first.0..).zip(new);
        numbered
            .map(|(page, hash)| hashes.insert(page, hash) != Some(hash))
            .collect()
    }
}

impl Lane {
    pub fn new(frames: Frames, there: Arc<There>) -> Self {
        let rounds = 0;
        Self {
            frames,
            there,
            rounds,
        }
    }

    fn send(&mut self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        let count = (bytes.len() / PAGE_SIZE) as u64;
        self.there.gets_content(first, count);
        self.there.sent.fetch_add(count, Ordering::Relaxed);
        self.frames.write_pages(first, bytes)
    }
}

impl PageSink for Lane {
    fn data(&mut self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        if self.rounds == 0 {
            return self.send(first, bytes);
        }
        let changed = self.there.changed(first, bytes);
        let mut at = 0;
        for run in changed.chunk_by(|one, next| one == next) {
            let end = at + run.len();
            match run[0] {
                true => {
                    let page = SourcePage(first.0 + at as u64);
                    self.send(page, &bytes[at * PAGE_SIZE..end * PAGE_SIZE])?;
                }
                false => {
                    let unchanged = run.len() as u64;
                    self.there.unchanged.fetch_add(unchanged, Ordering::Relaxed);
                    self.frames.keep_alive()?;
                }
            }
            at = end;
        }
        Ok(())
    }

    fn zeros(&mut self, first: SourcePage, pages: u64) -> Result<(), MigrateError> {
        // A new VM's memory is zeros.
        if !self.there.has_content(first, pages) {
            return self.frames.keep_alive();
        }
        self.there.gets_zeros(first, pages);
        self.frames.write_zeros(first, pages)
    }

    fn end_round(&mut self) -> Result<(), MigrateError> {
        self.rounds += 1;
        self.frames.signal(Kind::Sync)?;
        self.frames.expect(Kind::Synced)
    }

    fn idle(&mut self) -> Result<(), MigrateError> {
        self.frames.idle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Connection, Connections};
    use std::io;
    use std::os::unix::net::UnixStream;

    struct One(UnixStream);

    impl Connections for One {
        fn open(&self) -> io::Result<Box<dyn Connection>> {
            Ok(Box::new(self.0.try_clone()?))
        }
    }

    #[test]
    fn pages_that_have_not_changed_are_not_sent() {
        let (here, _there) = UnixStream::pair().expect("a pair");
        let there = There::new(8, 1);
        let frames = Frames::open(&One(here)).expect("a connection");
        let mut lane = Lane::new(frames, Arc::clone(&there));
        let [a, b] = [1, 2].map(|byte| [byte; PAGE_SIZE]);
        let sends = |lane: &mut Lane, first, pages: &[[u8; PAGE_SIZE]]| {
            let sent = lane.data(SourcePage(first), pages.as_flattened());
            sent.expect("room in the socket");
            (there.sent(), there.unchanged())
        };
        assert_eq!(sends(&mut lane, 0, &[a, a, a, a]), (4, 0));
        lane.rounds = 1;
        assert_eq!(
            sends(&mut lane, 0, &[a, a, a, a]),
            (8, 0),
            "none is remembered"
        );
        assert_eq!(sends(&mut lane, 0, &[a, b, b, a]), (10, 2));
        assert_eq!(sends(&mut lane, 1, &[b, a, b]), (12, 3));
        lane.zeros(SourcePage(0), 2).expect("room in the socket");
        assert_eq!(
            sends(&mut lane, 0, &[a, b, a]),
            (14, 4),
            "zeros are in between"
        );
    }
}
