//! The chunks of one object: its cache, the requests in flight, and their waiters.

use crate::cache::{Bytes, Cache};
use crate::place::{Answer, Pauses, Place, TryError};
use lacuna_addr::PAGE_SIZE;
use lacuna_source::{Outage, PageRequest, Policy};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use object_store::{GetOptions, GetRange, ObjectMeta};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

/// The most chunks that a sequential read requests ahead; never more than half of the cache.
const AHEAD: u64 = 8;

/// An open object.
pub(crate) struct Chunks {
    place: Place,
    meta: ObjectMeta,
    /// The outage as threads see it: the reason why the last try failed.
    outage: Outage,
    state: Mutex<ChunkTable, lock_order::ObjectChunks>,
}

struct ChunkTable {
    cache: Cache,
    /// Chunks in flight, with their waiters.
    coming: HashMap<u64, Vec<Waiter>>,
}

/// A waiter for a chunk.
enum Waiter {
    /// A request for a page of the chunk, its source's outage, and the time of the request.
    Page(PageRequest, Arc<Outage>, Instant),
    /// A thread, and the time at which its wait began.
    Thread(SyncSender<Result<Bytes, String>>, Instant),
    /// Nothing waits: the chunk is read ahead.
    Ahead,
}

impl Chunks {
    pub fn new(place: Place, meta: ObjectMeta) -> Self {
        let options = place.options();
        let chunks = options.cache / options.chunk;
        let policy = Policy {
            patience: options.patience,
            ..Policy::default()
        };
        Self {
            outage: Outage::new(policy),
            state: Mutex::new(ChunkTable {
                cache: Cache::new(chunks),
                coming: HashMap::new(),
            }),
            meta,
            place,
        }
    }

    /// Why the store gives no bytes of the object at present.
    pub fn outage(&self) -> Option<String> {
        self.outage.reason()
    }

    pub fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn state(&self) -> MutexGuard<'_, ChunkTable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The message for a failure to read `chunk`: it names the bytes and the object.
    fn failure(&self, chunk: u64, reason: &str) -> String {
        let Range { start, end } = self.range(chunk);
        let object = self.place.name_of(&self.meta.location);
        format!("bytes {start} to {} of {object}: {reason}", end - 1)
    }

    fn chunk_bytes(&self) -> u64 {
        self.place.options().chunk as u64
    }

    fn ahead(&self) -> u64 {
        let options = self.place.options();
        AHEAD.min((options.cache / options.chunk / 2) as u64)
    }

    /// The byte range of `chunk` in the object.
    fn range(&self, chunk: u64) -> Range<u64> {
        let start = chunk * self.chunk_bytes();
        start..(start + self.chunk_bytes()).min(self.meta.size)
    }

    /// Answers a request for a page inside the object: now, or when its chunk has arrived.
    pub fn page(self: &Arc<Self>, request: PageRequest, outage: &Arc<Outage>) {
        let chunk = request.page().0 * PAGE_SIZE as u64 / self.chunk_bytes();
        let mut state = self.state();
        if let Some(bytes) = state.cache.get(chunk) {
            drop(state);
            return self.provide(&request, outage, chunk, &bytes);
        }
        let waiter = Waiter::Page(request, Arc::clone(outage), Instant::now());
        self.wait_for(&mut state, chunk, waiter);
    }

    /// Adds `waiter` to the chunk's waiters. Starts a read of the chunk unless one is in flight.
    fn wait_for(self: &Arc<Self>, state: &mut ChunkTable, chunk: u64, waiter: Waiter) {
        let waiting = state.coming.entry(chunk).or_default();
        waiting.push(waiter);
        if waiting.len() == 1 {
            self.place.spawn(fetch(Arc::downgrade(self), chunk));
        }
    }

    /// Reads `into` from `offset`. The range is in the object.
    pub fn read(self: &Arc<Self>, into: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + into.len() as u64;
        let bytes = self.chunk_bytes();
        let chunks = offset / bytes..end.div_ceil(bytes);
        let mut state = self.state();
        let parts: Vec<_> = chunks
            .clone()
            .map(|chunk| self.part(&mut state, chunk))
            .collect();
        let last = self.meta.size.div_ceil(bytes);
        for chunk in chunks.end..(chunks.end + self.ahead()).min(last) {
            if !state.cache.contains(chunk) && !state.coming.contains_key(&chunk) {
                self.wait_for(&mut state, chunk, Waiter::Ahead);
            }
        }
        drop(state);
        for (chunk, part) in chunks.zip(parts) {
            let found = part.wait(&self.place)?;
            let range = self.range(chunk);
            let (from, to) = (offset.max(range.start), end.min(range.end));
            let at = (from - range.start) as usize..(to - range.start) as usize;
            into[(from - offset) as usize..(to - offset) as usize].copy_from_slice(&found[at]);
        }
        Ok(())
    }

