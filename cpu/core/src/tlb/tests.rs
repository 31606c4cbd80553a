//! The content of the arrays, and the entries that they must not return.

use super::*;
use proptest::prelude::*;

const READ_ONLY: Stores = Stores {
    allowed: false,
    tracked: false,
};

#[repr(align(4096))]
struct Frame([u8; PAGE_SIZE]);

fn frame(stores: Stores) -> (Box<Frame>, HostPage) {
    let mut memory = Box::new(Frame([0; PAGE_SIZE]));
    let base = NonNull::from(&mut memory.0).cast();
    // SAFETY: page-aligned, and the box outlives the test's use of the page.
    let page = unsafe { HostPage::new(base, stores) };
    (memory, page)
}

fn gfn(n: u64) -> Gfn {
    Gfn::new(n).expect("small")
}

const ALL: Rights = Rights {
    write: true,
    exec: true,
};

#[test]
fn hits_only_the_page_right_and_alignment_it_holds() {
    let (_memory, page) = frame(UNTRACKED);
    let mut tlb = Tlb::default();
    let va = 0xffff_8000_1234_5000;
    assert_eq!(tlb.load::<u8>(va), None);
    tlb.insert(va, gfn(7), page, ALL);
    assert!(tlb.store(va + 8, 0x1122_3344_5566_7788_u64));
    assert_eq!(tlb.load::<u32>(va + 12), Some(0x1122_3344));
    assert_eq!(tlb.load::<u32>(va + 13), None, "misaligned");
    assert_eq!(tlb.load::<u8>(va + 13), Some(0x33));
    assert_eq!(tlb.load::<u64>(va + 4096), None, "another page");
    assert_eq!(
        tlb.load::<u64>(va + 4096 * PAGES as u64),
        None,
        "another page, same entry"
    );
    assert_eq!(
        tlb.update(va + 8, |v: u64| v + 1),
        Some(0x1122_3344_5566_7788)
    );
    assert_eq!(
        tlb.update_locked(va + 8, |v: u64| v + 1),
        Some(0x1122_3344_5566_7789)
    );
    assert_eq!(tlb.executable_page(va).map(|(gfn, _)| gfn), Some(gfn(7)));
}

#[test]
fn an_empty_entry_matches_no_address() {
    let tlb = Tlb::default();
    for va in [0, 1, 7, 0xfff, u64::MAX, u64::MAX - 7] {
        assert_eq!(tlb.load::<u8>(va), None);
        assert_eq!(tlb.load::<u64>(va), None);
        assert!(!tlb.store(va, 0_u16));
        assert!(tlb.executable_page(va).is_none());
    }
}

#[test]
fn read_only_and_write_tracked_pages_take_no_stores() {
    let tracked = Stores {
        tracked: true,
        ..UNTRACKED
    };
    for stores in [READ_ONLY, tracked] {
        let (_memory, page) = frame(stores);
        let mut tlb = Tlb::default();
        tlb.insert(0x1000, gfn(1), page, ALL);
        assert!(!tlb.store(0x1000, 1_u8));
        assert!(tlb.writable_page(0x1000).is_none());
        assert_eq!(tlb.load::<u8>(0x1000), Some(0));
    }
}

#[test]
fn protect_and_flush() {
    let (_memory, page) = frame(UNTRACKED);
    let mut tlb = Tlb::default();
    tlb.insert(0x1000, gfn(1), page, ALL);
    tlb.insert(0x5000, gfn(1), page, ALL);
    tlb.insert(0x6000, gfn(2), page, Rights { exec: false, ..ALL });
    tlb.protect(gfn(1));
    assert!(!tlb.store(0x1000, 1_u8) && !tlb.store(0x5000, 1_u8) && tlb.store(0x6000, 1_u8));
    assert!(tlb.executable_page(0x6000).is_none());
    tlb.flush();
    assert_eq!(tlb.load::<u8>(0x1000), None);
    assert_eq!(tlb.load::<u8>(0x6000), None);
}

