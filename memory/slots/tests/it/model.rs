//! Slots, compared with a plain list of pages; and the text of every refusal.

use lacuna_addr::{BackingAddr, BackingRange, Gfn};
use lacuna_slots::{
    Limits, Slot, SlotData, SlotError, SlotFlags, SlotId, SlotSpec, Slots, Snapshot,
    assert_invariants,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGE: u64 = 4096;
const LIMITS: Limits = Limits {
    slots: 6,
    address_bits: 18,
};
const GFN_LIMIT: u64 = 1 << 6;

fn spec(id: u16, gfn: u64, backing_page: u64, pages: u64) -> SlotSpec<BackingAddr> {
    SlotSpec {
        id: SlotId(id),
        guest: gfn * PAGE,
        backing: BackingAddr::new(backing_page * PAGE),
        bytes: pages * PAGE,
        flags: SlotFlags::empty(),
    }
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame")
}

/// The first frame, the first page of the backing, and the number of pages.
#[derive(Clone, Copy, Debug)]
struct SlotPlace {
    gfn: u64,
    backing_page: u64,
    pages: u64,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Add(u16, SlotPlace),
    Replace(u16, SlotPlace),
    Remove { id: u16 },
}

fn any_op() -> impl Strategy<Value = Op> {
    let id = || 0..9u16;
    let place = || {
        (0..70u64, 0..40u64, 0..20u64).prop_map(|(gfn, backing_page, pages)| SlotPlace {
            gfn,
            backing_page,
            pages,
        })
    };
    prop_oneof![
        3 => (id(), place()).prop_map(|(id, place)| Op::Add(id, place)),
        2 => (id(), place()).prop_map(|(id, place)| Op::Replace(id, place)),
        1 => id().prop_map(|id| Op::Remove { id }),
    ]
}

/// The data of a slot, different for each slot.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Tag(u64);

impl SlotData for Tag {
    type Addr = BackingAddr;
}

/// A slot as four numbers.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Plain {
    gfn: u64,
    backing_page: u64,
    pages: u64,
    flags: SlotFlags,
    attach: u64,
}

impl Plain {
    fn of(slot: &Slot<Tag>) -> Self {
        Self {
            gfn: slot.gfns.start().get(),
            backing_page: slot.backing.start().get() / PAGE,
            pages: slot.gfns.pages(),
            flags: slot.flags,
            attach: slot.attach.0,
        }
    }
}

type Model = BTreeMap<u16, Plain>;

/// Whether `slot` may be placed there, beside the others.
fn placement(model: &Model, id: u16, slot: Plain) -> Result<(), &'static str> {
    if slot.gfn + slot.pages > GFN_LIMIT {
        return Err("beyond");
    }
    let meets = |(other_id, other): (&u16, &Plain)| {
        *other_id != id && slot.gfn < other.gfn + other.pages && other.gfn < slot.gfn + slot.pages
    };
    if model.iter().any(meets) {
        Err("overlap")
    } else {
        Ok(())
    }
}

fn kind(error: SlotError) -> &'static str {
    match error {
        SlotError::Overlap { .. } => "overlap",
        SlotError::Empty { .. } => "empty",
        SlotError::BeyondWidth { .. } => "beyond",
        SlotError::InUse { .. } => "in use",
        SlotError::Unknown { .. } => "unknown",
        SlotError::TooMany { .. } => "too many",
        other => panic!("these numbers cannot cause {other}"),
    }
}

fn step(slots: &Slots<Tag>, model: &mut Model, n: u64, op: Op) {
    let before = slots.snapshot();
    let (expected, result) = match op {
        Op::Add(id, place) | Op::Replace(id, place) => {
            let adds = matches!(op, Op::Add(..));
            let SlotPlace {
                gfn,
                backing_page,
                pages,
            } = place;
            let plain = Plain {
                gfn,
                backing_page,
                pages,
                flags: SlotFlags::empty(),
                attach: n,
            };
            let expected = match placement(model, id, plain) {
                _ if pages == 0 => Err("empty"),
                Err("beyond") => Err("beyond"),
                _ if adds && model.contains_key(&id) => Err("in use"),
                _ if adds && model.len() >= LIMITS.slots => Err("too many"),
                _ if !adds && !model.contains_key(&id) => Err("unknown"),
                placed => placed,
            };
            let spec = spec(id, gfn, backing_page, pages);
            let result = match adds {
                true => slots.add(spec, |_, _| Tag(n)),
                false => slots.replace(spec, |_, _| Tag(n)),
            };
            if expected.is_ok() {
                model.insert(id, plain);
            }
            (expected, result.map(|_| ()))
        }
        Op::Remove { id } => {
            let expected = model.remove(&id).map(|_| ()).ok_or("unknown");
            (expected, slots.remove(SlotId(id)).map(|_| ()))
        }
    };
    assert_eq!(result.map_err(kind), expected, "{op:?}");
    let after = slots.snapshot();
    let steps = after.generation().0 - before.generation().0;
    assert_eq!(
        steps,
        u64::from(expected.is_ok()),
        "one generation a change, none a refusal"
    );
}

