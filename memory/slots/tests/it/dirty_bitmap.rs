//! The dirty bitmap, compared with a plain set of pages: its refusals, and its counts under
//! threads.

use lacuna_slots::{ClearError, DirtyBitmap, Marked};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Clone, Debug)]
enum Op {
    Mark(usize),
    MarkAll(Vec<usize>),
    Take {
        first: usize,
        count: usize,
    },
    Copy {
        first: usize,
        count: usize,
    },
    Clear {
        first_page: usize,
        pages: usize,
        mask: Vec<u64>,
    },
    PutBack {
        first: usize,
        words: Vec<u64>,
    },
    SetAll,
}

fn any_op() -> impl Strategy<Value = Op> {
    let word = || prop_oneof![Just(0), Just(u64::MAX), any::<u64>()];
    let words = move || prop::collection::vec(word(), 0..5);
    let first_page = prop_oneof![3 => (0..6usize).prop_map(|word| word * 64), 1 => 0..300usize];
    let pages = prop_oneof![2 => (0..5usize).prop_map(|words| words * 64), 2 => 0..300usize];
    prop_oneof![
        20 => (0..300usize).prop_map(Op::Mark),
        4 => pages_in_a_row().prop_map(Op::MarkAll),
        3 => (0..5usize, 0..5usize).prop_map(|(first, count)| Op::Take { first, count }),
        2 => (0..5usize, 0..5usize).prop_map(|(first, count)| Op::Copy { first, count }),
        6 => (first_page, pages, words())
            .prop_map(|(first_page, pages, mask)| Op::Clear { first_page, pages, mask }),
        2 => (0..5usize, words()).prop_map(|(first, words)| Op::PutBack { first, words }),
        1 => Just(Op::SetAll),
    ]
}

/// Neighbouring pages, ascending or descending, between others: some share a word with the previous
/// one.
fn pages_in_a_row() -> impl Strategy<Value = Vec<usize>> {
    let run = (0..300usize, 0..20usize, any::<bool>()).prop_map(|(first, count, up)| {
        let pages = first..first + count;
        match up {
            true => pages.collect::<Vec<_>>(),
            false => pages.rev().collect(),
        }
    });
    prop::collection::vec(run, 0..5).prop_map(|runs| runs.concat())
}

/// The dirty pages of a slot.
struct Model {
    pages: usize,
    dirty: BTreeSet<usize>,
}

impl Model {
    fn words(&self) -> usize {
        self.pages.div_ceil(64)
    }

    fn has(&self, first: usize, count: usize) -> bool {
        first + count <= self.words()
    }

    fn word(&self, word: usize) -> u64 {
        let bits = (0..64).filter(|bit| self.dirty.contains(&(word * 64 + bit)));
        bits.fold(0, |bits, bit| bits | 1 << bit)
    }

    fn read(&self, first: usize, count: usize) -> Vec<u64> {
        (first..first + count).map(|word| self.word(word)).collect()
    }

    /// The words of the pages in `mask`; those pages become clean.
    fn clear(&mut self, first: usize, mask: &[u64]) -> Vec<u64> {
        let found = (0..mask.len()).map(|i| self.word(first + i) & mask[i]);
        let found: Vec<u64> = found.collect();
        for page in each_page(first, &found) {
            self.dirty.remove(&page);
        }
        found
    }

    /// KVM's rules for the arguments.
    fn allows(&self, first_page: usize, pages: usize, mask: usize) -> Result<(), &'static str> {
        if !first_page.is_multiple_of(64) {
            Err("misaligned")
        } else if first_page + pages > self.pages {
            Err("beyond")
        } else if !pages.is_multiple_of(64) && first_page + pages != self.pages {
            Err("ragged")
        } else if mask != pages.div_ceil(64) {
            Err("mask")
        } else {
            Ok(())
        }
    }
}

fn each_page(first: usize, words: &[u64]) -> Vec<usize> {
    let pages = 0..words.len() * 64;
    let set = pages.filter(|page| words[page / 64] >> (page % 64) & 1 == 1);
    set.map(|page| first * 64 + page).collect()
}

fn kind(error: ClearError) -> &'static str {
    match error {
        ClearError::Misaligned { .. } => "misaligned",
        ClearError::BeyondSlot { .. } => "beyond",
        ClearError::Ragged { .. } => "ragged",
        ClearError::Mask { .. } => "mask",
        other => panic!("{other} is new"),
    }
}