#[repr(align(4096))]
struct BlockMemory([[u8; PAGE_SIZE]; BLOCK_FRAMES as usize]);

/// A block of memory, and the [`HostPage`] of each of its pages, which describes the whole block.
/// Each page has its own number in its bytes.
fn block(stores: Stores) -> (Box<BlockMemory>, impl Fn(u64) -> HostPage) {
    let layout = std::alloc::Layout::new::<BlockMemory>();
    // SAFETY: the layout has a size, and zeros are bytes.
    let mut memory =
        unsafe { Box::from_raw(std::alloc::alloc_zeroed(layout).cast::<BlockMemory>()) };
    for (i, page) in memory.0.iter_mut().enumerate() {
        page[..2].copy_from_slice(&(i as u16).to_le_bytes());
    }
    let base: NonNull<u8> = NonNull::from(&mut memory.0).cast();
    let page = move |n: u64| {
        // SAFETY: a page of the block, which outlives the test's use of it.
        unsafe {
            let page = base.add((n % BLOCK_FRAMES) as usize * PAGE_SIZE);
            HostPage::new(page, stores).of_block()
        }
    };
    (memory, page)
}

const BLOCK_VA: u64 = 0xffff_8000_1240_0000;
const BLOCK_GFN: u64 = 7 * BLOCK_FRAMES;

fn va(page: u64) -> u64 {
    BLOCK_VA + page * PAGE_SIZE as u64
}

#[test]
fn a_block_refills_each_of_its_pages() {
    let (_memory, page) = block(UNTRACKED);
    let mut tlb = Tlb::default();
    assert!(tlb.refill(va(3), Access::Read).is_none());
    tlb.insert(va(3), gfn(BLOCK_GFN + 3), page(3), ALL);
    for n in (0..BLOCK_FRAMES).rev() {
        for access in [Access::Read, Access::Write, Access::Fetch] {
            let (frame, host) = tlb.refill(va(n) + 0x123, access).expect("all of the block");
            assert_eq!((frame, host.load_u16(0)), (gfn(BLOCK_GFN + n), n as u16));
            assert_eq!((host.is_writable(), host.span()), (true, Span::Page));
        }
        assert_eq!(tlb.load(va(n)), Some(n as u16), "an entry of its own");
        assert!(tlb.store(va(n) + 8, n));
        assert_eq!(page(n).load_u64(8), n);
        assert_eq!(
            tlb.executable_page(va(n)).map(|(gfn, _)| gfn),
            Some(gfn(BLOCK_GFN + n))
        );
    }
    for beyond in [
        va(0) - 1,
        va(BLOCK_FRAMES),
        va(3) + (BLOCKS as u64) * (2 << 20),
        0,
    ] {
        assert!(tlb.refill(beyond, Access::Read).is_none(), "{beyond:#x}");
    }
}

#[test]
fn a_block_gives_the_rights_it_has() {
    let (_memory, page) = block(UNTRACKED);
    for (write, exec) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut tlb = Tlb::default();
        tlb.insert(va(0), gfn(BLOCK_GFN), page(0), Rights { write, exec });
        assert!(tlb.refill(va(9), Access::Read).is_some());
        assert_eq!(tlb.refill(va(9), Access::Write).is_some(), write);
        assert_eq!(tlb.refill(va(9), Access::Fetch).is_some(), exec);
        assert_eq!(tlb.store(va(9), 1_u8), write);
        assert_eq!(tlb.executable_page(va(9)).is_some(), exec);
    }
    let (_memory, page) = block(READ_ONLY);
    let mut tlb = Tlb::default();
    tlb.insert(va(0), gfn(BLOCK_GFN), page(0), ALL);
    assert!(
        tlb.refill(va(1), Access::Write).is_none(),
        "read-only in stage 2"
    );
    assert!(tlb.refill(va(1), Access::Read).is_some());
    assert!(!tlb.store(va(1), 1_u8));
}

