//! Guests that take turns, with huge pages and without: random reads over more memory than 4 KiB
//! TLB entries cover, and skewed access to more memory than is resident. The null is a second VM
//! without huge pages: it shows the difference between two equal VMs.

use crate::experiment::{LabError, Options, skip_if_busy, vcpus};
use crate::fixture::{builder, resident};
use crate::players::{Cast, InBackground, Player, Slice, with_players};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, measures, paired, rounds};
use lacuna::PageCount;
use lacuna::dirty::Delivery;
use lacuna::memory::HugePages;
use lacuna::soft::VmBuilder;
use std::time::Duration;

/// Guest memory, and host memory for it, in MiB.
const MEMORY_MIB: u64 = 512;
const RESIDENT_MIB: u64 = 384;
/// Exponent of Zipf's law, in hundredths.
const SKEW: u64 = 99;

/// The arms, and the VMs in the order in which they are made.
const ARMS: [HugePages; 3] = [HugePages::Never, HugePages::Always, HugePages::Never];
const SMALL: usize = 0;
const HUGE: usize = 1;
const NULL: usize = 2;

/// Where the guest's hot pages are: the end of ids, the same in words and for the guest, the
/// rounds, and the bars of the ratio and of the kept share.
type Hot = (
    &'static str,
    &'static str,
    &'static str,
    usize,
    [Option<f64>; 2],
);
const PLACES: [Hot; 2] = [
    (
        "",
        "hot pages side by side",
        "scatter=0",
        31,
        [Some(0.97), Some(50.0)],
    ),
    (
        ".scattered",
        "hot pages anywhere",
        "scatter=1",
        9,
        [None, None],
    ),
];

const fn cast(guest: &'static str) -> Cast {
    Cast {
        guest,
        delivery: Delivery::Bitmap,
        background: InBackground::Reclaim,
    }
}

/// `thp.random_read_ratio`.
pub fn reads(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let mib = if options.quick { 256 } else { 1024 };
    let builders = ARMS.map(|huge| VmBuilder {
        huge,
        command_line: format!("huge=1 bytes={mib}M seconds=1000000"),
        // Room for the kernel and its tables, beside the memory to be read.
        ..resident(mib + 64, 1)
    });
    let turn = Slice {
        settle: Duration::from_millis(40),
        counted: Duration::from_millis(100),
    };
    let rates = with_players(&builders, cast("reads"), |mut players| {
        let repeats = if options.quick { 2 } else { 15 };
        rounds(3, repeats, |arm| Ok(players[arm].slice(turn)?.rate))
    })?;
    let ratio = paired(&rates[SMALL], &rates[HUGE]);
    report.push(
        Measurement::new("thp.random_read_ratio", "x", Better::Higher, ratio)
            .param("mib", mib)
            .param("guest_pages", "2 MiB in both")
            .arm("small_reads_per_s", Summary::of(&rates[SMALL]))
            .arm("huge_reads_per_s", Summary::of(&rates[HUGE]))
            .arm("null", paired(&rates[SMALL], &rates[NULL])),
    );
    Ok(())
}

/// The number of steps that [`pressure`] reports as progress.
pub const STEPS: u64 = PLACES.len() as u64;

/// `thp.pressure_ratio` and `thp.kept_percent`.
pub fn pressure(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    for hot in PLACES {
        let (suffix, about, words, ..) = hot;
        progress.step(format!("memory pressure, {about}"))?;
        let [memory, resident] =
            [MEMORY_MIB, RESIDENT_MIB].map(|mib| PageCount::from_bytes(mib << 20));
        let builders = ARMS.map(|huge| VmBuilder {
            huge,
            command_line: format!("huge=1 skew={SKEW} seconds=1000000 {words}"),
            ..builder(memory, resident, vcpus())
        });
        let turn = Slice {
            settle: Duration::from_millis(100),
            counted: Duration::from_millis(if options.quick { 200 } else { 500 }),
        };
        let found = with_players(&builders, cast("zipf"), |mut players| {
            take_turns(options.quick, turn, hot.3, &mut players)
        })?;
        let ids = ["pressure_ratio", "kept_percent"].map(|name| format!("thp.{name}{suffix}"));
        if Summary::of(&found[SMALL][2]).median == 0.0 {
            // A guest with a processor accesses more than is resident.
            let busy = LabError::Busy("the guest read no page from swap".into());
            skip_if_busy(report, ids, Err(busy))?;
            continue;
        }
        record(ids, hot, turn, &found, report);
    }
    Ok(())
}

/// The runs of each arm: accesses a second, the share of huge pages in the resident memory in
/// percent, and pages a second read from swap.
type Found = Vec<[Vec<f64>; 3]>;

fn take_turns(
    quick: bool,
    turn: Slice,
    rounds: usize,
    players: &mut [Player<'_>],
) -> Result<Found, LabError> {
    // Long enough that the hot pages are resident and the others are not.
    let counted = Duration::from_secs(if quick { 1 } else { 10 });
    for player in players.iter_mut() {
        player.slice(Slice { counted, ..turn })?;
    }
    measures(ARMS.len(), if quick { 2 } else { rounds }, |arm| {
        let took = players[arm].slice(turn)?;
        let huge = (took.host.huge_pages << 21) as f64;
        let resident = (took.host.resident << 12) as f64;
        Ok([took.rate, 100.0 * huge / resident, took.swap_ins])
    })
}

fn record(ids: [String; 2], hot: Hot, turn: Slice, found: &Found, report: &mut Report) {
    let rates = |arm: usize| &found[arm][0];
    let swap_ins = |arm: usize| Summary::of(&found[arm][2]);
    let ratio = paired(rates(SMALL), rates(HUGE));
    let kept = Summary::of(&found[HUGE][1]);
    let summaries = [("x", ratio), ("%", kept)];
    let measured = ids.into_iter().zip(summaries).zip(hot.4);
    let mut measured = measured.map(|((id, (unit, summary)), bar)| {
        let result = Measurement::new(id, unit, Better::Higher, summary)
            .param("memory_mib", MEMORY_MIB)
            .param("resident_mib", RESIDENT_MIB)
            .param("vcpus", vcpus())
            .param("swap", "compressed memory")
            .param("zipf_s", SKEW as f64 / 100.0)
            .param("write_percent", 50)
            .param("place", hot.1)
            .param("slice_ms", turn.counted.as_millis() as u64)
            .param("settle_ms", turn.settle.as_millis() as u64);
        bar.into_iter().fold(result, Measurement::bar)
    });
    let ratio = measured.next().expect("two results");
    report.push(
        ratio
            .arm("small", Summary::of(rates(SMALL)))
            .arm("huge", Summary::of(rates(HUGE)))
            .arm("small_swap_ins_per_s", swap_ins(SMALL))
            .arm("huge_swap_ins_per_s", swap_ins(HUGE))
            .arm("null", paired(rates(SMALL), rates(NULL))),
    );
    measured.for_each(|kept| report.push(kept));
}
