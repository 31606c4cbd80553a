//! A window without KVM: the tests map and unmap its pages, and touch only those that are mapped.

use super::*;
use crate::mapping::{copy_in, copy_out};
use lacuna_addr::BackingRange;
use lacuna_host::{Collapse, HostConfig, HugePages, Io, Swap};
use lacuna_sync::HostClock;
use lacuna_sys::Pagemap;

const PAGES: Page = 16 * BLOCK;

struct Bench {
    host: Arc<Host>,
    window: Arc<Window>,
    region: BackingRange,
    pagemap: Pagemap,
}

/// `None` if this host has no userfaultfd; the skip is recorded then.
fn bench(budget: Page, huge: HugePages) -> Option<Bench> {
    let pages = PageCount::new(PAGES.into());
    let host = Host::new(HostConfig {
        budget: PageCount::new(budget.into()),
        huge,
        swap: Swap::Memory.open(pages).unwrap(),
        io: Io::Threads { readers: 1 },
        clock: Arc::new(HostClock::default()),
    });
    let host = host.unwrap();
    let window = match Window::new(&host, pages) {
        Ok(window) => Arc::new(window),
        Err(why) => {
            lacuna_skip::skip(why);
            return None;
        }
    };
    let region = host.add_region(pages, Arc::clone(&window) as Arc<dyn MmuNotifier>);
    let region = region.unwrap();
    window.set_first(region.start());
    Some(Bench {
        host,
        window,
        region,
        pagemap: Pagemap::open().unwrap(),
    })
}

impl Bench {
    fn map(&self, page: Page) {
        let addr = self.pages(page, 1).start();
        self.host.with_spare_cache(|cache| {
            loop {
                match self.window.map(&self.host, (page, addr), cache) {
                    Mapped::Yes => return,
                    Mapped::No(Resolution::Pending(ticket)) => self.host.wait(&ticket).unwrap(),
                    Mapped::No(Resolution::NoMemory) => {
                        let _ = self.host.reclaim_direct(cache).unwrap();
                    }
                    Mapped::Later(_) => thread::yield_now(),
                    other => panic!("{other:?}"),
                }
            }
        });
    }

    fn pages(&self, first: Page, count: Page) -> BackingRange {
        let start = self.region.start().checked_add_pages(first.into());
        BackingRange::new(start.unwrap(), count.into()).unwrap()
    }

    fn age(&self, block: BackingRange) -> bool {
        let mut young = [false];
        self.window.age(&[block], &mut young);
        young[0]
    }

    fn mapped(&self) -> u64 {
        self.pagemap.present(self.window.range()).unwrap()
    }

    /// Whether a huge page of Linux is in the window. If not, records the test as skipped.
    fn has_huge_page(&self) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", self.window.range().start().get());
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let line = lines.find(|line| line.starts_with("AnonHugePages:"));
        let has = line.is_some_and(|line| !line.ends_with(" 0 kB"));
        if !has {
            lacuna_skip::skip(format!("no huge page of Linux: {line:?}"));
        }
        has
    }

    /// Replaces the first bytes of a mapped page.
    fn swap(&self, page: Page, new: u64) -> u64 {
        let (at, mut old) = (self.window.page(page), [0; 8]);
        // SAFETY: 1. the page lies in the window.
        unsafe {
            copy_out(at, &mut old);
            copy_in(at, &new.to_ne_bytes());
        }
        u64::from_ne_bytes(old)
    }
}

/// Also after Linux has split its huge page, and has replaced the pages of zeros in it.
#[test]
fn a_compound_page_is_mapped_and_unmapped_as_a_whole() {
    let Some(bench) = bench(8 * BLOCK, HugePages::Always) else {
        return;
    };
    let block = bench.pages(BLOCK, BLOCK);
    // A page that was unmapped by aging and is touched again is spared for some turns.
    for (page, spared, old) in [(700, 0, 0), (600, 3, 7)] {
        bench.map(page);
        assert_eq!(bench.mapped(), BLOCK.into());
        if !bench.has_huge_page() {
            return;
        }
        assert_eq!(bench.swap(700, 7), old);
        for _ in 0..spared {
            assert!(bench.age(block));
            assert_eq!(bench.mapped(), BLOCK.into());
        }
        assert!(bench.age(block));
        assert_eq!(bench.mapped(), 0);
        assert!(!bench.age(block));
    }
    bench.map(800);
    bench
        .window
        .try_invalidate(&[bench.pages(700, 1)], &mut Vec::new());
    assert_eq!(bench.mapped(), u64::from(BLOCK) - 1);
    bench.map(700);
    bench.window.split_huge(block);
    assert_eq!(bench.mapped(), 0);
    bench.map(900);
    assert!(bench.has_huge_page());
    assert_eq!(bench.swap(700, 8), 7);
    bench.window.invalidate(&[bench.region]);
    assert_eq!(bench.mapped(), 0);
    assert_eq!(bench.host.stats().huge_pages, 1);
}

