//! Migrations whose mode, link and faults a seed chooses.
//!
//! ```sh
//! LACUNA_MIGRATIONS=200 cargo test -p lacuna-migrate --test it streams::seeded -- --nocapture
//! ```
//! carries out 200 of them. `LACUNA_MIGRATION_SEED=n` repeats one.

use super::cuts::little;
use super::ends::{End, Outcome};
use super::link::{Cut, Side, UNCUT};
use fastrand::Rng;
use lacuna_machine::{Arch, Ending};
use lacuna_migrate::stream::{Compression, Mode};
use std::collections::BTreeMap;
use std::env;

/// A guest's fate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Result {
    /// It ran to its end on the source.
    Stayed,
    /// It ran to its end on the destination.
    Moved,
    /// The same, after cuts and new connections.
    Resumed,
    /// The source cannot know: it stays paused. The guest ran to its end on the destination.
    UnknownThere,
    /// The source cannot know: it stays paused until a person decides. Then it ran to its end
    /// there.
    UnknownHere,
    /// The connection or the source was gone after the switch: the destination's error names its
    /// missing page.
    Lost,
    /// The destination was killed after the switch: the source stays paused.
    KilledThere,
}

/// A place in the source's bytes: in the first messages, around the state of a post-copy, or in
/// memory.
fn in_stream(random: &mut Rng) -> Cut {
    Cut(match random.u32(0..8) {
        0 => random.u64(0..4_000),
        1 | 2 => random.u64(4_000..40_000),
        _ => random.u64(40_000..300_000),
    })
}

fn migrate(seed: u64) -> (String, usize, Outcome) {
    let mut random = Rng::with_seed(seed);
    let arch = [Arch::X86_64, Arch::Arm64][random.usize(0..2)];
    let mode = [Mode::PreCopy, Mode::PostCopy, Mode::Hybrid][random.usize(0..3)];
    let mut migration = little(arch, mode, [0, 9, 9][random.usize(0..3)]);
    migration.plan.streams = random.u32(1..4);
    let compressions = [Compression::None, Compression::Lz4, Compression::Zstd];
    migration.plan.compression = compressions[random.usize(0..3)];
    let cuts: Vec<_> = (0..random.u32(0..4))
        .map(|_| match random.u32(0..3) {
            0 => [UNCUT, Cut(random.u64(40..130))],
            _ => [in_stream(&mut random), UNCUT],
        })
        .collect();
    let victim = [None, None, Some(Side::Source), Some(Side::Destination)];
    migration.victim = victim[random.usize(0..4)].filter(|_| !cuts.is_empty());
    let plan = format!(
        "{arch:?} {:?} patience {} victim {:?} cuts {cuts:?}",
        migration.plan, migration.patience, migration.victim
    );
    println!("seed {seed}: {plan}");
    let outcome = migration.carry_out(&cuts);
    (plan, migration.patience, outcome)
}

/// The result that the documentation promises for this outcome; `None`: none.
fn judge(end: &Outcome, patience: usize) -> Option<Result> {
    let ran = |ending: &Ending| matches!(ending, Ending::Exited(0));
    let lost = |ending: &Ending| match ending {
        Ending::Failed(why) => why.to_string().contains("before this page arrived"),
        _ => false,
    };
    Some(match (&end.source, &end.destination) {
        (End::Ran(ending), None) if ran(ending) => Result::Stayed,
        (End::Gone, Some(ending)) if ran(ending) => match end.resumed {
            0 => Result::Moved,
            _ => Result::Resumed,
        },
        (End::Unknown(None), Some(ending)) if ran(ending) => Result::UnknownThere,
        (End::Unknown(Some(ending)), None) if ran(ending) => Result::UnknownHere,
        (End::Cut | End::Unknown(None), Some(ending)) if lost(ending) => match end.killed {
            Some(Side::Destination) => Result::KilledThere,
            Some(Side::Source) => Result::Lost,
            // A source that connects again outlives every cut.
            None if patience == 0 => Result::Lost,
            None => return None,
        },
        // The guest has needed none of the lost pages.
        (End::Cut, Some(ending)) if ran(ending) => Result::Moved,
        _ => return None,
    })
}

fn from_environment(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}: {text} is no number")),
    )
}

/// Whatever happens to the link, the guest runs to its end on one side with all of its memory, or
/// has the outcome documented for that case.
#[test]
fn migrations_end_as_documented() {
    let one = from_environment("LACUNA_MIGRATION_SEED");
    let count = from_environment("LACUNA_MIGRATIONS").unwrap_or(16);
    let seeds = one.map_or(0..count, |seed| seed..seed + 1);
    let mut counts = BTreeMap::new();
    for seed in seeds {
        let (plan, patience, end) = migrate(seed);
        let result =
            judge(&end, patience).unwrap_or_else(|| panic!("seed {seed}: {plan}: {end:?}"));
        *counts.entry(result).or_insert(0) += 1;
    }
    println!("{counts:?}");
    let both = [Result::Stayed, Result::Moved].map(|result| counts.contains_key(&result));
    assert!(one.is_some() || both == [true; 2], "{counts:?}");
}
