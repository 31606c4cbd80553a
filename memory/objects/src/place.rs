//! A store, the threads that read it, and the tries to read something.

use crate::folder::Options;
use object_store::path::Path as ObjectPath;
use object_store::{Error, GetOptions, ObjectMeta, ObjectStore};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, SemaphorePermit};

/// The longest try. A store that is slower than that for a chunk is of no use to a guest.
const TRY: Duration = Duration::from_secs(10);
/// The time between two looks at the flag that interrupts threads.
const LOOK: Duration = Duration::from_millis(50);

/// A store, and the threads that read it.
#[derive(Clone)]
pub(crate) struct Place {
    shared: Arc<Shared>,
    /// Threads that wait give up when it is set.
    interrupt: Arc<AtomicBool>,
}

struct Shared {
    store: Arc<dyn ObjectStore>,
    /// What comes before the names of objects in messages.
    name: String,
    options: Options,
    permits: Semaphore,
    /// `None` while this is dropped.
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Without a wait, because one of its own threads may be the one that drops it.
            runtime.shutdown_background();
        }
    }
}

/// Where a task sends what a thread waits for.
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

    /// An object, for people.
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

    /// Carries out a task, and waits for it unless the flag is set. A task of this runtime asks the
    /// store: `block_on` panics on a thread of another one.
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
            // The thread that waits for it may have been interrupted.
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

    /// One try, which has an end.
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

    /// Asks what is at `location`, for as long as the patience lasts.
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

/// Pauses between tries: 10 ms, and each one twice as long as the one before, up to a second.
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

    /// The length of the pause that comes now.
    pub fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (now * 2).min(Duration::from_secs(1));
        now
    }
}

/// Why a try has failed.
pub(crate) enum TryError {
    /// The store has answered this.
    Store(Error),
    /// The store has not answered within this time.
    Silent(Duration),
    /// What the store has answered is of no use.
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

    /// As a thread gets it that opens an object, after it has `waited`.
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
            // That an object is gone is said of one that was there.
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
            Self::Store(error) => error.fmt(f),
        }
    }
}
