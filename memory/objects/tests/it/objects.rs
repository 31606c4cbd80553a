//! Objects that are read in ranges and as pages, from failing stores.

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_objects::object_store::local::LocalFileSystem;
use lacuna_objects::object_store::memory::InMemory;
use lacuna_objects::object_store::path::Path as ObjectPath;
use lacuna_objects::object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};
use lacuna_objects::{Objects, ObjectsError, Options};
use lacuna_source::{
    Answer, Failure, Folder as _, PageRequest, PageRequester, PageSource, Policy, SourcePage,
    StoredFile, WhenGone,
};
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A store that fails while its count of failures is not zero, does not answer while the test has
/// silenced it, and counts its requests.
#[derive(Debug, Default)]
struct Faulty {
    inner: InMemory,
    failures: AtomicU64,
    /// The number of `head` requests that will fail.
    head_failures: AtomicU64,
    gets: AtomicU64,
    is_silent: AtomicBool,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn get_opts(&self, at: &ObjectPath, options: GetOptions) -> Result<GetResult> {
        if options.head {
            let one_less = |left: u64| left.checked_sub(1);
            let heads = &self.head_failures;
            let fails = heads.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
            if fails.is_ok() {
                let (store, source) = ("faulty", "the network is down".into());
                return Err(Error::Generic { store, source });
            }
        } else {
            self.gets.fetch_add(1, Ordering::SeqCst);
            if self.is_silent.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            let one_less = |left: u64| left.checked_sub(1);
            let fails = self
                .failures
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
            if fails.is_ok() {
                let (store, source) = ("faulty", "the network is down".into());
                return Err(Error::Generic { store, source });
            }
        }
        self.inner.get_opts(at, options).await
    }

    async fn put_opts(
        &self,
        at: &ObjectPath,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.inner.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        at: &ObjectPath,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(at, options).await
    }

    fn delete_stream(
        &self,
        all: BoxStream<'static, Result<ObjectPath>>,
    ) -> BoxStream<'static, Result<ObjectPath>> {
        self.inner.delete_stream(all)
    }

    fn list(&self, prefix: Option<&ObjectPath>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&ObjectPath>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &ObjectPath,
        to: &ObjectPath,
        options: CopyOptions,
    ) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

const OPTIONS: Options = Options {
    chunk: 4 * PAGE_SIZE,
    cache: 16 * PAGE_SIZE,
    parallel: 3,
    patience: Duration::from_secs(60),
};
const PAGES: u64 = 50;

/// The byte at `at` of the object.
fn byte(at: u64) -> u8 {
    (at / 7 + at / 4096) as u8
}

fn put(store: &Faulty, bytes: u64) {
    let content: Vec<u8> = (0..bytes).map(byte).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let at = ObjectPath::from("a/b/memory");
    let put = store.put(&at, content.into());
    runtime
        .expect("a runtime")
        .block_on(put)
        .expect("an object");
}

/// A store with one object of [`PAGES`] pages, opened.
fn opened(options: Options) -> (Arc<Faulty>, Box<dyn StoredFile>) {
    let store = Arc::new(Faulty::default());
    put(&store, PAGES * PAGE_SIZE as u64);
    let folder = Objects::new(Arc::clone(&store) as _, "a/b", options).expect("a folder");
    let file = folder.open("memory").expect("an object");
    (store, file)
}

type Got = (u64, std::result::Result<Vec<u8>, String>);

/// Sends the first answer for each page to the test.
struct Keep(Mutex<(Sender<Got>, HashSet<u64>)>);

impl PageRequester for Keep {
    fn answer(
        &self,
        key: u64,
        content: std::result::Result<&[u8; PAGE_SIZE], Failure<'_>>,
    ) -> Answer {
        let content = content.map(|page| page.to_vec());
        let content = content.map_err(|failure| failure.to_string());
        let mut kept = self.0.lock().expect("no panic");
        if !kept.1.insert(key) {
            return Answer::Late;
        }
        // An answer may arrive after the end of the test.
        let sent = kept.0.send((key, content));
        sent.map_or(Answer::Late, |()| Answer::Taken)
    }
}

fn ask(source: &dyn PageSource, pages: impl Iterator<Item = u64>) -> Receiver<Got> {
    let (sender, answers) = channel();
    let keep: Arc<dyn PageRequester> = Arc::new(Keep(Mutex::new((sender, HashSet::new()))));
    for page in pages {
        source.fetch(PageRequest::new(Arc::clone(&keep), page, SourcePage(page)));
    }
    answers
}

