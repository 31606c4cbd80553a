//! Snapshots in an object store, in programs with the feature `objects`. Other programs refuse its
//! URL.

use crate::refused::Refused;
use std::path::Path;

/// `path` as a URL, if it is one.
pub fn url(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| text.contains("://"))
}

/// Why no program, or not this one, opens `url`.
pub(crate) fn check(url: &str) -> Result<(), Refused> {
    if !url.starts_with("s3://") {
        return Err(Refused::request(format!(
            "{url}: no such store is supported: give s3://bucket/prefix, or the path of a folder"
        )));
    }
    if cfg!(not(feature = "objects")) {
        return Err(Refused::request(format!(
            "{url}: this program has no client for S3: build it with `cargo build --release \
             --features s3` (another VMM: with the feature objects of lacuna-control), or give the \
             path of a folder"
        )));
    }
    Ok(())
}

pub use client::open;
pub(crate) use client::with;

#[cfg(feature = "objects")]
mod client {
    use crate::refused::Refused;
    use lacuna::ErrorKind;
    use lacuna::migrate::{Folder, Store};
    use lacuna::objects::{Objects, ObjectsError, Options};
    use std::fs::File;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    /// The objects below `url`. `interrupt` ends a wait for them, and so does `patience`.
    ///
    /// # Errors
    /// The URL names no store, or this program cannot open it.
    pub fn open(
        url: &str,
        patience: Duration,
        interrupt: &Arc<AtomicBool>,
    ) -> Result<Arc<dyn Folder>, Refused> {
        let options = Options {
            patience,
            ..Options::default()
        };
        Ok(Arc::new(objects(url, options, interrupt)?))
    }

    /// Calls `save` with the store at `url`. `interrupt` ends a wait for it.
    pub(crate) fn with<T>(
        url: &str,
        interrupt: &Arc<AtomicBool>,
        save: impl FnOnce(Store<'_>) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        let objects = objects(url, Options::default(), interrupt)?;
        save(Store {
            folder: &objects,
            put: &|name: &str, file: &File| objects.put(name, file),
            remove: &|name: &str| objects.remove(name),
        })
    }

    fn objects(
        url: &str,
        options: Options,
        interrupt: &Arc<AtomicBool>,
    ) -> Result<Objects, Refused> {
        super::check(url)?;
        let objects = Objects::open(url, options).map_err(|error| {
            let kind = match error {
                ObjectsError::Threads(_) => ErrorKind::Host,
                _ => ErrorKind::Request,
            };
            Refused::of(kind, error)
        })?;
        Ok(objects.interrupted_by(interrupt))
    }
}

#[cfg(not(feature = "objects"))]
mod client {
    use crate::refused::Refused;
    use lacuna::migrate::{Folder, Store};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    /// Refuses `url`: this program has no client for it.
    ///
    /// # Errors
    /// Always.
    pub fn open(url: &str, _: Duration, _: &Arc<AtomicBool>) -> Result<Arc<dyn Folder>, Refused> {
        Err(super::check(url).expect_err("no store"))
    }

    pub(crate) fn with<T>(
        url: &str,
        _: &Arc<AtomicBool>,
        _: impl FnOnce(Store<'_>) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        Err(super::check(url).expect_err("no store"))
    }
}
