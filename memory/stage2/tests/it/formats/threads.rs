//! Real threads: vCPUs with TLBs, a reclaimer, and a host that reuses frames.
//!
//! A guest page is a counter. A vCPU increments it through any translation that it has. The
//! reclaimer evicts pages: it writes a page out only if its leaf was dirty, and gives the frame to
//! another page. At the end no increment is lost: D was right, and no vCPU ever accessed another
//! page's frame.

use super::Stage2;
use lacuna_addr::{Access, Gfn, GfnRange, Pfn};
use lacuna_stage2::{Age, Arena, Cause, Flush, Leaf, Shootdown, Translation, Violation, Walk};
use lacuna_sync::{GracePeriod, Qsbr, VcpuSlot};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;

const PAGES: u64 = 96;
const FRAMES: u32 = 48;
const VCPUS: usize = 2;
const ACCESSES: usize = 10_000;

/// The place of a page.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Page {
    Out(u64),
    In(Pfn),
    Leaving(Pfn),
}

#[derive(Default)]
struct Frame {
    owner: AtomicU64,
    value: AtomicU64,
}

struct Host {
    pages: Vec<Page>,
    free: Vec<Pfn>,
}

struct Fixture {
    stage2: Stage2,
    qsbr: Qsbr,
    host: Mutex<Host>,
    frames: Vec<Frame>,
    increments: Vec<AtomicU64>,
    done: AtomicBool,
}

impl Fixture {
    fn new() -> Self {
        let arena = Arena::new(64).expect("address space");
        let host = Host {
            pages: vec![Page::Out(0); PAGES as usize],
            free: (0..FRAMES).map(Pfn::new).collect(),
        };
        Self {
            stage2: Stage2::with_format(arena).expect("a root"),
            qsbr: Qsbr::new(VCPUS),
            host: Mutex::new(host),
            frames: (0..FRAMES).map(|_| Frame::default()).collect(),
            increments: (0..PAGES).map(|_| AtomicU64::new(0)).collect(),
            done: AtomicBool::new(false),
        }
    }

    /// The host's answer: a frame, or none for now.
    fn resolve(&self, page: u64) -> Option<Pfn> {
        let mut host = self.host.lock().expect("host");
        match host.pages[page as usize] {
            Page::In(pfn) => Some(pfn),
            Page::Leaving(_) => None,
            Page::Out(value) => {
                let pfn = host.free.pop()?;
                let frame = &self.frames[pfn.index()];
                frame.owner.store(page, Ordering::Relaxed);
                frame.value.store(value, Ordering::Relaxed);
                host.pages[page as usize] = Page::In(pfn);
                Some(pfn)
            }
        }
    }

    fn fault(&self, page: u64, violation: Violation) {
        let gfn = gfn_of(page);
        let seq = self.stage2.invalidate_seq(gfn);
        let Some(pfn) = self.resolve(page) else {
            return;
        };
        let leaf = if violation.access.is_write() {
            Leaf::dirty(pfn)
        } else {
            Leaf::clean(pfn)
        };
        let mut cursor = self.stage2.fault_cursor(gfn);
        if !cursor.invalidate_retry(seq) {
            let _ = cursor
                .map(gfn, leaf)
                .expect("the same frame, and room for tables");
        }
    }

    fn unmap(&self, victims: &[u64]) -> Flush<'_> {
        let mut flush = Flush::none(&self.stage2);
        for page in victims {
            let gfn = gfn_of(*page);
            let mut cursor = self.stage2.fault_cursor(gfn);
            cursor.invalidate_begin();
            let host = self.host.lock().expect("host");
            let Page::Leaving(pfn) = host.pages[*page as usize] else {
                panic!("our victim")
            };
            let mut clean = true;
            // A resolved but never mapped page has not been written.
            if let Some((removed, more)) = cursor.unmap_page(gfn) {
                assert_eq!(removed.leaf.pfn, pfn);
                clean = !removed.leaf.dirty;
                flush.join(more);
            }
            if clean {
                self.frames[pfn.index()]
                    .owner
                    .fetch_or(CLEAN, Ordering::Relaxed);
            }
            drop(host);
        }
        flush
    }

    /// Takes some pages from the guest, as reclaim does.
    fn reclaim(&self, first: u64, saved: &mut [u64]) {
        let victims: Vec<u64> = (first..first + 8).map(|p| p * 7 % PAGES).collect();
        let victims: Vec<u64> = victims
            .into_iter()
            .filter(|page| self.leave(*page))
            .collect();
        self.unmap(&victims).finish(&self.qsbr);
        for page in &victims {
            self.write_out(*page, saved);
            self.stage2.fault_cursor(gfn_of(*page)).invalidate_end();
        }
    }

    fn leave(&self, page: u64) -> bool {
        let mut host = self.host.lock().expect("host");
        let Page::In(pfn) = host.pages[page as usize] else {
            return false;
        };
        host.pages[page as usize] = Page::Leaving(pfn);
        true
    }

    /// Saves a dirty page, drops a clean one, and poisons the frame before it is free.
    fn write_out(&self, page: u64, saved: &mut [u64]) {
        let mut host = self.host.lock().expect("host");
        let Page::Leaving(pfn) = host.pages[page as usize] else {
            panic!("our victim")
        };
        let frame = &self.frames[pfn.index()];
        if frame.owner.load(Ordering::Relaxed) & CLEAN == 0 {
            saved[page as usize] = frame.value.load(Ordering::Relaxed);
        }
        frame.owner.store(u64::MAX, Ordering::Relaxed);
        frame.value.store(u64::MAX, Ordering::Relaxed);
        host.pages[page as usize] = Page::Out(saved[page as usize]);
        host.free.push(pfn);
    }
}

