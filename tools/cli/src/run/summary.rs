//! The summary of a run, for stdout.

use crate::sample::{Apf, Dirty, DirtyCounts, Huge, RunSample};
use crate::size::Size;
use lacuna_control::Pages;
use lacuna_lab::report::{short, time};
use lacuna_lab::stalls::VcpuStalls;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The summary of a run, for stdout.
pub(super) fn summary(last: &RunSample) -> String {
    let mut text = String::new();
    let name = name_width(last).max(6);
    let _ = writeln!(
        text,
        "{:<name$}  {:<8}{:>14}{:>12}",
        "thread", "kind", "steps", "steps/s"
    );
    let seconds = last.elapsed.as_secs_f64();
    for thread in &last.threads {
        let mean = if seconds > 0.0 {
            thread.counter.saturating_sub(thread.before) as f64 / seconds
        } else {
            0.0
        };
        let (counter, mean) = (thread.counter, short(mean));
        let _ = writeln!(
            text,
            "{:<name$}  {:<8}{counter:>14}{mean:>12}",
            thread.name, thread.kind
        );
    }
    let _ = writeln!(
        text,
        "\nmemory    guest {}, budget {}, peak {}",
        Size(last.memory_bytes),
        Size(last.budget_bytes),
        Size(last.peak_bytes),
    );
    if let Some(huge) = &last.huge {
        text.push_str(&huge_line(huge));
    }
    if let Some(pages) = &last.pages {
        text.push_str(&pages_line(pages));
    }
    let read = last
        .major_faults
        .map(|read| format!("; Linux has read {read} in guest code"));
    let _ = writeln!(
        text,
        "swap      {} pages in, {} out{}",
        last.swap_in,
        last.swap_out,
        read.unwrap_or_default()
    );
    let faults: Vec<String> = last
        .faults
        .iter()
        .map(|faults| format!("{} {}", faults.count, faults.kind))
        .collect();
    let _ = writeln!(text, "faults    {}", faults.join(", "));
    text.push_str(&exits_line(last));
    text.push_str(&dirty_line(&last.dirty));
    for stalls in &last.stalls {
        let _ = writeln!(text, "{}", stall_line(stalls));
    }
    if let Some(apf) = &last.apf {
        text.push_str(&apf_lines(apf));
    }
    let _ = writeln!(text, "time      {seconds:.1} s");
    text
}

/// The exits of all vCPUs by kind. Nothing without an exit.
fn exits_line(last: &RunSample) -> String {
    let mut kinds = BTreeMap::new();
    for (kind, count) in last.exits.iter().flatten() {
        *kinds.entry(*kind).or_insert(0) += count;
    }
    kinds.retain(|_, count: &mut u64| *count > 0);
    let parts = kinds.iter().map(|(kind, count)| format!("{count} {kind}"));
    match kinds.is_empty() {
        true => String::new(),
        false => format!("exits     {}\n", parts.collect::<Vec<_>>().join(", ")),
    }
}

fn huge_line(huge: &Huge) -> String {
    let Huge {
        pages,
        faults,
        fallbacks,
        splits,
        collapses,
    } = huge;
    format!(
        "huge      {pages} pages of 2M: {faults} by a fault, {collapses} by a collapse; {splits} \
         split; {fallbacks} faults found no 2M free\n"
    )
}

/// Asynchronous page faults: the host's side, then the guest's.
fn apf_lines(apf: &Apf) -> String {
    let Apf {
        taken,
        halted,
        repeated,
        swap_in_min_ns,
        swap_in_mean_ns,
        swap_in_max_ns,
        guest,
    } = apf;
    let [min, mean, max] = [swap_in_min_ns, swap_in_mean_ns, swap_in_max_ns].map(|ns| time(*ns));
    format!(
        "apf       {taken} taken, {halted} halted, {repeated} repeated; swap-in min {min}, mean \
         {mean}, max {max}\n\
         apf guest {} not present, {} ready ({} before the wait), {} wake-all, {} lost\n",
        guest.not_present, guest.ready, guest.ready_before_wait, guest.wake_all, guest.lost,
    )
}

/// Nothing for a guest whose writes were not tracked.
fn dirty_line(dirty: &Dirty) -> String {
    let counts = dirty.vcpus.unwrap_or_default();
    let DirtyCounts {
        logged,
        log_full,
        faults,
    } = counts;
    match counts == DirtyCounts::default() {
        true => String::new(),
        false => format!(
            "writes    by {}: {logged} logged, {log_full} times a full log, {faults} faults\n",
            dirty.detected_by
        ),
    }
}