fn answers(receiver: &Receiver<Got>, count: usize) -> Vec<Got> {
    (0..count)
        .map(|_| receiver.recv().expect("an answer"))
        .collect()
}

#[test]
fn ranges_anywhere() {
    let (_, file) = opened(OPTIONS);
    assert_eq!(file.length(), PAGES * PAGE_SIZE as u64);
    for (offset, length) in [
        (0, 1),
        (0, 204_800),
        (16_383, 2),
        (204_799, 1),
        (5000, 60_000),
    ] {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, offset)
            .expect("in the object");
        assert!(
            (offset..).zip(&bytes).all(|(at, found)| *found == byte(at)),
            "{offset}"
        );
    }
    for offset in [204_800, u64::MAX] {
        let error = file.read_exact_at(&mut [0], offset).expect_err("beyond");
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    }
}

#[test]
fn pages_come_by_chunks_which_are_kept() {
    let (store, file) = opened(OPTIONS);
    let source = file
        .page_source(PageCount::new(PAGES), Policy::default())
        .expect("pages");
    let got = ask(&*source, (0..PAGES).rev());
    for (page, content) in answers(&got, PAGES as usize) {
        let start = page * PAGE_SIZE as u64;
        let content = content.expect("a page");
        assert!(
            (start..)
                .zip(&content)
                .all(|(at, found)| *found == byte(at)),
            "{page}"
        );
    }
    // Pages of one chunk share its request. An evicted chunk is requested again.
    let gets = store.gets.load(Ordering::SeqCst);
    assert!((13..=PAGES).contains(&gets), "{gets}");
    let got = ask(&*source, [PAGES].into_iter());
    let (_, content) = got.recv().expect("an answer");
    assert!(
        content
            .expect_err("no page")
            .contains("beyond the guest's 50 pages")
    );
    let many = file.page_source(PageCount::new(PAGES + 1), Policy::default());
    let error = many.expect_err("too short").to_string();
    assert!(error.contains("has 50 pages"), "{error}");
}

#[test]
fn a_store_that_comes_back() {
    let (store, file) = opened(OPTIONS);
    store.failures.store(5, Ordering::SeqCst);
    let policy = Policy {
        patience: Duration::ZERO,
        when_gone: WhenGone::Hold,
    };
    let source = file
        .page_source(PageCount::new(PAGES), policy)
        .expect("pages");
    let got = ask(&*source, 0..PAGES);
    let all = answers(&got, PAGES as usize);
    assert!(all.iter().all(|(_, content)| content.is_ok()));
    store.failures.store(3, Ordering::SeqCst);
    let mut bytes = vec![0; 40 * PAGE_SIZE];
    file.read_exact_at(&mut bytes, 0)
        .expect("the store comes back");
}

#[test]
fn a_store_that_dies() {
    let (store, file) = opened(Options {
        patience: Duration::from_millis(5),
        ..OPTIONS
    });
    let policy = Policy {
        patience: Duration::from_millis(5),
        when_gone: WhenGone::Poison,
    };
    let source = file
        .page_source(PageCount::new(PAGES), policy)
        .expect("pages");
    answers(&ask(&*source, 0..1), 1);
    store.failures.store(u64::MAX, Ordering::SeqCst);
    let lost = answers(&ask(&*source, 20..30), 10);
    // Each error names the bytes and the object: the page's chunk of four pages.
    let told = |page: u64| {
        let start = page / 4 * 4 * PAGE_SIZE as u64;
        let end = (start + 4 * PAGE_SIZE as u64).min(PAGES * PAGE_SIZE as u64) - 1;
        format!("bytes {start} to {end} of faulty/a/b/memory: ")
    };
    for (page, content) in lost {
        let error = content.expect_err("lost");
        assert!(error.starts_with(&told(page)), "{error}");
        assert!(error.ends_with("the network is down"), "{error}");
    }
    let mut bytes = [0; PAGE_SIZE];
    let error = file.read_exact_at(&mut bytes, 48 * PAGE_SIZE as u64);
    let error = error.expect_err("lost").to_string();
    assert!(error.starts_with(&told(48)), "{error}");
    assert!(error.ends_with("the network is down"), "{error}");
    // Cached chunks are provided.
    let (_, content) = answers(&ask(&*source, 0..1), 1).remove(0);
    content.expect("a page");
}

