//! Guests that take turns, with huge pages and without: random reads over more memory than 4 KiB
//! TLB entries cover, and skewed access to more memory than is resident. The null is a second VM
//! without huge pages: it shows the difference between two equal VMs.

use crate::experiment::{LabError, LabResult, Options, skip_if_busy, vcpus};
use crate::fixture::{builder, resident, with_size};
use crate::players::{Cast, InBackground, with_players};
use crate::result::{Better, Measurement, Report};
use crate::slices::Pace;
use crate::stats::{Summary, measures, paired};
use lacuna::PageCount;
use lacuna::memory::HugePages;
use lacuna::soft::VmBuilder;
use std::time::Duration;

/// Guest memory, and host memory for it, in MiB.
const MIB: [u64; 2] = [512, 384];
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
const NEIGHBOURS: Hot = (
    "",
    "hot pages side by side",
    "scatter=0",
    31,
    [Some(0.97), Some(50.0)],
);
const SCATTERED: Hot = (
    ".scattered",
    "hot pages anywhere",
    "scatter=1",
    9,
    [None, None],
);
const PLACES: [Hot; 2] = [NEIGHBOURS, SCATTERED];

/// The number of steps that [`pressure`] reports as progress.
pub const STEPS: u64 = PLACES.len() as u64;

/// The runs of each arm: accesses a second, the share of huge pages in the resident memory in
/// percent, and pages a second read from swap.
type Found = Vec<[Vec<f64>; 3]>;

/// Lets three VMs of `builder` take turns, after each has run for `warm`.
fn compare(
    builder: impl Fn(HugePages) -> VmBuilder,
    guest: &'static str,
    warm: Duration,
    pace: Pace,
) -> LabResult<Found> {
    let cast = Cast {
        guest,
        background: InBackground::Reclaim,
    };
    with_players(&ARMS.map(builder), cast, |mut players| {
        for player in &mut players {
            player.slice(Pace {
                slice: warm,
                ..pace
            })?;
        }
        measures(ARMS.len(), pace.rounds, |arm| {
            let took = players[arm].slice(pace)?;
            let huge = (took.host.huge_pages << 21) as f64;
            let resident = (took.host.resident << 12) as f64;
            Ok([took.rate, 100.0 * huge / resident, took.swap_ins])
        })
    })
}

/// The ratio of accesses, huge pages / none.
fn ratio(id: &str, found: &Found) -> Measurement {
    let rates = |arm: usize| &found[arm][0];
    Measurement::new(id, "x", Better::Higher, paired(rates(SMALL), rates(HUGE)))
        .arm("small", Summary::of(rates(SMALL)))
        .arm("huge", Summary::of(rates(HUGE)))
        .arm("null", paired(rates(SMALL), rates(NULL)))
}

/// `thp.random_read_ratio`.
pub fn reads(options: &Options, report: &mut Report) -> LabResult {
    let (mib, rounds) = if options.quick { (256, 2) } else { (1024, 15) };
    let builder = |huge| VmBuilder {
        arch: options.arch,
        huge,
        command_line: format!("huge=1 bytes={mib}M seconds=1000000"),
        // Room for the kernel and its tables, beside the memory to be read.
        ..resident(mib + 64, 1)
    };
    let pace = Pace::new(rounds, 100, 40);
    let found = compare(builder, "reads", pace.slice, pace)?;
    let result = ratio("thp.random_read_ratio", &found);
    report.push(
        result
            .param("mib", mib)
            .param("guest_pages", "2 MiB in both"),
    );
    Ok(())
}

/// `thp.pressure_ratio` and `thp.kept_percent`.
pub fn pressure(options: &Options, report: &mut Report) -> LabResult {
    // The VMs first run until the hot pages are resident and the others are not.
    let (warm_s, slice_ms) = if options.quick { (1, 200) } else { (10, 500) };
    for (suffix, about, words, rounds, bars) in PLACES {
        options.step(format!("memory pressure, {about}"))?;
        let [memory, resident] = MIB.map(|mib| PageCount::from_bytes(mib << 20));
        let builder = |huge| VmBuilder {
            arch: options.arch,
            huge,
            command_line: format!("huge=1 skew={SKEW} seconds=1000000 {words}"),
            ..builder(memory, resident, vcpus())
        };
        let rounds = if options.quick { 2 } else { rounds };
        let pace = Pace::new(rounds, slice_ms, 100);
        let found = compare(builder, "zipf", Duration::from_secs(warm_s), pace)?;
        let ids = ["pressure_ratio", "kept_percent"].map(|name| format!("thp.{name}{suffix}"));
        let swap_ins = |arm: usize| Summary::of(&found[arm][2]);
        if swap_ins(SMALL).median == 0.0 {
            // A guest with a processor accesses more than is resident.
            let busy = LabError::Busy("the guest read no page from swap".into());
            skip_if_busy(report, ids, Err(busy))?;
            continue;
        }
        let kept = Summary::of(&found[HUGE][1]);
        let results = [
            ratio(&ids[0], &found)
                .arm("small_swap_ins_per_s", swap_ins(SMALL))
                .arm("huge_swap_ins_per_s", swap_ins(HUGE)),
            Measurement::new(&ids[1], "%", Better::Higher, kept),
        ];
        for (result, bar) in results.into_iter().zip(bars) {
            let result = with_size(result, &builder(HugePages::Always))
                .param("swap", "compressed memory")
                .param("zipf_s", SKEW as f64 / 100.0)
                .param("place", about)
                .param("slice_ms", slice_ms);
            report.push(bar.into_iter().fold(result, Measurement::bar));
        }
    }
    Ok(())
}
