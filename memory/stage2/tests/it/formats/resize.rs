//! One thread splits and collapses blocks all the time, while vCPUs on other threads read and write
//! them.
//!
//! Each guest page is a counter; its frame never changes. A harvester clears D by write protection,
//! waits for the shoot-down, and copies the dirty pages. At the end each copy must equal its page:
//! a lost D, of a leaf of either size, would make them differ. And every walk must find a leaf, and
//! the page's frame.

use super::Stage2;
use lacuna_addr::{Access, Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Age, Arena, Cause, Leaf, MapError, Mapped, Translation, Walk};
use lacuna_sync::{GracePeriod, Qsbr, VcpuSlot};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

const BLOCKS: u64 = 2;
const PAGES: u64 = BLOCKS * 512;
const VCPUS: usize = 2;
const ACCESSES: usize = 40_000;
/// Guest block b is mapped to host block b + 3.
const FIRST: u64 = 3 * 512;

/// How a table of small leaves is collapsed. No thread makes fast page faults here, so both ways
/// are allowed.
#[derive(Clone, Copy)]
enum Way {
    /// By `Cursor::collapse`, which freezes the 512 entries.
    Frozen,
    /// By `Cursor::collapse_uniform`, which does not change them.
    Uniform,
}

struct Fixture {
    way: Way,
    stage2: Stage2,
    qsbr: Qsbr,
    values: Vec<AtomicU64>,
    done: AtomicBool,
}

impl Fixture {
    fn new(way: Way) -> Self {
        let stage2 = Stage2::with_format(Arena::new(16).expect("address space")).expect("a root");
        for block in 0..BLOCKS {
            let mapped = stage2.fault_cursor(gfn(block * 512)).map(
                gfn(block * 512),
                leaf(block * 512, Access::Read, Level::L2M),
            );
            assert!(mapped.is_ok(), "{mapped:?}");
        }
        Self {
            way,
            stage2,
            qsbr: Qsbr::new(VCPUS),
            values: (0..PAGES).map(|_| AtomicU64::new(0)).collect(),
            done: AtomicBool::new(false),
        }
    }