/// A try without an answer ends, and another follows. The page request waits, without an error. A
/// reading thread gets an error, which names the silent store.
#[test]
fn a_store_that_does_not_answer() {
    let (store, file) = opened(Options {
        patience: Duration::from_millis(5),
        ..OPTIONS
    });
    store.is_silent.store(true, Ordering::SeqCst);
    let policy = Policy {
        patience: Duration::ZERO,
        when_gone: WhenGone::Hold,
    };
    let source = file
        .page_source(PageCount::new(PAGES), policy)
        .expect("pages");
    let got = ask(&*source, [7].into_iter());
    let error = file.read_exact_at(&mut [0], 40 * PAGE_SIZE as u64);
    let error = error.expect_err("no answer").to_string();
    let told = "bytes 163840 to 180223 of faulty/a/b/memory: no answer within 5ms";
    assert_eq!(error, told);
    while store.gets.load(Ordering::SeqCst) < 4 {
        std::thread::yield_now();
    }
    assert!(got.try_recv().is_err(), "the request waits");
    store.is_silent.store(false, Ordering::SeqCst);
    let (page, content) = got.recv().expect("an answer");
    let content = content.expect("the store has come back");
    assert_eq!((page, content[0]), (7, byte(7 * PAGE_SIZE as u64)));
}

#[test]
fn an_object_that_is_replaced() {
    let (store, file) = opened(OPTIONS);
    put(&store, 1000);
    let error = file
        .read_exact_at(&mut [0; 10], 0)
        .expect_err("another object");
    let error = error.to_string();
    assert!(error.contains("was replaced"), "{error}");
    assert!(
        error.starts_with("bytes 0 to 16383 of faulty/a/b/memory: "),
        "{error}"
    );
}

/// Unanswered requests fail when the source and the folder are dropped.
#[test]
fn the_end_of_a_folder_answers_all_requests() {
    let (store, file) = opened(OPTIONS);
    store.failures.store(u64::MAX, Ordering::SeqCst);
    let policy = Policy {
        when_gone: WhenGone::Hold,
        ..Policy::default()
    };
    let source = file
        .page_source(PageCount::new(PAGES), policy)
        .expect("pages");
    let got = ask(&*source, 0..1);
    drop((source, file));
    let (_, content) = got.recv().expect("an answer");
    assert!(content.is_err());
}

#[test]
fn urls() {
    let open = |url: &str| Objects::open(url, OPTIONS);
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("saved")).expect("a folder");
    std::fs::write(folder.path().join("saved/pages"), b"12345").expect("a file");
    let url = format!("file://{}/other/", folder.path().display());
    let other = open(&url).expect("a place");
    assert_eq!(other.path().to_str(), url.strip_suffix('/'));
    let error = other.open("pages").err().expect("no file");
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    let file = other
        .beside("saved")
        .expect("a place")
        .open("pages")
        .expect("a file");
    let mut bytes = [0; 3];
    file.read_exact_at(&mut bytes, 2).expect("in the file");
    assert_eq!((file.length(), &bytes), (5, b"345"));
    for (url, told) in [
        ("no url", "relative URL"),
        ("gs://bucket/x", "no such store is supported"),
        ("http://host/x", "no such store is supported"),
        #[cfg(not(feature = "s3"))]
        ("s3://bucket/x", "cargo build --release --features s3"),
        ("nothing:///x", "nothing:///x"),
    ] {
        let error = open(url).err().expect("no store").to_string();
        assert!(error.contains(told), "{error}");
    }
    let chunk = Options {
        chunk: 5000,
        ..OPTIONS
    };
    let error = Objects::open("file:///x", chunk).err().expect("no pages");
    assert!(matches!(error, ObjectsError::Chunk(5000)), "{error}");
}

/// No character of a name is percent-encoded, in the prefix or after it.
#[test]
fn names_are_taken_as_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = "web~1 #[50%] {a}*? \u{e4}";
    std::fs::create_dir(folder.path().join(name)).expect("a folder");
    std::fs::write(folder.path().join(name).join("pages"), b"12345").expect("a file");
    let url = format!("file://{}/other", folder.path().display());
    let other = Objects::open(&url, OPTIONS).expect("a place");
    let base = other.beside(name).expect("a place");
    assert_eq!(base.open("pages").expect("a file").length(), 5);
    let store = LocalFileSystem::new_with_prefix(folder.path()).expect("a store");
    let store: Arc<dyn ObjectStore> = Arc::new(store);
    let whole = Objects::new(Arc::clone(&store), name, OPTIONS).expect("a place");
    assert_eq!(whole.open("pages").expect("a file").length(), 5);
    for name in ["..", "a/b", "a\nb"] {
        let error = other.beside(name).err().expect("no name");
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}");
    }
    let error = Objects::new(store, "a/../b", OPTIONS).err();
    let error = error.expect("no prefix");
    assert!(matches!(error, ObjectsError::Prefix { .. }), "{error}");
}

