//! The time from a request to its page: `cargo bench -p lacuna-source`.
//!
//! The bench requests pages from each source one by one, and then all at once. The file lies in the
//! page cache, and the peer is in this process, so the figures are about the sources and not about
//! a disk or a network.

#[path = "../tests/it/common/mod.rs"]
mod common;

use common::{Answers, page};
use lacuna_addr::PageCount;
use lacuna_source::{Measured, MemoryFile, PageRequest, PageSource, Peer, Policy, Zeros, serve};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Instant;

/// Pages requested one by one, and at once.
const ONE_BY_ONE: u64 = 4000;
const AT_ONCE: u64 = 32_000;
const PAGES: PageCount = PageCount::new(ONE_BY_ONE + AT_ONCE);

/// Provides pages that are not zeros, at once.
struct Numbers;

impl PageSource for Numbers {
    fn describe(&self) -> String {
        "numbers".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = request.provide(&page(request.page().0));
    }
}

fn measure(name: &str, source: impl PageSource) {
    let source = Measured::new(source);
    for number in 0..ONE_BY_ONE {
        Answers::fetch(&source, number).expect("the source has the page");
    }
    let stats = source.stats();
    let answers = Answers::new();
    let start = Instant::now();
    let pages = ONE_BY_ONE..PAGES.get();
    pages
        .clone()
        .for_each(|number| answers.ask(&source, number));
    pages.for_each(|number| _ = answers.of(number));
    let each = start.elapsed() / AT_ONCE as u32;
    let (p50, p99) = (stats.p50, stats.p99);
    println!("{name:<16} one by one: p50 {p50:?}, p99 {p99:?}; all at once: {each:?} a page");
}

fn main() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    for number in 0..PAGES.get() {
        let written = file.as_file().write_all_at(&page(number), number * 4096);
        written.expect("room for the file");
    }
    let opened = |file: Result<MemoryFile, _>| file.expect("the file was just made");
    let policy = Policy::default;
    measure("zeros", Zeros);
    measure(
        "file, io_uring",
        opened(MemoryFile::open(file.path(), PAGES, policy())),
    );
    let threads = MemoryFile::open_without_ring(file.path(), PAGES, policy());
    measure("file, threads", opened(threads));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("peer");
    let listener = UnixListener::bind(&path).expect("a socket");
    let _server = serve(listener, PAGES, Arc::new(Numbers)).expect("threads");
    measure(
        "peer",
        Peer::connect(&path, PAGES, policy()).expect("the server runs"),
    );
}