fn compare(slots: &Slots<Tag>, reader: &mut lacuna_slots::Reader<Tag>, model: &Model) {
    let snapshot = slots.snapshot();
    assert_invariants(&snapshot);
    assert_eq!(snapshot.len(), model.len());
    for raw in 0..GFN_LIMIT + 2 {
        let expected = model
            .iter()
            .find(|(_, s)| (s.gfn..s.gfn + s.pages).contains(&raw));
        let found = reader
            .find(gfn(raw))
            .map(|slot| (slot.id.0, Plain::of(slot)));
        assert_eq!(found, expected.map(|(id, plain)| (*id, *plain)));
        if let Some(slot) = reader.find(gfn(raw)) {
            let page = raw - slot.gfns.start().get();
            assert_eq!(slot.page(gfn(raw)) as u64, page);
            assert_eq!(
                slot.backing_of(gfn(raw)),
                BackingAddr::new(slot.backing.start().get() + page * PAGE)
            );
        }
    }
    for start in 0..60 {
        for pages in [1, 5, 60] {
            let range = BackingRange::new(BackingAddr::new(start * PAGE), pages).expect("a range");
            let mut found = BTreeMap::new();
            snapshot.overlapping(range, |hit| {
                let frames = (hit.gfns.start().get(), hit.gfns.pages());
                assert!(
                    found.insert(hit.slot.id.0, frames).is_none(),
                    "reported twice"
                );
            });
            let mut expected = BTreeMap::new();
            for (id, slot) in model {
                let first = slot.backing_page.max(start);
                let end = (slot.backing_page + slot.pages).min(start + pages);
                if first < end {
                    expected.insert(*id, (slot.gfn + first - slot.backing_page, end - first));
                }
            }
            assert_eq!(found, expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn slots_are_a_list_of_pages(ops in prop::collection::vec(any_op(), 1..40)) {
        let slots = Slots::new(LIMITS);
        let mut reader = slots.reader();
        let mut model = Model::new();
        for (n, op) in ops.into_iter().enumerate() {
            step(&slots, &mut model, n as u64, op);
            compare(&slots, &mut reader, &model);
        }
    }
}

fn refusal(slots: &Slots<Tag>, spec: SlotSpec<BackingAddr>) -> String {
    let refused = slots
        .add(spec, |_, _| Tag(0))
        .map(|_| ())
        .expect_err("refused");
    refused.to_string()
}

#[test]
fn every_refusal_says_what_to_do() {
    let slots = Slots::new(LIMITS);
    let add = |spec| refusal(&slots, spec);
    slots.add(spec(1, 8, 0, 8), |_, _| Tag(0)).expect("room");
    assert_eq!(
        add(spec(2, 15, 0, 2)),
        "slot 2 (gfn 0xf..0x11) would overlap slot 1 (gfn 0x8..0x10): \
         remove or move one of them first"
    );
    let crooked = |guest, host, bytes| {
        let flags = SlotFlags::empty();
        SlotSpec {
            id: SlotId(3),
            guest,
            backing: BackingAddr::new(host),
            bytes,
            flags,
        }
    };
    assert_eq!(
        add(crooked(0x123, 0, PAGE)),
        "slot 3: its guest address 0x123 is not a multiple of 4 KiB: align it"
    );
    assert_eq!(
        add(crooked(0, 0x10, PAGE)),
        "slot 3: its backing address 0x10 is not a multiple of 4 KiB: align it"
    );
    assert_eq!(
        add(crooked(0, 0, 1000)),
        "slot 3: its size 0x3e8 is not a multiple of 4 KiB: align it"
    );
    assert_eq!(
        add(spec(4, 0, 0, 0)),
        "slot 4 would have no pages: give it a size, or remove the slot"
    );
    assert_eq!(
        add(spec(4, 60, 0, 5)),
        "slot 4 reaches beyond the guest's physical addresses, which end at 0x40000: place it lower"
    );
    assert_eq!(
        add(crooked(u64::MAX - PAGE + 1, 0, PAGE)),
        "slot 3 reaches beyond the guest's physical addresses, which end at 0x40000: place it lower"
    );
    assert_eq!(
        add(crooked(0, u64::MAX - PAGE + 1, 2 * PAGE)),
        "slot 3: 0x2000 bytes from backing address 0xfffffffffffff000 wrap around: \
         check both numbers"
    );
    assert_eq!(
        add(spec(1, 30, 0, 1)),
        "slot 1 exists already: remove it first, or choose another number"
    );
    for id in 10..15 {
        slots
            .add(spec(id, u64::from(id) * 2, 0, 1), |_, _| Tag(0))
            .expect("room");
    }
    assert_eq!(
        add(spec(20, 40, 0, 1)),
        "slot 20 would be one slot more than the 6 that this VM may have: remove one first"
    );
    let unknown = slots.remove(SlotId(99)).map(|_| ()).expect_err("refused");
    assert_eq!(unknown.to_string(), "there is no slot 99: add it first");
}

/// `count` slots of 16 pages, side by side.
fn row(slots: &Slots<Tag>, count: u16) {
    for i in 0..count {
        let at = u64::from(i) * 16;
        slots.add(spec(i, at, at, 16), |_, _| Tag(0)).expect("room");
    }
}

fn find(snapshot: &Snapshot<Tag>, page: u64, pages: u64) -> (Vec<u16>, usize) {
    let range = BackingRange::new(BackingAddr::new(page * PAGE), pages).expect("a range");
    let mut hits = Vec::new();
    let steps = snapshot.overlapping(range, |hit| hits.push(hit.slot.id.0));
    (hits, steps)
}

fn many() -> Slots<Tag> {
    Slots::new(Limits {
        slots: 600,
        ..Limits::default()
    })
}

#[test]
fn a_range_in_one_slot_is_found_in_few_steps() {
    for count in [1u16, 2, 3, 5, 8, 63, 64, 65, 100, 509, 512] {
        let slots = many();
        row(&slots, count);
        let most = count.next_power_of_two().ilog2() as usize + 2;
        for page in 0..u64::from(count) * 16 {
            let (hits, steps) = find(&slots.snapshot(), page, 1);
            assert_eq!(hits, [(page / 16) as u16]);
            assert!(steps <= most, "{steps} of {count} nodes for page {page}");
        }
    }
}

#[test]
fn shared_backing_costs_a_step_for_each_slot_that_is_nested_in_others() {
    let slots = many();
    row(&slots, 256);
    // One slot aliases all the backing; four more are nested in each other, far from the requested
    // page.
    slots
        .add(spec(500, 0x10_0000, 0, 256 * 16), |_, _| Tag(0))
        .expect("room");
    for depth in 0..4u64 {
        let at = 0x20_0000 + depth * 0x100;
        slots
            .add(
                spec(501 + depth as u16, at, 8 + depth, 64 - 2 * depth),
                |_, _| Tag(0),
            )
            .expect("room");
    }
    let snapshot = slots.snapshot();
    for page in 128..256 * 16 {
        let (hits, steps) = find(&snapshot, page, 1);
        assert_eq!(hits, [(page / 16) as u16, 500]);
        assert!(steps <= 9 + 2 + 5, "{steps} nodes for page {page}");
    }
    let (hits, _) = find(&snapshot, 20, 1);
    assert_eq!(hits, [1, 504, 503, 502, 501, 500]);
}

#[test]
fn a_reader_sees_whole_changes_only() {
    // Slots are added and removed in pairs of changes: 1, then 1 and 2, then 1 again. A snapshot is
    // one of the published states, never a mixture.
    let slots = Slots::new(Limits::default());
    slots.add(spec(1, 0, 0, 4), |_, _| Tag(0)).expect("room");
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let reader = s.spawn(|| {
            let mut reader = slots.reader();
            let mut last = reader.generation();
            while !done.load(Ordering::Relaxed) {
                let snapshot = reader.snapshot();
                let now = snapshot.generation();
                assert!(now >= last, "generations go forward");
                assert!(snapshot.find(gfn(0)).is_some());
                let both = snapshot.find(gfn(100)).is_some();
                assert_eq!(both, now.0 % 2 == 0, "{now:?}");
                last = now;
            }
        });
        for _ in 0..1000 {
            slots.add(spec(2, 100, 0, 4), |_, _| Tag(0)).expect("free");
            slots.remove(SlotId(2)).expect("there");
        }
        done.store(true, Ordering::Relaxed);
        reader.join().expect("reader");
    });
    assert_eq!(slots.snapshot().generation().0, 2001);
}

#[test]
fn a_reader_sees_a_change_at_once() {
    let slots = Slots::new(Limits::default());
    let mut reader = slots.reader();
    assert!(reader.find(gfn(0)).is_none());
    slots.add(spec(1, 0, 0, 4), |_, _| Tag(7)).expect("room");
    assert_eq!(reader.find(gfn(3)).map(|slot| slot.attach), Some(Tag(7)));
    slots.remove(SlotId(1)).expect("it is there");
    assert!(reader.find(gfn(3)).is_none());
}
