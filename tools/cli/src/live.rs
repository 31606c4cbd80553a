//! The live view of a run on a terminal, and the summary at its end everywhere.
//!
//! ```text
//! fault-0  ████████░░░░░░░░  52 %   31.2k/s      one line a thread, a bar where it has a goal
//! work-0   1.2M              410k/s
//! resident 512M of 512M (guest: 2G)   swap in 81k out 64k   faults zero 130k major 81k
//! ```
//! No line is wider than a terminal of 60 columns or more. Longer text has further lines.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::IsTerminal;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use lacuna_lab::report::{short, time};
use lacuna_lab::stalls::VcpuStalls;
use rustix::termios::tcgetwinsize;

use crate::sample::{Apf, Dirty, DirtyCounts, Huge, RunSample, Thread};
use crate::size::Size;
use lacuna_control::Pages;

/// The widest bar.
const BAR: usize = 24;
/// A line of a thread, without its name and its bar: blanks, the percentage, and the rate.
const BESIDE_BAR: usize = 16;
/// The columns of a terminal that does not report their number.
const COLUMNS: usize = 80;
/// The gap between two parts of a line.
const GAP: &str = "   ";

/// A live view on stderr, for a [`RunSample`] several times a second.
pub struct Live {
    screen: MultiProgress,
    /// The terminal's columns now.
    columns: fn() -> usize,
    threads: Vec<ProgressBar>,
    /// The pages of a source, once there is one.
    pages: Option<ProgressBar>,
    totals: ProgressBar,
}

impl Live {
    /// A view if stderr is a terminal; `None` otherwise, because it would only fill a log.
    pub fn on_stderr() -> Option<Self> {
        let target = ProgressDrawTarget::stderr_with_hz(5);
        std::io::stderr()
            .is_terminal()
            .then(|| Self::on(target, columns))
    }

    fn on(target: ProgressDrawTarget, columns: fn() -> usize) -> Self {
        let screen = MultiProgress::with_draw_target(target);
        let totals = screen.add(ProgressBar::new_spinner().with_style(style("{msg}")));
        Self {
            screen,
            columns,
            threads: Vec::new(),
            pages: None,
            totals,
        }
    }

    /// Prints a line of the guest's above the view.
    pub fn println(&self, line: &str) {
        // It fails only when the terminal does, and there is no other place to report that.
        let _ = self.screen.println(line);
    }

    /// Shows `now`.
    pub fn update(&mut self, now: &RunSample) {
        while self.threads.len() < now.threads.len() {
            let bar = ProgressBar::new(0);
            self.threads
                .push(self.screen.insert(self.threads.len(), bar));
        }
        let width = name_width(now);
        let columns = (self.columns)();
        for (bar, thread) in self.threads.iter().zip(&now.threads) {
            show_thread(bar, thread, width, columns);
        }
        if let Some(pages) = &now.pages {
            let bar = self.pages.get_or_insert_with(|| {
                let bar = ProgressBar::new_spinner().with_style(style("{msg}"));
                self.screen.insert_before(&self.totals, bar)
            });
            bar.set_message(fit(&pages_now(pages), columns));
            bar.tick();
        }
        self.totals.set_message(fit(&totals(now), columns));
        self.totals.tick();
    }

    /// Removes the view, so that the summary stands alone.
    pub fn finish(self) {
        for bar in &self.threads {
            bar.finish_and_clear();
        }
        self.pages.iter().for_each(ProgressBar::finish_and_clear);
        self.totals.finish_and_clear();
    }
}

/// The columns of the terminal on stderr.
pub fn columns() -> usize {
    match tcgetwinsize(std::io::stderr()) {
        Ok(size) if size.ws_col > 0 => size.ws_col.into(),
        _ => COLUMNS,
    }
}

/// `text` in lines of at most `columns`. A line ends between two parts, or between two words of a
/// part wider than a line. A wider word stays whole.
pub fn fit(text: &str, columns: usize) -> String {
    let mut lines = String::new();
    let mut at = 0;
    let mut put = |words: &str, gap: &str| {
        let width = words.chars().count();
        if at > 0 && at + gap.len() + width > columns {
            lines.push('\n');
            at = 0;
        } else if at > 0 {
            lines.push_str(gap);
            at += gap.len();
        }
        lines.push_str(words);
        at += width;
    };
    for part in text.split(GAP) {
        if part.chars().count() <= columns {
            put(part, GAP);
            continue;
        }
        for (n, word) in part.split(' ').enumerate() {
            put(word, if n == 0 { GAP } else { " " });
        }
    }
    lines
}

/// The width of the longest name of a thread.
fn name_width(now: &RunSample) -> usize {
    let names = now.threads.iter().map(|thread| thread.name.len());
    names.max().unwrap_or(0)
}

