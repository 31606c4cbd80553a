//! The score of a guest under dirty logging: `churn` with a monitor that harvests once a second.
//! There is a VM for each arm, in turns.
//!
//! Each delivery is measured in two sets, each at a dirty rate of its own. The setting on the
//! status page sets that rate: it is the share of transactions that write to cold pages. The lab
//! searches for the rate at which write protection leaves 92 % of the score without logging, as in
//! the cover letter of the KVM PML series (2015). The set `.raw` is as measured. In `.exitcost`
//! each exit is charged its cost on hardware ([`charged`](super::score_charge)). If even the
//! highest rate leaves more than 92 %, that rate is used, and the results have no bar. The runs of
//! `.exitcost` are also charged the time of an exit on this host's KVM: `.exitcost_here`.

use super::score_charge::{COLD_MAX, Search, charged};
use super::score_guest::{Churn, Period, Setup, Watch, play, with_churns};
use super::{exit_here, score_always};
use crate::exit_cost::{EXIT_NS, SOURCE as EXIT_SOURCE};
use crate::experiment::{LabError, Options, vcpus};
use crate::fixture::resident;
use crate::host_info::HostInfo;
use crate::players::TURN;
use crate::report::{Progress, align, short};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, percent_across};
use lacuna_soft::{Backup, Delivery, Detection, RingSize, VmBuilder};
use std::time::Duration;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 7;

/// The score that write protection is to have, in percent, and the score that the search aims for:
/// a little less.
const WANTED: f64 = 92.0;
const AIM: f64 = 91.5;
/// The least score of PML at that rate.
const BAR: f64 = 97.0;
/// SPECjbb scores in the cover letter of the KVM PML series: PML 96.17 with a graphic window and
/// 95.72 without; write protection 91.99 and 90.72.
const COVER_LETTER: &str = "cover letter of the KVM PML series, 2015: SPECjbb, PML 95.7 to 96.2, \
                            write protection 90.7 to 92.0";
const COVER_LETTER_PML: f64 = 95.7;
const COVER_LETTER_WP: f64 = 90.7;

/// A set of figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Set {
    /// As measured.
    Raw,
    /// With each exit charged.
    ExitCost,
}

impl Set {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Raw, Self::ExitCost];

    /// The end of its ids.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::ExitCost => "exitcost",
        }
    }

    /// What each exit is charged, in nanoseconds.
    const fn exit_ns(self) -> f64 {
        match self {
            Self::Raw => 0.0,
            Self::ExitCost => EXIT_NS,
        }
    }

    /// Marks a figure of this set as simulated, if it is.
    pub fn marked(self, measurement: Measurement) -> Measurement {
        match self {
            Self::Raw => measurement,
            Self::ExitCost => measurement
                .simulated()
                .param("exit_ns", EXIT_NS)
                .param("exit_source", EXIT_SOURCE),
        }
    }
}

/// An arm: the end of its id, and how it logs. The first two do not log; the second is the null.
const ARMS: [(&str, Watch); 4] = [
    ("none", Watch::Nothing(Detection::WriteProtect)),
    ("null", Watch::Nothing(Detection::WriteProtect)),
    ("wp", Watch::Dirty(Detection::WriteProtect)),
    ("pml", Watch::Dirty(Detection::Pml)),
];
const NONE: usize = 0;
const NULL: usize = 1;
const WP: usize = 2;

/// The largest ring for each vCPU.
pub fn rings() -> Delivery {
    Delivery::Ring {
        size: RingSize::from_bytes(RingSize::BYTES_MAX).expect("it is its own limit"),
        backup: Backup::None,
    }
}

/// Sizes, times and rounds.
#[derive(Clone, Copy)]
struct Pace {
    mib: u64,
    period: Duration,
    /// Rounds of each VM in each arm.
    rounds: usize,
    tries: usize,
}

impl Pace {
    fn of(options: &Options) -> Self {
        match options.quick {
            true => Self {
                mib: 128,
                period: Duration::from_millis(100),
                rounds: 1,
                tries: 3,
            },
            false => Self {
                // Half of the machine's memory for four VMs.
                mib: 2048.min((HostInfo::detect().memory_bytes >> 23).max(128)),
                period: Duration::from_secs(1),
                rounds: 9,
                tries: 5,
            },
        }
    }
}

/// VMs that record writes in `delivery`.
fn setup(pace: Pace, delivery: Delivery) -> Setup {
    let hot = pace.mib / 32;
    Setup {
        builder: VmBuilder {
            command_line: format!("hot={hot}M writes=100 frees=0 seconds=1000000"),
            ..resident(pace.mib, vcpus())
        },
        delivery,
        period: pace.period,
    }
}

