//! Memory files: every page as in a plain model, and files that change or end.

use crate::common;

use common::{Answers, Bytes, PAGE, bytes_of, page};
use lacuna_addr::PageCount;
use lacuna_source::{
    Answer, Failure, FileError, Measured, MemoryFile, PageRequest, PageRequester, PageSource,
    Policy, SourcePage, Zeros,
};
use proptest::prelude::*;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::NamedTempFile;

/// Opens the file in each way, first with io_uring if this host has it.
fn each(path: &Path, pages: u64) -> [MemoryFile; 3] {
    let pages = PageCount::new(pages);
    let open = || MemoryFile::open(path, pages, Policy::default()).unwrap();
    let without = MemoryFile::open_without_ring(path, pages, Policy::default()).unwrap();
    assert!(!without.has_ring());
    [open(), without, open().answering_at_once()]
}

fn file(pages: u64) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    for number in 0..pages {
        let offset = number * PAGE as u64;
        file.as_file().write_all_at(&page(number), offset).unwrap();
    }
    file
}

#[derive(Clone, Debug)]
struct Write {
    offset: usize,
    bytes: Vec<u8>,
}

const PAGES: usize = 96;

fn writes() -> impl Strategy<Value = Vec<Write>> {
    let write = (0..PAGES * PAGE, prop::collection::vec(any::<u8>(), 1..9000));
    let write = write.prop_map(|(offset, bytes)| Write { offset, bytes });
    prop::collection::vec(write, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_page_is_that_of_the_file(
        writes in writes(),
        order in Just((0..PAGES as u64).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let sparse = NamedTempFile::new().unwrap();
        sparse.as_file().set_len((PAGES * PAGE) as u64).unwrap();
        let mut model = vec![0; PAGES * PAGE];
        for Write { offset, bytes } in writes {
            let length = bytes.len().min(model.len() - offset);
            model[offset..offset + length].copy_from_slice(&bytes[..length]);
            sparse.as_file().write_all_at(&bytes[..length], offset as u64).unwrap();
        }
        for source in each(sparse.path(), PAGES as u64) {
            let answers = Answers::new();
            order.iter().for_each(|&page| answers.ask(&source, page));
            for (number, content) in (0..).zip(model.as_chunks().0) {
                prop_assert_eq!(answers.of(number), Ok(Bytes::from(content)), "page {}", number);
            }
        }
    }
}

#[test]
fn a_file_that_is_truncated_loses_its_pages() {
    let file = file(8);
    for source in each(file.path(), 8) {
        assert_eq!(Answers::fetch(&source, 7), Ok(bytes_of(7)));
    }
    let sources = each(file.path(), 8);
    file.as_file().set_len(3 * PAGE as u64 + 100).unwrap();
    for source in sources {
        for number in [0, 3, 4, 7] {
            let lost = Answers::fetch(&source, number).unwrap_err();
            let reason = "the file was truncated: it had 32768 bytes";
            assert!(lost.starts_with(reason), "page {number}: {lost}");
        }
    }
}

#[test]
fn a_file_that_is_truncated_and_extended_provides_no_zeros() {
    let file = file(8);
    // An old time differs from the next modification's, whatever the clock's step.
    let old = std::time::SystemTime::UNIX_EPOCH;
    file.as_file().set_modified(old).unwrap();
    let sources = each(file.path(), 8);
    file.as_file().set_len(0).unwrap();
    file.as_file().set_len(8 * PAGE as u64).unwrap();
    for source in sources {
        let lost = Answers::fetch(&source, 5).unwrap_err();
        assert!(
            lost.contains("written to after the guest was started"),
            "{lost}"
        );
    }
}

#[test]
fn files_that_cannot_serve_the_guest_are_refused() {
    let refused = |path: &Path, pages| {
        let policy = Policy::default();
        let opened = MemoryFile::open(path, PageCount::new(pages), policy);
        opened.err().unwrap()
    };
    let short = file(3);
    let error = refused(short.path(), 4);
    assert!(matches!(
        error,
        FileError::TooShort {
            has: 3,
            needs: 4,
            ..
        }
    ));
    let expected = "has 3 pages of 4 KiB and the guest needs 4: give the guest less memory";
    assert!(error.to_string().contains(expected), "{error}");
    assert!(matches!(
        refused(Path::new("/tmp"), 1),
        FileError::NotAFile(_)
    ));
    let missing = refused(Path::new("/nonexistent/memory"), 1);
    let expected = "cannot open the memory file /nonexistent/memory: No such file";
    assert!(missing.to_string().starts_with(expected), "{missing}");
}

#[test]
fn a_page_beyond_the_guest_is_lost() {
    let file = file(4);
    for source in each(file.path(), 2) {
        let lost = Answers::fetch(&source, 2).unwrap_err();
        assert_eq!(lost, "page 2 is beyond the guest's 2 pages");
    }
}

#[test]
fn dropping_a_file_answers_everything() {
    let file = file(64);
    for source in each(file.path(), 64) {
        let answers = Answers::new();
        (0..64).for_each(|number| answers.ask(&source, number));
        drop(source);
        for number in 0..64 {
            match answers.of(number) {
                Ok(content) => assert_eq!(content, bytes_of(number)),
                Err(reason) => assert_eq!(reason, "it dropped the request"),
            }
        }
    }
}

#[test]
fn what_a_source_does_is_counted() {
    let file = file(8);
    for source in each(file.path(), 8).map(Measured::new) {
        let answers = Answers::new();
        (0..10).for_each(|number| answers.ask(&source, number));
        (0..10).for_each(|number| _ = answers.of(number));
        // The counter follows a moment after the requester has the page.
        let stats = loop {
            let stats = source.stats();
            if stats.in_flight == 0 {
                break stats;
            }
            std::thread::yield_now();
        };
        assert_eq!((stats.asked, stats.provided, stats.failed), (10, 8, 2));
        assert!(stats.p50 > std::time::Duration::ZERO && stats.p50 <= stats.p99);
        // A second request for the page: only the first answer counts.
        answers.ask(&source, 0);
        while source.stats().in_flight > 0 {
            std::thread::yield_now();
        }
        assert_eq!(source.stats().provided, 8);
    }
}

#[test]
fn zeros_are_provided_at_once() {
    let zeros = Measured::new(Zeros);
    let answers = Answers::new();
    answers.ask(&zeros, 1 << 40);
    assert_eq!(answers.count(), 1);
    assert_eq!(answers.of(1 << 40), Ok(Bytes::from(&[0; PAGE])));
    assert_eq!(
        (zeros.describe().as_str(), zeros.stats().provided),
        ("zeros", 1)
    );
}

/// Looks at the counters whenever it gets an answer.
struct Looks {
    source: Arc<Measured<Zeros>>,
    failed: AtomicU64,
    answered: AtomicBool,
}

impl PageRequester for Looks {
    fn answer(&self, _key: u64, _: Result<&[u8; PAGE], Failure<'_>>) -> Answer {
        let failed = self.source.stats().failed;
        self.failed.fetch_max(failed, Ordering::Relaxed);
        match self.answered.swap(true, Ordering::Relaxed) {
            false => Answer::Taken,
            true => Answer::Late,
        }
    }
}

/// The end of a request that was answered is no lost page, not even for a moment.
#[test]
fn a_page_that_was_provided_is_never_counted_as_lost() {
    let source = Arc::new(Measured::new(Zeros));
    let looks = Arc::new(Looks {
        source: Arc::clone(&source),
        failed: AtomicU64::new(0),
        answered: AtomicBool::new(false),
    });
    PageRequest::new(looks.clone(), 0, SourcePage(0)).send(&*source);
    assert_eq!(source.stats().provided, 1);
    assert_eq!(looks.failed.load(Ordering::Relaxed), 0);
}

/// Keeps all requests.
#[derive(Default)]
struct Keeps(Mutex<Vec<PageRequest>>);

impl PageSource for Keeps {
    fn describe(&self) -> String {
        "keeps".into()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.lock().unwrap().push(request);
    }
}

/// The end of a run ends the waits for pages, whatever the source does. These pages are not lost.
#[test]
fn the_end_of_a_run_ends_the_waits_for_pages() {
    let source = Measured::new(Keeps::default());
    let answers = Answers::new();
    answers.ask(&source, 1);
    source.end("the run has ended");
    answers.ask(&source, 2);
    for number in [1, 2] {
        assert_eq!(answers.of(number), Err("the run has ended".to_owned()));
    }
    assert_eq!((source.stats().asked, source.stats().failed), (2, 0));
}
