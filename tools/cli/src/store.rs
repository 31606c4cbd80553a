//! Snapshots in an object store, in builds with the feature `s3`. Other builds refuse its URL.

use std::path::Path;

/// `path` as a URL, if it is one.
pub(crate) fn url(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| text.contains("://"))
}

/// Why no build, or not this one, opens `url`.
fn check(url: &str) -> Result<(), String> {
    if !url.starts_with("s3://") {
        return Err(format!(
            "{url}: no such store is supported: give s3://bucket/prefix, or the path of a folder"
        ));
    }
    if cfg!(not(feature = "s3")) {
        return Err(format!(
            "{url}: this build has no client for S3: build it with `cargo build --release \
             --features s3`, or give the path of a folder"
        ));
    }
    Ok(())
}

#[cfg(feature = "s3")]
pub(crate) use s3::{open, with};
#[cfg(not(feature = "s3"))]
pub(crate) use without::{open, with};

#[cfg(feature = "s3")]
mod s3 {
    use crate::control::message::Refused;
    use crate::exit::Exit;
    use crate::run::Refusal;
    use lacuna::ErrorKind;
    use lacuna::migrate::Folder;
    use lacuna::migrate::Store;
    use lacuna::objects::{Objects, ObjectsError, Options};
    use std::fs::File;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    /// The objects below `url`. `interrupt` ends a wait for them, and so does `patience`.
    pub(crate) fn open(
        url: &str,
        patience: Duration,
        interrupt: &Arc<AtomicBool>,
    ) -> Result<Arc<dyn Folder>, Refusal> {
        super::check(url).map_err(|refused| (Exit::Usage, refused))?;
        let options = Options {
            patience,
            ..Options::default()
        };
        let objects = Objects::open(url, options);
        let objects = objects.map_err(|error| (Exit::from(kind(&error)), error.to_string()))?;
        Ok(Arc::new(objects.interrupted_by(interrupt)))
    }

    /// Calls `save` with the store at `url`. `interrupt` ends a wait for it.
    pub(crate) fn with<T>(
        url: &str,
        interrupt: &Arc<AtomicBool>,
        save: impl FnOnce(Store<'_>) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        super::check(url).map_err(Refused::request)?;
        let objects = Objects::open(url, Options::default());
        let objects = objects.map_err(|error| Refused::of(kind(&error), &error))?;
        let objects = objects.interrupted_by(interrupt);
        save(Store {
            folder: &objects,
            put: &|name: &str, file: &File| objects.put(name, file),
            remove: &|name: &str| objects.remove(name),
        })
    }

    fn kind(error: &ObjectsError) -> ErrorKind {
        match error {
            ObjectsError::Threads(_) => ErrorKind::Host,
            _ => ErrorKind::Request,
        }
    }
}

#[cfg(not(feature = "s3"))]
mod without {
    use crate::control::message::Refused;
    use crate::exit::Exit;
    use crate::run::Refusal;
    use lacuna::migrate::Folder;
    use lacuna::migrate::Store;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    pub(crate) fn open(
        url: &str,
        _: Duration,
        _: &Arc<AtomicBool>,
    ) -> Result<Arc<dyn Folder>, Refusal> {
        let refused = super::check(url).expect_err("no store");
        Err((Exit::Usage, refused))
    }

    pub(crate) fn with<T>(
        url: &str,
        _: &Arc<AtomicBool>,
        _: impl FnOnce(Store<'_>) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        let refused = super::check(url).expect_err("no store");
        Err(Refused::request(refused))
    }
}