/// Shows a thread whose name has `width` columns with the blanks behind it.
fn show_thread(bar: &ProgressBar, thread: &Thread, width: usize, columns: usize) {
    let room = columns.saturating_sub(width + BESIDE_BAR).clamp(1, BAR);
    if thread.goal > 0 {
        let template = format!("{{prefix}} {{bar:{room}}} {{percent:>3}} %  {{msg}}");
        bar.set_style(style(&template));
        bar.set_length(thread.goal);
        bar.set_message(format!("{}/s", short(thread.rate)));
    } else {
        bar.set_style(style("{prefix} {msg}"));
        let count = short(thread.counter as f64);
        bar.set_message(format!("{count:<room$}        {}/s", short(thread.rate)));
    }
    bar.set_prefix(format!("{:<width$}", thread.name));
    bar.set_position(thread.counter);
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).expect("the template is well formed");
    style.progress_chars("█░")
}

fn totals(now: &RunSample) -> String {
    let faults: String = now
        .faults
        .iter()
        .map(|f| format!(" {} {}", f.kind, short(f.count as f64)))
        .collect();
    let huge = now.huge.map_or(String::new(), |huge| {
        format!(", {} in 2M pages", Size(huge.pages << 21))
    });
    format!(
        "resident {} of {}{huge} (guest: {})   swap in {} out {}   faults{faults}",
        Size(now.resident_bytes),
        Size(now.budget_bytes),
        Size(now.memory_bytes),
        short(now.swap_in as f64),
        short(now.swap_out as f64),
    )
}

fn pages_now(pages: &Pages) -> String {
    let [present, missing] = [pages.present, pages.missing].map(|count| short(count as f64));
    let lost = match pages.lost {
        0 => String::new(),
        lost => format!(" lost {lost}"),
    };
    if pages.whole {
        return format!("pages whole: all {present} are here");
    }
    format!(
        "pages present {present} missing {missing}{lost}   fetched {}/s, p99 {}",
        short(pages.rate),
        time(pages.p99_ns)
    )
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

/// The summary of a run, for stdout.
pub fn summary(last: &RunSample) -> String {
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
            thread.counter as f64 / seconds
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Faults, GuestApf};
    use indicatif::InMemoryTerm;
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

    fn sample() -> RunSample {
        let thread = |name: &str, kind: &str, counter, goal, rate| Thread {
            name: name.into(),
            kind: kind.into(),
            counter,
            goal,
            rate,
        };
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
fault-0  fault            50000       12.5k
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

    #[test]
    fn the_live_view_has_a_line_a_thread_and_goes_away() {
        let terminal = InMemoryTerm::new(10, 120);
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let mut live = Live::on(target, || 120);
        live.update(&sample());
        let screen = terminal.contents();
        let lines: Vec<&str> = screen.lines().collect();
        assert_eq!(lines.len(), 4, "{screen}");
        assert!(lines[0].starts_with("fault-0 ████████████░"), "{screen}");
        assert!(lines[0].ends_with("50 %  12.5k/s"), "{screen}");
        assert!(
            lines[1].starts_with("work-0  8.0M ") && lines[1].ends_with("2.0M/s"),
            "{screen}"
        );
        let totals = "resident 512M of 512M, 300M in 2M pages (guest: 2G)   swap in 81.0k out \
                      640   faults zero 131k major 81.0k";
        let pages = "pages present 65.5k missing 459k lost 2   fetched 16.4k/s, p99 1.2 ms";
        assert_eq!(lines[2], pages);
        assert_eq!(lines[3], totals);
        live.finish();
        assert_eq!(terminal.contents().trim(), "");
    }
    #[test]
    fn no_line_is_wider_than_the_terminal() {
        fn check<const WIDTH: u16>() {
            let terminal = InMemoryTerm::new(20, WIDTH);
            let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
            let mut live = Live::on(target, || WIDTH.into());
            let mut sample = sample();
            sample.threads[0].name = "a name of 24 characters.".into();
            sample.swap_in = 123_456_789;
            live.update(&sample);
            let screen = terminal.contents();
            // A line that the terminal wraps is cut where its columns end, inside a word.
            for line in [
                "50 %  12.5k/s",
                "2.0M/s",
                "pages present 65.5k missing 459k lost 2",
                "fetched 16.4k/s, p99 1.2 ms",
                "resident 512M of 512M, 300M in 2M pages (guest: 2G)",
                "swap in 123M out 640",
                "faults zero 131k major 81.0k",
            ] {
                assert!(screen.contains(line), "{WIDTH}, {line}:\n{screen}");
            }
            let lines = screen.lines();
            assert!(
                lines
                    .clone()
                    .all(|line| line.chars().count() <= WIDTH.into())
            );
            assert!(lines.clone().all(|line| !line.starts_with(' ')), "{screen}");
        }
        check::<60>();
        check::<80>();
        check::<110>();
    }

    #[test]
    fn text_is_broken_between_parts_and_then_between_words() {
        for (columns, lines) in [
            (40, "one two   three four   five"),
            (22, "one two   three four\nfive"),
            (10, "one two\nthree four\nfive"),
            (6, "one\ntwo\nthree\nfour\nfive"),
            (3, "one\ntwo\nthree\nfour\nfive"),
        ] {
            assert_eq!(
                fit("one two   three four   five", columns),
                lines,
                "{columns}"
            );
        }
    }
}
