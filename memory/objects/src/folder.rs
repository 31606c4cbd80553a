//! Objects as a folder.

use crate::chunks::Chunks;
use crate::options::Options;
use crate::place::Place;
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_source::{
    FileError, Folder, MemoryId, Outage, PageRequest, PageSource, Policy, StoredFile,
};
use object_store::path::{Path as ObjectPath, PathPart};
use object_store::{ObjectStore, ObjectStoreScheme};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use url::Url;

/// Why objects cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectsError {
    /// The URL names no place.
    #[error("{url}: {wrong}: give a URL such as file:///folder or s3://bucket/prefix")]
    Url {
        /// The URL.
        url: String,
        /// What is wrong with it.
        wrong: String,
    },
    /// No object has this prefix.
    #[error("{prefix:?}: {wrong}: give names with / between them")]
    Prefix {
        /// The prefix.
        prefix: String,
        /// What is wrong with it.
        wrong: String,
    },
    /// The build has no client for S3.
    #[error(
        "{0}: this build has no client for S3: build it with `cargo build --release --features \
         s3`, or give a folder"
    )]
    NoS3(String),
    /// No build supports such a store.
    #[error("{0}: no such store is supported: give file:///folder or s3://bucket/prefix")]
    NoSuchStore(String),
    /// The options contradict each other.
    #[error("chunks of {0} bytes: give a multiple of 4096 that is not 0")]
    Chunk(usize),
    /// A thread cannot be started.
    #[error("cannot start the threads of the object store: {0}; raise the limit (ulimit -u)")]
    Threads(io::Error),
}

/// The objects whose names begin with one prefix, as a [`Folder`].
pub struct Objects {
    place: Place,
    prefix: ObjectPath,
    path: PathBuf,
}

impl Objects {
    /// The objects of `store` whose names begin with `prefix` and a slash. Names are used
    /// unchanged: nothing is percent-encoded.
    ///
    /// # Errors
    /// No object has this prefix, the options contradict each other, or a thread cannot be started.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        prefix: &str,
        options: Options,
    ) -> Result<Self, ObjectsError> {
        let name = format!("{store}/");
        let parsed = ObjectPath::parse(prefix).map_err(|error| ObjectsError::Prefix {
            prefix: prefix.to_owned(),
            wrong: error.to_string(),
        })?;
        Self::of(store, &name, parsed, options)
    }

    /// The objects below `url`: `file:///folder`, or with the feature `s3` a store with S3's
    /// protocol, `s3://bucket/prefix`. The environment has the store's settings. For S3 this
    /// installs `ring` as the process's provider of `rustls`, unless there is one.
    ///
    /// # Errors
    /// [`ObjectsError`].
    pub fn open(url: &str, options: Options) -> Result<Self, ObjectsError> {
        let wrong = |error: &dyn ToString| ObjectsError::Url {
            url: url.to_owned(),
            wrong: error.to_string(),
        };
        let parsed = Url::parse(url).map_err(|error| wrong(&error))?;
        let scheme = ObjectStoreScheme::parse(&parsed).map_err(|error| wrong(&error))?;
        let store: Arc<dyn ObjectStore> = match &scheme.0 {
            ObjectStoreScheme::Local => Arc::new(object_store::local::LocalFileSystem::new()),
            #[cfg(feature = "s3")]
            ObjectStoreScheme::AmazonS3 => Arc::new(s3(url, options).map_err(|e| wrong(&e))?),
            #[cfg(not(feature = "s3"))]
            ObjectStoreScheme::AmazonS3 => return Err(ObjectsError::NoS3(url.to_owned())),
            _ => return Err(ObjectsError::NoSuchStore(url.to_owned())),
        };
        let root = url.trim_end_matches('/');
        let root = root.strip_suffix(scheme.1.as_ref()).unwrap_or(root);
        Self::of(store, root, scheme.1, options)
    }

    fn of(
        store: Arc<dyn ObjectStore>,
        name: &str,
        prefix: ObjectPath,
        options: Options,
    ) -> Result<Self, ObjectsError> {
        if options.chunk == 0 || !options.chunk.is_multiple_of(PAGE_SIZE) {
            return Err(ObjectsError::Chunk(options.chunk));
        }
        let mut threads = tokio::runtime::Builder::new_multi_thread();
        threads
            .worker_threads(2)
            .max_blocking_threads(options.parallel.max(1));
        let runtime = threads.thread_name("lacuna-objects").enable_all().build();
        let runtime = runtime.map_err(ObjectsError::Threads)?;
        Ok(Self::at(Place::new(store, name, options, runtime), prefix))
    }

    /// A thread that waits for the store checks `flag` several times a second. Once the flag is
    /// set, the thread gets an error of the kind [`io::ErrorKind::Interrupted`].
    #[must_use]
    pub fn interrupted_by(mut self, flag: &Arc<AtomicBool>) -> Self {
        self.place = self.place.interrupted_by(flag);
        self
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    pub(crate) fn location(&self, name: &str) -> io::Result<ObjectPath> {
        child(self.prefix.clone(), name)
    }

    fn at(place: Place, prefix: ObjectPath) -> Self {
        let path = PathBuf::from(place.name_of(&prefix));
        Self {
            place,
            prefix,
            path,
        }
    }
}

