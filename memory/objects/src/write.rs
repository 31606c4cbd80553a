//! Makes objects of files.
//!
//! ```text
//! a file ─┬─ up to 8 MiB ─► PUT ────────────────────────────────► the object
//!         └─ longer ──────► parts of 8 MiB, 4 at a time ─► end ─► the object
//! ```
//! No reader sees a part of an object. If the store fails, the whole object is written again, until
//! [`Options::patience`](crate::Options::patience) is over. Before that, S3's client has tried each
//! request several times.

use crate::folder::Objects;
use crate::place::{Answer, Pauses, Place, TryError};
use object_store::path::Path as ObjectPath;
use object_store::{Error, MultipartUpload, ObjectStoreExt as _, PutPayload};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::{Duration, Instant};

/// The shortest part. S3 takes 10000 parts of 5 MiB or more.
const PART: u64 = 8 << 20;
const PARTS_MAX: u64 = 10_000;
/// The most parts in flight.
const PARALLEL: usize = 4;
/// How long a failed upload waits for its abort.
const ABORT: Duration = Duration::from_secs(2);

/// Why an object was not made.
enum PutError {
    /// The file cannot be read, or the wait was interrupted.
    Here(io::Error),
    Store(Error),
}

impl From<io::Error> for PutError {
    fn from(error: io::Error) -> Self {
        Self::Here(error)
    }
}

impl From<Error> for PutError {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

impl Objects {
    /// Writes the content of `file` to the object `name`, and replaces an existing object.
    ///
    /// # Errors
    /// The file cannot be read, the store refuses it, or [`Objects::interrupted_by`].
    pub fn put(&self, name: &str, file: &File) -> io::Result<()> {
        let (location, place) = (self.location(name)?, self.place());
        let (began, mut pauses) = (Instant::now(), Pauses::default());
        loop {
            let error = match put_once(place, &location, file) {
                Ok(()) => return Ok(()),
                Err(PutError::Here(error)) => return Err(error),
                Err(PutError::Store(error)) => TryError::Store(error),
            };
            let waited = began.elapsed();
            let is_over = waited >= place.options().patience || place.is_interrupted();
            if error.is_final() || is_over {
                return Err(error.into_io(waited));
            }
            thread::sleep(pauses.next());
        }
    }

    /// Removes the object `name`, if it exists.
    ///
    /// # Errors
    /// The store does not remove it.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let (location, place) = (self.location(name)?, self.place().clone());
        let removed = self.place().run(async move {
            let removed = place.store().delete(&location);
            place.one_try(removed).await
        });
        match removed? {
            Ok(()) | Err(TryError::Store(Error::NotFound { .. })) => Ok(()),
            Err(error) => Err(error.into_io(Duration::ZERO)),
        }
    }
}

fn put_once(place: &Place, location: &ObjectPath, file: &File) -> Result<(), PutError> {
    let length = file.metadata()?.len();
    let read = |at: u64, bytes: u64| {
        let mut part = vec![0; bytes as usize];
        file.read_exact_at(&mut part, at)?;
        Ok::<_, io::Error>(PutPayload::from(part))
    };
    let (store, to) = (place.clone(), location.clone());
    if length <= PART {
        let content = read(0, length)?;
        place.run(async move { store.store().put(&to, content).await })??;
        return Ok(());
    }
    let mut upload = place.run(async move { store.store().put_multipart(&to).await })??;
    let part = PART.max(length.div_ceil(PARTS_MAX));
    let done = (0..length)
        .step_by(part as usize)
        .try_fold(VecDeque::new(), |mut coming, at| {
            if coming.len() == PARALLEL {
                next_part(place, &mut coming)?;
            }
            let content = read(at, part.min(length - at))?;
            coming.push_back(place.start(upload.put_part(content)));
            Ok(coming)
        });
    let done = done.and_then(|mut coming| {
        while !coming.is_empty() {
            next_part(place, &mut coming)?;
        }
        Ok(())
    });
    if let Err(error) = done {
        abort(place, upload);
        return Err(error);
    }
    let completed = place.run(async move {
        let completed = upload.complete().await;
        if completed.is_err() {
            // The first error is returned.
            let _ = upload.abort().await;
        }
        completed
    });
    completed??;
    Ok(())
}

type Part = Answer<Result<(), Error>>;

/// Waits for the oldest part in flight.
fn next_part(place: &Place, coming: &mut VecDeque<Part>) -> Result<(), PutError> {
    match coming.pop_front() {
        Some(part) => Ok(place.wait(&part)??),
        None => Ok(()),
    }
}

/// Aborts an upload, so that the store keeps none of its parts. An unreachable store keeps them.
fn abort(place: &Place, mut upload: Box<dyn MultipartUpload>) {
    let ended = place.start(async move { upload.abort().await });
    // A failure changes nothing.
    let _ = ended.recv_timeout(ABORT);
}