    /// Handles a write fault: sets W and D in a leaf of `level` that maps `page`. If `level` is 2
    /// MiB but the block has small leaves, sets them in the page's small leaf. Returns what a TLB
    /// may cache; `None` if no table page is free.
    fn fault(&self, page: u64, level: Level) -> Option<Translation> {
        let start = page & !(level.pages() - 1);
        let wanted = leaf(start, Access::Write, level);
        // A `let`, because a cursor in the `match` head is held to the end of the match: the call
        // of `fault` in an arm would wait for its range lock for ever.
        let mapped = self.stage2.fault_cursor(gfn(start)).map(gfn(start), wanted);
        match mapped {
            Ok(Mapped::New(_)) => panic!("page {page} was not mapped"),
            Ok(_) => Some(Translation {
                pfn: wanted.frame_of(gfn(page)),
                level,
                writable: true,
                exec: true,
            }),
            Err(MapError::Occupied { .. }) if level == Level::L2M => self.fault(page, Level::L4K),
            Err(MapError::Exhausted(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Splits the block if one leaf maps it, otherwise collapses it.
    fn resize(&self, block: u64) {
        let at = gfn(block * 512 + 7);
        let mut cursor = self.stage2.fault_cursor(at);
        if cursor.split(at).is_ok_and(|split| split.is_some()) {
            return;
        }
        let collapsed = match self.way {
            Way::Frozen => cursor.collapse(at),
            Way::Uniform => cursor.collapse_uniform(at, frame(block * 512)),
        }
        .expect("frames never change");
        drop(cursor);
        if let Some((_, flush)) = collapsed {
            flush.retire(&self.qsbr);
        }
    }

    /// Write-protects `range`, and copies its dirty pages to `saved`.
    fn harvest(&self, range: GfnRange, saved: &mut [u64]) {
        let mut dirty = Vec::new();
        let mut cursor = self.stage2.cursor(range);
        // If no table page is free, the leaf stays large, and `protect` clears W and D for the
        // whole block. All of its pages are then copied, which is right too.
        let _ = cursor.cut(range, |_| {});
        let flush = cursor.protect([range], |was| {
            if was.leaf.dirty {
                dirty.push(was.leaf.span(was.gfn));
            }
        });
        drop(cursor);
        flush.finish(&self.qsbr);
        for gfn in dirty.into_iter().flat_map(GfnRange::iter) {
            let page = gfn.get() as usize;
            saved[page] = self.values[page].load(Ordering::Relaxed);
        }
    }
}

struct Vcpu<'w> {
    fixture: &'w Fixture,
    index: usize,
    tlb: Vec<Option<Translation>>,
    flushed_at: GracePeriod,
}

/// Goes offline, also by a panic: otherwise other threads would wait for this vCPU for ever.
impl Drop for Vcpu<'_> {
    fn drop(&mut self) {
        self.fixture.qsbr.offline(self.index);
    }
}

impl Vcpu<'_> {
    fn run(&mut self) {
        let mut random = Random(self.index as u64 + 1);
        self.online();
        self.flush();
        for i in 0..ACCESSES {
            let access = match random.below(4) {
                0 => Access::Write,
                _ => Access::Read,
            };
            // Eight pages of each block, so that the vCPUs often access the same page.
            let page = random.below(BLOCKS) * 512 + random.below(8) * 73;
            let level = Level::ALL[random.below(2) as usize];
            self.access(page, access, level);
            if self.slot().has_request() {
                self.slot().take();
                self.online();
            }
            if i % 500 == 0 {
                self.fixture.qsbr.offline(self.index);
                thread::yield_now();
                self.online();
            }
        }
    }

    fn slot(&self) -> &VcpuSlot {
        self.fixture.qsbr.vcpu(self.index)
    }

    fn online(&mut self) {
        let grace = self.fixture.qsbr.online(self.index);
        if self.flushed_at < grace {
            self.flush();
            self.flushed_at = grace;
        }
    }

    fn flush(&mut self) {
        self.tlb.fill(None);
        self.slot().flushed();
    }

    fn access(&mut self, page: u64, access: Access, level: Level) {
        loop {
            match self.tlb[page as usize] {
                Some(t) if t.writable || !access.is_write() => return self.touch(page, t, access),
                _ => {}
            }
            self.slot().note(page / 512);
            match self.fixture.stage2.walk(gfn(page), access) {
                Walk::Hit(translation) => self.tlb[page as usize] = Some(translation),
                Walk::Violation(violation) => {
                    assert!(
                        matches!(violation.cause, Cause::Denied(_)),
                        "page {page} was always mapped"
                    );
                    assert!(access.is_write(), "reads are always allowed");
                    self.tlb[page as usize] = self.fixture.fault(page, level);
                    if self.tlb[page as usize].is_none() {
                        // No table page is free, and tables in limbo may wait for this vCPU: it
                        // goes offline.
                        self.fixture.qsbr.offline(self.index);
                        self.fixture.stage2.reap(&self.fixture.qsbr);
                        thread::yield_now();
                        self.online();
                    }
                }
            }
        }
    }

    fn touch(&self, page: u64, translation: Translation, access: Access) {
        assert_eq!(translation.pfn.get(), FIRST + page, "another page's frame");
        if access.is_write() {
            self.fixture.values[page as usize].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A small generator; each thread has its own numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame")
}

fn frame(page: u64) -> Pfn {
    Pfn::new((FIRST + page) as u32)
}

fn leaf(page: u64, access: Access, level: Level) -> Leaf {
    let pfn = frame(page);
    match access {
        Access::Write => Leaf::dirty(pfn).at(level),
        Access::Read | Access::Fetch => Leaf::clean(pfn).at(level),
    }
}

#[test]
fn no_d_is_lost_and_no_walk_misses_while_leaves_change_size() {
    [Way::Frozen, Way::Uniform]
        .into_iter()
        .for_each(change_sizes);
}

fn change_sizes(way: Way) {
    let fixture = Fixture::new(way);
    let mut saved = vec![0; PAGES as usize];
    thread::scope(|s| {
        let vcpus: Vec<_> = (0..VCPUS)
            .map(|index| {
                let mut vcpu = Vcpu {
                    fixture: &fixture,
                    index,
                    tlb: vec![None; PAGES as usize],
                    flushed_at: GracePeriod::default(),
                };
                s.spawn(move || vcpu.run())
            })
            .collect();
        let resizer = s.spawn(|| {
            let mut random = Random(77);
            while !fixture.done.load(Ordering::Relaxed) {
                fixture.resize(random.below(BLOCKS));
                if random.below(16) == 0 {
                    thread::yield_now();
                }
            }
        });
        let harvester = s.spawn(|| {
            let mut random = Random(99);
            while !fixture.done.load(Ordering::Relaxed) {
                let start = random.below(PAGES);
                let pages = random.below(PAGES - start) + 1;
                let range = GfnRange::new(gfn(start), pages).expect("a range");
                fixture.harvest(range, &mut saved);
                let age = fixture.stage2.fault_cursor(gfn(start)).age(gfn(start));
                assert_ne!(age, Age::Absent);
                if random.below(16) == 0 {
                    fixture.stage2.verify();
                }
                thread::yield_now();
            }
        });
        let ended: Vec<_> = vcpus.into_iter().map(|vcpu| vcpu.join()).collect();
        fixture.done.store(true, Ordering::Relaxed);
        resizer.join().expect("resizer");
        harvester.join().expect("harvester");
        ended.into_iter().for_each(|end| end.expect("vCPU"));
    });
    let all = GfnRange::new(gfn(0), PAGES).expect("a range");
    fixture.harvest(all, &mut saved);
    let values: Vec<u64> = fixture
        .values
        .iter()
        .map(|v| v.load(Ordering::Relaxed))
        .collect();
    assert_eq!(
        saved, values,
        "a page that was written was not reported dirty"
    );
    assert!(values.iter().sum::<u64>() > 0);
    assert_eq!(fixture.stage2.verify().pages(), PAGES);
}

/// The race: a walk enters the table of small leaves; the collapse replaces the table by one leaf;
/// the walk sets D in the old table, where that D is lost. A walk sets D only in a leaf with W. So
/// the large leaf gets D if any page has W.
#[test]
fn a_collapsed_leaf_is_dirty_if_any_page_is_writable() {
    let fixture = Fixture::new(Way::Uniform);
    let at = gfn(5);
    let collapsed = || {
        let mut cursor = fixture.stage2.fault_cursor(at);
        assert!(cursor.split(at).expect("a table").is_some());
        let (collapsed, flush) = cursor
            .collapse_uniform(at, frame(0))
            .expect("uniform")
            .expect("a table");
        drop(cursor);
        flush.retire(&fixture.qsbr);
        assert_eq!(fixture.stage2.verify().pages(), PAGES);
        collapsed.leaf
    };
    let clean = collapsed();
    assert!(!clean.dirty && !clean.is_writable());
    assert!(fixture.fault(5, Level::L2M).is_some());
    assert!(collapsed().dirty, "it was dirty");
    // One page has W without D, the others have neither.
    let mut cursor = fixture.stage2.fault_cursor(at);
    assert!(cursor.split(at).expect("a table").is_some());
    let block = GfnRange::new(gfn(0), 512).expect("a range");
    let page = GfnRange::new(at, 1).expect("a range");
    let mut flush = cursor.clear_dirty([page], |_| {});
    for others in [GfnRange::new(gfn(0), 5), GfnRange::new(gfn(6), 506)] {
        flush.join(cursor.protect([others.expect("a range")], |_| {}));
    }
    let (collapsed, table) = cursor
        .collapse_uniform(at, frame(0))
        .expect("uniform")
        .expect("a table");
    drop(cursor);
    flush.join(table);
    flush.finish(&fixture.qsbr);
    assert!(collapsed.leaf.is_writable() && collapsed.leaf.dirty);
    assert_eq!(collapsed.leaf.span(at), block);
}