#[test]
fn a_smaller_leaf_of_the_guest_or_a_watched_page_makes_no_block() {
    let (_memory, page) = block(UNTRACKED);
    let mut tlb = Tlb::default();
    let elsewhere = va(5);
    tlb.insert(elsewhere, gfn(BLOCK_GFN), page(0).within(Span::Page), ALL);
    assert!(tlb.refill(va(5), Access::Read).is_none());
    let stores = Stores {
        tracked: true,
        ..UNTRACKED
    };
    // SAFETY: as `page`, with nothing claimed for the block.
    let tracked = unsafe { HostPage::new(page(0).base(), stores).of_block() };
    tlb.insert(va(0), gfn(BLOCK_GFN), tracked, ALL);
    assert!(tlb.refill(va(1), Access::Read).is_none());
    assert_eq!(page(0).within(Span::Block).span(), Span::Block);
}

#[test]
#[should_panic(expected = "lies in guest-virtual space as in guest-physical")]
fn a_block_at_another_place_in_its_block_is_refused() {
    let (_memory, page) = block(UNTRACKED);
    Tlb::default().insert(va(1), gfn(BLOCK_GFN), page(0), ALL);
}

#[test]
fn protect_and_flush_reach_blocks() {
    let (_memory, page) = block(UNTRACKED);
    let mut tlb = Tlb::default();
    let alias = va(0) + (4 << 20);
    let other = va(0) + (6 << 20);
    tlb.insert(va(0), gfn(BLOCK_GFN), page(0), ALL);
    tlb.insert(alias, gfn(BLOCK_GFN), page(0), ALL);
    tlb.insert(other, gfn(BLOCK_GFN + BLOCK_FRAMES), page(0), ALL);
    assert!(tlb.refill(va(9), Access::Write).is_some());
    assert!(tlb.refill(va(10), Access::Write).is_some());
    tlb.protect(gfn(BLOCK_GFN + 9));
    assert!(!tlb.store(va(9), 0_u16), "its own entry");
    assert!(tlb.store(va(10), 10_u16), "another page of the block");
    for at in [va(9), va(11), alias + 9 * 4096, alias + 11 * 4096] {
        assert!(tlb.refill(at, Access::Write).is_none(), "{at:#x}");
        assert!(tlb.refill(at, Access::Read).is_some(), "{at:#x}");
        assert!(!tlb.store(at, 0_u16), "a page refilled since");
    }
    assert!(tlb.refill(other + 9 * 4096, Access::Write).is_some());
    tlb.flush();
    for at in [va(0), va(9), alias, other] {
        assert!(tlb.refill(at, Access::Read).is_none(), "{at:#x}");
        assert_eq!(tlb.load::<u8>(at), None);
    }
}

#[test]
fn forget_takes_all_of_the_leaf_and_no_more() {
    const GIB: u64 = 1 << 30;
    let (_memory, page) = block(UNTRACKED);
    let base = 0xffff_8000_0000_0000;
    let places = [
        base,
        base + 0x1000,
        base + (2 << 20) - 0x1000,
        base + (2 << 20),
        base + GIB - 0x1000,
        base + GIB,
        base - 0x1000,
    ];
    for (max_level, span) in [
        (Level::L4K, Span::Page),
        (Level::L2M, Span::Block),
        (Level::L1G, Span::Block),
    ] {
        for at in places {
            let mut tlb = Tlb::default();
            for va in places {
                let n = va >> 12;
                tlb.insert(va, gfn(n & 0xf_ffff), page(n).within(span), ALL);
            }
            let known = |tlb: &mut Tlb, va: u64| {
                tlb.readable_page(va).is_some() || tlb.refill(va, Access::Read).is_some()
            };
            let before = places.map(|va| known(&mut tlb, va));
            tlb.forget(at + 0x123, max_level);
            for (va, before) in places.into_iter().zip(before) {
                let away = va >> max_level.byte_shift() == at >> max_level.byte_shift();
                assert_eq!(
                    known(&mut tlb, va),
                    before && !away,
                    "{max_level:?} {at:#x} {va:#x}"
                );
            }
            tlb.flush();
            assert!(places.iter().all(|&va| !known(&mut tlb, va)));
        }
    }
}

