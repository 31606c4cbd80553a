//! Fills and records of working sets, beside faults and removals.

use crate::vmm::{Bed, Manual, Memory, Vmm, Words, content, removals, word};
use fastrand::Rng;
use lacuna_addr::{Level, PageCount};
use lacuna_pager::{Config, Fill, FillRate, Image, PagerCounts, Record};
use lacuna_skip::test;
use lacuna_source::{Answer, PageSource, SourcePage, TouchedMemory, Touches};
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

const UNIT: u64 = 512;

fn image(source: Arc<dyn PageSource>, pages: u64) -> Image {
    Image::new(source, PageCount::new(pages))
}

/// All pages, without a limit.
pub fn all(source: Arc<dyn PageSource>) -> Fill {
    Fill {
        source,
        working_set: None,
        is_whole: true,
        rate: None,
    }
}

/// A pager of `pages` pages that answers faults at once.
fn filled(fill: Fill, pages: u64) -> Bed {
    let fill = Some(fill);
    let image = Image {
        fill,
        ..image(Arc::new(Words), pages)
    };
    Bed::of(image, Config::default())
}

fn counts(bed: &Bed) -> PagerCounts {
    bed.pager.stats().counts
}

fn touches(path: &Path, pages: u64) -> Touches {
    let checksum = None;
    Touches::load(path, TouchedMemory { checksum, pages }).unwrap()
}

#[test]
fn all_pages_come_without_a_fault() {
    let uffd = removals();
    let bed = filled(all(Arc::new(Words)), 700);
    let vmm = Vmm::connect(&bed, uffd, 0, 700);
    bed.wait("the fill", |pager| pager.stats().counts.placed == 700);
    for page in 0..700 {
        assert_eq!(vmm.memory.read_whole(page), word(page));
    }
    let counts = counts(&bed);
    assert_eq!(
        (counts.faults, counts.filled, counts.fill_late),
        (0, 700, 0)
    );
    assert_eq!(bed.said(), [""; 0]);
}

/// Without a fill, a page is asked for at its first fault.
#[test]
fn a_lazy_vm_asks_for_what_it_needs() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 64);
    let vmm = Vmm::connect(&bed, uffd, 0, 64);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| vmm.memory.read_whole(9));
        let request = source.next();
        assert_eq!(request.page(), SourcePage(9));
        assert_eq!(request.provide(&content(9)), Answer::Taken);
        assert_eq!(reader.join().unwrap(), word(9));
    });
    assert!(source.is_empty());
    assert_eq!(counts(&bed).filled, 0);
}

/// The fill's source is silent: it gets requests for a window, and no fault waits for it. Its
/// answers are late for pages that were needed or removed meanwhile, and the others are placed.
#[test]
fn a_silent_source_of_the_fill_delays_no_fault() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = filled(all(source.clone()), 400);
    let vmm = Vmm::connect(&bed, uffd, 0, 400);
    bed.wait("a window", |_| source.len() == 256);
    assert_eq!(vmm.memory.read_whole(3), word(3));
    vmm.memory.write(3, 7);
    vmm.memory.discard(4, 2);
    vmm.memory.discard(300, 1);
    bed.wait("all answers", |pager| {
        while !source.is_empty() {
            let request = source.next();
            assert_eq!(request.provide(&content(request.page().0)), Answer::Taken);
            assert_eq!(request.provide(&[9; 4096]), Answer::Late);
        }
        // Page 300 was not missing any more when the fill came to it.
        pager.stats().counts.filled == 400 - 4
    });
    for page in 0..400 {
        let expected = match page {
            3 => 7,
            4 | 5 | 300 => 0,
            page => word(page),
        };
        assert_eq!(vmm.memory.read_whole(page), expected, "page {page}");
    }
    let counts = counts(&bed);
    assert_eq!((counts.fill_late, counts.lost), (3, 0));
    assert_eq!(counts.placed, 400 - 3);
}

