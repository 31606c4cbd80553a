//! The chunks of one object: its cache, the requests in flight, and what waits for them.

use crate::cache::{Bytes, Cache};
use crate::folder::Place;
use lacuna_addr::PAGE_SIZE;
use lacuna_source::{Outage, PageRequest, Policy};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use object_store::{Error, GetOptions, GetRange, ObjectMeta};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The first pause between two tries; each one is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(10);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Chunks that are asked for before a read in order comes to them: at most so many, and at most
/// half of those that are kept.
const AHEAD: u64 = 8;

/// An open object.
pub(crate) struct Chunks {
    place: Place,
    meta: ObjectMeta,
    /// For reads that a thread waits for.
    outage: Outage,
    state: Mutex<State, lock_order::ObjectChunks>,
}

struct State {
    cache: Cache,
    /// Chunks that a task reads, with what waits for them.
    coming: HashMap<u64, Vec<Waiter>>,
}

/// What waits for a chunk.
enum Waiter {
    /// The request for a page of it, and the policy of its source.
    Page(PageRequest, Arc<Outage>, Instant),
    /// A thread.
    Thread(SyncSender<Result<Bytes, String>>, Instant),
    /// None: the chunk is read ahead.
    Ahead,
}

/// Why a try gave no chunk.
enum ReadError {
    /// Another try may succeed.
    Again(String),
    /// No other try can succeed.
    Never(String),
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
            state: Mutex::new(State {
                cache: Cache::new(chunks),
                coming: HashMap::new(),
            }),
            meta,
            place,
        }
    }

    pub fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A failure to read `chunk`, for people: which bytes of which object.
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

    /// The bytes of the object that are in `chunk`.
    fn range(&self, chunk: u64) -> Range<u64> {
        let start = chunk * self.chunk_bytes();
        start..(start + self.chunk_bytes()).min(self.meta.size)
    }

    /// Answers a request for a page of the object, which has it: now, or when its chunk has come.
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

    /// Adds `waiter` to those for `chunk`, and starts to read it unless a task does.
    fn wait_for(self: &Arc<Self>, state: &mut State, chunk: u64, waiter: Waiter) {
        let waiting = state.coming.entry(chunk).or_default();
        waiting.push(waiter);
        if waiting.len() == 1 {
            self.place.spawn(fetch(Arc::downgrade(self), chunk));
        }
    }

    /// Reads `into` from `offset` on, which is in the object.
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
            let found = part.wait()?;
            let range = self.range(chunk);
            let (from, to) = (offset.max(range.start), end.min(range.end));
            let at = (from - range.start) as usize..(to - range.start) as usize;
            into[(from - offset) as usize..(to - offset) as usize].copy_from_slice(&found[at]);
        }
        Ok(())
    }

    fn part(self: &Arc<Self>, state: &mut State, chunk: u64) -> Part {
        if let Some(bytes) = state.cache.get(chunk) {
            return Part::Here(bytes);
        }
        let (sender, receiver) = sync_channel(1);
        self.wait_for(state, chunk, Waiter::Thread(sender, Instant::now()));
        Part::Coming(receiver)
    }

    /// One try.
    async fn get(&self, chunk: u64) -> Result<Bytes, ReadError> {
        let range = self.range(chunk);
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            // Another object at this place is refused.
            if_match: self.meta.e_tag.clone(),
            ..GetOptions::default()
        };
        let _permit = self.place.permit().await;
        let patience = self.place.options().patience;
        let get = async {
            let found = self
                .place
                .store()
                .get_opts(&self.meta.location, options)
                .await?;
            found.bytes().await
        };
        let found = match tokio::time::timeout(patience, get).await {
            Err(_) => return Err(ReadError::Again(format!("no answer within {patience:?}"))),
            Ok(found) => found.map_err(|error| read_error(&error))?,
        };
        match found.len() as u64 == range.end - range.start {
            true => Ok(Bytes::from(&found[..])),
            false => Err(ReadError::Never(
                "the object is shorter than it was when the guest was started from it".into(),
            )),
        }
    }

    fn has_come(&self, chunk: u64, bytes: Bytes) {
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

    /// No try can succeed.
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

    /// After a try that has failed for `reason`: gives up what has waited too long. Returns whether
    /// something still waits.
    fn keep_trying(&self, chunk: u64, reason: &str) -> bool {
        let reason = &self.failure(chunk, reason);
        let now = Instant::now();
        let mut state = self.state();
        let waiting = state.coming.remove(&chunk).unwrap_or_default();
        let is_late = |waiter: &Waiter| match waiter {
            Waiter::Page(_, outage, at) => outage
                .deadline_after_failure(*at)
                .is_some_and(|end| end <= now),
            Waiter::Thread(_, at) => self.outage.deadline(*at).is_some_and(|end| end <= now),
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

/// Reads a chunk, as often as something waits for it and another try may succeed. It keeps the
/// object open only during a try: when the object is closed, the requests for its pages fail.
async fn fetch(chunks: Weak<Chunks>, chunk: u64) {
    let mut pause = PAUSE;
    while let Some(open) = chunks.upgrade() {
        match open.get(chunk).await {
            Ok(bytes) => return open.has_come(chunk, bytes),
            Err(ReadError::Never(reason)) => return open.fail(chunk, &reason),
            Err(ReadError::Again(reason)) => {
                if !open.keep_trying(chunk, &reason) {
                    return;
                }
            }
        }
        drop(open);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// A chunk that a thread reads.
enum Part {
    Here(Bytes),
    Coming(Receiver<Result<Bytes, String>>),
}

impl Part {
    fn wait(self) -> io::Result<Bytes> {
        match self {
            Self::Here(bytes) => Ok(bytes),
            Self::Coming(answer) => match answer.recv() {
                Ok(answer) => answer.map_err(io::Error::other),
                Err(_) => Err(io::Error::other("the threads of the store have ended")),
            },
        }
    }
}

/// What an error of a store means for another try.
fn read_error(error: &Error) -> ReadError {
    let reason = error.to_string();
    match error {
        Error::NotFound { .. } => ReadError::Never(format!("the object is gone: {reason}")),
        Error::Precondition { .. } => ReadError::Never(format!(
            "the object was replaced after the guest was started from it: {reason}"
        )),
        Error::InvalidPath { .. }
        | Error::NotSupported { .. }
        | Error::NotImplemented { .. }
        | Error::PermissionDenied { .. }
        | Error::Unauthenticated { .. }
        | Error::UnknownConfigurationKey { .. } => ReadError::Never(reason),
        _ => ReadError::Again(reason),
    }
}