/// A compound page is split for a discard, and collapsed again because its pages are in use.
#[test]
fn a_block_in_use_is_collapsed_and_moved_as_a_whole() {
    let Some(bench) = bench(8 * BLOCK, HugePages::Always) else {
        return;
    };
    let all = BLOCK..2 * BLOCK;
    bench.map(700);
    let is_huge = bench.has_huge_page();
    all.clone()
        .for_each(|page| _ = bench.swap(page, page.into()));
    bench.host.discard(bench.pages(700, 1)).unwrap();
    assert_eq!(bench.mapped(), 0);
    all.clone().for_each(|page| bench.map(page));
    assert_eq!(bench.mapped(), BLOCK.into());
    assert!((0..100).any(|_| bench.host.collapse_step() == Collapse::Made));
    assert_eq!(bench.mapped(), 0);
    bench.map(600);
    assert_eq!(bench.mapped(), BLOCK.into());
    assert!(!is_huge || bench.has_huge_page());
    for page in all {
        let expected = if page == 700 { 0 } else { page.into() };
        assert_eq!(bench.swap(page, 1), expected);
    }
}

/// As many pages as were touched, to the end of the block, without pages that were touched before.
#[test]
fn first_touches_in_order_map_pages_ahead() {
    let Some(bench) = bench(8 * BLOCK, HugePages::Never) else {
        return;
    };
    for (touched, mapped) in [(0, 2), (2, 6), (6, 14), (14, 30), (30, 46)] {
        bench.map(touched);
        assert_eq!(bench.mapped(), mapped);
    }
    while bench.mapped() < BLOCK.into() {
        bench.map(bench.mapped() as Page);
    }
    assert_eq!(bench.mapped(), BLOCK.into());
    bench.map(602);
    bench.window.invalidate(&[bench.pages(602, 1)]);
    for (touched, mapped) in [(600, 1), (601, 2), (603, 3), (605, 4), (602, 5)] {
        bench.map(touched);
        assert_eq!(bench.mapped(), u64::from(BLOCK) + mapped);
    }
}

/// Apart from frames that are still to be emptied, the window and the frames never take more memory
/// together than the budget, and no write is lost, while compound pages are made, split, swapped
/// out page by page and collapsed.
#[test]
fn huge_pages_stay_in_the_budget() {
    pages_stay_in_the_budget(HugePages::Always);
}

#[test]
fn small_pages_stay_in_the_budget() {
    pages_stay_in_the_budget(HugePages::Never);
}

fn pages_stay_in_the_budget(huge: HugePages) {
    let budget = 5 * BLOCK;
    let Some(bench) = bench(budget, huge) else {
        return;
    };
    let most = match huge {
        HugePages::Never => budget as usize + COPIED_MAX,
        _ => budget as usize,
    };
    for round in 0..3 {
        for turn in 0..PAGES {
            // The first half of the memory in order, and one page of 8 at random.
            let page = match turn % 8 {
                0 => turn.wrapping_mul(0x9e37_79b1) % PAGES,
                _ => turn / 2,
            };
            bench.map(page);
            let old = bench.swap(page, u64::from(page) + 1);
            assert!(old == 0 || old == u64::from(page) + 1, "{page}: {old}");
            assert!(old != 0 || round == 0, "{page} was lost");
            if turn % 64 == 0 {
                let _ = bench.host.collapse_step();
                let frames = bench.pagemap.present(bench.window.frames).unwrap();
                let resident = frames + bench.mapped();
                assert!(resident <= most as u64, "{resident}");
            }
        }
    }
    let stats = bench.host.stats();
    let has_huge = huge != HugePages::Never;
    assert_eq!(
        stats.huge_faults > 0 && stats.splits > 0,
        has_huge,
        "{stats:?}"
    );
}
