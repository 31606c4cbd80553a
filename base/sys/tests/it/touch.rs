//! A touch of a page ends when the page arrives or another thread interrupts it, and no
//! interruption is lost.

use lacuna_addr::{Hva, PAGE_SIZE};
use lacuna_sys::{Errno, MissingArea, Touched, Toucher};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;

const PAGE: [u8; PAGE_SIZE] = [7; PAGE_SIZE];

/// Missing pages; if there is no userfaultfd, the test is recorded as skipped.
fn area(pages: u64) -> Option<MissingArea> {
    match MissingArea::new(pages) {
        Ok(area) => Some(area),
        Err(Errno::PERM | Errno::NOSYS) => {
            lacuna_skip::skip("no userfaultfd, or no permission");
            None
        }
        Err(errno) => panic!("{errno}"),
    }
}

fn touch(toucher: &Toucher, page: Hva, is_over: &AtomicBool) -> Touched {
    // SAFETY: 1. each test maps the page, and joins its threads before it unmaps it.
    unsafe { toucher.touch(page, || is_over.load(Ordering::SeqCst)) }
}

fn provide(area: &MissingArea, page: u64) {
    area.userfaultfd().copy(&PAGE, area.page(page)).unwrap();
}

/// Sleeps until a thread waits for a page of `area`.
fn wait_for_fault(area: &MissingArea) {
    let mut faults = Vec::new();
    while faults.is_empty() {
        area.userfaultfd().faults(&mut faults).unwrap();
        thread::yield_now();
    }
}

#[test]
fn a_page_that_is_there_is_touched_at_once() {
    let Some(area) = area(2) else { return };
    Toucher::check().unwrap();
    let (toucher, never) = (Toucher::default(), AtomicBool::new(false));
    provide(&area, 0);
    assert_eq!(touch(&toucher, area.page(0), &never), Touched::Present);
    // An interruption outside a touch has no effect on the next touch.
    toucher.interrupt();
    assert_eq!(touch(&toucher, area.page(0), &never), Touched::Present);
    let over = AtomicBool::new(true);
    assert_eq!(touch(&toucher, area.page(1), &over), Touched::Interrupted);
}

#[test]
fn a_missing_page_comes_or_the_wait_is_interrupted() {
    let Some(area) = area(2) else { return };
    let (toucher, over) = (Toucher::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        let first = scope.spawn(|| touch(&toucher, area.page(0), &over));
        wait_for_fault(&area);
        provide(&area, 0);
        assert_eq!(first.join().unwrap(), Touched::Present);
        let second = scope.spawn(|| touch(&toucher, area.page(1), &over));
        wait_for_fault(&area);
        over.store(true, Ordering::SeqCst);
        toucher.interrupt();
        assert_eq!(second.join().unwrap(), Touched::Interrupted);
    });
    // The page is missing as before.
    over.store(false, Ordering::SeqCst);
    thread::scope(|scope| {
        let again = scope.spawn(|| touch(&toucher, area.page(1), &over));
        wait_for_fault(&area);
        provide(&area, 1);
        assert_eq!(again.join().unwrap(), Touched::Present);
    });
}

/// Threads touch a page that never arrives, and another thread interrupts each touch at an unknown
/// point: before it, in the middle, asleep. After a lost interruption the touch would never end.
#[test]
fn no_interruption_is_lost() {
    const THREADS: usize = 4;
    const TIMES: u64 = 5000;
    let Some(area) = area(1) else { return };
    let page = area.page(0);
    let asleep = AtomicUsize::new(0);
    thread::scope(|scope| {
        for number in 0..THREADS as u64 {
            let asleep = &asleep;
            scope.spawn(move || {
                let (toucher, over) = (Toucher::default(), AtomicBool::new(false));
                let round = AtomicU64::new(0);
                thread::scope(|scope| {
                    let touches = scope.spawn(|| {
                        for next in 1..=TIMES {
                            round.store(next, Ordering::SeqCst);
                            while !over.load(Ordering::SeqCst) {
                                let touched = touch(&toucher, page, &over);
                                assert_eq!(touched, Touched::Interrupted);
                            }
                            over.store(false, Ordering::SeqCst);
                        }
                    });
                    for next in 1..=TIMES {
                        while round.load(Ordering::SeqCst) != next {
                            thread::yield_now();
                        }
                        // Some touches are interrupted at once, others when the thread sleeps.
                        for _ in 0..(next * 7 + number) % 40 * 50 {
                            std::hint::spin_loop();
                        }
                        over.store(true, Ordering::SeqCst);
                        toucher.interrupt();
                        while over.load(Ordering::SeqCst) {
                            thread::yield_now();
                        }
                    }
                    touches.join().unwrap();
                });
                asleep.fetch_add(1, Ordering::Relaxed);
            });
        }
        // The faults are read, as a handler would.
        let mut faults = Vec::new();
        while asleep.load(Ordering::Relaxed) < THREADS {
            area.userfaultfd().faults(&mut faults).unwrap();
            faults.clear();
            thread::yield_now();
        }
    });
}

/// After a touch, the thread's number is cleared: a late interruption signals no other thread.
#[test]
fn a_late_interruption_harms_no_thread() {
    let Some(area) = area(1) else { return };
    let toucher = Toucher::default();
    let (sender, touched) = channel();
    thread::scope(|scope| {
        let (toucher, area, over) = (&toucher, &area, AtomicBool::new(false));
        scope.spawn(move || {
            provide(area, 0);
            for _ in 0..1000 {
                sender.send(touch(toucher, area.page(0), &over)).unwrap();
            }
        });
        for _ in 0..1000 {
            toucher.interrupt();
        }
    });
    toucher.interrupt();
    assert_eq!(touched.iter().count(), 1000);
}

/// The program blocks all signals of a thread after its first touch. Its later touches are still
/// interruptible.
#[test]
fn a_thread_that_blocks_signals_is_interrupted() {
    let Some(area) = area(2) else { return };
    let (toucher, over) = (Toucher::default(), AtomicBool::new(false));
    provide(&area, 0);
    thread::scope(|scope| {
        let touching = scope.spawn(|| {
            assert_eq!(touch(&toucher, area.page(0), &over), Touched::Present);
            block_all_signals();
            touch(&toucher, area.page(1), &over)
        });
        wait_for_fault(&area);
        over.store(true, Ordering::SeqCst);
        toucher.interrupt();
        assert_eq!(touching.join().unwrap(), Touched::Interrupted);
    });
}

fn block_all_signals() {
    // SAFETY: 1. all zeros is a valid `sigset_t`. 2. The calls change the set, and the calling
    // thread's mask.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}
