//! A store, its threads, and the tries to read from it.

use crate::options::Options;
use object_store::path::Path as ObjectPath;
use object_store::{Error, GetOptions, ObjectMeta, ObjectStore};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, SemaphorePermit};

/// The longest try. A slower store is of no use to a guest.
const TRY: Duration = Duration::from_secs(10);
/// The period at which a waiting thread checks the interrupt flag.
const LOOK: Duration = Duration::from_millis(50);

/// A store and its threads.
#[derive(Clone)]
pub(crate) struct Place {
    shared: Arc<Shared>,
    /// While it is set, threads do not wait.
    interrupt: Arc<AtomicBool>,
}

struct Shared {
    store: Arc<dyn ObjectStore>,
    /// The prefix of objects' names in messages.
    name: String,
    options: Options,
    permits: Semaphore,
    /// `None` only during the drop.
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // The drop does not wait for the threads: one of them may be the dropping thread.
            runtime.shutdown_background();
        }
    }
}

/// The channel on which a thread waits for a task's result.
pub(crate) type Answer<T> = Receiver<T>;

impl Place {
    pub fn new(
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: Options,
        runtime: tokio::runtime::Runtime,
    ) -> Self {
        let shared = Arc::new(Shared {
            store,
            name: name.to_owned(),
            permits: Semaphore::new(options.parallel.max(1)),
            options,
            runtime: Some(runtime),
        });
        let interrupt = Arc::default();
        Self { shared, interrupt }
    }

    pub fn interrupted_by(mut self, flag: &Arc<AtomicBool>) -> Self {
        self.interrupt = Arc::clone(flag);
        self
    }

    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    pub fn store(&self) -> &dyn ObjectStore {
        &*self.shared.store
    }

    /// An object's name in messages.
    pub fn name_of(&self, location: &ObjectPath) -> String {
        format!("{}{location}", self.shared.name)
    }

    pub async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.shared.permits.acquire().await.ok()
    }

    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let runtime = self.shared.runtime.as_ref();
        let runtime = runtime.expect("it is taken when nothing refers to this");
        drop(runtime.spawn(task));
    }

    /// Carries out a task, and waits for it unless the flag is set. The task runs in the store's
    /// own runtime: `block_on` panics on a thread of another runtime.
    pub fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        self.wait(&self.start(task))
    }

    /// Starts a task.
    pub fn start<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Answer<T> {
        let (sender, answer) = sync_channel(1);
        self.spawn(async move {
            // The waiting thread may have been interrupted.
            let _ = sender.try_send(task.await);
        });
        answer
    }

    /// Waits for a task's answer, unless the flag is set.
    pub fn wait<T>(&self, answer: &Answer<T>) -> io::Result<T> {
        loop {
            match answer.recv_timeout(LOOK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("the threads of the store have ended"));
                }
                Err(RecvTimeoutError::Timeout) if self.is_interrupted() => {
                    let text = "the wait for the store was interrupted";
                    return Err(io::Error::new(io::ErrorKind::Interrupted, text));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    pub fn is_interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    /// Tries once, for a bounded time.
    pub async fn one_try<T>(
        &self,
        ask: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, TryError> {
        let time = self.options().patience.min(TRY);
        match tokio::time::timeout(time, ask).await {
            Ok(done) => done.map_err(TryError::Store),
            Err(_) => Err(TryError::Silent(time)),
        }
    }

    /// Reads the metadata of the object at `location`. Tries again until the patience is over.
    pub async fn head(&self, location: &ObjectPath) -> io::Result<ObjectMeta> {
        let (began, mut pauses) = (Instant::now(), Pauses::default());
        loop {
            let head = GetOptions::new().with_head(true);
            let found = self.one_try(self.store().get_opts(location, head)).await;
            let error = match found {
                Ok(found) => return Ok(found.meta),
                Err(error) => error,
            };
            let waited = began.elapsed();
            if error.is_final() || waited >= self.options().patience || self.is_interrupted() {
                return Err(error.into_io(waited));
            }
            pauses.pause().await;
        }
    }
}

/// Pauses between tries: 10 ms, then each twice as long as the last, up to a second.
pub(crate) struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(Duration::from_millis(10))
    }
}

impl Pauses {
    pub async fn pause(&mut self) {
        tokio::time::sleep(self.next()).await;
    }

    /// The length of the next pause.
    pub fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (now * 2).min(Duration::from_secs(1));
        now
    }
}

/// The reason of a failed try.
pub(crate) enum TryError {
    /// The store answered with this error.
    Store(Error),
    /// The store did not answer within this time.
    Silent(Duration),
    /// The store's answer is of no use.
    Useless(String),
}

impl TryError {
    pub fn never(reason: &str) -> Self {
        Self::Useless(reason.to_owned())
    }

    /// Whether no other try can succeed.
    pub const fn is_final(&self) -> bool {
        match self {
            Self::Silent(_) => false,
            Self::Useless(_) => true,
            Self::Store(error) => matches!(
                error,
                Error::NotFound { .. }
                    | Error::Precondition { .. }
                    | Error::InvalidPath { .. }
                    | Error::NotSupported { .. }
                    | Error::NotImplemented { .. }
                    | Error::PermissionDenied { .. }
                    | Error::Unauthenticated { .. }
                    | Error::UnknownConfigurationKey { .. }
            ),
        }
    }

    /// The error for a thread that opens an object, after it has `waited`.
    pub fn into_io(self, waited: Duration) -> io::Error {
        let kind = match &self {
            Self::Store(Error::NotFound { .. }) => io::ErrorKind::NotFound,
            Self::Store(Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) => {
                io::ErrorKind::PermissionDenied
            }
            Self::Silent(_) => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::Other,
        };
        let text = match &self {
            error if !error.is_final() => {
                let seconds = waited.as_secs_f64();
                format!("the store has failed for {seconds:.1} s; the last error: {error}")
            }
            // `Display` calls a missing object gone; this object may never have existed.
            Self::Store(error) => error.to_string(),
            error => error.to_string(),
        };
        io::Error::new(kind, text)
    }
}

impl std::fmt::Display for TryError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent(time) => write!(f, "no answer within {time:?}"),
            Self::Useless(reason) => f.write_str(reason),
            Self::Store(error @ Error::NotFound { .. }) => write!(f, "the object is gone: {error}"),
            Self::Store(error @ Error::Precondition { .. }) => write!(
                f,
                "the object was replaced after the guest was started from it: {error}"
            ),
            Self::Store(error) => {
                error.fmt(f)?;
                // Such as a certificate that is not trusted: the error itself says only that the
                // request failed.
                let mut cause: &dyn std::error::Error = error;
                while let Some(next) = cause.source() {
                    cause = next;
                }
                match cause.to_string() {
                    said if error.to_string().contains(&said) => Ok(()),
                    unsaid => write!(f, ": {unsaid}"),
                }
            }
        }
    }
}
