//! What the view shows: the samples of the last second, and curves of the last minute.

use super::feed::{News, Sample};
use crate::output::visible;
use lacuna::memory::PageMap;
use lacuna_control::{Settings, State, Status};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time over which rates are taken.
const WINDOW: Duration = Duration::from_secs(1);
/// The time that the curves show.
pub(super) const SHOWN: Duration = Duration::from_secs(60);

/// Kinds of faults in the order to show them, each with its counter.
pub(super) const FAULTS: [(&str, &str); 10] = [
    ("zero-fill", "lacuna_host_faults_zero_fill_total"),
    ("resident", "lacuna_host_faults_resident_total"),
    ("swap-in", "lacuna_host_faults_swap_in_total"),
    ("missing", "lacuna_host_faults_missing_total"),
    ("shared", "lacuna_host_faults_shared_ticket_total"),
    ("rescued", "lacuna_host_faults_rescued_total"),
    ("write log", "lacuna_dirty_faults_total"),
    ("write fast", "lacuna_dirty_fast_page_faults_total"),
    // On kvm, Linux has the guest's memory.
    ("zero-fill", "lacuna_vm_first_touches"),
    ("swap-in", "lacuna_vm_pages_in_total"),
];

/// How many of [`FAULTS`] soft has.
const SOFT: usize = 8;
/// How many of them, the first ones, have times.
pub(super) const TIMED: usize = 4;
/// The quantiles of the times.
pub(super) const QUANTILES: [(&str, &str); 2] = [("p50", "0.5"), ("p99", "0.99")];

/// The curves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Curve {
    /// Faults a second of the kind with this index in [`FAULTS`].
    Faults(usize),
    /// The time of a fault of this kind in nanoseconds, at the quantile with the second index in
    /// [`QUANTILES`], of all faults so far.
    Time(usize, usize),
    /// Tokens in flight.
    Tokens,
    /// Steps a second of the guest's threads.
    Steps,
}

/// A value of each curve.
struct Point {
    at: Instant,
    faults: [f64; FAULTS.len()],
    times_ns: [[f64; QUANTILES.len()]; TIMED],
    tokens: f64,
    steps: f64,
}

impl Point {
    fn of(&self, curve: Curve) -> f64 {
        match curve {
            Curve::Faults(kind) => self.faults[kind],
            Curve::Time(kind, quantile) => self.times_ns[kind][quantile],
            Curve::Tokens => self.tokens,
            Curve::Steps => self.steps,
        }
    }
}

/// What the view shows.
#[derive(Default)]
pub(super) struct Model {
    samples: VecDeque<Sample>,
    points: VecDeque<Point>,
    marks: VecDeque<(Instant, char)>,
    pub settings: Option<Settings>,
    pub map: Option<PageMap>,
    /// The VM on the other side of a migration.
    pub other: Option<Status>,
    /// The last lines of the guest and of this process.
    pub lines: Vec<String>,
    /// What the last key did, or why it did nothing.
    pub note: String,
    /// Text above the curves that stays: a demo's.
    pub heading: Vec<String>,
    pub shows_help: bool,
    pub has_colours: bool,
}

impl Model {
    pub fn new(has_colours: bool) -> Self {
        Self {
            has_colours,
            ..Self::default()
        }
    }

    /// Takes news of the VM. Returns why the connection is lost, if it is.
    pub fn take(&mut self, news: News) -> Option<String> {
        match news {
            News::Sample(sample) => self.add(*sample),
            News::Settings(settings) => self.settings = Some(*settings),
            News::Map(map) => self.map = Some(self.arrived(map)),
            News::Done(mark, text) => {
                self.mark(mark);
                self.note = text;
            }
            News::Heading(lines) => self.heading = lines,
            News::Refused(why) => self.note = visible(&why).into_owned(),
            News::Gone(why) => return Some(why),
        }
        None
    }

    /// `map` without missing pages if all pages are here: the VM has no memory for those of zeros.
    fn arrived(&self, mut map: PageMap) -> PageMap {
        let status = self.status();
        let of_source = status.and_then(|now| now.pages.as_ref());
        let is_whole = of_source.is_some_and(|pages| pages.whole || pages.missing == 0)
            || status
                .and_then(|now| now.arriving.as_ref())
                .is_some_and(|now| now.missing == Some(0));
        if is_whole {
            for cell in &mut map.cells {
                cell.untouched += std::mem::take(&mut cell.missing);
            }
        }
        map
    }

    /// Takes news of the VM on the other side.
    pub fn take_other(&mut self, news: News) {
        match news {
            News::Sample(sample) => self.other = Some(sample.status),
            News::Gone(_) => self.other = None,
            _ => {}
        }
    }