/// A page that the fill does not get is not lost. The user gets one message.
#[test]
fn a_failing_source_of_the_fill_loses_nothing() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = filled(all(source.clone()), 8);
    let vmm = Vmm::connect(&bed, uffd, 0, 8);
    for _ in 0..8 {
        assert_eq!(source.next().fail("it is away"), Answer::Taken);
    }
    bed.wait("the message", |_| !bed.said().is_empty());
    for page in 0..8 {
        assert_eq!(vmm.memory.read_whole(page), word(page));
    }
    let said = bed.said();
    let is_right = said[0].contains("it is away; a fault asks for it again");
    assert!(said.len() == 1 && is_right, "{said:?}");
    assert_eq!(counts(&bed).lost, 0);
}

/// Units of several pages: a fault and the fill each gather one, and the first whole one counts.
#[test]
fn a_huge_unit_comes_from_one_of_both() {
    for fill_is_first in [false, true] {
        let uffd = removals();
        let [faults, fills] = [(); 2].map(|()| Arc::new(Manual::default()));
        let image = Image {
            fill: Some(all(fills.clone())),
            ..image(faults.clone(), UNIT)
        };
        let bed = Bed::of(image, Config::default());
        let memory = Memory::anonymous(UNIT, Level::L2M.bytes());
        let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
        // The fill asks for no unit that a fault has asked for.
        bed.wait("the fill", |_| fills.len() == 512);
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || memory.read_whole(5));
            bed.wait("the fault", |_| faults.len() == 512);
            // The last one has only a part of its pages when the first one has all.
            let (first, last) = match fill_is_first {
                true => (&fills, &faults),
                false => (&faults, &fills),
            };
            for (source, pages) in [(last, 300), (first, 512)] {
                for _ in 0..pages {
                    let request = source.next();
                    assert_eq!(request.provide(&content(request.page().0)), Answer::Taken);
                }
            }
            assert_eq!(reader.join().unwrap(), word(5));
            memory.write(6, 1);
            while !last.is_empty() {
                let request = last.next();
                let _ = request.provide(&content(request.page().0));
            }
        });
        let filled = u64::from(fill_is_first);
        bed.wait("the counts", |pager| {
            let counts = pager.stats().counts;
            (counts.filled, counts.fill_late, counts.placed) == (filled, 1 - filled, 1)
        });
        assert_eq!([6, 7].map(|page| memory.read_whole(page)), [1, word(7)]);
        assert_eq!(bed.said(), [""; 0]);
    }
}

/// A VM whose fill waits for its source ends like any other.
#[test]
fn the_end_of_a_vm_ends_its_fill() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = filled(all(source.clone()), 16);
    let vmm = Vmm::connect(&bed, uffd, 0, 16);
    let request = source.next();
    drop(vmm);
    bed.wait("the end", |pager| pager.connections() == 0);
    assert_eq!(request.provide(&content(0)), Answer::Late);
}

/// The record of a filled VM would lack pages, so the recorded VM is not filled. The next one is.
#[test]
fn a_recorded_vm_is_not_filled() {
    let [first, second] = [(); 2].map(|()| removals());
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("record");
    let source = Arc::new(Manual::default());
    let image = Image {
        record: Some(Arc::new(Record::new(path.clone(), PageCount::new(8)))),
        fill: Some(all(source.clone())),
        ..image(Arc::new(Words), 8)
    };
    let bed = Bed::of(image, Config::default());
    let vmm = Vmm::connect(&bed, first, 0, 8);
    vmm.memory.read(5);
    drop(vmm);
    bed.wait("the end", |pager| pager.connections() == 0);
    assert!(source.is_empty());
    assert_eq!(touches(&path, 8).pages(), [SourcePage(5)]);
    let _vmm = Vmm::connect(&bed, second, 0, 8);
    bed.wait("the fill", |_| source.len() == 8);
}

/// At 4096 bytes an hour, the second page is not asked for.
#[test]
fn the_fill_keeps_its_rate() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let rate = Some(FillRate::new(NonZeroU64::MIN));
    let fill = Fill {
        rate,
        ..all(source.clone())
    };
    let bed = filled(fill, 16);
    let _vmm = Vmm::connect(&bed, uffd, 0, 16);
    assert_eq!(source.next().provide(&content(0)), Answer::Taken);
    bed.wait("the page", |pager| pager.stats().counts.placed == 1);
    assert!(source.is_empty());
}

