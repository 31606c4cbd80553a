//! Stage 2, compared with a plain map; `verify()` runs after every step. The same operations run
//! over each table format.

mod dirty;
mod fixture;
mod plain;

use fixture::Fixture;
use lacuna_addr::Access;
use lacuna_stage2::{Arm64, Counts, Ept, TableFormat, Write};
use plain::range;
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Map { gfn: u64, frame: u32, write: Write },
    MapLarge { gfn: u64, frame: u32, write: Write },
    Fill { gfn: u64, frame: u32, write: Write },
    Split { gfn: u64 },
    Collapse { gfn: u64 },
    CollapseTo { gfn: u64, frame: u32, write: Write },
    Unmap { a: u64, b: u64 },
    CutAndUnmap { a: u64, b: u64 },
    UnmapPage { gfn: u64 },
    UnmapAt { gfn: u64 },
    Protect { a: u64, b: u64 },
    CutAndProtect { a: u64, b: u64 },
    ClearDirty { a: u64, b: u64 },
    PresetDirty { a: u64, b: u64 },
    FastPageFault { gfn: u64 },
    Age { gfn: u64 },
    TestYoung { gfn: u64 },
    Walk { gfn: u64, access: Access },
}

/// Frames at which tables of each level begin and end.
fn any_gfn() -> impl Strategy<Value = u64> {
    let block = prop::sample::select(vec![
        0,
        1,
        2,
        511,
        512,
        513,
        (1 << 18) - 1,
        1 << 18,
        (1 << 27) - 512,
        (1 << 27) - 1,
    ]);
    let page = prop::sample::select(vec![0, 1, 2, 511]);
    (block, page).prop_map(|(block, page): (u64, u64)| block * 512 + page)
}

/// Ranges of a few blocks at most; most of them include a part of a block.
fn near() -> impl Strategy<Value = (u64, u64)> {
    (any_gfn(), 0..1200u64).prop_map(|(a, more)| (a, (a + more).min((1 << 36) - 1)))
}

fn any_op() -> impl Strategy<Value = Op> {
    let write = prop::sample::select(vec![Write::Never, Write::OnFault, Write::Allowed]);
    let access = prop::sample::select(vec![Access::Read, Access::Write, Access::Fetch]);
    let gfn = any_gfn;
    prop_oneof![
        8 => (gfn(), 0..2u32, write.clone())
            .prop_map(|(gfn, frame, write)| Op::Map { gfn, frame, write }),
        4 => (gfn(), 0..2u32, write.clone())
            .prop_map(|(gfn, frame, write)| Op::MapLarge { gfn, frame, write }),
        1 => (gfn(), 0..2u32, write.clone())
            .prop_map(|(gfn, frame, write)| Op::Fill { gfn, frame, write }),
        2 => gfn().prop_map(|gfn| Op::Split { gfn }),
        3 => gfn().prop_map(|gfn| Op::Collapse { gfn }),
        2 => (gfn(), 0..2u32, write)
            .prop_map(|(gfn, frame, write)| Op::CollapseTo { gfn, frame, write }),
        2 => (gfn(), gfn()).prop_map(|(a, b)| Op::Unmap { a, b }),
        2 => near().prop_map(|(a, b)| Op::CutAndUnmap { a, b }),
        2 => near().prop_map(|(a, b)| Op::CutAndProtect { a, b }),
        1 => gfn().prop_map(|a| Op::Unmap { a: a & !511, b: a | 511 }),
        3 => gfn().prop_map(|gfn| Op::UnmapPage { gfn }),
        2 => gfn().prop_map(|gfn| Op::UnmapAt { gfn }),
        2 => (gfn(), gfn()).prop_map(|(a, b)| Op::Protect { a, b }),
        3 => near().prop_map(|(a, b)| Op::ClearDirty { a, b }),
        1 => near().prop_map(|(a, b)| Op::PresetDirty { a, b }),
        2 => gfn().prop_map(|gfn| Op::FastPageFault { gfn }),
        2 => gfn().prop_map(|gfn| Op::Age { gfn }),
        1 => gfn().prop_map(|gfn| Op::TestYoung { gfn }),
        6 => (gfn(), access).prop_map(|(gfn, access)| Op::Walk { gfn, access }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn stage2_is_a_map(ops in prop::collection::vec(any_op(), 1..80)) {
        is_a_map::<Ept>(&ops);
    }

    #[test]
    fn stage2_is_a_map_in_the_format_of_arm64(ops in prop::collection::vec(any_op(), 1..80)) {
        is_a_map::<Arm64>(&ops);
    }
}

fn is_a_map<F: TableFormat>(ops: &[Op]) {
    let mut fixture = Fixture::<F>::new();
    for op in ops {
        fixture.step(*op);
    }
    fixture.unmap(range(0, (1 << 36) - 1));
    assert_eq!(fixture.stage2.verify(), Counts::default());
    let usage = fixture.stage2.arena().usage();
    assert_eq!(usage.in_use, 1, "only the root is left");
}
