//! The kernel behaves as this crate expects: pages are supplied, moved and waited for, and writes
//! are recorded.

use lacuna_addr::{Access, Hva, HvaRange, PAGE_SIZE};
use lacuna_sys::{
    EVENT_BYTES, Errno, Fault, MissingArea, Pagemap, Partial, Userfaultfd, Waiters, Written,
};
use rustix::fs::OFlags;
use rustix::io::{ReadWriteFlags, preadv2};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use rustix::thread::gettid;
use std::io::IoSliceMut;
use std::os::fd::{AsFd as _, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// Another process can clear the flag `O_NONBLOCK` of a descriptor at any time.
#[test]
fn events_do_not_wait_without_the_flag() {
    let Some(uffd) = or_skip(Userfaultfd::open_user_with_removals()) else {
        return;
    };
    rustix::fs::fcntl_setfl(uffd.as_fd(), OFlags::empty()).unwrap();
    let mut no_bytes = [0; 32];
    let buffers = &mut [IoSliceMut::new(&mut no_bytes)];
    let read = preadv2(&uffd, buffers, u64::MAX, ReadWriteFlags::NOWAIT);
    if read == Err(Errno::OPNOTSUPP) {
        return lacuna_skip::skip("before Linux 6.10");
    }
    let (done, is_done) = channel();
    thread::spawn(move || {
        let (buffer, mut events) = (event_buffer(), Vec::new());
        let read = uffd.events(&buffer, &mut events);
        done.send((read, events.len())).unwrap();
    });
    let read = is_done.recv_timeout(Duration::from_secs(20));
    assert_eq!(read, Ok((Ok(()), 0)));
}

pub fn event_buffer() -> [AtomicU8; EVENT_BYTES] {
    [const { AtomicU8::new(0) }; EVENT_BYTES]
}

fn open() -> Option<Userfaultfd> {
    or_skip(Userfaultfd::open())
}

fn open_tracking() -> Option<Userfaultfd> {
    or_skip(Userfaultfd::open_tracking())
}

/// Returns the descriptor or its memory. If there is none, records the test as skipped.
fn or_skip<T>(uffd: Result<T, Errno>) -> Option<T> {
    match uffd {
        Ok(uffd) => Some(uffd),
        Err(Errno::PERM | Errno::NOSYS) => {
            lacuna_skip::skip("no userfaultfd, or no permission");
            None
        }
        Err(errno) => panic!("{errno}"),
    }
}

/// Four untouched pages, registered. They stay mapped: a test may leave threads behind.
fn register(uffd: &Userfaultfd) -> impl Fn(u64) -> Hva + use<> {
    let range = map();
    // SAFETY: 1. the mapping stays for ever and is accessed only by atomics.
    unsafe { uffd.register(range) }.unwrap();
    pages_of(range)
}

fn pages_of(range: HvaRange) -> impl Fn(u64) -> Hva + use<> {
    move |index| Hva::new(range.start().get() + index * PAGE_SIZE as u64)
}

/// Four untouched pages.
fn map() -> HvaRange {
    let bytes = 4 * PAGE_SIZE;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: 1. a new mapping at an address of the kernel's choice.
    let base = unsafe { mmap_anonymous(ptr::null_mut(), bytes, prot, MapFlags::PRIVATE) }.unwrap();
    // SAFETY: 1. the advice keeps the content of the mapping just made.
    unsafe { madvise(base, bytes, Advice::LinuxNoHugepage) }.unwrap();
    let start = base.expose_provenance() as u64;
    HvaRange::new(Hva::new(start), 4).unwrap()
}

fn word(page: Hva) -> &'static AtomicU64 {
    let pointer = ptr::with_exposed_provenance_mut(page.get() as usize);
    // SAFETY: 1. `register` gave the address of a page that stays mapped.
    unsafe { AtomicU64::from_ptr(pointer) }
}

#[test]
fn only_a_userfaultfd_is_taken_for_one() {
    let file = std::fs::File::open("/dev/null").unwrap();
    let refused = Userfaultfd::try_from(OwnedFd::from(file));
    assert_eq!(refused.unwrap_err(), Errno::INVAL);
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let refused = Userfaultfd::try_from(OwnedFd::from(socket));
    assert_eq!(refused.unwrap_err(), Errno::INVAL);
    let Some(uffd) = open() else { return };
    let copy = uffd.as_fd().try_clone_to_owned().unwrap();
    assert!(Userfaultfd::try_from(copy).is_ok());
}

