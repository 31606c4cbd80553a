//! Clones that share the pages of their image.

use crate::fill::all;
use crate::vmm::{Bed, Manual, Words, content, word};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_pager::{Config, Image, WhenLost};
use lacuna_pager_client::{Accesses, Client, ClientError, PagedMemory};
use lacuna_skip::test;
use lacuna_source::{Answer, PageRequest, PageSource};
use lacuna_sys::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const PAGE: u64 = PAGE_SIZE as u64;

/// A clone's memory. Skips the test without minor faults.
pub fn clone_of(bed: &Bed) -> PagedMemory {
    or_skip(
        Client::connect(&bed.path)
            .unwrap()
            .memory(Accesses::User, |_| {}),
    )
}

pub fn or_skip<T>(made: Result<T, ClientError>) -> T {
    made.unwrap_or_else(|error| match error {
        ClientError::NotAllowed | ClientError::OldKernel | ClientError::System(Errno::NOSYS) => {
            lacuna_skip::skip_test(error)
        }
        error => panic!("{error}"),
    })
}

/// The word of all words of a page.
pub fn whole(memory: &PagedMemory, page: u64) -> u64 {
    let mut bytes = [0; PAGE_SIZE];
    memory.read(page * PAGE, &mut bytes);
    let words = bytes.as_chunks().0;
    let first = u64::from_ne_bytes(words[0]);
    for word in words {
        assert_eq!(u64::from_ne_bytes(*word), first, "page {page}");
    }
    first
}

/// [`Words`], whose every fourth page has zeros alone. Counts the requests.
#[derive(Default)]
pub struct Sparse(pub AtomicU64);

impl Sparse {
    pub fn word(page: u64) -> u64 {
        if page % 4 == 3 { 0 } else { word(page) }
    }
}

impl PageSource for Sparse {
    fn describe(&self) -> String {
        "words and zeros".into()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.fetch_add(1, Ordering::Relaxed);
        let page = request.page().0;
        let _ = match Self::word(page) {
            0 => request.provide(&[0; PAGE_SIZE]),
            _ => request.provide(&content(page)),
        };
    }
}

/// A field of this process's mapping at the memory, from /proc/self/smaps, in KiB.
pub fn smaps(memory: &PagedMemory, field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", memory.range().start().get());
    let lines = text.lines().skip_while(|line| !line.starts_with(&start));
    let line = lines.skip(1).find_map(|line| line.strip_prefix(field));
    let number = line.unwrap().trim().trim_end_matches(" kB");
    number.parse().unwrap()
}

/// Clones that have read all pages need the memory of one, and of what they have written. A page of
/// zeros needs none.
#[test]
fn clones_need_the_memory_of_one() {
    const PAGES: u64 = 128;
    const CLONES: u64 = 4;
    const WRITTEN: u64 = 2;
    let source = Arc::new(Sparse::default());
    let bed = Bed::new(source.clone(), PAGES);
    let clones = [(); CLONES as usize].map(|()| clone_of(&bed));
    for (at, memory) in (0..).zip(&clones) {
        for page in 0..PAGES {
            assert_eq!(whole(memory, page), Sparse::word(page), "clone {at}");
        }
    }
    assert_eq!(source.0.load(Ordering::Relaxed), PAGES);
    for (at, memory) in (0..).zip(&clones) {
        for page in 0..WRITTEN {
            memory.write(page * PAGE, &[at + 1]);
        }
    }
    for (at, memory) in (0..).zip(&clones) {
        let mut byte = [0];
        memory.read(0, &mut byte);
        assert_eq!(byte, [at + 1]);
        let own = smaps(memory, "Anonymous:");
        assert_eq!(own, WRITTEN * PAGE / 1024, "clone {at}");
    }
    let all: u64 = clones.iter().map(|memory| smaps(memory, "Pss:")).sum();
    let (one, written) = (PAGES * PAGE / 1024, CLONES * WRITTEN * PAGE / 1024);
    assert!(all * 10 <= one * 12 + written * 10, "{all} KiB, one {one}");
    bed.wait("the counts", |pager| {
        let counts = pager.stats().counts;
        (counts.shared, counts.placed) == (CLONES * PAGES * 3 / 4, CLONES * PAGES / 4)
    });
    assert_eq!(bed.said(), [""; 0]);
}

/// Waits until this number of clones have each one unanswered request.
pub fn wait_for_requests(bed: &Bed, clones: usize) {
    bed.wait("the requests", |pager| {
        let vms = pager.vms();
        vms.iter().filter(|vm| vm.pages.in_flight == 1).count() == clones
    });
}

/// All clones that wait for a page get the one answer of the source.
#[test]
fn one_answer_serves_all_clones() {
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 4);
    let clones = [(); 3].map(|()| clone_of(&bed));
    thread::scope(|scope| {
        let readers = clones
            .each_ref()
            .map(|memory| scope.spawn(|| whole(memory, 2)));
        let request = source.next();
        wait_for_requests(&bed, 3);
        assert_eq!(request.provide(&content(2)), Answer::Taken);
        assert_eq!(request.provide(&content(3)), Answer::Late);
        for reader in readers {
            assert_eq!(reader.join().unwrap(), word(2));
        }
    });
    assert!(source.is_empty());
}

