//! Compares the rmap walk strategies ([`RmapWalk`]) for an invalidation. All take the same range
//! locks and remove the same leaves; they differ in how they find the slots and leaves of a range.
//!
//! Each figure is the time of `begin_invalidation_as` alone. The shoot-down that follows is not in
//! it, and no vCPU runs. So no published figure is beside it; `call` times the whole call. Before
//! each call the range is mapped again, outside the timed part.

use super::fixture::{BLOCK, Fixture};
use super::spread::Spread;
use crate::experiment::{LabError, Options};
use crate::report::{align, time};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, paired, rounds};
use lacuna_addr::Level;
use lacuna_soft::{HugePages, RmapWalk, Steps};
use serde_json::{Value, json};
use std::time::Instant;

/// The invalidated range.
struct Work {
    suffix: &'static str,
    about: &'static str,
    blocks: u64,
    level: Level,
    /// Invalidations in a slice with up to 8 slots. With more slots there are fewer.
    calls: u64,
}

const HUGE_PAGE: Work = Work {
    suffix: "",
    about: "one 2 MiB page",
    blocks: 1,
    level: Level::L2M,
    calls: 200,
};

const WORKS: [Work; 4] = [
    HUGE_PAGE,
    Work {
        suffix: ".small",
        about: "2 MiB in 4 KiB pages",
        blocks: 1,
        level: Level::L4K,
        calls: 20,
    },
    Work {
        suffix: ".64m",
        about: "64 MiB in 2 MiB pages",
        blocks: 32,
        level: Level::L2M,
        calls: 10,
    },
    Work {
        suffix: ".64m_small",
        about: "64 MiB in 4 KiB pages",
        blocks: 32,
        level: Level::L4K,
        calls: 2,
    },
];

/// For each number of slots: how many of [`WORKS`] are measured, from the first on, and the bar.
/// The bar is the least ratio of `page_loop`'s time to `per_level`'s, for one huge page.
const SLOTS: [(u64, usize, Option<f64>); 4] = [
    (1, WORKS.len(), Some(5.0)),
    (8, 1, None),
    (64, WORKS.len(), Some(20.0)),
    (512, 1, None),
];

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = SLOTS.len() as u64 + 1;

/// Lacuna's strategy (`PerLevel`) twice, the second time as the null; then the others.
const ARMS: [(&str, RmapWalk); 5] = [
    ("per_level", RmapWalk::PerLevel),
    ("null", RmapWalk::PerLevel),
    ("page_loop", RmapWalk::PageLoop),
    ("range_then_pages", RmapWalk::RangeThenPages),
    ("walk", RmapWalk::Walk),
];
const OURS: usize = 0;
const NULL: usize = 1;
const PAGE_LOOP: usize = 2;

/// The measurements of one arm.
#[derive(Default)]
struct Took {
    /// One figure for each round, in nanoseconds: the mean of the medians of its two slices.
    runs: Vec<f64>,
    /// The times of all calls, the uncounted first round included.
    spread: Spread,
    /// The steps of the last call. Every call invalidates the same range, mapped in the same way.
    steps: Steps,
}

/// Measures `thp.range_vs_page.*`, `thp.slots_growth_512` and `thp.slot_steps_512`.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &crate::report::Progress,
) -> Result<(), LabError> {
    let mut table = vec![
        [
            "work to find and remove leaves",
            "slots",
            "rmap walk",
            "time",
            "slots or nodes read",
            "rmap words",
            "table entries",
            "leaves",
        ]
        .map(str::to_owned),
    ];
    for (slots, works, bar) in SLOTS {
        progress.step(format!("invalidation among {slots} slots"))?;
        for work in &WORKS[..works] {
            let took = compare(work, slots, repeats(options, work))?;
            let bar = bar.filter(|_| work.suffix.is_empty());
            table.extend(rows(work, slots, &took));
            report.push(results_of(work, slots, bar, &took));
        }
    }
    report.detail(align(&table));
    progress.step("invalidation, 1 and 512 slots")?;
    growth(options, report)
}

fn repeats(options: &Options, work: &Work) -> usize {
    match (options.quick, work.suffix) {
        (true, _) => 2,
        (false, "") => 15,
        (false, _) => 6,
    }
}

fn huge(level: Level) -> HugePages {
    match level {
        Level::L4K => HugePages::Never,
        _ => HugePages::Always,
    }
}

/// Runs one slice of `calls` invalidations. Returns the median of their times, in nanoseconds.
fn slice(
    fixture: &mut Fixture,
    work: &Work,
    walk: RmapWalk,
    calls: u64,
    took: &mut Took,
) -> Result<f64, LabError> {
    let mut slice = Vec::new();
    let range = fixture.range(work.blocks);
    for _ in 0..calls {
        fixture.fault_in(work.blocks, work.level)?;
        let start = Instant::now();
        let begun = fixture.mmu().begin_invalidation_as(walk, &[range]);
        let spent = start.elapsed();
        took.steps = begun.steps();
        begun.finish();
        took.spread.record(spent);
        slice.push(spent.as_nanos() as f64);
    }
    Ok(Summary::of(&slice).median)
}

