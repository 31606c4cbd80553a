//! `lacuna demo NAME`: one system in 20 seconds, without its mechanism and with it.
//!
//! ```text
//! guest starts paused ─► off, settles, slices ─► on, settles, slices ─► stop
//! ```
//! The demo is a client of the guest's control socket. The load is the same in both halves, and the
//! time in which it settles does not count. Each slice has one rate. A difference counts if the 95
//! % intervals of the two medians do not overlap, and if it is larger than the change inside of
//! each half: another load on the host changes the rates too.

use crate::args::{Cli, Command, DemoArgs, DemoName, RunArgs};
use crate::counters::Counters;
use crate::exit::{Exit, no_answer};
use crate::output::{self, print};
use crate::run::{Refusal, catch_signals, exit_of, run_beside};
use crate::view::Caption;
use clap::{Parser, ValueEnum};
use lacuna::dirty::Detection;
use lacuna_control::{AskError, Client, SetRequest, WatchRequest};
use lacuna_lab::report::short;
use lacuna_lab::stats::Summary;
use std::num::NonZeroU64;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The time of a rate.
const SLICE: Duration = Duration::from_millis(250);
/// Slices of a half.
const SLICES: usize = 30;
/// The time after a switch that does not count.
const SETTLES: Duration = Duration::from_secs(2);
/// The longest time until the load begins.
const BEGINS: Duration = Duration::from_secs(30);
/// The time in which runs take turns.
const TIME: Duration = Duration::from_secs(20);
/// Runs of each kind at least: with fewer, an interval does not cover 95 %.
const TURNS_LEAST: usize = 6;
/// The time between two looks at a counter.
const LOOK: Duration = Duration::from_millis(10);
/// A period of the log of writes, in `pml`.
const PERIOD: Duration = Duration::from_millis(100);

/// A demo.
struct Demo {
    name: DemoName,
    /// The problem, and the mechanism.
    about: [&'static str; 2],
    /// The options of `lacuna run`.
    run: &'static str,
    counted: Counted,
    how: How,
}

/// How a demo compares.
enum How {
    /// One guest, shown live, whose settings are switched after half of the time.
    Switch([Half; 2]),
    /// Short runs in turns, each as long as its guest takes, every second one with this option.
    Turns(&'static str),
}

/// What a demo counts: the sum of these metrics with these labels, and the unit of its rate.
struct Counted {
    metrics: &'static [&'static str],
    labels: &'static [(&'static str, &'static str)],
    unit: &'static str,
}

/// A half of a demo.
#[derive(Clone, PartialEq)]
struct Half {
    name: &'static str,
    set: SetRequest,
    /// Logs the guest's writes in this half.
    watch: Option<Detection>,
    /// The letter of the switch on the view's time axis.
    mark: char,
}

impl Half {
    fn of(name: &'static str, mark: char) -> Self {
        Self {
            name,
            set: SetRequest::default(),
            watch: None,
            mark,
        }
    }
}

const STEPS: &[&str] = &["lacuna_guest_thread_steps_total"];
const WORK: &[(&str, &str)] = &[("kind", "work")];

impl Demo {
    fn of(name: DemoName) -> Self {
        let apf = |arch| {
            let [mut off, mut on] = [Half::of("off", 'a'), Half::of("on", 'A')];
            off.set.async_faults = Some(false);
            on.set.async_faults = Some(true);
            Self {
                name,
                about: [
                    "A vCPU that needs a page from swap waits, and all processes of the guest on \
                     this vCPU wait with it.",
                    "With async page faults the guest gets an event instead, and runs another \
                     process until the page is there.",
                ],
                run: arch,
                counted: Counted {
                    metrics: STEPS,
                    labels: WORK,
                    unit: "steps of the workers",
                },
                how: How::Switch([off, on]),
            }
        };
        match name {
            DemoName::Apf => apf(
                "bm --memory 256M --resident 64M --vcpus 2 --swap mem,latency=1ms --append \
                 workers=2~faulters=2~populate=1~seconds=1000000~slice_us=4000~tick_us=1000",
            ),
            DemoName::Arm64 => apf(
                "bm --arch arm64 --memory 256M --resident 64M --vcpus 2 --swap mem,latency=1ms \
                 --append \
                 workers=2~faulters=2~populate=1~seconds=1000000~slice_us=4000~tick_us=1000",
            ),
            DemoName::Thp => Self::thp(),
            DemoName::Pml => Self::pml(),
            DemoName::Missing => Self::missing(),
        }
    }

