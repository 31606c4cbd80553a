//! A guest's page is mapped by a copy of its frame, which is emptied some time later, and unmapped
//! by a move back, as the kvm backend's window does: every interleaving of an access with reclaim.
//! The page word and the frame descriptor are the real ones.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p lacuna-host --test loom_window --release`
#![cfg(loom)]

use lacuna_addr::Pfn;
use lacuna_frames::{Desc, Dirt, FrameState, PageNo, PageState, PageWord};
use lacuna_swap::SwapEntry;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

const PAGE: PageNo = PageNo::new(77);
/// No page is at this place. A read finds zeros.
const ABSENT: u64 = u64::MAX;
/// The content before the guest's writes.
const FIRST: u64 = 1;

/// One page, in its frame at first.
struct Fixture {
    word: PageWord,
    desc: Desc,
    /// The window's lock, and whether the page is mapped.
    table: Mutex<bool>,
    frame: AtomicU64,
    window: AtomicU64,
    entry: AtomicU64,
}

impl Fixture {
    fn new() -> Arc<Self> {
        let fixture = Self {
            word: PageWord::new(),
            desc: Desc::default(),
            table: Mutex::new(false),
            frame: AtomicU64::new(FIRST),
            window: AtomicU64::new(ABSENT),
            entry: AtomicU64::new(ABSENT),
        };
        fixture.desc.set_state(FrameState::Cached);
        fixture.desc.prepare(PAGE, Dirt::Dirty);
        let frame = Pfn::new(0);
        let state = PageState::Resident { frame, entry: None };
        fixture.word.change(PageState::Empty, state).unwrap();
        fixture.desc.publish();
        Arc::new(fixture)
    }

    /// `Window::map`. Returns whether the page is in its frame or in the window.
    fn map(&self) -> bool {
        let mut mapped = self.table.lock().unwrap();
        let is_ready = loop {
            let state = self.word.load();
            match state.rescued() {
                Some(rescued) if self.word.change(state, rescued).is_err() => {}
                Some(_) => break true,
                None => break matches!(state, PageState::Resident { .. }),
            }
        };
        if is_ready {
            self.desc.mark_dirty();
            if !*mapped {
                let content = self.frame.load(Ordering::Relaxed);
                assert_ne!(content, ABSENT, "a ready page has its bytes in its frame");
                assert_eq!(self.window.swap(content, Ordering::Relaxed), ABSENT);
                *mapped = true;
            }
        }
        is_ready
    }

    /// `Window::empty_later`.
    fn empty(&self) {
        let mapped = self.table.lock().unwrap();
        if *mapped {
            self.frame.store(ABSENT, Ordering::Relaxed);
        }
    }

    /// `Window::unmap`.
    fn unmap(&self) {
        let mut mapped = self.table.lock().unwrap();
        if std::mem::take(&mut *mapped) {
            let content = self.window.swap(ABSENT, Ordering::Relaxed);
            assert_ne!(content, ABSENT, "a mapped page is in the window");
            self.frame.store(content, Ordering::Relaxed);
        }
    }

    /// An access of the guest: a write to the window, or a fault and another try. Returns whether
    /// the write was made before the page had gone to swap.
    fn write(&self) -> bool {
        loop {
            let content = self.window.load(Ordering::Relaxed);
            let write = || {
                let (from, to) = (content, content + 1);
                let order = Ordering::Relaxed;
                self.window.compare_exchange(from, to, order, order).is_ok()
            };
            if content != ABSENT && write() {
                return true;
            }
            if !self.map() {
                return false;
            }
        }
    }

    /// `Core::pick` to `Core::complete_write`, for the one page. Returns whether it went to swap.
    fn reclaim(&self, ages: bool) -> bool {
        let Some(_) = self.desc.isolate() else {
            return false;
        };
        if ages {
            self.unmap();
        }
        let evicted = self.word.advance(PageState::evicted);
        evicted.expect("an isolated page is resident");
        self.unmap();
        assert_eq!(self.desc.take_dirty(), Dirt::Dirty);
        // A read of an empty frame finds zeros. The page was taken back then.
        let copy = self.frame.load(Ordering::Relaxed);
        let to = SwapEntry::new(9);
        if self.word.advance(|state| state.write_started(to)).is_err() {
            self.desc.mark_dirty();
            self.desc.publish();
            return false;
        }
        assert_ne!(copy, ABSENT, "a page that is written out is in its frame");
        self.entry.store(copy, Ordering::Relaxed);
        let is_gone = self.word.advance(PageState::written).is_ok();
        if is_gone {
            assert_eq!(self.window.load(Ordering::Relaxed), ABSENT);
            assert_eq!(self.frame.swap(ABSENT, Ordering::Relaxed), copy);
        }
        self.desc.publish();
        is_gone
    }
}

fn access_against_reclaim(ages: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let page = Fixture::new();
        let guest = {
            let page = page.clone();
            thread::spawn(move || {
                let first = page.write();
                page.empty();
                u64::from(first) + u64::from(page.write())
            })
        };
        let is_gone = page.reclaim(ages);
        let writes = guest.join().unwrap();
        let places = [&page.frame, &page.window].map(|place| place.load(Ordering::Relaxed));
        let content = match is_gone {
            true => {
                assert_eq!(places, [ABSENT; 2], "it takes no memory");
                page.entry.load(Ordering::Relaxed)
            }
            false => {
                let mapped = *page.table.lock().unwrap();
                assert!(mapped || places[1] == ABSENT, "it is in one place");
                places[usize::from(mapped)]
            }
        };
        assert_eq!(content, FIRST + writes, "no write is lost");
    });
}

#[test]
fn no_write_is_lost_while_a_page_leaves() {
    access_against_reclaim(false);
}

#[test]
fn no_write_is_lost_while_a_page_is_aged_and_leaves() {
    access_against_reclaim(true);
}