    fn part(self: &Arc<Self>, state: &mut ChunkTable, chunk: u64) -> Part {
        if let Some(bytes) = state.cache.get(chunk) {
            return Part::Here(bytes);
        }
        let (sender, receiver) = sync_channel(1);
        self.wait_for(state, chunk, Waiter::Thread(sender, Instant::now()));
        Part::Coming(receiver)
    }

    /// Tries once to read `chunk`.
    async fn get(&self, chunk: u64) -> Result<Bytes, TryError> {
        let range = self.range(chunk);
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            // The store refuses the read if another object is at this place.
            if_match: self.meta.e_tag.clone(),
            ..GetOptions::default()
        };
        let _permit = self.place.permit().await;
        let get = async {
            let store = self.place.store();
            let found = store.get_opts(&self.meta.location, options).await?;
            found.bytes().await
        };
        let found = self.place.one_try(get).await?;
        match found.len() as u64 == range.end - range.start {
            true => Ok(Bytes::from(&found[..])),
            false => Err(TryError::never(
                "the object is shorter than it was when the guest was started from it",
            )),
        }
    }

    fn has_come(&self, chunk: u64, bytes: Bytes) {
        self.outage.ended();
        let mut state = self.state();
        state.cache.insert(chunk, Arc::clone(&bytes));
        let waiting = state.coming.remove(&chunk);
        drop(state);
        for waiter in waiting.into_iter().flatten() {
            match waiter {
                Waiter::Page(request, outage, _) => self.provide(&request, &outage, chunk, &bytes),
                // The thread may have ended.
                Waiter::Thread(sender, _) => _ = sender.try_send(Ok(Arc::clone(&bytes))),
                Waiter::Ahead => {}
            }
        }
    }

    fn provide(&self, request: &PageRequest, outage: &Outage, chunk: u64, bytes: &Bytes) {
        outage.provided();
        let at = request.page().0 * PAGE_SIZE as u64 - self.range(chunk).start;
        // `Answer::Late`: the page was provided in another way, or its memory is gone.
        let _ = match bytes[at as usize..].first_chunk() {
            Some(page) => request.provide(page),
            None => request.fail("the object ends inside of the page"),
        };
    }

    /// Fails all waiters for `chunk`: no try can succeed.
    fn fail(&self, chunk: u64, reason: &str) {
        let reason = &self.failure(chunk, reason);
        let waiting = self.state().coming.remove(&chunk);
        for waiter in waiting.into_iter().flatten() {
            match waiter {
                Waiter::Page(request, ..) => _ = request.fail(reason),
                Waiter::Thread(sender, _) => _ = sender.try_send(Err(reason.to_owned())),
                Waiter::Ahead => {}
            }
        }
    }

    /// Records a failed try, and gives up the waiters that are past their deadline. Returns whether
    /// waiters are left.
    fn keep_trying(&self, chunk: u64, reason: &str) -> bool {
        let reason = &self.failure(chunk, reason);
        self.outage.failed(reason);
        let now = Instant::now();
        let mut state = self.state();
        let waiting = state.coming.remove(&chunk).unwrap_or_default();
        let is_late = |waiter: &Waiter| match waiter {
            Waiter::Page(_, outage, at) => outage
                .deadline_after_failure(*at)
                .is_some_and(|end| end <= now),
            Waiter::Thread(_, at) => {
                let end = self.outage.deadline(*at);
                end.is_some_and(|end| end <= now) || self.place.is_interrupted()
            }
            Waiter::Ahead => true,
        };
        let (late, waiting): (Vec<_>, Vec<_>) = waiting.into_iter().partition(is_late);
        let goes_on = !waiting.is_empty();
        if goes_on {
            state.coming.insert(chunk, waiting);
        }
        drop(state);
        for waiter in late {
            match waiter {
                Waiter::Page(request, outage, _) => outage.give_up(&request, reason),
                Waiter::Thread(sender, _) => _ = sender.try_send(Err(reason.to_owned())),
                Waiter::Ahead => {}
            }
        }
        goes_on
    }
}

/// Reads a chunk, and tries again while there are waiters and a try may succeed. It keeps the
/// object open only during a try: when the object is closed, the requests for its pages fail.
async fn fetch(chunks: Weak<Chunks>, chunk: u64) {
    let mut pauses = Pauses::default();
    while let Some(open) = chunks.upgrade() {
        match open.get(chunk).await {
            Ok(bytes) => return open.has_come(chunk, bytes),
            Err(error) if error.is_final() => return open.fail(chunk, &error.to_string()),
            Err(error) => {
                if !open.keep_trying(chunk, &error.to_string()) {
                    return;
                }
            }
        }
        drop(open);
        pauses.pause().await;
    }
}

/// A chunk for a reading thread.
enum Part {
    Here(Bytes),
    Coming(Answer<Result<Bytes, String>>),
}

impl Part {
    fn wait(self, place: &Place) -> io::Result<Bytes> {
        match self {
            Self::Here(bytes) => Ok(bytes),
            Self::Coming(answer) => place.wait(&answer)?.map_err(io::Error::other),
        }
    }
}