#[test]
fn pages_are_supplied_once_and_moved_whole() {
    let Some(uffd) = open() else { return };
    let page = register(&uffd);
    uffd.copy(&[7; PAGE_SIZE], page(0)).unwrap();
    assert_eq!(word(page(0)).load(Ordering::Relaxed), 0x0707_0707_0707_0707);
    assert_eq!(uffd.copy(&[8; PAGE_SIZE], page(0)), Err(Errno::EXIST));
    // SAFETY: 1. both pages are registered.
    let shift = |from, to| unsafe { uffd.shift(page(from), page(to)) };
    assert_eq!(shift(0, 1), Ok(()));
    assert_eq!(word(page(1)).load(Ordering::Relaxed), 0x0707_0707_0707_0707);
    assert_eq!(shift(0, 2), Err(Errno::NOENT));
    uffd.copy(&[9; PAGE_SIZE], page(2)).unwrap();
    assert_eq!(shift(1, 2), Err(Errno::EXIST));
    let mut faults = Vec::new();
    uffd.faults(&mut faults).unwrap();
    assert_eq!(faults, [], "no missing page was touched");
}

#[test]
fn a_thread_that_touches_a_missing_page_waits_and_is_reported() {
    let Some(uffd) = open() else { return };
    let page = register(&uffd);
    uffd.copy(&[5; PAGE_SIZE], page(0)).unwrap();
    // SAFETY: 1. both pages are registered.
    unsafe { uffd.shift(page(0), page(1)) }.unwrap();
    let (first, (sender, receiver)) = (page(0), channel());
    let reader = thread::spawn(move || {
        sender.send(gettid().as_raw_nonzero().get() as u32).unwrap();
        word(first).load(Ordering::Relaxed)
    });
    let mut faults = Vec::new();
    while faults.is_empty() {
        uffd.faults(&mut faults).unwrap();
        thread::yield_now();
    }
    let expected = Fault {
        page: first,
        access: Access::Read,
        thread: receiver.recv().unwrap(),
    };
    assert_eq!(faults, [expected]);
    // A thread woken without a page faults again.
    uffd.wake(faults[0].page).unwrap();
    faults.clear();
    while faults.is_empty() {
        uffd.faults(&mut faults).unwrap();
        thread::yield_now();
    }
    let from = Hva::new(faults[0].page.get() + PAGE_SIZE as u64);
    // SAFETY: 1. both pages are registered.
    unsafe { uffd.shift(from, faults[0].page) }.unwrap();
    assert_eq!(reader.join().unwrap(), 0x0505_0505_0505_0505);
}

/// A page moves from plain memory into place and back, with its new content. In plain memory a page
/// that has left reads as zeros, and then no page can be moved there until the zeros are dropped.
#[test]
fn a_page_moves_between_plain_memory_and_its_place() {
    let Some(uffd) = open() else { return };
    let (place, plain) = (register(&uffd), map());
    // SAFETY: 1. the mapping stays for ever and is accessed only by atomics.
    unsafe { uffd.register_for_moves(plain) }.unwrap();
    let frame = pages_of(plain);
    word(frame(0)).store(5, Ordering::Relaxed);
    // SAFETY: 1. all pages are registered.
    let shift = |from, to| unsafe { uffd.shift(from, to) };
    assert_eq!(shift(frame(0), place(2)), Ok(()));
    assert_eq!(word(place(2)).swap(6, Ordering::Relaxed), 5);
    assert_eq!(shift(place(2), frame(0)), Ok(()));
    assert_eq!(word(frame(0)).load(Ordering::Relaxed), 6);
    assert_eq!(shift(frame(0), place(2)), Ok(()));
    assert_eq!(word(frame(0)).load(Ordering::Relaxed), 0);
    assert_eq!(shift(place(2), frame(0)), Err(Errno::EXIST));
    let stale = ptr::with_exposed_provenance_mut(frame(0).get() as usize);
    // SAFETY: 1. the page is in the mapping, whose bytes are accessed by atomics alone.
    unsafe { madvise(stale, PAGE_SIZE, Advice::LinuxDontNeed) }.unwrap();
    assert_eq!(shift(place(2), frame(0)), Ok(()));
    assert_eq!(word(frame(0)).load(Ordering::Relaxed), 6);
}