fn step(bitmap: &DirtyBitmap, model: &mut Model, op: Op) {
    match op {
        Op::Mark(page) if page < model.pages => {
            let fresh = model.dirty.insert(page);
            let expected = if fresh { Marked::New } else { Marked::Already };
            assert_eq!(bitmap.mark(page), expected);
        }
        Op::MarkAll(mut pages) => {
            pages.retain(|page| *page < model.pages);
            assert_eq!(bitmap.mark_all(pages.iter().copied()), pages.len());
            model.dirty.extend(pages);
        }
        Op::Take { first, count } if model.has(first, count) => {
            let mut out = vec![0xdead; count];
            bitmap.take(first, &mut out);
            assert_eq!(out, model.clear(first, &vec![u64::MAX; count]));
        }
        Op::Copy { first, count } if model.has(first, count) => {
            let mut out = vec![0xdead; count];
            bitmap.copy(first, &mut out);
            assert_eq!(out, model.read(first, count));
        }
        Op::Clear {
            first_page,
            pages,
            mut mask,
        } => {
            let expected = model.allows(first_page, pages, mask.len());
            let asked = mask.clone();
            let result = bitmap.clear(first_page, pages, &mut mask);
            assert_eq!(result.map_err(kind), expected);
            match expected {
                Ok(()) => assert_eq!(mask, model.clear(first_page / 64, &asked)),
                Err(_) => assert_eq!(mask, asked),
            }
        }
        Op::PutBack { first, mut words } if model.has(first, words.len()) => {
            let last = model.words() - 1;
            if let Some(word) = words.get_mut(last.wrapping_sub(first)) {
                *word &= u64::MAX >> (model.words() * 64 - model.pages);
            }
            bitmap.put_back(first, &words);
            model.dirty.extend(each_page(first, &words));
        }
        Op::SetAll => {
            bitmap.set_all();
            model.dirty.extend(0..model.pages);
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_bitmap_is_a_set_of_pages(
        pages in prop_oneof![Just(1usize), Just(64), Just(256), 1..290usize],
        ops in prop::collection::vec(any_op(), 1..60),
    ) {
        let bitmap = DirtyBitmap::new(pages);
        let mut model = Model { pages, dirty: BTreeSet::new() };
        assert_eq!((bitmap.pages(), bitmap.words()), (pages, model.words()));
        for op in ops {
            step(&bitmap, &mut model, op);
            let mut all = vec![0; bitmap.words()];
            bitmap.copy(0, &mut all);
            assert_eq!(all, model.read(0, model.words()));
        }
    }
}

#[test]
fn bytes_are_in_kvms_order() {
    let bitmap = DirtyBitmap::new(130);
    for page in [0, 9, 63, 64, 129] {
        bitmap.mark(page);
    }
    let mut words = [0; 3];
    bitmap.copy(0, &mut words);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    for page in 0..130 {
        let set = bytes[page / 8] >> (page % 8) & 1 == 1;
        assert_eq!(set, [0, 9, 63, 64, 129].contains(&page), "page {page}");
    }
}

#[test]
fn every_refusal_says_what_to_do() {
    let bitmap = DirtyBitmap::new(100);
    let clear = |first_page, pages, words| {
        let refused = bitmap.clear(first_page, pages, &mut vec![0; words]);
        refused.expect_err("refused").to_string()
    };
    assert_eq!(
        clear(3, 64, 1),
        "first page 3 is not a multiple of 64: clear whole words"
    );
    assert_eq!(
        clear(0, 70, 2),
        "70 pages from page 0 end within a word: clear a multiple of 64 pages, or up to the end \
         of the slot at page 100"
    );
    assert_eq!(
        clear(64, 64, 1),
        "64 pages from page 64 reach beyond the slot's end at page 100: clear fewer"
    );
    assert_eq!(
        clear(usize::MAX - 63, usize::MAX, 1),
        format!(
            "{} pages from page {} reach beyond the slot's end at page 100: clear fewer",
            usize::MAX,
            usize::MAX - 63
        )
    );
    assert_eq!(
        clear(64, 36, 2),
        "36 pages have a mask of 1 words, not of 2: pass 1"
    );
}

#[test]
#[should_panic(expected = "page 100 of 100")]
fn a_page_beyond_the_slot_cannot_be_marked() {
    bitmap_of_100().mark(100);
}

#[test]
#[should_panic(expected = "word 1 has no such pages")]
fn a_page_beyond_the_slot_cannot_be_put_back() {
    bitmap_of_100().put_back(0, &[0, 1 << 36]);
}

#[test]
#[should_panic(expected = "2 words from 1 of 2")]
fn words_beyond_the_slot_cannot_be_taken() {
    bitmap_of_100().take(1, &mut [0; 2]);
}

fn bitmap_of_100() -> DirtyBitmap {
    DirtyBitmap::new(100)
}

/// Two threads mark at random while a third harvests in both ways. Every bit that a mark set was
/// cleared exactly once.
#[test]
fn every_new_mark_is_harvested_once() {
    const PAGES: usize = 1000;
    const MARKS: u64 = 400_000;
    let bitmap = DirtyBitmap::new(PAGES);
    let (fresh, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let marker = |mut x: u64| {
        for _ in 0..MARKS {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1);
            if bitmap.mark((x >> 33) as usize % PAGES) == Marked::New {
                fresh.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    let ones = |words: &[u64]| -> u64 { words.iter().map(|w| u64::from(w.count_ones())).sum() };
    let harvested = std::thread::scope(|s| {
        let harvester = s.spawn(|| {
            let (mut sum, mut round) = (0, 0);
            loop {
                let last = done.load(Ordering::Acquire);
                let mut words = [0; PAGES.div_ceil(64)];
                if last || round % 2 == 0 {
                    bitmap.take(0, &mut words);
                } else {
                    bitmap.copy(0, &mut words);
                    bitmap.clear(0, PAGES, &mut words).expect("all of it");
                }
                sum += ones(&words);
                round += 1;
                if last {
                    return sum;
                }
            }
        });
        let other = s.spawn(|| marker(1));
        marker(2);
        other.join().expect("marker");
        done.store(true, Ordering::Release);
        harvester.join().expect("harvester")
    });
    assert_eq!(harvested, fresh.load(Ordering::Relaxed));
}