/// A simulated program: it uses its code and data, in an order of its own, and a few pages that
/// another run does not use.
fn run(memory: Memory, seed: u64) {
    let mut rng = Rng::with_seed(seed);
    let mut pages: Vec<u64> = (0..900).map(|at| at * 4 + 1).collect();
    pages.extend((0..90).map(|_| rng.u64(0..memory.pages)));
    rng.shuffle(&mut pages);
    for page in pages {
        assert_eq!(memory.read_whole(page), word(page));
    }
}

/// Runs a VM in pages of `page` with a pager of `image`. Returns its counters.
fn serve(image: Image, page: Level, seed: u64) -> PagerCounts {
    let (uffd, pages, has_fill) = (removals(), image.pages.get(), image.fill.is_some());
    let bed = Bed::of(image, Config::default());
    let memory = Memory::anonymous(pages, Level::L2M.bytes());
    let vmm = Vmm::with(&bed, uffd, (memory, 0), page);
    bed.wait("the fill", |pager| {
        let is_filled = pager.vms().first().is_some_and(|vm| vm.is_filled);
        is_filled || !has_fill
    });
    run(memory, seed);
    drop(vmm);
    bed.wait("the end", |pager| pager.connections() == 0);
    counts(&bed)
}

/// A record saves at least 80 % of the faults of a later run, in pages of each size.
#[test]
fn a_working_set_saves_faults() {
    let folder = TempDir::new().unwrap();
    let pages = 8 * UNIT;
    for recorded in [Level::L4K, Level::L2M] {
        let path = folder.path().join(format!("of-{recorded:?}"));
        let record = Some(Arc::new(Record::new(path.clone(), PageCount::new(pages))));
        let image_of = |fill| Image {
            fill,
            record: None,
            ..image(Arc::new(Words), pages)
        };
        let recording = Image {
            record,
            ..image_of(None)
        };
        let first = serve(recording, recorded, 1);
        let set = touches(&path, pages);
        let units = pages / UNIT;
        match recorded {
            Level::L4K => assert_eq!(set.pages().len() as u64, first.placed),
            _ => assert_eq!((set.pages().len() as u64, first.placed), (pages, units)),
        }
        for replayed in [Level::L4K, Level::L2M] {
            let without = serve(image_of(None), replayed, 2);
            let fill = Fill {
                working_set: Some(set.clone()),
                is_whole: false,
                ..all(Arc::new(Words))
            };
            let with = serve(image_of(Some(fill)), replayed, 2);
            assert!(
                with.faults * 5 <= without.faults && with.working_set == with.filled,
                "{recorded:?} {replayed:?}: {with:?} {without:?}"
            );
            assert_eq!(with.faults_after_fill, with.faults);
        }
    }
}

/// The record has the first VM's pages in the order of touch, and not the second VM's.
#[test]
fn the_first_vm_is_recorded() {
    let [first, second] = [(); 2].map(|()| removals());
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("record");
    let record = Arc::new(Record::new(path.clone(), PageCount::new(64)));
    let image = Image {
        record: Some(Arc::clone(&record)),
        ..image(Arc::new(Words), 64)
    };
    let bed = Bed::of(image, Config::default());
    let first = Vmm::connect(&bed, first, 32, 32);
    bed.wait("the first", |_| record.is_taken());
    let second = Vmm::connect(&bed, second, 0, 32);
    second.memory.read(3);
    [5, 0, 30]
        .into_iter()
        .for_each(|page| _ = first.memory.read(page));
    record.save().unwrap();
    let expected = [37, 32, 62].map(SourcePage);
    assert_eq!(touches(&path, 64).pages(), expected);
    first.memory.read(1);
    drop(first);
    bed.wait("the end", |pager| pager.stats().vms == 1);
    bed.wait("the file", |_| touches(&path, 64).pages().len() == 4);
    std::fs::remove_file(&path).unwrap();
    drop(second);
    bed.wait("the end", |pager| pager.connections() == 0);
    assert!(!path.exists());
}