proptest! {
    /// Compares with a list of all insertions. A hit must be an entry inserted for that page or its
    /// block since the last flush. It must have only inserted rights, and none that was cleared
    /// since.
    #[test]
    fn hits_are_what_was_inserted(steps in prop::collection::vec(step(), 1..60)) {
        let (_memory, page) = block(UNTRACKED);
        let (mut tlb, mut model) = (Tlb::default(), Model::default());
        for step in steps {
            match step {
                Step::Insert(known) => {
                    let page = page(known.n).within(known.span);
                    tlb.insert(at(known.block, known.n), known.gfn, page, known.rights);
                    model.since_flush.push(known);
                }
                Step::Protect(gfn) => {
                    tlb.protect(gfn);
                    model.protected.push((gfn, model.since_flush.len()));
                }
                Step::Flush => {
                    tlb.flush();
                    model = Model::default();
                }
            }
            for (block, n) in (0..3).flat_map(|block| (0..4).map(move |n| (block, n))) {
                let va = at(block, n);
                if let Some((gfn, host)) = tlb.executable_page(va) {
                    let rights = Rights { write: host.is_writable(), exec: true };
                    prop_assert!(model.allows(block, n, gfn, rights));
                }
                for access in [Access::Read, Access::Write, Access::Fetch] {
                    let Some((gfn, host)) = tlb.refill(va, access) else { continue };
                    let exec = access == Access::Fetch;
                    let rights = Rights { write: host.is_writable(), exec };
                    prop_assert!(model.allows(block, n, gfn, rights));
                    prop_assert_eq!(tlb.load(va), Some(n as u16));
                    prop_assert_eq!(tlb.writable_page(va).is_some(), rights.write);
                }
            }
        }
    }
}

/// One translation: page `n` of a guest-virtual block, or the whole block.
#[derive(Clone, Copy, Debug)]
struct Known {
    block: u64,
    n: u64,
    gfn: Gfn,
    rights: Rights,
    span: Span,
}

impl Known {
    fn translates(&self, block: u64, n: u64) -> Option<Gfn> {
        match self.span {
            _ if self.block != block => None,
            Span::Page if self.n != n => None,
            _ => Gfn::new(self.gfn.get() - self.n + n),
        }
    }
}

#[derive(Default)]
struct Model {
    since_flush: Vec<Known>,
    /// Protected frames, each with the number of insertions before the protection.
    protected: Vec<(Gfn, usize)>,
}

impl Model {
    fn allows(&self, block: u64, n: u64, gfn: Gfn, rights: Rights) -> bool {
        let protected = self.protected.iter().filter(|(frame, _)| *frame == gfn);
        let writable_from = protected.map(|(_, at)| *at).max().unwrap_or(0);
        self.since_flush.iter().enumerate().any(|(at, known)| {
            let write = known.rights.write && at >= writable_from;
            known.translates(block, n) == Some(gfn)
                && (write || !rights.write)
                && (known.rights.exec || !rights.exec)
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(Known),
    Protect(Gfn),
    Flush,
}

/// Page `n` of one of three blocks of guest-virtual memory; 0 and 2 share an entry.
fn at(block: u64, n: u64) -> u64 {
    va(n) + (block / 2 * BLOCKS as u64 + block % 2) * (2 << 20)
}

fn step() -> impl Strategy<Value = Step> {
    let span = prop::sample::select(vec![Span::Page, Span::Block]);
    let frame = |frames: u64, n: u64| gfn(frames * BLOCK_FRAMES + n);
    prop_oneof![
        6 => (0..3_u64, 0..4_u64, 1..3_u64, any::<(bool, bool)>(), span).prop_map(
            move |(block, n, frames, (write, exec), span)| Step::Insert(Known {
                block,
                n,
                gfn: frame(frames, n),
                rights: Rights { write, exec },
                span,
            })
        ),
        2 => (1..3_u64, 0..4_u64).prop_map(move |(frames, n)| Step::Protect(frame(frames, n))),
        1 => Just(Step::Flush),
    ]
}