const CLEAN: u64 = 1 << 32;

/// Pages in several blocks; some are neighbours, some are below other upper tables.
fn gfn_of(page: u64) -> Gfn {
    Gfn::new((page % 3) * (1 << 18) + (page % 5) * 512 + page).expect("below 2^36")
}

struct Vcpu<'w> {
    fixture: &'w Fixture,
    index: usize,
    tlb: Vec<Option<Translation>>,
    flushed_at: GracePeriod,
}

impl Vcpu<'_> {
    fn run(&mut self, mut seed: u64) {
        self.online();
        for i in 0..ACCESSES {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let access = if seed >> 60 < 6 {
                Access::Write
            } else {
                Access::Read
            };
            self.access((seed >> 33) % PAGES, access);
            if self.slot().has_request() {
                self.slot().take();
                self.online();
            }
            if i % 1000 == 0 {
                self.fixture.qsbr.offline(self.index);
                self.online();
            }
        }
        self.fixture.qsbr.offline(self.index);
    }

    fn slot(&self) -> &VcpuSlot {
        self.fixture.qsbr.vcpu(self.index)
    }

    fn online(&mut self) {
        let grace = self.fixture.qsbr.online(self.index);
        if self.flushed_at < grace {
            self.tlb.fill(None);
            self.flushed_at = grace;
        }
    }

    fn access(&mut self, page: u64, access: Access) {
        loop {
            match self.tlb[page as usize] {
                Some(t) if t.writable || !access.is_write() => return self.touch(page, t, access),
                _ => {}
            }
            match self.fixture.stage2.walk(gfn_of(page), access) {
                Walk::Hit(translation) => self.tlb[page as usize] = Some(translation),
                Walk::Violation(violation) => {
                    self.fixture.fault(page, violation);
                    // A fault ends the basic block: the reclaimer may be waiting for this vCPU.
                    self.fixture.qsbr.offline(self.index);
                    thread::yield_now();
                    self.online();
                }
            }
        }
    }

    fn touch(&self, page: u64, translation: Translation, access: Access) {
        let frame = &self.fixture.frames[translation.pfn.index()];
        assert_eq!(
            frame.owner.load(Ordering::Relaxed) & !CLEAN,
            page,
            "another page's frame"
        );
        if access.is_write() {
            frame.value.fetch_add(1, Ordering::Relaxed);
            self.fixture.increments[page as usize].fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn no_write_is_lost_and_no_frame_is_met_after_reuse() {
    let fixture = Fixture::new();
    let mut saved = vec![0; PAGES as usize];
    thread::scope(|s| {
        let vcpus: Vec<_> = (0..VCPUS)
            .map(|index| {
                let tlb = vec![None; PAGES as usize];
                let fixture = &fixture;
                s.spawn(move || {
                    Vcpu {
                        fixture,
                        index,
                        tlb,
                        flushed_at: GracePeriod::default(),
                    }
                    .run(index as u64)
                })
            })
            .collect();
        let reclaimer = s.spawn(|| {
            let mut round = 0;
            while !fixture.done.load(Ordering::Relaxed) {
                if fixture.host.lock().expect("host").free.len() > 8 {
                    thread::yield_now();
                    continue;
                }
                round += 1;
                fixture.reclaim(round * 8, &mut saved);
                let aged = gfn_of(round % PAGES);
                let _: Age = fixture.stage2.fault_cursor(aged).age(aged);
                if round % 64 == 0 {
                    fixture.stage2.verify();
                }
            }
        });
        for vcpu in vcpus {
            vcpu.join().expect("vCPU");
        }
        fixture.done.store(true, Ordering::Relaxed);
        reclaimer.join().expect("reclaimer");
    });
    fixture.stage2.verify();
    let host = fixture.host.lock().expect("host");
    for page in 0..PAGES as usize {
        let value = match host.pages[page] {
            Page::Out(value) => value,
            Page::In(pfn) => fixture.frames[pfn.index()].value.load(Ordering::Relaxed),
            Page::Leaving(_) => panic!("the reclaimer has finished"),
        };
        assert_eq!(
            value,
            fixture.increments[page].load(Ordering::Relaxed),
            "page {page}"
        );
    }
}

#[test]
fn cursors_that_link_the_same_upper_table_agree() {
    const THREADS: u64 = 4;
    for round in 0..200 {
        let stage2 = Stage2::with_format(Arena::new(32).expect("address space")).expect("a root");
        let start = Barrier::new(THREADS as usize);
        thread::scope(|s| {
            for t in 0..THREADS {
                let (stage2, start) = (&stage2, &start);
                s.spawn(move || {
                    let gfn = Gfn::new((1 << 18) * round + t * 512).expect("a frame");
                    start.wait();
                    let mapped = stage2
                        .fault_cursor(gfn)
                        .map(gfn, Leaf::clean(Pfn::new(t as u32)));
                    assert!(mapped.is_ok(), "{mapped:?}");
                });
            }
        });
        let counts = stage2.verify();
        assert_eq!((counts.pages(), counts.tables), (THREADS, 2 + THREADS));
    }
}

#[test]
fn walks_survive_the_removal_of_their_tables() {
    // Tables are unlinked, freed and used again while a vCPU walks all the time. It must see the
    // right frame or nothing, never a frame of the block that got the table next.
    let stage2 = Stage2::with_format(Arena::new(16).expect("address space")).expect("a root");
    let qsbr = Qsbr::new(1);
    let done = AtomicBool::new(false);
    let gfn = |block: u64, page: u64| Gfn::new(block << 18 | page).expect("a frame");
    thread::scope(|s| {
        let walker = s.spawn(|| {
            let mut hits = 0u64;
            for i in 0.. {
                if i % 16 == 0 {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    qsbr.vcpu(0).take();
                    qsbr.online(0);
                }
                let block = i % 3;
                if let Walk::Hit(t) = stage2.walk(gfn(block, 5), Access::Read) {
                    assert_eq!(t.pfn, Pfn::new(block as u32));
                    hits += 1;
                }
            }
            qsbr.offline(0);
            hits
        });
        for i in 0..300u64 {
            let block = i % 3;
            let leaf = Leaf::clean(Pfn::new(block as u32));
            let mapped = stage2.fault_cursor(gfn(block, 5)).map(gfn(block, 5), leaf);
            assert!(mapped.is_ok(), "{mapped:?}");
            let all = GfnRange::new(gfn(0, 0), 3 << 18).expect("3 GiB");
            let flush = stage2.cursor(all).unmap(all, |_| {});
            flush.finish(&qsbr);
        }
        done.store(true, Ordering::Relaxed);
        walker.join().expect("walker");
    });
    assert_eq!(
        stage2.verify().tables,
        1,
        "the range spans each table below the root's first"
    );
}

#[test]
fn a_table_is_not_reused_while_a_vcpu_may_walk_it() {
    let stage2 = Stage2::with_format(Arena::new(4).expect("address space")).expect("a root");
    let qsbr = Qsbr::new(1);
    let at = Gfn::new(0).expect("zero");
    assert!(
        stage2
            .fault_cursor(at)
            .map(at, Leaf::clean(Pfn::new(1)))
            .is_ok()
    );
    qsbr.online(0);
    let block = stage2.fault_cursor(at).range();
    let waiting = stage2.cursor(block).unmap(block, |_| {}).start(&qsbr);
    assert_eq!(stage2.arena().usage().limbo, 1);
    let other = Gfn::new(512).expect("a frame");
    let refused = stage2
        .fault_cursor(other)
        .map(other, Leaf::clean(Pfn::new(1)));
    assert!(
        refused.is_err(),
        "the only table left is in limbo: {refused:?}"
    );
    qsbr.offline(0);
    waiting.wait(&qsbr);
    let mapped = stage2
        .fault_cursor(other)
        .map(other, Leaf::clean(Pfn::new(1)));
    assert!(mapped.is_ok(), "{mapped:?}");
    stage2.verify();
}

#[test]
fn a_flush_of_nothing_asks_nobody() {
    struct Never;
    impl Shootdown for Never {
        fn request(&self) -> GracePeriod {
            panic!("nothing is stale")
        }
        fn passed(&self, _: GracePeriod) -> bool {
            panic!("nothing is stale")
        }
    }
    let stage2 = Stage2::with_format(Arena::new(4).expect("address space")).expect("a root");
    let range = GfnRange::page(Gfn::new(9).expect("a frame"));
    stage2.cursor(range).unmap(range, |_| {}).finish(&Never);
    let absent = Walk::Violation(Violation {
        access: Access::Read,
        cause: Cause::Absent,
    });
    assert_eq!(stage2.walk(range.start(), Access::Read), absent);
}

#[test]
fn a_flush_is_finished_when_everybody_has_passed() {
    struct Slow(AtomicU64);
    impl Shootdown for Slow {
        fn request(&self) -> GracePeriod {
            GracePeriod::default()
        }
        fn passed(&self, _: GracePeriod) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed) >= 200
        }
    }
    let stage2 = Stage2::with_format(Arena::new(4).expect("address space")).expect("a root");
    let at = Gfn::new(0).expect("zero");
    assert!(
        stage2
            .fault_cursor(at)
            .map(at, Leaf::clean(Pfn::new(1)))
            .is_ok()
    );
    let slow = Slow(AtomicU64::new(0));
    let (_, flush) = stage2.fault_cursor(at).unmap_page(at).expect("mapped");
    flush.finish(&slow);
    assert!(slow.0.load(Ordering::Relaxed) > 200);
}