/// After a split of a huge page, its pages of zeros are the kernel's one. The move of such a page
/// over another one fails, and is not taken for the bug of Linux.
#[test]
fn a_page_of_zeros_is_not_lost() {
    let Some(uffd) = open() else { return };
    let (here, plain) = (pages_of(map()), map());
    // SAFETY: 1. both mappings stay for ever and are accessed only by atomics.
    unsafe {
        uffd.register_for_moves(HvaRange::new(here(0), 4).unwrap())
            .unwrap();
        uffd.register_for_moves(plain).unwrap();
    }
    let frame = pages_of(plain);
    let touch = |page| word(page).load(Ordering::Relaxed);
    assert_eq!((touch(here(0)), touch(frame(0))), (0, 0));
    // SAFETY: 1. all pages are registered.
    let shift = |to| unsafe { uffd.shift(here(0), to) };
    assert_eq!(shift(frame(0)), Err(Errno::EXIST));
    assert_eq!(shift(frame(1)), Ok(()));
    assert_eq!(shift(frame(2)), Err(Errno::NOENT));
}

/// A run of pages moves until its first page that cannot.
#[test]
fn a_run_of_pages_moves_together() {
    let Some(uffd) = open() else { return };
    let (place, plain) = (register(&uffd), map());
    // SAFETY: 1. the mapping stays for ever and is accessed only by atomics.
    unsafe { uffd.register_for_moves(plain) }.unwrap();
    let frame = pages_of(plain);
    (0..3).for_each(|page| word(frame(page)).store(page + 5, Ordering::Relaxed));
    // SAFETY: 1. all pages are registered.
    let moved = unsafe { uffd.shift_run(frame(0), place(0), 4) };
    let errno = Errno::NOENT;
    assert_eq!(moved, Err(Partial { done: 3, errno }));
    let arrived = [0, 1, 2].map(|page| word(place(page)).load(Ordering::Relaxed));
    assert_eq!(arrived, [5, 6, 7]);
}

/// A page goes to and fro while a thread writes to it. The processor changes the page's entry
/// during moves, after which Linux 6.18 reports some successful moves as failed.
#[test]
fn a_page_moves_while_it_is_written() {
    let Some(uffd) = open() else { return };
    let (page, plain) = (register(&uffd), map());
    // SAFETY: 1. the mapping stays for ever and is accessed only by atomics.
    unsafe { uffd.register_for_moves(plain) }.unwrap();
    let (here, away) = (page(0), pages_of(plain)(0));
    uffd.copy(&[0; PAGE_SIZE], here).unwrap();
    let writes = AtomicU64::new(1);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut count = 0;
            while writes.load(Ordering::Relaxed) != 0 {
                count = word(here).fetch_add(1, Ordering::Relaxed) + 1;
            }
            count
        });
        for _ in 0..100_000 {
            // From now on the next write changes the entry.
            let old = ptr::with_exposed_provenance_mut(here.get() as usize);
            // SAFETY: 1. the advice keeps the content of a page of the mapping.
            unsafe { madvise(old, PAGE_SIZE, Advice::LinuxCold) }.unwrap();
            // SAFETY: 1. both pages are registered.
            let moved = unsafe { uffd.shift(here, away).and_then(|()| uffd.shift(away, here)) };
            if moved.is_err() {
                // Wakes the writer, so that the test ends.
                writes.store(0, Ordering::Relaxed);
                uffd.unregister(HvaRange::new(here, 4).unwrap()).unwrap();
            }
            assert_eq!(moved, Ok(()));
        }
        writes.store(0, Ordering::Relaxed);
        let count = writer.join().unwrap();
        assert_eq!(word(here).load(Ordering::Relaxed), count);
    });
}