/// The store of a bucket. Its own retries are short, because this crate tries again.
#[cfg(feature = "s3")]
fn s3(url: &str, options: Options) -> Result<object_store::aws::AmazonS3, object_store::Error> {
    let retries = object_store::RetryConfig {
        max_retries: 2,
        retry_timeout: options.patience,
        ..Default::default()
    };
    // `reqwest` takes the provider of the process. One that the program has installed stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = object_store::aws::AmazonS3Builder::from_env();
    builder.with_url(url).with_retry(retries).build()
}

/// The object `name` in `folder`. Each character stands for itself, as in the prefix; joining a
/// `&str` would percent-encode it.
fn child(folder: ObjectPath, name: &str) -> io::Result<ObjectPath> {
    let part = PathPart::parse(name);
    let part = part.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    Ok(folder.join(part))
}

impl Folder for Objects {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StoredFile>> {
        let location = self.location(name)?;
        let place = self.place.clone();
        let meta = self
            .place
            .run(async move { place.head(&location).await })??;
        let chunks = Chunks::new(self.place.clone(), meta);
        Ok(Box::new(Object {
            chunks: Arc::new(chunks),
            path: self.path.join(name),
        }))
    }

    fn beside(&self, name: &str) -> io::Result<Arc<dyn Folder>> {
        let mut parts: Vec<_> = self.prefix.parts().collect();
        if parts.pop().is_none() {
            let text = "the whole store has nothing beside it";
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        let prefix = child(ObjectPath::from_iter(parts), name)?;
        Ok(Arc::new(Self::at(self.place.clone(), prefix)))
    }
}

/// An open object.
struct Object {
    chunks: Arc<Chunks>,
    path: PathBuf,
}

impl StoredFile for Object {
    fn length(&self) -> u64 {
        self.chunks.meta().size
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        match offset.checked_add(into.len() as u64) {
            Some(end) if end <= self.length() => self.chunks.read(into, offset),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn page_source(
        &self,
        pages: PageCount,
        policy: Policy,
    ) -> Result<Box<dyn PageSource>, FileError> {
        let (has, needs) = (self.length() / PAGE_SIZE as u64, pages.get());
        if has < needs {
            let path = self.path.clone();
            return Err(FileError::TooShort { path, has, needs });
        }
        Ok(Box::new(ObjectPages {
            chunks: Arc::clone(&self.chunks),
            path: self.path.clone(),
            pages: needs,
            outage: Arc::new(Outage::new(policy)),
        }))
    }
}

/// The pages of an object.
struct ObjectPages {
    chunks: Arc<Chunks>,
    path: PathBuf,
    pages: u64,
    outage: Arc<Outage>,
}

impl PageSource for ObjectPages {
    fn describe(&self) -> String {
        format!("the object {}", self.path.display())
    }

    fn memory_id(&self) -> MemoryId {
        let meta = self.chunks.meta();
        let version = meta.e_tag.as_deref().unwrap_or_default();
        let size = meta.size.to_le_bytes();
        MemoryId::of(&[
            b"object",
            self.describe().as_bytes(),
            version.as_bytes(),
            &size,
        ])
    }

    fn outage(&self) -> Option<String> {
        self.chunks.outage()
    }

    fn fetch(&self, request: PageRequest) {
        let page = request.page();
        if page.0 >= self.pages {
            // `Answer::Late`: the page's memory is gone.
            let _ = request.fail(&format!(
                "{page} is beyond the guest's {} pages",
                self.pages
            ));
            return;
        }
        self.chunks.page(request, &self.outage);
    }
}