/// A task of another runtime opens an object and reads it.
#[test]
fn a_task_of_another_runtime() {
    let store = Arc::new(Faulty::default());
    put(&store, PAGES * PAGE_SIZE as u64);
    let folder = Objects::new(store, "a/b", OPTIONS).expect("a folder");
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("a runtime").block_on(async {
        let file = folder.open("memory").expect("an object");
        let mut bytes = [0; 1];
        file.read_exact_at(&mut bytes, 5000).expect("in the object");
        assert_eq!(bytes[0], byte(5000));
    });
}

/// Opening waits until the store is back, but does not wait for an object that does not exist.
#[test]
fn a_store_that_is_away_when_an_object_is_opened() {
    let (store, _) = opened(OPTIONS);
    let open = |name: &str, patience| {
        let options = Options {
            patience,
            ..OPTIONS
        };
        let folder = Objects::new(Arc::clone(&store) as _, "a/b", options).expect("a folder");
        folder.open(name)
    };
    store.head_failures.store(4, Ordering::SeqCst);
    open("memory", Duration::MAX).expect("the store comes back");
    let error = open("nothing", Duration::MAX).err().expect("no object");
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    store.head_failures.store(u64::MAX, Ordering::SeqCst);
    let error = open("memory", Duration::from_millis(5)).err();
    let error = error.expect("it stays away").to_string();
    assert!(error.contains("the store has failed for"), "{error}");
    assert!(error.ends_with("the network is down"), "{error}");
}

/// Threads that wait for a store give up when they are interrupted, whatever their patience.
#[test]
fn a_thread_that_waits_is_interrupted() {
    let store = Arc::new(Faulty::default());
    put(&store, PAGES * PAGE_SIZE as u64);
    let options = Options {
        patience: Duration::MAX,
        ..OPTIONS
    };
    let flag = Arc::new(AtomicBool::new(false));
    let folder = Objects::new(Arc::clone(&store) as _, "a/b", options).expect("a folder");
    let folder = folder.interrupted_by(&flag);
    let file = folder.open("memory").expect("an object");
    store.is_silent.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| file.read_exact_at(&mut [0], 0));
        while store.gets.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        flag.store(true, Ordering::SeqCst);
        let error = reads.join().expect("no panic").expect_err("no bytes");
        assert_eq!(error.kind(), std::io::ErrorKind::Interrupted);
    });
    store.head_failures.store(u64::MAX, Ordering::SeqCst);
    let error = folder.open("memory").err().expect("no object");
    assert!(
        [std::io::ErrorKind::Interrupted, std::io::ErrorKind::Other].contains(&error.kind()),
        "{error}"
    );
}

/// A source reports why it provides no page, until it provides one.
#[test]
fn a_source_says_why_it_is_out() {
    let (store, file) = opened(OPTIONS);
    let policy = Policy {
        when_gone: WhenGone::Hold,
        ..Policy::default()
    };
    let source = file.page_source(PageCount::new(PAGES), policy);
    let source = source.expect("pages");
    assert_eq!(source.outage(), None);
    store.failures.store(u64::MAX, Ordering::SeqCst);
    let got = ask(&*source, 0..1);
    let reason = loop {
        if let Some(reason) = source.outage() {
            break reason;
        }
        std::thread::yield_now();
    };
    assert!(reason.ends_with("the network is down"), "{reason}");
    store.failures.store(0, Ordering::SeqCst);
    answers(&got, 1)
        .remove(0)
        .1
        .expect("the store has come back");
    assert_eq!(source.outage(), None);
}

/// A file becomes an object, in one request or in parts. A later object replaces it.
#[test]
fn objects_are_made_of_files() {
    let store = Arc::new(lacuna_objects::object_store::memory::InMemory::new());
    let folder = Objects::new(store, "a", OPTIONS).expect("a folder");
    for length in [3 * PAGE_SIZE + 5, 20 << 20, 0] {
        let content: Vec<u8> = (0..length as u64).map(byte).collect();
        let mut file = tempfile::tempfile().expect("a file");
        std::io::Write::write_all(&mut file, &content).expect("a file");
        folder.put("memory", &file).expect("an object");
        let object = folder.open("memory").expect("an object");
        let mut found = vec![0; length];
        object.read_exact_at(&mut found, 0).expect("its bytes");
        assert!(found == content, "{length}");
    }
    folder.remove("memory").expect("it is removed");
    folder.remove("memory").expect("it is not there");
    let error = folder.open("memory").err().expect("no object");
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
}