/// Memory without missing pages: its first touch is not recorded as late, and writes are.
#[test]
fn the_kernel_records_writes_to_memory_without_missing_pages() {
    let Some(uffd) = or_skip(Userfaultfd::open_recording()) else {
        return;
    };
    let page = register(&uffd);
    let range = HvaRange::new(page(0), 4).unwrap();
    let pagemap = Pagemap::open().unwrap();
    let count = |then| {
        let mut pages = 0;
        let scanned = pagemap.written(range, then, |run| pages += run.pages());
        scanned.map(|()| pages)
    };
    assert_eq!(pagemap.present(range), Ok(0));
    for index in [0, 2] {
        word(page(index)).store(1, Ordering::Relaxed);
    }
    assert_eq!(pagemap.present(range), Ok(2));
    assert_eq!(count(Written::Protect), Ok(2));
    assert_eq!(count(Written::Keep), Ok(0));
    word(page(2)).store(2, Ordering::Relaxed);
    assert_eq!(count(Written::Keep), Ok(1));
}

#[test]
fn the_kernel_records_which_pages_are_written() {
    let Some(uffd) = open_tracking() else { return };
    let page = register(&uffd);
    let range = HvaRange::new(page(0), 4).unwrap();
    let pagemap = Pagemap::open().unwrap();
    let written = |then| {
        let mut pages = Vec::new();
        let note = |run: HvaRange| {
            let first = (run.start().get() - page(0).get()) / PAGE_SIZE as u64;
            pages.extend(first..first + run.pages());
        };
        pagemap.written(range, then, note).unwrap();
        pages
    };
    assert_eq!(written(Written::Protect), [], "there is nothing");
    for index in [0, 1, 3] {
        uffd.copy(&[index as u8; PAGE_SIZE], page(index)).unwrap();
    }
    assert_eq!(written(Written::Keep), [0, 1, 3], "what comes is written");
    assert_eq!(written(Written::Protect), [0, 1, 3]);
    assert_eq!(written(Written::Protect), []);
    assert_eq!(word(page(1)).load(Ordering::Relaxed), 0x0101_0101_0101_0101);
    assert_eq!(written(Written::Keep), [], "a read is none");
    word(page(3)).store(9, Ordering::Relaxed);
    assert_eq!(written(Written::Keep), [3]);
    word(page(3)).store(10, Ordering::Relaxed);
    assert_eq!(written(Written::Protect), [3]);
    // The scans have set no mark on absent pages.
    uffd.copy(&[7; PAGE_SIZE], page(2)).unwrap();
    assert_eq!(written(Written::Protect), [2]);
    uffd.unprotect(range).unwrap();
    assert_eq!(written(Written::Keep), [0, 1, 2, 3]);
    assert_eq!(word(page(3)).load(Ordering::Relaxed), 10);
}

#[test]
fn a_range_that_is_not_tracked_is_refused() {
    let Some(uffd) = open() else { return };
    let page = register(&uffd);
    let range = HvaRange::new(page(0), 4).unwrap();
    assert_eq!(uffd.unprotect(range), Err(Errno::NOENT));
    let scan = Pagemap::open()
        .unwrap()
        .written(range, Written::Protect, drop);
    assert!(matches!(scan, Err(Errno::PERM | Errno::NOTTY)), "{scan:?}");
}

/// A thread that touches a missing page waits for it; an emptied page is missing again.
#[test]
fn an_area_waits_for_its_pages() {
    let Some(area) = or_skip(MissingArea::new(2)) else {
        return;
    };
    for round in 0..2 {
        thread::scope(|scope| {
            let toucher = scope.spawn(|| area.touch(1));
            let mut faults = Vec::new();
            while faults.is_empty() {
                thread::yield_now();
                area.userfaultfd().faults(&mut faults).unwrap();
            }
            assert_eq!(faults[0].page, area.page(1), "round {round}");
            assert!(!toucher.is_finished(), "its page is missing");
            area.userfaultfd()
                .copy(&[7; PAGE_SIZE], area.page(1))
                .unwrap();
        });
        area.empty().unwrap();
    }
}

/// Calls `look` until it finds something.
fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        match look() {
            Some(found) => return found,
            None => thread::yield_now(),
        }
    }
}

