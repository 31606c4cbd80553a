//! The page source, with pages that Linux cannot move.

use super::*;
use crate::memory::{copy_in, copy_out};
use io_uring::IoUring;
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_swap::Swap;
use lacuna_sync::LatencySetting;
use std::sync::mpsc;

const PAGES: u64 = 4096;
/// A page that is on probation after all pages were touched in turn: 448 pages are mapped then, and
/// the 64 before them are in the store.
const ON_PROBATION: Page = PAGES as Page - 480;

/// A source whose oldest pages are swapped out, to a file. `None` if this host has no userfaultfd;
/// the skip is recorded then.
fn source() -> Option<(Source, Arc<Memory>, Arc<VcpuKicks>)> {
    let uffd = match Source::open(Tracker::Kvm) {
        Ok(uffd) => uffd,
        Err((what, errno)) => {
            lacuna_skip::skip(format!("userfaultfd: {what}: {errno}"));
            return None;
        }
    };
    let memory = Arc::new(Memory::new(PageCount::new(PAGES)).unwrap());
    let kicks = Arc::new(VcpuKicks::new(1));
    let config = SourceConfig {
        resident: PageCount::new(Pages::BUDGET_MIN as u64),
        swap: Swap::File(std::env::temp_dir()),
        latency: LatencySetting::default(),
        first_touch: FirstTouch::Immediate,
        from: None,
    };
    let slots = Arc::new(SlotTable::new());
    let source = Source::start(
        uffd,
        Arc::clone(&memory),
        &slots,
        config.clone(),
        config.swap.open(PageCount::new(PAGES)).unwrap(),
        Arc::clone(&kicks),
    );
    let source = source.unwrap();
    for page in 0..PAGES as u32 {
        write(&memory, page, u64::from(page) + 1);
    }
    Some((source, memory, kicks))
}

fn write(memory: &Memory, page: Page, word: u64) {
    // SAFETY: 1. the page is in the guest's mapping.
    unsafe { copy_in(memory.guest.page(page), &word.to_ne_bytes()) };
}

fn read(memory: &Memory, page: Page) -> u64 {
    let mut word = [0; 8];
    // SAFETY: 1. the page is in the guest's mapping.
    unsafe { copy_out(memory.guest.page(page), &mut word) };
    u64::from_ne_bytes(word)
}

/// Pins the store's copy of `page`, as a reading device does. Linux does not move a pinned page.
fn pin(memory: &Memory, page: Page) -> Option<IoUring> {
    let ring = match IoUring::new(1) {
        Ok(ring) => ring,
        Err(error) => {
            lacuna_skip::skip(format!("io_uring: {error}"));
            return None;
        }
    };
    let pinned = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(memory.store.page(page).get() as usize),
        iov_len: PAGE_SIZE,
    };
    // SAFETY: 1. the mapping outlives the ring, which never uses the buffer.
    unsafe { ring.submitter().register_buffers(&[pinned]) }.unwrap();
    Some(ring)
}

/// The source retries a page that it cannot move, and other pages arrive meanwhile.
#[test]
fn a_busy_page_is_retried() {
    let Some((source, memory, _kicks)) = source() else {
        return;
    };
    let Some(ring) = pin(&memory, ON_PROBATION) else {
        return;
    };
    let (sender, receiver) = mpsc::channel();
    let reader = Arc::clone(&memory);
    let waits = thread::spawn(move || sender.send(read(&reader, ON_PROBATION)).unwrap());
    // A source with a limit on its retries would give up within this time.
    thread::sleep(Duration::from_millis(2500));
    assert_eq!(source.failure(), None);
    assert_eq!(read(&memory, 1), 2, "other pages arrive meanwhile");
    assert!(
        receiver.try_recv().is_err(),
        "the pinned page cannot have arrived"
    );
    ring.submitter().unregister_buffers().unwrap();
    let word = u64::from(ON_PROBATION) + 1;
    assert_eq!(receiver.recv().unwrap(), word);
    waits.join().unwrap();
    assert_eq!(read(&memory, ON_PROBATION), word);
    assert_eq!(source.failure(), None);
}

/// The end of a VM does not wait for a page that cannot arrive.
#[test]
fn a_busy_page_does_not_delay_the_end() {
    let Some((source, memory, kicks)) = source() else {
        return;
    };
    let Some(ring) = pin(&memory, ON_PROBATION) else {
        return;
    };
    let reader = Arc::clone(&memory);
    let waits = thread::spawn(move || read(&reader, ON_PROBATION));
    while source.stats().faults <= PAGES {
        thread::yield_now();
    }
    kicks.stop();
    source.wake();
    waits.join().unwrap();
    drop((source, ring));
}
