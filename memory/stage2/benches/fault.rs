//! The cost of a resident fault in this crate, in nanoseconds: `cargo bench -p lacuna-stage2`.
//!
//! The best of several rounds, for each table format. It compares two commits, or the formats, on
//! one machine; it is not a test.

use lacuna_addr::{Access, Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Arena, Arm64, Ept, Leaf, Mapped, Stage2, TableFormat, Walk};
use lacuna_sync::Qsbr;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

const PAGES: u64 = 1 << 18;
const ROUNDS: usize = 7;

fn main() {
    println!("                              EPT   arm64");
    compare(
        "walk, leaf table in cache",
        walk_near::<Ept>,
        walk_near::<Arm64>,
    );
    compare(
        "walk, random over 1 GiB",
        walk_far::<Ept>,
        walk_far::<Arm64>,
    );
    let map = |threads| move || map_threads::<Ept>(threads);
    let map_arm64 = |threads| move || map_threads::<Arm64>(threads);
    compare("map 4K by fault cursor", map(1), map_arm64(1));
    compare("map 4K, 2 threads, each", map(2), map_arm64(2));
    compare(
        "unmap_at and map again",
        unmap_and_map::<Ept>,
        unmap_and_map::<Arm64>,
    );
    compare("age_at", age::<Ept>, age::<Arm64>);
}

/// The formats take turns, so that other load on the machine affects both.
fn compare(what: &str, mut ept: impl FnMut() -> f64, mut arm64: impl FnMut() -> f64) {
    let rounds = (0..ROUNDS).map(|_| (ept(), arm64()));
    let best = rounds.fold((f64::INFINITY, f64::INFINITY), |best, round| {
        (best.0.min(round.0), best.1.min(round.1))
    });
    println!("{what:26} {:6.1}  {:6.1} ns", best.0, best.1);
}

fn walk_near<F: TableFormat>() -> f64 {
    let stage2 = mapped::<F>(512);
    per_step(10_000_000, |i| walk(&stage2, i % 512))
}

fn walk_far<F: TableFormat>() -> f64 {
    let stage2 = mapped::<F>(PAGES);
    let mut x = 1u64;
    per_step(2_000_000, |_| {
        x = x
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        walk(&stage2, (x >> 33) % PAGES);
    })
}

/// Each thread maps its own 512 MiB, in order, as a guest touches fresh memory.
fn map_threads<F: TableFormat>(threads: u64) -> f64 {
    let stage2 = empty::<F>();
    let start = Barrier::new(threads as usize);
    let worker = |t: u64| {
        start.wait();
        per_step(PAGES / 2, |i| {
            let _ = map(&stage2, t * PAGES + i, Leaf::dirty(Pfn::new(i as u32)));
        })
    };
    std::thread::scope(|s| {
        let handles: Vec<_> = (0..threads).map(|t| s.spawn(move || worker(t))).collect();
        handles
            .into_iter()
            .map(|h| h.join().expect("worker"))
            .fold(0.0, f64::max)
    })
}

fn unmap_and_map<F: TableFormat>() -> f64 {
    let stage2 = mapped::<F>(512);
    let no_vcpu = Qsbr::new(1);
    let at = map(&stage2, 7, Leaf::dirty(Pfn::new(7))).at();
    per_step(1_000_000, |_| {
        let mut cursor = stage2.fault_cursor(gfn(7));
        let (_, flush) = cursor.unmap_at(at, gfn(7)).expect("mapped");
        drop(cursor);
        flush.finish(&no_vcpu);
        let _ = map(&stage2, 7, Leaf::dirty(Pfn::new(7)));
    })
}

fn age<F: TableFormat>() -> f64 {
    let stage2 = mapped::<F>(512);
    let at = map(&stage2, 7, Leaf::dirty(Pfn::new(7))).at();
    per_step(5_000_000, |_| {
        let _ = black_box(stage2.fault_cursor(gfn(7)).age_at(at, gfn(7)));
    })
}

fn per_step(steps: u64, mut step: impl FnMut(u64)) -> f64 {
    let start = Instant::now();
    (0..steps).for_each(&mut step);
    start.elapsed().as_nanos() as f64 / steps as f64
}

fn empty<F: TableFormat>() -> Stage2<F> {
    let arena = Arena::new(1 << 13).expect("address space");
    // The arena is touched before the clock starts, because growing is the host kernel's time.
    let stage2 = Stage2::with_format(arena).expect("a root");
    let range = GfnRange::new(gfn(0), 2 * PAGES).expect("range");
    for i in (0..2 * PAGES).step_by(Level::L2M.pages() as usize) {
        let _ = map(&stage2, i, Leaf::clean(Pfn::new(0)));
    }
    let flush = stage2.cursor(range).unmap(range, |_| {});
    flush.finish(&Qsbr::new(0));
    stage2
}

fn mapped<F: TableFormat>(pages: u64) -> Stage2<F> {
    let stage2 = empty::<F>();
    for i in 0..pages {
        let _ = map(&stage2, i, Leaf::dirty(Pfn::new(i as u32)));
    }
    stage2
}

fn map<F: TableFormat>(stage2: &Stage2<F>, i: u64, leaf: Leaf) -> Mapped {
    stage2.fault_cursor(gfn(i)).map(gfn(i), leaf).expect("room")
}

fn walk<F: TableFormat>(stage2: &Stage2<F>, i: u64) {
    let outcome = stage2.walk(gfn(i), Access::Read);
    assert!(matches!(black_box(outcome), Walk::Hit(_)));
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame number")
}