fn fault(uffd: &Userfaultfd) -> Hva {
    let mut faults = Vec::new();
    until(|| {
        uffd.faults(&mut faults).unwrap();
        faults.first().map(|fault| fault.page)
    })
}

#[test]
fn a_run_of_pages_is_placed_up_to_one_that_is_there() {
    let Some(uffd) = or_skip(Userfaultfd::open_user()) else {
        return;
    };
    let page = register(&uffd);
    let run: [[u8; PAGE_SIZE]; 4] = [1, 2, 3, 4].map(|byte| [byte; PAGE_SIZE]);
    let place = |pages, to| uffd.place(pages, page(to), Waiters::LeaveAsleep);
    assert_eq!(place(&run[2..3], 2), Ok(()));
    let errno = Errno::EXIST;
    assert_eq!(place(&run, 0), Err(Partial { done: 2, errno }));
    assert_eq!(place(&run[2..], 2), Err(Partial { done: 0, errno }));
    let errno = Errno::NOENT;
    assert_eq!(place(&run[3..], 4), Err(Partial { done: 0, errno }));
    assert_eq!(place(&run[3..], 3), Ok(()));
    for index in 0..4 {
        let bytes = word(page(index)).load(Ordering::Relaxed).to_ne_bytes();
        assert_eq!(bytes, [index as u8 + 1; 8]);
    }
}

#[test]
fn a_fill_wakes_when_it_is_told_to() {
    let Some(uffd) = or_skip(Userfaultfd::open_user()) else {
        return;
    };
    let page = register(&uffd);
    for (index, waiters) in [(0, Waiters::Wake), (1, Waiters::LeaveAsleep)] {
        let touched = page(index);
        let reader = thread::spawn(move || word(touched).load(Ordering::Relaxed));
        let missing = fault(&uffd);
        assert_eq!(missing, touched);
        uffd.place(&[[7; PAGE_SIZE]], missing, waiters).unwrap();
        if waiters == Waiters::LeaveAsleep {
            uffd.wake(missing).unwrap();
        }
        assert_eq!(reader.join().unwrap(), 0x0707_0707_0707_0707);
    }
}

#[test]
fn threads_that_wait_go_on_when_the_range_is_unregistered() {
    let Some(uffd) = or_skip(Userfaultfd::open_user()) else {
        return;
    };
    let page = register(&uffd);
    let range = HvaRange::new(page(0), 4).unwrap();
    let touched = page(2);
    let reader = thread::spawn(move || word(touched).load(Ordering::Relaxed));
    assert_eq!(fault(&uffd), touched);
    uffd.unregister(range).unwrap();
    assert_eq!(reader.join().unwrap(), 0);
    let errno = Errno::NOENT;
    let late = uffd.place(&[[7; PAGE_SIZE]], page(3), Waiters::Wake);
    assert_eq!(late, Err(Partial { done: 0, errno }));
}

/// A system call on a missing page fails and does not wait.
#[test]
fn a_system_call_fails_on_a_missing_page() {
    let Some(uffd) = or_skip(Userfaultfd::open_user()) else {
        return;
    };
    let page = register(&uffd);
    let zeros = std::fs::File::open("/dev/zero").unwrap();
    // SAFETY: 1. `register` gave the address of a page that stays mapped; no other thread uses it.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut(
            ptr::with_exposed_provenance_mut::<u8>(page(1).get() as usize),
            PAGE_SIZE,
        )
    };
    let read = rustix::io::read(&zeros, bytes);
    assert_eq!(read, Err(Errno::FAULT));
}

/// A descriptor also fills memory registered with another descriptor of the same process. So code
/// must not use its descriptor any more when the memory belongs to another VM.
#[test]
fn a_descriptor_fills_the_memory_of_another_one() {
    let Some(other) = or_skip(Userfaultfd::open_user()) else {
        return;
    };
    let Some(area) = or_skip(MissingArea::new(1)) else {
        return;
    };
    assert_eq!(other.copy(&[7; PAGE_SIZE], area.page(0)), Ok(()));
    let again = area.userfaultfd().copy(&[8; PAGE_SIZE], area.page(0));
    assert_eq!(again, Err(Errno::EXIST));
}
