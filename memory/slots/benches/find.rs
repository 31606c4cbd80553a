//! The cost of finding a slot, for a fault and for an invalidation, in nanoseconds: `cargo bench -p
//! lacuna-slots`.

use lacuna_addr::{BackingAddr, BackingRange, Gfn, PAGE_SIZE};
use lacuna_slots::{Limits, SlotData, SlotFlags, SlotId, SlotSpec, Slots};
use std::hint::black_box;
use std::time::Instant;

const STEPS: u64 = 5_000_000;
const BLOCK: u64 = 512 * PAGE_SIZE as u64;

fn main() {
    for count in [1, 8, 64, 512] {
        let slots = slots(count);
        let mut reader = slots.reader();
        let same = per_step(|_| {
            black_box(reader.find(gfn(512)));
        });
        let mut x = 1u64;
        let random = per_step(|_| {
            x = x
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            black_box(reader.find(gfn((x >> 33) % (u64::from(count) * 1024))));
        });
        let mut nodes = 0;
        let mut by_backing = |block: &mut dyn FnMut() -> u64| {
            per_step(|_| {
                let start = BackingAddr::new((1 << 30) + block() * BLOCK);
                let range = BackingRange::new(black_box(start), 512).expect("a block");
                nodes = slots.read().overlapping(range, |hit| {
                    black_box(hit.gfns);
                });
            })
        };
        let blocks = u64::from(count) * 2;
        let same_block = by_backing(&mut || blocks / 3);
        let random_block = by_backing(&mut || {
            x = x
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (x >> 33) % blocks
        });
        println!(
            "{count:4} slots: by gfn: same {same:5.1} ns, random {random:5.1} ns; \
             by host block: same {same_block:5.1} ns, random {random_block:5.1} ns, {nodes} nodes"
        );
    }
}

/// A slot without data.
struct Plain;

impl SlotData for Plain {
    type Addr = BackingAddr;
}

fn slots(count: u16) -> Slots<Plain> {
    let slots = Slots::new(Limits {
        slots: 512,
        ..Limits::default()
    });
    for i in 0..count {
        let bytes = 1024 * PAGE_SIZE as u64;
        let guest = u64::from(i) * bytes;
        let backing = BackingAddr::new((1 << 30) + guest);
        let spec = SlotSpec {
            id: SlotId(i),
            guest,
            backing,
            bytes,
            flags: SlotFlags::empty(),
        };
        slots.add(spec, |_, _| Plain).expect("room");
    }
    slots
}

fn per_step(mut step: impl FnMut(u64)) -> f64 {
    let start = Instant::now();
    (0..STEPS).for_each(&mut step);
    start.elapsed().as_nanos() as f64 / STEPS as f64
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame number")
}
