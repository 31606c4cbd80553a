//! `lacuna demo NAME`: one system in half a minute, without its mechanism and with it.
//!
//! ```text
//! guest starts paused ─► off, settles, slices ─► on, settles, slices ─► stop
//! ```
//! The demo is a client of the guest's control socket. The load is the same in both halves, and the
//! time in which it settles does not count. Each slice has one rate. A difference counts if the 95
//! % intervals of the two medians do not overlap, and if it is larger than the change inside of
//! each half: another load on the host changes the rates too.
//!
//! Memory is missing only once, so `missing` compares short guests instead, which take turns.

use crate::args::{Cli, Command, DemoArgs, DemoName, RunArgs};
use crate::counters::Counters;
use crate::exit::{Exit, no_answer};
use crate::lab::settled;
use crate::output::print;
use crate::run::{Refusal, catch_signals, exit_of, run_beside};
use crate::signals::Signals;
use crate::view::Caption;
use clap::{Parser, ValueEnum};
use lacuna::dirty::Detection;
use lacuna_control::{AskError, Client, SetRequest, WatchRequest};
use lacuna_lab::demand_paging::DemandPaging;
use lacuna_lab::interrupt;
use lacuna_lab::options::options_of;
use lacuna_lab::report::{Progress, Verbosity, short};
use lacuna_lab::stats::Summary;
use std::num::NonZeroU64;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The time of a rate.
const SLICE: Duration = Duration::from_millis(250);
/// Slices of a half.
const SLICES: usize = 30;
/// The time after a switch that does not count.
const SETTLES: Duration = Duration::from_secs(2);
/// The longest time until the load begins, and until a gauge has grown.
const BEGINS: Duration = Duration::from_secs(30);
/// Turns of each kind of guest.
const TURNS: usize = 20;
/// The time between two looks at a counter.
const LOOK: Duration = Duration::from_millis(10);
/// A period of the log of writes, in `pml`.
const PERIOD: Duration = Duration::from_millis(100);