    fn thp() -> Self {
        let [mut off, mut on] = [Half::of("off", 'h'), Half::of("on", 'H')];
        off.set.huge_pages = Some(false);
        on.set.huge_pages = Some(true);
        Self {
            name: DemoName::Thp,
            about: [
                "Random accesses to much memory in pages of 4 KiB miss the TLB nearly every time, \
                 and each miss walks the page tables.",
                "The host collapses the guest's memory into pages of 2 MiB: one TLB entry covers \
                 512 times as much.",
            ],
            run: "reads --memory 256M --resident 256M --vcpus 1 --thp always --append \
                  seconds=1000000",
            counted: Counted {
                metrics: STEPS,
                labels: &[],
                unit: "reads",
            },
            how: How::Switch([off, on]),
        }
    }

    fn pml() -> Self {
        let [mut off, mut on] = [Half::of("off", 'd'), Half::of("on", 'D')];
        off.watch = Some(Detection::WriteProtect);
        on.watch = Some(Detection::Pml);
        Self {
            name: DemoName::Pml,
            about: [
                "A migration must know which pages the guest writes. With write protection, the \
                 first write to each page in each round is a fault.",
                "With page-modification logging the vCPU puts the page's number into a log, \
                 without a fault.",
            ],
            run: "churn --memory 256M --resident 256M --vcpus 2 --append seconds=1000000~hot=0",
            counted: Counted {
                metrics: &[
                    "lacuna_dirty_faults_total",
                    "lacuna_dirty_fast_page_faults_total",
                ],
                labels: &[],
                unit: "faults for the log of writes",
            },
            how: How::Switch([off, on]),
        }
    }

    fn missing() -> Self {
        Self {
            name: DemoName::Missing,
            about: [
                "The memory of a restored or moved guest is elsewhere at first. Here each vCPU \
                 that needs a page waits in one queue for a thread that provides it.",
                "With exits for missing memory, the vCPU's own thread provides the page: no \
                 queue, and no wake-up.",
            ],
            run: "touch --memory 256M --resident 256M --vcpus 4 --pages-from zeros --append \
                  threads=4",
            counted: Counted {
                metrics: &["lacuna_host_faults_missing_total"],
                labels: &[],
                unit: "pages",
            },
            how: How::Turns(" --exit-on-missing"),
        }
    }

    /// The arguments of a run with `options` and a control socket.
    fn args(&self, options: &str, control: &Path) -> RunArgs {
        let line = format!("lacuna run {}{options} --paused --control", self.run);
        let words = line.split_whitespace().map(|word| word.replace('~', " "));
        let cli = Cli::parse_from(words.map(PathBuf::from).chain([control.to_owned()]));
        match cli.command {
            Some(Command::Run(args)) => args,
            _ => unreachable!("the line is one of lacuna run"),
        }
    }

    /// The value of these metrics with the demo's labels.
    fn count(&self, client: &mut Client, metrics: &[&str]) -> Result<f64, AskError> {
        let counters = Counters::of_stat(&client.counters()?);
        let sum = |metric: &&str| counters.values(metric, self.counted.labels).sum::<f64>();
        Ok(metrics.iter().map(sum).sum())
    }

