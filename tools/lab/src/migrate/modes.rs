//! Pre-copy, post-copy and hybrid: blackout and total. Also the blackout of a large guest.

use super::VCPUS;
use super::ends::{Moved, counted, move_guest};
use super::route::Route;
use crate::experiment::{LabResult, Options};
use crate::guests::{GuestBuilder, beside};
use crate::result::{Better, Measurement, Report};
use crate::session::Session;
use crate::stats::{Rounds, Summary, measures, paired, quantile};
use lacuna::Running;
use lacuna::migrate::stream::Mode;
use std::time::Instant;

/// Memory of the large guest in MiB.
pub const LARGE: u64 = 2048;
/// The longest blackout of a post-copy in milliseconds.
const BLACKOUT: f64 = 50.0;
/// The heaps of `churn`: the hot one is written again and again, the cold one rarely.
pub const CHURN: &str = "hot=4M writes=100 frees=0 seconds=1000000";

/// One move over TCP. Also returns, for each vCPU, the milliseconds from the last instruction on
/// the source until a process on it had made progress.
fn move_once<B: GuestBuilder>(
    builder: &B,
    guest: &Running<B::Vm>,
    mode: Mode,
) -> LabResult<(Moved, Vec<f64>)> {
    let (moved, at) = move_guest(builder, guest, (mode, Route::tcp()?), counted)?;
    let since = |at: &Instant| (*at - moved.paused).as_secs_f64() * 1e3;
    let blackouts = at.iter().map(since).collect();
    Ok((moved, blackouts))
}

fn longest(blackouts: &[f64]) -> f64 {
    blackouts.iter().copied().fold(0.0, f64::max)
}

/// `migrate.blackout.*` and `migrate.total.*`.
pub fn measure<B: GuestBuilder>(
    prefix: &str,
    builder: &B,
    memory: u64,
    rounds: Rounds,
    report: &mut Report,
) -> LabResult {
    const ARMS: [(&str, Mode); 4] = [
        ("precopy", Mode::PreCopy),
        ("null", Mode::PreCopy),
        ("postcopy", Mode::PostCopy),
        ("hybrid", Mode::Hybrid),
    ];
    let runs = beside(builder, "churn", CHURN, |Session { running, .. }| {
        measures(ARMS.len(), rounds, |arm| {
            let (moved, blackouts) = move_once(builder, running, ARMS[arm].1)?;
            Ok([longest(&blackouts), moved.total, moved.pages as f64])
        })
    })?;
    for (index, (name, mode)) in ARMS
        .into_iter()
        .enumerate()
        .filter(|(_, arm)| arm.0 != "null")
    {
        let [blackout, total, pages] = [0, 1, 2].map(|figure| Summary::of(&runs[index][figure]));
        let found = |what, unit, figure| {
            let id = format!("{prefix}.{what}.{name}");
            let found = of_churn(id, unit, figure, memory).arm("pages_sent", pages);
            match mode {
                Mode::PreCopy => {
                    let [first, second] = [0, 1].map(|arm| &runs[arm]);
                    let column = usize::from(what == "total");
                    found.arm("null", paired(&first[column], &second[column]))
                }
                _ => found,
            }
        };
        let blackout = found("blackout", "ms", blackout);
        report.push(match mode {
            Mode::PostCopy => blackout.bar(BLACKOUT),
            Mode::PreCopy | Mode::Hybrid => blackout,
        });
        report.push(found("total", "s", total));
    }
    Ok(())
}

fn of_churn(id: String, unit: &str, figure: Summary, memory: u64) -> Measurement {
    Measurement::new(id, unit, Better::Lower, figure)
        .param("memory_mib", memory)
        .param("vcpus", VCPUS)
        .param("guest", format!("churn {CHURN}"))
}

/// `migrate.blackout.postcopy_2g`.
pub fn large<B: GuestBuilder>(
    prefix: &str,
    builder: &B,
    memory: u64,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let moves = if options.quick { 3 } else { 25 };
    let (mut each, mut of_all, mut totals) = (Vec::new(), Vec::new(), Vec::new());
    beside(builder, "churn", CHURN, |Session { running, .. }| {
        // The first move is not counted.
        move_once(builder, running, Mode::PostCopy)?;
        for _ in 0..moves {
            let (moved, blackouts) = move_once(builder, running, Mode::PostCopy)?;
            each.push(longest(&blackouts));
            of_all.extend(blackouts);
            totals.push(moved.total);
        }
        Ok(())
    })?;
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(&of_all, share));
    report.say(format!(
        "{prefix}: post-copy of {memory} MiB, {moves} moves: of the blackouts of all vCPUs, half \
         are at most {p50:.1} ms, and 99 of 100 at most {p99:.1} ms."
    ));
    let id = format!("{prefix}.blackout.postcopy_2g");
    let found = of_churn(id, "ms", Summary::of(&each), memory)
        .bar(BLACKOUT)
        .arm("total_seconds", Summary::of(&totals))
        .arm(
            "vcpus",
            serde_json::json!({"count": of_all.len(), "p50_ms": p50, "p99_ms": p99}),
        );
    report.push(found);
    Ok(())
}