/// A demo.
struct Demo {
    /// The problem, and the mechanism.
    about: [&'static str; 2],
    /// The options of `lacuna run`, or of `lacuna test demand-paging` for guests that take turns.
    run: &'static str,
    counted: Counted,
    how: How,
}

/// How a demo compares.
enum How {
    /// One guest, shown live, whose settings are switched after half of the time.
    Switch([Half; 2]),
    /// Guests of `lacuna test demand-paging` in turns, with these options.
    Turns([&'static str; 2]),
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
    /// While the guest is paused, this gauge first grows to at least this value.
    grows: Option<(&'static str, f64)>,
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
            grows: None,
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
        // Nearly all of the 128 blocks that the guest reads.
        on.grows = Some(("lacuna_host_huge_pages", 120.0));
        Self {
            about: [
                "Random accesses to much memory in pages of 4 KiB miss the TLB nearly every time, \
                 and each miss walks the page tables.",
                "The host collapses the guest's memory into pages of 2 MiB: one TLB entry covers \
                 512 times as much. The guest is paused for it. Its own tables map 2 MiB pages all \
                 the time.",
            ],
            // A collapse needs a free block of the budget.
            run: "reads --memory 512M --resident 384M --vcpus 1 --thp always --append \
                  huge=1~bytes=256M~seconds=1000000",
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
            about: [
                "The memory of a restored or moved guest is elsewhere at first. Here each vCPU \
                 that needs a page sleeps in one queue until a thread has provided it.",
                "With exits for missing memory, the vCPU's own thread provides the page: no \
                 queue, and no wake-up.",
            ],
            run: "--memory-kind pool --vcpus 2 --bytes 8M",
            counted: Counted {
                metrics: &[],
                labels: &[],
                unit: "pages",
            },
            how: How::Turns([" --by queue", " --by exits"]),
        }
    }

    /// The arguments of a run with a control socket.
    fn args(&self, control: &Path) -> RunArgs {
        let line = format!("lacuna run {} --paused --control", self.run);
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

    /// Measures both halves of a run that waits for a resume, and ends it.
    fn measure(
        &self,
        halves: &[Half; 2],
        control: &Path,
        caption: Option<&Caption>,
    ) -> Result<[Vec<f64>; 2], AskError> {
        let mut client = Client::connect(control)?;
        let mut rates = [Vec::new(), Vec::new()];
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

    /// The guests that take turns.
    fn guests(&self, options: &[&str; 2]) -> [DemandPaging; 2] {
        options.map(|option| options_of(&format!("{}{option}", self.run)))
    }

    /// The rates of guests in turns, or why they have ended early.
    fn turns(&self, options: &[&str; 2], signals: &Signals) -> Result<[Vec<f64>; 2], Exit> {
        let guests = self.guests(options);
        // A guest has two steps.
        let progress = Progress::new(2 * 2 * TURNS as u64, Verbosity::Normal);
        let mut rates = [Vec::new(), Vec::new()];
        for _ in 0..TURNS {
            for (rates, guest) in rates.iter_mut().zip(&guests) {
                match guest.run(&progress) {
                    Ok(outcome) => rates.push(outcome.rate()),
                    Err(error) => return Err(settled(Err(error), signals).0),
                }
            }
        }
        Ok(rates)
    }

    /// Waits until the gauge has grown, with the guest paused, and until the load has settled.
    fn settle(&self, grows: Option<(&str, f64)>, client: &mut Client) -> Result<(), AskError> {
        if let Some((gauge, to)) = grows {
            // A fault in a block undoes its collapse, and this guest faults all the time.
            client.pause()?;
            let began = Instant::now();
            while self.count(client, &[gauge])? < to && began.elapsed() < BEGINS {
                thread::sleep(LOOK);
            }
            client.resume()?;
        }
        thread::sleep(SETTLES);
        Ok(())
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
        self.settle(half.grows, client)?;
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
        Some(name) => show(Demo::of(name)),
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

fn show(demo: Demo) -> Result<Exit, Refusal> {
    print(&format!("{}\n{}\n", demo.about[0], demo.about[1]))?;
    let signals = catch_signals(&interrupt::flag())?;
    let unit = demo.counted.unit;
    let rates = match &demo.how {
        How::Switch(halves) => {
            let halves = halves.clone();
            switched(demo, halves, &signals)?
        }
        How::Turns(options) => demo.turns(options, &signals),
    };
    match rates {
        Ok([off, on]) => {
            print(&difference(unit, &off, &on))?;
            Ok(Exit::Done)
        }
        Err(early) => Ok(early),
    }
}

/// Shows a guest whose settings are switched. Returns the rates of both halves, or why the guest
/// has ended early.
fn switched(
    demo: Demo,
    halves: [Half; 2],
    signals: &Signals,
) -> Result<Result<[Vec<f64>; 2], Exit>, Refusal> {
    let failed = |error: std::io::Error| (Exit::Host, format!("the demo cannot run: {error}"));
    let folder = tempfile::tempdir().map_err(failed)?;
    let control = folder.path().join("control");
    let args = demo.args(&control);
    let script = move |caption: Option<Caption>| demo.measure(&halves, &control, caption.as_ref());
    let (exit, rates) = run_beside(&args, signals, script)?;
    match exit {
        Exit::Interrupted(_) => Ok(Err(exit)),
        _ => rates.map(Ok).map_err(no_answer),
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
        true if apart && of_on.median < of_off.median / 100.0 => "nearly none are left".into(),
        true if apart => format!("{:.2} times as many", of_on.median / of_off.median),
        true => "no significant difference".into(),
        false => "no significant difference, as the rates also change inside of a half".into(),
    };
    let text = |of: &Summary| {
        let [median, low, high] = [of.median, of.low, of.high].map(short);
        format!("{median} ({low}..{high}, {} rates)", of.runs)
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
            match &demo.how {
                How::Turns(options) => {
                    for guest in demo.guests(options) {
                        assert_eq!(guest.check(), Ok(()));
                    }
                }
                How::Switch([off, on]) => {
                    assert!(off != on);
                    let args = demo.args(Path::new("/c d"));
                    assert_eq!(args.on.control, Some("/c d".into()));
                    assert!(args.on.paused && args.budget() <= args.memory);
                }
            }
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
        assert!(text.contains("off 102 (100..103, 8 rates)"), "{text}");
        assert!(text.ends_with(": 2.03 times as many\n"), "{text}");
        let text = difference("faults", &of(1000.0, 1.0), &of(0.0, 0.1));
        assert!(text.ends_with(": nearly none are left\n"), "{text}");
        let drifts = [100.0, 101.0, 102.0, 103.0, 140.0, 141.0, 142.0, 143.0];
        let text = difference("steps", &drifts, &drifts.map(|rate| rate + 30.0));
        assert!(text.contains("inside of a half"), "{text}");
        assert!(difference("steps", &[], &[1.0]).contains("too early"));
    }
}