    /// Measures a run that waits for a resume, and ends it. Returns the rates of both halves, or
    /// the rate of all of it.
    fn measure(
        &self,
        control: &Path,
        caption: Option<&Caption>,
    ) -> Result<[Vec<f64>; 2], AskError> {
        let mut client = Client::connect(control)?;
        let mut rates = [Vec::new(), Vec::new()];
        let How::Switch(halves) = &self.how else {
            rates[0].extend(self.whole(&mut client)?);
            return Ok(rates);
        };
        let measured = rates.iter_mut().zip(halves).try_for_each(|(rates, half)| {
            if let Some(caption) = caption {
                let about = self.about.map(str::to_owned);
                let now = format!("now {}", half.name.to_uppercase());
                caption.say([&about[..], &[now]].concat());
                caption.mark(half.mark, half.name);
            }
            *rates = self.slices(half, control, &mut client)?;
            Ok(())
        });
        // The guest may have ended before.
        let _ = client.stop();
        measured.map(|()| rates)
    }

    /// The mean rate of a guest that ends by itself.
    fn whole(&self, client: &mut Client) -> Result<Option<f64>, AskError> {
        client.resume()?;
        let (mut first, mut last) = (None, None);
        loop {
            match self.count(client, self.counted.metrics) {
                Ok(0.0) => {}
                Ok(count) => {
                    last = Some((Instant::now(), count));
                    first = first.or(last);
                }
                Err(AskError::Gone { .. }) => break,
                Err(error) => return Err(error),
            }
            thread::sleep(LOOK);
        }
        Ok(first.zip(last).and_then(|((began, first), (ended, last))| {
            let seconds = (ended - began).as_secs_f64();
            (last > first).then(|| (last - first) / seconds)
        }))
    }