/// Measures [`ARMS`] in turns.
///
/// # Errors
/// Also if the last call of an arm did not remove all leaves of the range.
fn compare(work: &Work, slots: u64, repeats: usize) -> Result<Vec<Took>, LabError> {
    let mut fixture = Fixture::new(slots, work.blocks, huge(work.level))?;
    let mut took: Vec<Took> = ARMS.iter().map(|_| Took::default()).collect();
    let calls = (work.calls / slots.div_ceil(8)).max(2);
    let runs = rounds(ARMS.len(), repeats, |arm| {
        slice(&mut fixture, work, ARMS[arm].1, calls, &mut took[arm])
    })?;
    took.iter_mut()
        .zip(runs)
        .for_each(|(took, runs)| took.runs = runs);
    let leaves = work.blocks * BLOCK / work.level.pages();
    match took.iter().find(|took| took.steps.leaves != leaves) {
        None => Ok(took),
        Some(took) => Err(LabError::Guest(format!(
            "an invalidation removed {} leaves of {leaves}",
            took.steps.leaves
        ))),
    }
}

fn results_of(work: &Work, slots: u64, bar: Option<f64>, took: &[Took]) -> Measurement {
    let plural = if slots == 1 { "" } else { "s" };
    let id = format!("thp.range_vs_page.{slots}slot{plural}{}", work.suffix);
    let ratio = paired(&took[OURS].runs, &took[PAGE_LOOP].runs);
    let mut result = Measurement::new(id, "x", Better::Higher, ratio)
        .param("work", work.about)
        .param("slots", slots)
        .arm("null", paired(&took[OURS].runs, &took[NULL].runs));
    for ((name, _), took) in ARMS.iter().zip(took) {
        if *name != "null" {
            result = result.arm(&format!("{name}_ns"), arm(took));
        }
    }
    bar.into_iter().fold(result, Measurement::bar)
}

fn arm(took: &Took) -> Value {
    let Steps {
        slots,
        words,
        entries,
        leaves,
    } = took.steps;
    let mut value = Value::from(Summary::of(&took.runs));
    value["steps"] = json!({"slots": slots, "rmap_words": words, "table_entries": entries,
                            "leaves": leaves});
    value["histogram_ns"] = took.spread.buckets();
    value
}

fn rows(work: &Work, slots: u64, took: &[Took]) -> Vec<[String; 8]> {
    let arms = ARMS.iter().zip(took).enumerate();
    let row = |(index, ((name, _), took)): (usize, (&(&str, _), &Took))| {
        let Steps {
            slots: looked_at,
            words,
            entries,
            leaves,
        } = took.steps;
        [
            if index == 0 {
                format!("  {}", work.about)
            } else {
                String::new()
            },
            if index == 0 {
                slots.to_string()
            } else {
                String::new()
            },
            (*name).to_owned(),
            time(Summary::of(&took.runs).median as u64),
            looked_at.to_string(),
            words.to_string(),
            entries.to_string(),
            leaves.to_string(),
        ]
    };
    arms.filter(|(index, _)| *index != NULL).map(row).collect()
}

/// Measures `thp.slots_growth_512` (the same invalidation with 1 and with 512 slots) and
/// `thp.slot_steps_512` (index nodes read to find one slot among 512).
fn growth(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let many = 512;
    let mut fixtures = [
        Fixture::new(1, 1, HugePages::Always)?,
        Fixture::new(many, 1, HugePages::Always)?,
    ];
    let mut took: [Took; 3] = Default::default();
    // Arms 0 and 1 have 1 slot, and arm 1 is the null. Arm 2 has 512 slots.
    let runs = rounds(3, 2 * repeats(options, &HUGE_PAGE), |arm| {
        let fixture = &mut fixtures[usize::from(arm == 2)];
        slice(
            fixture,
            &HUGE_PAGE,
            RmapWalk::PerLevel,
            HUGE_PAGE.calls,
            &mut took[arm],
        )
    })?;
    let result = |name: &str, unit, summary| {
        Measurement::new(format!("thp.{name}"), unit, Better::Lower, summary)
    };
    report.push(
        result("slots_growth_512", "x", paired(&runs[0], &runs[2]))
            .bar(1.5)
            .arm("1_slot_ns", Summary::of(&runs[0]))
            .arm("512_slots_ns", Summary::of(&runs[2]))
            .arm("null", paired(&runs[0], &runs[1])),
    );
    // This is a count, not a time: one invalidation of each slot, and the largest count is
    // reported.
    let fixture = &fixtures[1];
    let places = fixture.others().iter().copied().chain([fixture.range(1)]);
    let looked_at = places.map(|range| {
        let begun = fixture
            .mmu()
            .begin_invalidation_as(RmapWalk::PerLevel, &[range]);
        let steps = begun.steps();
        begun.finish();
        steps.slots as f64
    });
    let looked_at: Vec<f64> = looked_at.collect();
    let worst = looked_at.iter().copied().fold(0.0, f64::max);
    report.push(
        result("slot_steps_512", "nodes", Summary::of(&[worst]))
            .bar(11.0)
            .param(
                "what",
                "the largest count of all slots; the bar is log2(slots) + 2",
            )
            .arm("each_slot", Summary::of(&looked_at)),
    );
    Ok(())
}
