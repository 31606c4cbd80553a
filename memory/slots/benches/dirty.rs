//! The cost of recording and harvesting one dirty page, in nanoseconds. The best of several rounds
//! counts, because the machine may be busy: `cargo bench -p lacuna-slots --bench dirty`.

use lacuna_slots::{DirtyBitmap, RingSize, SlotId, dirty_ring};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// 8 GiB.
const PAGES: usize = 2 << 20;
const STEPS: usize = 4_000_000;
/// Pages of a full log.
const LOG: usize = 512;

fn main() {
    bitmap();
    ring();
}

fn bitmap() {
    let bitmap = DirtyBitmap::new(PAGES);
    let near = per_step(|i| {
        black_box(bitmap.mark(i % PAGES));
    });
    let far = per_step(|i| {
        black_box(bitmap.mark(scatter(i)));
    });
    println!("bitmap of 8 GiB: mark {near:.1} ns in order, {far:.1} ns at random");
    for pages in [1 << 9, 1 << 11, 1 << 14, PAGES] {
        let each = per_step(|i| {
            if i % LOG == 0 {
                bitmap.mark_all((i..i + LOG).map(|i| scatter(i) % pages));
            }
        });
        println!("  logs of {LOG} pages among {pages}: {each:.1} ns a page");
    }
    for per_mille in [1, 10, 100, 1000] {
        let (mut took, mut cleared) = (Duration::MAX, Duration::MAX);
        let mut words = vec![0; bitmap.words()];
        let dirty = PAGES * per_mille / 1000;
        const ROUNDS: usize = 20;
        for _ in 0..ROUNDS {
            mark(&bitmap, &mut words, dirty);
            took = took.min(time(|| bitmap.take(0, &mut words)));
            mark(&bitmap, &mut words, dirty);
            cleared = cleared.min(time(|| {
                bitmap.copy(0, &mut words);
                bitmap.clear(0, PAGES, &mut words).expect("all of it");
            }));
        }
        let each = |least: Duration| least.as_nanos() as f64 / dirty as f64;
        println!(
            "  {:5.1} % dirty: take {:.3} ns a dirty page, copy and clear {:.3} ns",
            per_mille as f64 / 10.0,
            each(took),
            each(cleared)
        );
    }
}

/// Marks `dirty` scattered pages.
fn mark(bitmap: &DirtyBitmap, words: &mut [u64], dirty: usize) {
    bitmap.take(0, words);
    for i in 0..dirty {
        bitmap.mark(scatter(i));
    }
}

/// A permutation of the pages: multiplication by an odd factor.
fn scatter(i: usize) -> usize {
    i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % PAGES
}

fn ring() {
    let size = RingSize::from_bytes(RingSize::BYTES_MAX).expect("a size");
    for (name, page) in [
        ("in order", (|i| i) as fn(usize) -> usize),
        ("at random", scatter),
    ] {
        let (mut producer, mut consumer) = dirty_ring(size);
        let (mut pushed, mut harvested, mut reset) = (Duration::MAX, Duration::MAX, Duration::MAX);
        const ROUNDS: usize = 100;
        for round in 0..ROUNDS {
            let first = round * size.soft_limit();
            pushed = pushed.min(time(|| {
                for i in first..first + size.soft_limit() {
                    let _ = black_box(producer.push(SlotId(0), page(i)));
                }
            }));
            harvested = harvested.min(time(|| {
                consumer.harvest(|slot, page| {
                    black_box((slot, page));
                });
            }));
            reset = reset.min(time(|| {
                consumer.reset(|slot, page| {
                    black_box((slot, page));
                });
            }));
        }
        let each = |least: Duration| least.as_nanos() as f64 / size.soft_limit() as f64;
        println!(
            "ring of 64 Ki, pages {name}: push {:.2} ns, harvest {:.2} ns, reset {:.2} ns an entry",
            each(pushed),
            each(harvested),
            each(reset)
        );
    }
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn per_step(mut step: impl FnMut(usize)) -> f64 {
    let start = Instant::now();
    (0..STEPS).for_each(&mut step);
    start.elapsed().as_nanos() as f64 / STEPS as f64
}
