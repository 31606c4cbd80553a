//! The table in the cover letter of the exits on missing memory, 2023: pages a second through one
//! userfaultfd, and by exits, for nine numbers of vCPUs.

use crate::demand_paging::{By, DemandPaging, Fixture, unavailable};
use crate::experiment::{LabResult, Options, cores};
use crate::paging::{SERIES, SOURCE, charged};
use crate::report::{align, short};
use crate::result::{Better, Measurement, Report};
use crate::size::Size;
use crate::stats::{Summary, paired, rounds};
use lacuna::PAGE_SIZE;

pub const STEPS: u64 = SERIES.len() as u64;
/// The beginning of the ids.
pub const ID: &str = "letters.paging.exit_vs_queue";

/// The letter has averages of five runs.
const RUNS: usize = 5;
/// Bytes that each vCPU touches; the letter does not say its own.
const BYTES: u64 = 16 << 20;
/// The most vCPUs that are timed on a host with fewer cores.
const CROWD: usize = 16;

const QUEUE: usize = 0;
const EXITS: usize = 1;

/// Whether a row is timed on this host. With more vCPUs than that, the threads' turns on the cores
/// decide the rate, and not how a page is provided.
fn is_timed(vcpus: usize, options: &Options) -> bool {
    let most = if options.quick { 2 } else { cores().max(CROWD) };
    vcpus <= most
}

/// `letters.paging.exit_vs_queue.*`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let bytes = if options.quick { 1 << 20 } else { BYTES };
    let bytes = bytes / u64::from(options.scale);
    let bytes = Size(bytes.next_multiple_of(PAGE_SIZE as u64));
    report.say(format!(
        "letters.paging: each vCPU touches {bytes}, once, in Linux memory; {RUNS} rounds of each \
         arm in turns. One userfaultfd with one reader against exits whose vCPU's own thread \
         copies the page. Different from the letter: on our processor an exit is the return of a \
         function, so a second ratio charges each page the exit of its arm on hardware; the letter \
         had 256 cores, this host has {}.",
        cores()
    ));
    let of = |vcpus| {
        let mut demand = DemandPaging::default();
        (demand.guest.arch, demand.guest.vcpus, demand.guest.bytes) = (options.arch, vcpus, bytes);
        demand
    };
    if let Some(why) = unavailable(&of(1)) {
        report.skip(format!("{ID}.*"), why);
        return Ok(());
    }
    let head = [
        "vCPUs",
        "theirs: queue",
        "exits",
        "ratio",
        "ours: queue",
        "exits",
        "ratio",
        "exits charged",
    ];
    let mut table = vec![head.map(str::to_owned)];
    for (vcpus, without, with) in SERIES {
        options.step(format!("paging: {vcpus} vCPUs"))?;
        let theirs = [without, with].map(|thousands| short(thousands * 1e3));
        let row = |ours: [String; 4]| {
            let [queue, exits] = theirs.clone();
            let [a, b, c, d] = ours;
            let ratio = format!("{:.2}", with / without);
            [vcpus.to_string(), queue, exits, ratio, a, b, c, d]
        };
        if !is_timed(vcpus, options) {
            table.push(row(["not timed", "", "", ""].map(str::to_owned)));
            continue;
        }
        let (cells, result) = timed(&of(vcpus))?;
        table.push(row(cells));
        report.push(result.reference(with / without, SOURCE));
    }
    report.detail(format!(
        "Pages a second, theirs and ours\n{}",
        align(&table)
    ));
    Ok(())
}

/// The rates of a number of vCPUs for people, and the result.
fn timed(base: &DemandPaging) -> LabResult<([String; 4], Measurement)> {
    let arms = [By::Queue, By::Exits].map(|by| DemandPaging { by, ..base.clone() });
    let fixture = Fixture::soft(base)?;
    let rates = rounds(arms.len(), RUNS, |arm| fixture.rate(&arms[arm]))?;
    let with_exits = [QUEUE, EXITS].map(|arm| {
        let rates = rates[arm].iter();
        rates
            .map(|&rate| charged(rate, &arms[arm]))
            .collect::<Vec<_>>()
    });
    let ratio = paired(&rates[QUEUE], &rates[EXITS]);
    let on_hardware = paired(&with_exits[QUEUE], &with_exits[EXITS]);
    let [queue, exits] = [QUEUE, EXITS].map(|arm| Summary::of(&rates[arm]));
    let cells = [
        short(queue.median),
        short(exits.median),
        format!("{:.2}", ratio.median),
        format!("{:.2}", on_hardware.median),
    ];
    let id = format!("{ID}.{}vcpu", base.guest.vcpus);
    let result = Measurement::new(id, "x", Better::Higher, ratio)
        .param("bytes_each", base.guest.bytes.0)
        .arm("queue_per_s", queue)
        .arm("exits_per_s", exits)
        .arm("ratio_with_exits_charged", on_hardware);
    Ok((cells, result))
}

#[cfg(test)]
mod tests {
    use super::super::tests::quick;
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    #[test]
    fn the_letters_rows_stand_beside_ours() {
        needs_guests();
        let report = quick("paging");
        if let Some(skipped) = report.skipped.first() {
            lacuna_skip::skip_test(skipped.why.clone());
        }
        let ids: Vec<_> = report.results.iter().map(|result| &*result.id).collect();
        assert_eq!(ids, [1, 2].map(|vcpus| format!("{ID}.{vcpus}vcpu")));
        let table = &report.details[0];
        let rows: Vec<_> = table.lines().skip(2).collect();
        assert_eq!(rows.len(), SERIES.len(), "{table}");
        assert!(
            rows[8].starts_with("256") && rows[8].contains("4.0M"),
            "{table}"
        );
        assert_eq!(
            table.matches("not timed").count(),
            SERIES.len() - 2,
            "{table}"
        );
    }
}