    fn add(&mut self, sample: Sample) {
        let at = sample.at;
        self.samples.push_back(sample);
        while self.samples.len() > 2 && at - self.samples[1].at >= WINDOW {
            self.samples.pop_front();
        }
        let seconds = |kind: usize, quantile| {
            let labels = [("kind", FAULTS[kind].0), ("quantile", quantile)];
            let mut values = self.values("lacuna_fault_seconds", &labels);
            values.next().unwrap_or(0.0)
        };
        let steps = self.rate("lacuna_guest_thread_steps_total", &[]);
        let point = Point {
            at,
            faults: FAULTS.map(|(_, name)| self.rate(name, &[])),
            times_ns: std::array::from_fn(|kind| QUANTILES.map(|(_, at)| seconds(kind, at) * 1e9)),
            tokens: self.values("lacuna_apf_in_flight", &[]).sum(),
            steps,
        };
        self.points.push_back(point);
        let is_old = |then: Instant| at - then > SHOWN;
        while self.points.front().is_some_and(|point| is_old(point.at)) {
            self.points.pop_front();
        }
        while self.marks.front().is_some_and(|(then, _)| is_old(*then)) {
            self.marks.pop_front();
        }
    }

    /// Marks the time of a switch.
    fn mark(&mut self, letter: char) {
        self.marks.push_back((Instant::now(), letter));
    }

    pub fn status(&self) -> Option<&Status> {
        self.samples.back().map(|sample| &sample.status)
    }

    pub fn state(&self) -> Option<State> {
        self.status().map(|status| status.state)
    }

    pub fn memory_bytes(&self) -> u64 {
        self.status().map_or(0, |status| status.memory_bytes)
    }

    /// The last values of the metric `name` with these labels.
    pub fn values(&self, name: &str, labels: &[(&str, &str)]) -> impl Iterator<Item = f64> {
        let last = self.samples.back().map(|last| &last.counters);
        last.into_iter()
            .flat_map(move |last| last.values(name, labels))
    }

    /// The labels of the metric `name`, which have the label `label`.
    pub fn each(&self, name: &str, label: &str) -> Vec<crate::counters::Labels> {
        let last = self.samples.back();
        last.map_or_else(Vec::new, |last| {
            last.counters.each(name, label).cloned().collect()
        })
    }

    /// The growth a second of the counters `name` with these labels, over the last second.
    pub fn rate(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let (Some(first), Some(last)) = (self.samples.front(), self.samples.back()) else {
            return 0.0;
        };
        let seconds = (last.at - first.at).as_secs_f64();
        let sum = |sample: &Sample| sample.counters.values(name, labels).sum::<f64>();
        match seconds > 0.0 {
            true => ((sum(last) - sum(first)) / seconds).max(0.0),
            false => 0.0,
        }
    }

    /// The faults that this VM counts: their index in [`FAULTS`].
    pub fn faults(&self) -> impl Iterator<Item = usize> {
        let is_soft = self.values(FAULTS[0].1, &[]).next().is_some();
        let kinds = if is_soft { 0..SOFT } else { SOFT..FAULTS.len() };
        kinds.filter(|kind| self.values(FAULTS[*kind].1, &[]).any(|count| count > 0.0))
    }

    /// The last value of a curve.
    pub fn last(&self, curve: Curve) -> f64 {
        self.points.back().map_or(0.0, |point| point.of(curve))
    }

    /// A curve in `width` columns of equal time: the mean of each; `None` before the first sample.
    pub fn curve(&self, curve: Curve, width: usize) -> Vec<Option<f64>> {
        let mut sums = vec![(0.0, 0); width];
        let now = self.points.back().map(|point| point.at);
        for point in &self.points {
            if let Some(column) = now.and_then(|now| column(now - point.at, width)) {
                sums[column].0 += point.of(curve);
                sums[column].1 += 1;
            }
        }
        let mut before = None;
        let mean = |(sum, count): (f64, u32)| {
            if count > 0 {
                before = Some(sum / f64::from(count));
            }
            before
        };
        sums.into_iter().map(mean).collect()
    }

    /// The marks on a time axis of `width` columns.
    pub fn axis(&self, width: usize) -> String {
        let mut axis = vec!['─'; width];
        if let Some(now) = self.points.back().map(|point| point.at) {
            for (then, letter) in &self.marks {
                if let Some(column) = column(now.saturating_duration_since(*then), width) {
                    axis[column] = *letter;
                }
            }
        }
        axis.into_iter().collect()
    }
}

/// The column of a point of `age`, of `width`; `None` if it is too old.
fn column(age: Duration, width: usize) -> Option<usize> {
    let from_right = (age.as_secs_f64() / SHOWN.as_secs_f64() * width as f64) as usize;
    width.checked_sub(1 + from_right)
}
