//! Skewed access to more memory than is resident, with huge pages and without. The null is a second
//! VM without huge pages: it shows the difference between two equal VMs.

use crate::experiment::{LabError, Options, skip_if_busy, vcpus};
use crate::fixture::builder;
use crate::players::{Cast, InBackground, Player, Slice, with_players};
use crate::report::short;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, measures, paired};
use lacuna_addr::PageCount;
use lacuna_soft::{Delivery, HugePages, VmBuilder};
use std::time::Duration;

/// Guest memory, in MiB.
const MEMORY_MIB: u64 = 512;
/// Host memory for it, in MiB.
const RESIDENT_MIB: u64 = 384;
/// Exponent of Zipf's law, in hundredths.
const SKEW: u64 = 99;

/// The arms, and the VMs in the order in which they are made.
const SMALL: usize = 0;
const HUGE: usize = 1;
const NULL: usize = 2;

/// Where the guest's hot pages are, and the figures promised for it.
struct PressurePlace {
    suffix: &'static str,
    about: &'static str,
    words: &'static str,
    rounds: usize,
    ratio: Option<f64>,
    kept: Option<f64>,
}

const PLACES: [PressurePlace; 2] = [
    PressurePlace {
        suffix: "",
        about: "hot pages side by side",
        words: "scatter=0",
        rounds: 31,
        ratio: Some(0.97),
        kept: Some(50.0),
    },
    PressurePlace {
        suffix: ".scattered",
        about: "hot pages anywhere",
        words: "scatter=1",
        rounds: 9,
        ratio: None,
        kept: None,
    },
];

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = PLACES.len() as u64;

const fn turn(options: &Options) -> Slice {
    Slice {
        settle: Duration::from_millis(100),
        counted: Duration::from_millis(if options.quick { 200 } else { 500 }),
    }
}

/// `thp.pressure_ratio` and `thp.kept_percent`.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &crate::report::Progress,
) -> Result<(), LabError> {
    for place in &PLACES {
        progress.step(format!("memory pressure, {}", place.about))?;
        let [memory, resident] =
            [MEMORY_MIB, RESIDENT_MIB].map(|mib| PageCount::from_bytes(mib << 20));
        let builder = |huge| VmBuilder {
            huge,
            command_line: format!("huge=1 skew={SKEW} seconds=1000000 {}", place.words),
            ..builder(memory, resident, vcpus())
        };
        let builders = [HugePages::Never, HugePages::Always, HugePages::Never].map(builder);
        let cast = Cast {
            guest: "zipf",
            delivery: Delivery::Bitmap,
            background: InBackground::Reclaim,
        };
        let found = with_players(&builders, cast, |mut players| {
            take_turns(options, place, &mut players)
        })?;
        if Summary::of(&found[SMALL][2]).median == 0.0 {
            // A guest with a processor accesses more than is resident.
            let ids = ["pressure_ratio", "kept_percent"].map(|name| id(name, place));
            let busy = LabError::Busy("the guest read no page from swap".into());
            skip_if_busy(report, ids, Err(busy))?;
            continue;
        }
        record(options, place, &found, report);
    }
    Ok(())
}

fn id(name: &str, place: &PressurePlace) -> String {
    format!("thp.{name}{}", place.suffix)
}

/// The runs of each arm: accesses a second, the share of huge pages in the resident memory in
/// percent, and pages a second read from swap.
type Found = Vec<[Vec<f64>; 3]>;

fn take_turns(
    options: &Options,
    place: &PressurePlace,
    players: &mut [Player<'_>],
) -> Result<Found, LabError> {
    let turn = turn(options);
    // Long enough that the hot pages are resident and the others are not.
    let warm_up = Slice {
        counted: Duration::from_secs(if options.quick { 1 } else { 10 }),
        ..turn
    };
    for player in players.iter_mut() {
        player.slice(warm_up)?;
    }
    let rounds = if options.quick { 2 } else { place.rounds };
    measures(3, rounds, |arm| {
        let took = players[arm].slice(turn)?;
        let huge = (took.host.huge_pages << 21) as f64;
        let resident = ((took.host.resident) << 12) as f64;
        Ok([took.rate, 100.0 * huge / resident, took.swap_ins])
    })
}

fn record(options: &Options, place: &PressurePlace, found: &Found, report: &mut Report) {
    let rates = |arm: usize| &found[arm][0];
    let swap_ins = |arm: usize| Summary::of(&found[arm][2]);
    let ratio = paired(rates(SMALL), rates(HUGE));
    let kept = Summary::of(&found[HUGE][1]);
    report.say(format!(
        "memory pressure, {}: with huge pages the guest makes {:.3} times as many accesses ({} a \
         second without). {:.0} % of the resident memory stays in huge pages.",
        place.about,
        ratio.median,
        short(Summary::of(rates(SMALL)).median),
        kept.median,
    ));
    let turn = turn(options);
    let measured = |name: &str, unit, summary, bar: Option<f64>| {
        let result = Measurement::new(id(name, place), unit, Better::Higher, summary)
            .param("memory_mib", MEMORY_MIB)
            .param("resident_mib", RESIDENT_MIB)
            .param("vcpus", vcpus())
            .param("swap", "compressed memory")
            .param("zipf_s", SKEW as f64 / 100.0)
            .param("write_percent", 50)
            .param("place", place.about)
            .param("slice_ms", turn.counted.as_millis() as u64)
            .param("settle_ms", turn.settle.as_millis() as u64);
        bar.into_iter().fold(result, Measurement::bar)
    };
    report.push(
        measured("pressure_ratio", "x", ratio, place.ratio)
            .arm("small", Summary::of(rates(SMALL)))
            .arm("huge", Summary::of(rates(HUGE)))
            .arm("small_swap_ins_per_s", swap_ins(SMALL))
            .arm("huge_swap_ins_per_s", swap_ins(HUGE))
            .arm("null", paired(rates(SMALL), rates(NULL))),
    );
    report.push(measured("kept_percent", "%", kept, place.kept));
}
