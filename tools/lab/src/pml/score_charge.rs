//! The exits of dirty logging on hardware: they are counted here, and each is charged
//! ([`crate::exit_cost`]).
//!
//! | exit | how often |
//! |---|---|
//! | write fault | once for each page that write protection detects |
//! | full log | once for 512 logged pages (ours is flushed more often: at every exit) |
//! | shoot-down of a harvest, or of a vCPU that reaps full rings | once for each vCPU and harvest |
//! | kick for the same | the same, with PML |
//! | full ring | as counted |

use lacuna_soft::{Detection, DirtyStats};

/// Entries of a log.
const LOG: u64 = 512;

/// Counts of a measurement.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The counters of all vCPUs together.
    pub stats: DirtyStats,
    /// Exits because a ring was full.
    pub rings_full: u64,
    /// Harvests of the monitor.
    pub harvests: u64,
    /// Dirty pages that the harvests found.
    pub dirtied: u64,
}

impl Counted {
    /// The counts since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        self.combine(before, |now, then| now - then)
    }

    /// The sum of both.
    #[must_use]
    pub fn and(&self, more: &Self) -> Self {
        self.combine(more, |a, b| a + b)
    }

    fn combine(&self, other: &Self, each: impl Fn(u64, u64) -> u64) -> Self {
        let (a, b) = (&self.stats, &other.stats);
        Self {
            stats: DirtyStats {
                faults: each(a.faults, b.faults),
                fast_page_faults: each(a.fast_page_faults, b.fast_page_faults),
                log_full: each(a.log_full, b.log_full),
                flushes: each(a.flushes, b.flushes),
                logged: each(a.logged, b.logged),
            },
            rings_full: each(self.rings_full, other.rings_full),
            harvests: each(self.harvests, other.harvests),
            dirtied: each(self.dirtied, other.dirtied),
        }
    }

    /// The exits that `vcpus` vCPUs would have had on hardware.
    pub fn exits(&self, detection: Detection, vcpus: u64) -> u64 {
        let kicks = match detection {
            Detection::WriteProtect => 1,
            Detection::Pml => 2,
        };
        let DirtyStats {
            faults,
            fast_page_faults,
            log_full,
            logged,
            ..
        } = self.stats;
        let full = log_full.max(logged / LOG);
        let harvests = self.harvests + self.rings_full;
        faults + fast_page_faults + full + self.rings_full + kicks * harvests * vcpus
    }
}

/// The rate that `vcpus` vCPUs together would have reached in `seconds`, if each of `exits` had
/// taken `exit_ns` of one of them.
pub fn charged(rate: f64, seconds: f64, vcpus: u64, exits: u64, exit_ns: f64) -> f64 {
    let lost = exits as f64 * exit_ns / 1e9 / vcpus as f64;
    rate * seconds / (seconds + lost)
}

/// The most cold transactions, of 65536. The search begins with 1 as the fewest.
pub const COLD_MAX: u32 = 1 << 16;

/// A search for the number of cold transactions, of 65536, at which a score has a certain value.
/// The score falls as the number rises. The search is a bisection of the number's logarithm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    low: f64,
    high: f64,
}

impl Search {
    /// A new search.
    pub fn new() -> Self {
        Self {
            low: 0.0,
            high: f64::from(COLD_MAX).ln(),
        }
    }

    /// The number to try next.
    pub fn cold(&self) -> u32 {
        let cold = f64::midpoint(self.low, self.high).exp().round();
        (cold as u32).clamp(1, COLD_MAX)
    }

    /// The search after the score at [`Search::cold`] is known.
    #[must_use]
    pub fn narrowed(self, score: f64, wanted: f64) -> Self {
        let middle = f64::midpoint(self.low, self.high);
        match score > wanted {
            true => Self {
                low: middle,
                ..self
            },
            false => Self {
                high: middle,
                ..self
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_those_of_hardware() {
        let mut counted = Counted {
            harvests: 3,
            ..Counted::default()
        };
        assert_eq!(counted.exits(Detection::WriteProtect, 2), 6);
        assert_eq!(counted.exits(Detection::Pml, 2), 12);
        counted.stats.fast_page_faults = 1000;
        counted.stats.faults = 10;
        counted.rings_full = 1;
        assert_eq!(counted.exits(Detection::WriteProtect, 2), 1019);
        // 2048 pages would have filled four logs on hardware.
        counted.stats.logged = 2048;
        counted.stats.flushes = 300;
        counted.stats.log_full = 2;
        assert_eq!(counted.exits(Detection::Pml, 2), 1011 + 4 + 16);
    }

    #[test]
    fn differences_and_sums_go_field_by_field() {
        let some = |n| Counted {
            stats: DirtyStats {
                faults: n,
                fast_page_faults: 2 * n,
                log_full: 3 * n,
                flushes: 4 * n,
                logged: 5 * n,
            },
            rings_full: 6 * n,
            harvests: 7 * n,
            dirtied: 8 * n,
        };
        assert_eq!(some(5).since(&some(2)), some(3));
        assert_eq!(some(5).and(&some(2)), some(7));
    }

    #[test]
    fn a_charge_is_time_of_all_vcpus() {
        assert_eq!(charged(100.0, 2.0, 2, 0, 500.0), 100.0);
        // Two vCPUs have four seconds, and so many exits take two of them.
        let rate = charged(100.0, 2.0, 2, 4_000_000, 500.0);
        assert!((rate - 100.0 * 2.0 / 3.0).abs() < 0.01);
    }

    #[test]
    fn a_search_ends_where_the_score_is() {
        let score = |cold: u32| 100.0 - f64::from(cold) / 1000.0;
        let mut search = Search::new();
        for _ in 0..20 {
            search = search.narrowed(score(search.cold()), 92.0);
        }
        assert!(search.cold().abs_diff(8000) < 50, "{}", search.cold());
        let most = (0..20).fold(Search::new(), |search, _| search.narrowed(99.0, 92.0));
        assert!(most.cold() >= COLD_MAX - 1);
    }
}