/// The transactions a second of a period, with `exit_ns` for each exit.
fn worth(exit_ns: f64, period: &Period, watch: Watch) -> f64 {
    match watch {
        Watch::Dirty(detection) => {
            let vcpus = vcpus() as u64;
            let exits = period.counted.exits(detection, vcpus);
            charged(period.rate(), period.done.cpu, vcpus, exits, exit_ns)
        }
        Watch::Nothing(_) => period.rate(),
    }
}

/// The dirty rate for a set: so many of 65536 transactions write to cold pages.
#[derive(Clone, Copy)]
struct Rate {
    cold: u32,
    /// Whether write protection has the wanted score there, or less.
    reached: bool,
}

/// Searches for the share of cold transactions at which write protection has the score [`AIM`].
fn calibrate(
    churns: &mut [Churn<'_>],
    setup: &Setup,
    tries: usize,
    set: Set,
) -> Result<Rate, LabError> {
    let mut score = |cold: u32| -> Result<f64, LabError> {
        let arms = [NONE, WP].map(|arm| ARMS[arm].1);
        let periods = play(churns, setup, &arms, cold, 1)?;
        let sum = |arm: usize| -> f64 {
            let all = periods[arm].iter();
            all.map(|period| worth(set.exit_ns(), period, arms[arm]))
                .sum()
        };
        Ok(100.0 * sum(1) / sum(0))
    };
    if score(COLD_MAX)? > WANTED {
        return Ok(Rate {
            cold: COLD_MAX,
            reached: false,
        });
    }
    let mut search = Search::new();
    for _ in 0..tries {
        search = search.narrowed(score(search.cold())?, AIM);
    }
    Ok(Rate {
        cold: search.cold(),
        reached: true,
    })
}

/// The periods of all arms, with one delivery and one share of cold transactions.
struct Runs {
    delivery: &'static str,
    /// Of each arm, period by period.
    periods: Vec<Vec<Period>>,
}

impl Runs {
    fn rates(&self, arm: usize, exit_ns: f64) -> Vec<f64> {
        let worth = |period| worth(exit_ns, period, ARMS[arm].1);
        self.periods[arm].iter().map(worth).collect()
    }

    fn wall(&self, arm: usize) -> Vec<f64> {
        self.periods[arm].iter().map(Period::wall_rate).collect()
    }

    fn sum(&self, arm: usize) -> Period {
        let all = self.periods[arm].iter();
        all.fold(Period::default(), |sum, one| sum.and(one))
    }
}

/// `pml.score_percent.*` and `pml.always_on_loss_percent`.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    let pace = Pace::of(options);
    report.say(format!(
        "pml: a score is the guest's transactions a second with dirty logging, in percent of those \
         without. The bar of {BAR} % is for `pml.score_percent.pml.exitcost`. That figure is \
         simulated in one respect: an exit to this hypervisor is the return of a function, so \
         each exit is charged {EXIT_NS:.0} ns, its cost on hardware ({EXIT_SOURCE}). The `.raw` \
         figures are as measured. The dirty rate is not measured but searched for: it is the rate \
         at which write protection keeps {WANTED} %, as in the published run.",
    ));
    let here = exit_here::measure(options, report)?;
    for (delivery, to) in [("", Delivery::Bitmap), ("_ring", rings())] {
        let setup = setup(pace, to);
        with_churns(&setup, ARMS.len(), |churns| {
            for set in Set::ALL {
                progress.step(format!("scores{delivery}, {}", set.name()))?;
                let rate = calibrate(churns, &setup, pace.tries, set)?;
                let arms = ARMS.map(|arm| arm.1);
                let periods = play(churns, &setup, &arms, rate.cold, pace.rounds)?;
                let runs = Runs { delivery, periods };
                record(report, pace, set, rate, &runs);
                if let (Set::ExitCost, Some(exit_ns)) = (set, here) {
                    tell_here(report, pace, exit_ns, &runs);
                }
            }
            if to == Delivery::Bitmap {
                progress.step("PML on while no slot logs")?;
                score_always::measure(report, churns, &setup, pace.rounds)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn record(report: &mut Report, pace: Pace, set: Set, rate: Rate, runs: &Runs) {
    let rates = |arm| runs.rates(arm, set.exit_ns());
    let percent = |arm| percent_across(&rates(NONE), &rates(arm), pace.rounds);
    // The calibration has held if the interval reaches the wanted score.
    let reached = rate.reached && percent(WP).low <= WANTED;
    for (arm, (name, _)) in ARMS.iter().enumerate().skip(WP) {
        let id = format!("pml.score_percent.{name}{}.{}", runs.delivery, set.name());
        let sum = runs.sum(arm);
        let result = Measurement::new(id, "%", Better::Higher, percent(arm))
            .param("memory_mib", pace.mib)
            .param("vcpus", vcpus())
            .param("harvest_ms", pace.period.as_millis() as u64)
            .param("turn_ms", TURN.as_millis() as u64)
            .param("cold_of_65536", rate.cold)
            .param(
                "pages_dirtied_per_s",
                sum.counted.dirtied as f64 / sum.done.wall,
            )
            .arm("none_per_s", Summary::of(&rates(NONE)))
            .arm("watched_per_s", Summary::of(&rates(arm)))
            .param(
                "rings_full_per_s",
                sum.counted.rings_full as f64 / sum.done.wall,
            )
            .arm("null_percent", percent(NULL));
        let result = match set {
            // Exits are not charged to the figure by the wall clock.
            Set::ExitCost => result,
            Set::Raw => {
                let wall = percent_across(&runs.wall(NONE), &runs.wall(arm), pace.rounds);
                result.arm("wall_percent", wall)
            }
        };
        let result = match (arm, reached) {
            (WP, _) => result.reference(COVER_LETTER_WP, COVER_LETTER),
            (_, true) => result.bar(BAR).reference(COVER_LETTER_PML, COVER_LETTER),
            (_, false) => result.reference(COVER_LETTER_PML, COVER_LETTER),
        };
        report.push(set.marked(result));
    }
    let set_name = format!("{}{}", set.name(), runs.delivery);
    report.say(said(&set_name, rate.cold, reached, percent, &runs.sum(WP)));
    report.detail(table(set, runs));
}

/// The scores of the same runs, if an exit took as long as one to the VMM on this host's KVM.
fn tell_here(report: &mut Report, pace: Pace, exit_ns: f64, runs: &Runs) {
    let rates = |arm| runs.rates(arm, exit_ns);
    for (arm, (name, _)) in ARMS.iter().enumerate().skip(WP) {
        let id = format!("pml.score_percent.{name}{}.exitcost_here", runs.delivery);
        let percent = percent_across(&rates(NONE), &rates(arm), pace.rounds);
        let result = Measurement::new(id, "%", Better::Higher, percent)
            .simulated()
            .param("exit_ns", exit_ns)
            .param(
                "exit_source",
                "an exit to the VMM on this host's KVM: pml.kvm.exit_ns",
            )
            .arm("watched_per_s", Summary::of(&rates(arm)));
        report.push(result);
    }
}

/// The result of the calibration, in words.
fn said(
    set: &str,
    cold: u32,
    reached: bool,
    percent: impl Fn(usize) -> Summary,
    sum: &Period,
) -> String {
    let (wp, null) = (percent(WP), percent(NULL));
    let dirtied = short(sum.counted.dirtied as f64 / sum.done.wall);
    let at = format!(
        "{set}: with {cold} of 65536 transactions on cold pages, the guest dirties {dirtied} pages \
         a second under write protection, and its score is {:.1} %. The null is {:.1} % ({:.1} .. \
         {:.1})",
        wp.median, null.median, null.low, null.high
    );
    match reached {
        true => format!("{at}."),
        false => format!(
            "{at}. Write protection does not go down to the {WANTED} % of the published figure, so \
             the scores of this set have no bar."
        ),
    }
}

/// The counts of each arm, for each second.
fn table(set: Set, runs: &Runs) -> String {
    let head = format!("{}, per second", set.name());
    let header = [
        &head,
        "pages dirtied",
        "faults",
        "fast_page_faults",
        "logged",
        "logs full",
        "flushes",
        "rings full",
        "harvest ms",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    for (arm, (name, _)) in ARMS.iter().enumerate() {
        let Period {
            done,
            counted,
            harvesting,
        } = runs.sum(arm);
        let each = |count: u64| short(count as f64 / done.wall);
        let stats = &counted.stats;
        rows.push([
            format!("  {name}{}", runs.delivery),
            each(counted.dirtied),
            each(stats.faults),
            each(stats.fast_page_faults),
            each(stats.logged),
            each(stats.log_full),
            each(stats.flushes),
            each(counted.rings_full),
            format!("{:.1}", harvesting.as_secs_f64() * 1e3 / done.wall),
        ]);
    }
    align(&rows)
}
