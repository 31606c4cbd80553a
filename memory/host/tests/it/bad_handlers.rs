//! Late or misbehaving handlers outside of the host.

use crate::common;

use common::FakeMmu;
use common::linux::{BLOCK, read};
use common::source::{TestSource, page_of, page_with};
use lacuna_addr::{BackingRange, Hva, HvaRange, Level, PageCount};
use lacuna_host::{Host, HostError, LinuxError, PageSource, SourcePage, Toucher};
use lacuna_skip::test;
use lacuna_source::{External, HandlerRegion, Policy, WhenGone};
use lacuna_sys::Errno;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

const PAGES: u64 = 16;

/// A host with addresses for two regions.
fn host() -> Arc<Host> {
    common::linux::host(2 * BLOCK)
}

/// Ends the test if threads cannot touch missing pages.
fn threads(policy: Policy) -> Arc<External> {
    let external = External::threads(&[], policy);
    if let Err(errno) = Toucher::check() {
        lacuna_skip::skip_test(errno);
    }
    match external {
        Ok(external) => Arc::new(external),
        Err(errno) => lacuna_skip::skip_test(errno),
    }
}

fn add(
    host: &Arc<Host>,
    source: Arc<dyn PageSource>,
    pages: u64,
) -> Result<BackingRange, HostError> {
    let mmu = FakeMmu::of(host);
    host.add_linux_region(Some((source, SourcePage(0))), PageCount::new(pages), mmu)
}

fn hva(host: &Host, range: BackingRange) -> Hva {
    host.addresses(range).unwrap().start()
}

/// A handler copies a page after its VM is gone. The page does not appear in the memory of the next
/// VM. The addresses are used again when nothing has the handler's descriptor.
#[test]
fn a_late_handler_does_not_fill_the_next_vm() {
    let (host, late) = (host(), threads(Policy::default()));
    let first = add(&host, Arc::clone(&late) as Arc<dyn PageSource>, PAGES).unwrap();
    let page = hva(&host, first);
    host.remove_region(first).unwrap();
    let source = TestSource::new();
    let next = add(&host, Arc::clone(&source) as Arc<dyn PageSource>, PAGES).unwrap();
    source.provides(next);
    let copied = late
        .userfaultfd_of(SourcePage(0))
        .copy(&page_with(77).0, page);
    let coming = host.fetch(next.start()).unwrap().unwrap();
    assert!(source.answer_one(0));
    host.wait(&coming).unwrap();
    let word = u64::from_le_bytes(*page_of(next.start()).0.first_chunk().unwrap());
    assert_eq!(read(&host, next.start()), Ok(word), "the other VM's page");
    assert_eq!(copied, Err(Errno::NOENT));
    host.remove_region(next).unwrap();
    let refused = add(&host, TestSource::new(), 2 * BLOCK)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("memory of 1 regions"), "{refused}");
    drop(late);
    let all = add(&host, TestSource::new(), 2 * BLOCK).unwrap();
    assert_eq!(hva(&host, all), page);
    host.verify();
}

/// A process keeps the addresses until it closes its connection, although the VMM has forgotten it.
#[test]
fn a_process_keeps_addresses_until_its_end() {
    drop(threads(Policy::default()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("handler");
    let listener = UnixListener::bind(&path).unwrap();
    let killed = Arc::new(AtomicUsize::new(0));
    let note = Arc::clone(&killed);
    let policy = Policy {
        when_gone: WhenGone::Kill(Arc::new(move |_| _ = note.fetch_add(1, Ordering::SeqCst))),
        ..Policy::default()
    };
    let host = host();
    let external = Arc::new(External::process(&path, policy).unwrap());
    let range = add(&host, Arc::clone(&external) as Arc<dyn PageSource>, PAGES).unwrap();
    let region = HandlerRegion {
        memory: host.addresses(range).unwrap(),
        first: SourcePage(0),
        page: Level::L4K,
    };
    external.begin(&[region]).unwrap();
    let (connection, _) = listener.accept().unwrap();
    host.remove_region(range).unwrap();
    external.finish();
    drop(external);
    assert!(add(&host, TestSource::new(), 2 * BLOCK).is_err());
    drop(connection);
    let all = loop {
        match add(&host, TestSource::new(), 2 * BLOCK) {
            Ok(range) => break range,
            Err(HostError::Linux(LinuxError::Room { .. })) => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    };
    host.remove_region(all).unwrap();
    assert_eq!(killed.load(Ordering::SeqCst), 0, "the VM was gone before");
}

/// The handler ends the registration of a page. The VMM's content for it cannot be put in place,
/// and is not silently replaced by zeros.
#[test]
fn a_handler_that_unregisters_a_page() {
    let (host, handler) = (host(), threads(Policy::default()));
    let range = add(&host, Arc::clone(&handler) as Arc<dyn PageSource>, PAGES).unwrap();
    let one = HvaRange::new(hva(&host, range), 1).unwrap();
    handler
        .userfaultfd_of(SourcePage(0))
        .unregister(one)
        .unwrap();
    let provided = host.provide(range.start(), &page_with(5).0);
    assert!(matches!(provided, Err(HostError::Lost(_))), "{provided:?}");
    host.verify();
}

/// A patience that no clock can measure is endless.
#[test]
fn a_patience_without_an_end() {
    let policy = Policy {
        patience: Duration::MAX,
        ..Policy::default()
    };
    let (host, handler) = (host(), threads(policy));
    let range = add(&host, Arc::clone(&handler) as Arc<dyn PageSource>, PAGES).unwrap();
    let uffd = handler.userfaultfd_of(SourcePage(0));
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&host, range.start()));
        let mut faults = Vec::new();
        while faults.is_empty() && !reader.is_finished() {
            uffd.faults(&mut faults).unwrap();
            thread::yield_now();
        }
        uffd.copy(&page_with(5).0, hva(&host, range)).unwrap();
        assert_eq!(reader.join().unwrap(), Ok(5));
    });
    host.verify();
}