fn stall_line(stalls: &VcpuStalls) -> String {
    let VcpuStalls {
        vcpu,
        count,
        p50_ns,
        p99_ns,
        p999_ns,
    } = *stalls;
    let [p50, p99, p999] = [p50_ns, p99_ns, p999_ns].map(time);
    format!("vcpu {vcpu:<4} {count} stalls, p50 {p50}, p99 {p99}, p99.9 {p999}")
}

/// The width of the longest name of a thread.
fn name_width(now: &RunSample) -> usize {
    let names = now.threads.iter().map(|thread| thread.name.len());
    names.max().unwrap_or(0)
}

fn pages_line(pages: &Pages) -> String {
    let [p50, p99] = [pages.p50_ns, pages.p99_ns].map(time);
    let whole = if pages.whole { " (whole)" } else { "" };
    format!(
        "pages     {} present{whole}, {} missing, {} lost; {}/s, fetch p50 {p50}, p99 {p99}\n",
        pages.present,
        pages.missing,
        pages.lost,
        short(pages.rate),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Faults, GuestApf, Thread};
    use std::time::Duration;

    fn dirty() -> Dirty {
        Dirty {
            detected_by: "write protection".into(),
            delivery: "ring".into(),
            vcpus: Some(DirtyCounts {
                logged: 0,
                log_full: 0,
                faults: 70,
            }),
        }
    }

    /// A thread with 1000 steps from before the guest moved here.
    fn thread(name: &str, kind: &str, counter: u64, goal: u64, rate: f64) -> Thread {
        Thread {
            name: name.into(),
            kind: kind.into(),
            counter,
            goal,
            before: 1000,
            rate,
        }
    }

    fn sample() -> RunSample {
        let faults = |kind: &str, count| Faults {
            kind: kind.into(),
            count,
        };
        RunSample {
            elapsed: Duration::from_secs(4),
            threads: vec![
                thread("fault-0", "fault", 50_000, 100_000, 12_500.0),
                thread("work-0", "work", 8_000_000, 0, 2e6),
            ],
            memory_bytes: 2 << 30,
            budget_bytes: 512 << 20,
            resident_bytes: 512 << 20,
            peak_bytes: 520 << 20,
            swap_in: 81_000,
            major_faults: None,
            swap_out: 640,
            faults: vec![faults("zero", 131_072), faults("major", 81_000)],
            exits: vec![[("mmio", 0), ("io", 7)].into(), [("io", 5)].into()],
            stalls: vec![VcpuStalls {
                vcpu: 0,
                count: 81_000,
                p50_ns: 900,
                p99_ns: 61_500,
                p999_ns: 2_500_000,
            }],
            huge: Some(Huge {
                pages: 150,
                faults: 192,
                fallbacks: 64,
                splits: 50,
                collapses: 8,
            }),
            apf: Some(Apf {
                taken: 640,
                halted: 3,
                repeated: 1,
                swap_in_min_ns: 52_000,
                swap_in_mean_ns: 1_100_000,
                swap_in_max_ns: 3_200_000,
                guest: GuestApf {
                    not_present: 640,
                    ready: 639,
                    ready_before_wait: 2,
                    wake_all: 1,
                    lost: 0,
                },
            }),
            dirty: dirty(),
            pages: Some(Pages {
                total: 524_288,
                present: 65_536,
                missing: 458_750,
                lost: 2,
                whole: false,
                in_flight: 12,
                rate: 16_384.0,
                p50_ns: 90_000,
                p99_ns: 1_200_000,
            }),
        }
    }

    #[test]
    fn a_summary_tells_everything() {
        let expected = "\
thread   kind             steps     steps/s
fault-0  fault            50000       12.2k
work-0   work           8000000        2.0M

memory    guest 2G, budget 512M, peak 520M
huge      150 pages of 2M: 192 by a fault, 8 by a collapse; 50 split; 64 faults found no 2M free
pages     65536 present, 458750 missing, 2 lost; 16.4k/s, fetch p50 90.0 us, p99 1.2 ms
swap      81000 pages in, 640 out
faults    131072 zero, 81000 major
exits     12 io
writes    by write protection: 0 logged, 0 times a full log, 70 faults
vcpu 0    81000 stalls, p50 900 ns, p99 61.5 us, p99.9 2.5 ms
apf       640 taken, 3 halted, 1 repeated; swap-in min 52.0 us, mean 1.1 ms, max 3.2 ms
apf guest 640 not present, 639 ready (2 before the wait), 1 wake-all, 0 lost
time      4.0 s
";
        assert_eq!(summary(&sample()), expected);
    }

    #[test]
    fn a_run_that_did_nothing_has_a_summary_too() {
        assert!(summary(&RunSample::default()).ends_with("time      0.0 s\n"));
    }
}