    /// The rates of a half.
    fn slices(
        &self,
        half: &Half,
        control: &Path,
        client: &mut Client,
    ) -> Result<Vec<f64>, AskError> {
        if half.set != SetRequest::default() {
            client.set(half.set.clone())?;
        }
        client.resume()?;
        let began = Instant::now();
        while self.count(client, STEPS)? == 0.0 && began.elapsed() < BEGINS {
            thread::sleep(LOOK);
        }
        let periods = (SETTLES + SLICE * SLICES as u32).as_millis() / PERIOD.as_millis();
        let watching = half.watch.map(|detect| {
            let request = WatchRequest {
                every_ms: Some(PERIOD.as_millis() as u64),
                window_ms: Some(PERIOD.as_millis() as u64),
                count: NonZeroU64::new(periods as u64),
                detect: Some(detect),
            };
            let client = Client::connect(control);
            thread::spawn(move || {
                let mut periods = client?.watch(request)?;
                periods.try_for_each(|period| period.map(drop))
            })
        });
        thread::sleep(SETTLES);
        let mut rates = Vec::new();
        let mut before = (Instant::now(), self.count(client, self.counted.metrics)?);
        while rates.len() < SLICES {
            thread::sleep(SLICE);
            let now = (Instant::now(), self.count(client, self.counted.metrics)?);
            rates.push((now.1 - before.1) / (now.0 - before.0).as_secs_f64());
            before = now;
        }
        if let Some(watching) = watching {
            // Without its monitor a half has nothing to compare.
            watching
                .join()
                .unwrap_or_else(|panic| resume_unwind(panic))?;
        }
        Ok(rates)
    }
}

/// Shows a demo, or their list.
pub fn demo(args: &DemoArgs) -> Exit {
    exit_of(match args.name {
        None => print(&list()).map(|()| Exit::Done).map_err(Into::into),
        Some(name) => show(&Demo::of(name)),
    })
}

fn list() -> String {
    let demos = DemoName::value_variants().iter();
    let lines = demos.filter_map(|name| {
        let value = name.to_possible_value()?;
        let help = value
            .get_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        Some(format!("lacuna demo {:<8} {help}\n", value.get_name()))
    });
    lines.collect()
}

fn show(demo: &Demo) -> Result<Exit, Refusal> {
    let failed = |error: std::io::Error| (Exit::Host, format!("the demo cannot run: {error}"));
    print(&format!("{}\n{}\n", demo.about[0], demo.about[1]))?;
    let folder = tempfile::tempdir().map_err(failed)?;
    let control = folder.path().join("control");
    let signals = catch_signals(&Arc::default())?;
    let run = |options: &str, is_shown: bool| {
        let mut args = demo.args(options, &control);
        args.on.output.quiet = !is_shown;
        let (demo, control) = (Demo::of(demo.name), control.clone());
        let script = move |caption: Option<Caption>| demo.measure(&control, caption.as_ref());
        let (exit, rates) = run_beside(&args, &signals, script)?;
        match exit {
            Exit::Interrupted(_) => Ok(Err(exit)),
            _ => rates.map(Ok).map_err(no_answer),
        }
    };
    let rates = match demo.how {
        How::Switch(_) => run("", true)?,
        How::Turns(option) => {
            // The lines of so many guests say nothing more.
            let _lines = output::discard_lines();
            let began = Instant::now();
            let mut rates = Ok([Vec::new(), Vec::new()]);
            while let Ok(all) = &mut rates
                && (all[0].len() < TURNS_LEAST || began.elapsed() < TIME)
            {
                for (rates, option) in all.iter_mut().zip(["", option]) {
                    match run(option, false)? {
                        Ok([rate, _]) => rates.extend(rate),
                        Err(exit) => return Ok(exit),
                    }
                }
            }
            rates
        }
    };
    match rates {
        Ok([off, on]) => {
            print(&difference(demo.counted.unit, &off, &on))?;
            Ok(Exit::Done)
        }
        Err(interrupted) => Ok(interrupted),
    }
}

/// The measured difference, in one line.
fn difference(unit: &str, off: &[f64], on: &[f64]) -> String {
    if off.is_empty() || on.is_empty() {
        return format!("{unit}: the guest has ended too early to compare\n");
    }
    let [of_off, of_on] = [off, on].map(Summary::of);
    let apart = of_on.low > of_off.high || of_on.high < of_off.low;
    let change = drift(off).max(drift(on));
    let verdict = match (of_on.median - of_off.median).abs() > change {
        true if apart => format!("{:.2} times as many", of_on.median / of_off.median),
        true => "no significant difference".into(),
        false => "no significant difference, as the rates also change inside of a half".into(),
    };
    let text = |of: &Summary| {
        let [median, low, high] = [of.median, of.low, of.high].map(short);
        format!("{median} ({low}..{high}, {} slices)", of.runs)
    };
    let [off, on] = [&of_off, &of_on].map(text);
    format!("{unit} a second: off {off}, on {on}: {verdict}\n")
}

/// How much the median changes from the first part of a half to the second one.
fn drift(rates: &[f64]) -> f64 {
    let (first, second) = rates.split_at(rates.len() / 2);
    match first.is_empty() {
        true => 0.0,
        false => (Summary::of(first).median - Summary::of(second).median).abs(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_demo_is_a_run_that_can_be_started() {
        for name in DemoName::value_variants() {
            let demo = Demo::of(*name);
            let option = match &demo.how {
                How::Turns(option) => option,
                How::Switch([off, on]) => {
                    assert!(off != on);
                    ""
                }
            };
            let args = demo.args(option, Path::new("/c d"));
            assert_eq!(args.on.control, Some("/c d".into()));
            assert!(args.on.paused && args.budget() <= args.memory);
        }
        assert_eq!(list().lines().count(), 5);
    }

    #[test]
    fn overlap_and_drift_are_no_difference() {
        let of = |from: f64, step: f64| {
            let rates = [0.0, 2.0, 1.0, 3.0, 3.0, 1.0, 2.0, 0.0];
            rates.map(|at| from + step * at)
        };
        let text = difference("steps", &of(100.0, 1.0), &of(101.0, 1.0));
        assert!(text.contains("no significant difference\n"), "{text}");
        let text = difference("steps", &of(100.0, 1.0), &of(204.5, 1.0));
        assert!(text.contains("off 102 (100..103, 8 slices)"), "{text}");
        assert!(text.ends_with(": 2.03 times as many\n"), "{text}");
        let drifts = [100.0, 101.0, 102.0, 103.0, 140.0, 141.0, 142.0, 143.0];
        let text = difference("steps", &drifts, &drifts.map(|rate| rate + 30.0));
        assert!(text.contains("inside of a half"), "{text}");
        assert!(difference("steps", &[], &[1.0]).contains("too early"));
    }
}