/// A page that a clone takes away has zeros there, and its content elsewhere, whatever was first.
#[test]
fn a_removal_is_one_clones_own() {
    let bed = Bed::new(Arc::new(Words), 8);
    let (a, b) = (clone_of(&bed), clone_of(&bed));
    // Read, written, and never touched before.
    assert_eq!(whole(&a, 0), word(0));
    a.write(PAGE, &[9]);
    a.discard(0, 3).unwrap();
    for page in 0..3 {
        assert_eq!(whole(&a, page), 0, "page {page}");
        assert_eq!(whole(&b, page), word(page));
        a.write(page * PAGE, &[7; PAGE_SIZE]);
        a.discard(page, 1).unwrap();
        assert_eq!(whole(&a, page), 0, "page {page}");
    }
    // The other pages are untouched by it.
    assert_eq!((whole(&a, 3), whole(&b, 4)), (word(3), word(4)));
}

/// A removal before the answer: the waiting thread gets zeros, and the other clone the content.
#[test]
fn a_removed_page_gets_no_late_content() {
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 1);
    let (a, b) = (clone_of(&bed), clone_of(&bed));
    thread::scope(|scope| {
        let readers = [&a, &b].map(|memory| scope.spawn(|| whole(memory, 0)));
        let request = source.next();
        wait_for_requests(&bed, 2);
        a.discard(0, 1).unwrap();
        // Late, if the other clone's request is not in the queue yet.
        let _ = request.provide(&content(0));
        let [removed, kept] = readers.map(|reader| reader.join().unwrap());
        assert_eq!((removed, kept), (0, word(0)));
    });
    assert_eq!(whole(&a, 0), 0);
}

/// Threads of several clones read, write and take away pages at random, each in its own clone.
#[test]
fn clones_at_random() {
    const PAGES: u64 = 32;
    let source = Arc::new(Sparse::default());
    let bed = Bed::new(source.clone(), PAGES);
    let clones = [(); 3].map(|()| clone_of(&bed));
    thread::scope(|scope| {
        for (seed, memory) in (0..).zip(&clones) {
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                let mut expected: Vec<_> = (0..PAGES).map(Sparse::word).collect();
                for step in 1..1500 {
                    let page = random.u64(0..PAGES);
                    match random.u8(0..4) {
                        0 => {
                            memory.discard(page, 1).unwrap();
                            expected[page as usize] = 0;
                        }
                        1 => {
                            let word = step << 8 | seed;
                            let words = [word; PAGE_SIZE / 8].map(u64::to_ne_bytes);
                            memory.write(page * PAGE, words.as_flattened());
                            expected[page as usize] = word;
                        }
                        _ => assert_eq!(whole(memory, page), expected[page as usize]),
                    }
                }
            });
        }
    });
    assert!(source.0.load(Ordering::Relaxed) <= PAGES);
}

/// A lost page is lost for all clones that wait. A later clone asks the source again.
#[test]
fn a_lost_page_is_lost_for_all() {
    let source = Arc::new(Manual::default());
    let bed = Bed::losing(source.clone(), 1, WhenLost::Hold);
    // They live as long as the threads, which wait for ever.
    let clones = [(); 2].map(|()| Arc::new(clone_of(&bed)));
    let _wait = clones.each_ref().map(|memory| {
        let memory = Arc::clone(memory);
        thread::spawn(move || whole(&memory, 0))
    });
    wait_for_requests(&bed, 2);
    // A second request follows only if one clone's request is behind the first answer.
    bed.wait("the losses", |pager| {
        if !source.is_empty() {
            assert_eq!(source.next().fail("it burnt"), Answer::Taken);
        }
        pager.stats().counts.lost == 2
    });
    assert!(source.is_empty());
    let later = clone_of(&bed);
    thread::scope(|scope| {
        let reader = scope.spawn(|| whole(&later, 0));
        assert_eq!(source.next().provide(&content(0)), Answer::Taken);
        assert_eq!(reader.join().unwrap(), word(0));
    });
}

/// A fill brings a page while the faults' source looks for it. That source's failure takes the page
/// from no clone.
#[test]
fn a_failure_behind_a_fill_loses_no_page() {
    let [faults, fills] = [(); 2].map(|()| Arc::new(Manual::default()));
    let image = Image {
        fill: Some(all(fills.clone())),
        ..Image::new(faults.clone(), PageCount::new(1))
    };
    let bed = Bed::of(image, Config::default());
    let a = clone_of(&bed);
    let fill = fills.next();
    thread::scope(|scope| {
        let reader = scope.spawn(|| whole(&a, 0));
        let fault = faults.next();
        assert_eq!(fill.provide(&content(0)), Answer::Taken);
        assert_eq!(reader.join().unwrap(), word(0));
        assert_eq!(fault.fail("it burnt"), Answer::Late);
    });
    let b = clone_of(&bed);
    let mut asked = 0;
    thread::scope(|scope| {
        let reader = scope.spawn(|| whole(&b, 0));
        bed.wait("the page", |_| {
            if !faults.is_empty() {
                asked += 1;
                let _ = faults.next().provide(&content(0));
            }
            reader.is_finished()
        });
        assert_eq!(reader.join().unwrap(), word(0));
    });
    assert_eq!(asked, 0);
}

/// Memory that is not shared: the handshake of Firecracker.
#[test]
fn an_anonymous_client() {
    let source = Arc::new(Sparse::default());
    let bed = Bed::new(source.clone(), 8);
    for _ in 0..2 {
        let client = Client::connect(&bed.path).unwrap();
        let memory = client.anonymous(PageCount::new(8), Accesses::User, |_| {});
        let memory = or_skip(memory);
        for page in 0..8 {
            assert_eq!(whole(&memory, page), Sparse::word(page));
        }
        memory.discard(0, 2).unwrap();
        assert_eq!((whole(&memory, 1), whole(&memory, 2)), (0, word(2)));
    }
    assert_eq!(source.0.load(Ordering::Relaxed), 16);
    assert_eq!(bed.pager.stats().counts.shared, 0);
}
