//! The reports about a migration: by its source, and by its destination. They have a JSON form.

use crate::stream::Mode;
use crate::{MemoryLayout, PageSet};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::SourcePage;
use lacuna_metrics::{Kind, Metrics, Value};
use serde::{Deserialize, Serialize};
use std::fmt;

const PAGE: u64 = PAGE_SIZE as u64;

/// The progress of a migration.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct OutgoingProgress {
    /// Where to.
    pub to: String,
    /// The order in which the guest and its memory are sent.
    pub mode: Mode,
    /// Where the guest is.
    pub stage: OutgoingStage,
    /// Which round, from 1; 0 before the first, and after the hand-over.
    pub round: u32,
    /// Sent pages of this round.
    pub done: u64,
    /// Pages of this round.
    pub pages: u64,
    /// Remaining pages of this round.
    pub remaining: u64,
    /// Seconds until these are sent, at the rate of this round so far; null before its first page.
    /// Another round may follow.
    #[serde(default)]
    pub seconds_left: Option<f64>,
    /// Pages a second that the guest has written during the last round here. A page counts once for
    /// a round, however often it was written.
    #[serde(default)]
    pub dirty_rate: u64,
    /// For how many percent of the time the guest is held here, so that it writes fewer pages.
    #[serde(default)]
    pub throttle: u32,
    /// Bytes over the connections so far.
    pub bytes: u64,
    /// Bytes a second, lately.
    pub rate: f64,
    /// How often the connection was cut after the hand-over, attempts to connect again
    /// included.
    pub cuts: u32,
    /// How the last one was cut; null before.
    pub cut: Option<String>,
}

impl OutgoingProgress {
    /// Puts the progress into `to`.
    pub fn fill(&self, to: &mut Metrics) {
        use Kind::{Counter, Gauge};
        for (name, help, kind, value) in [
            (
                "lacuna_migration_sent_bytes_total",
                "Bytes sent and received over the connections of this migration.",
                Counter,
                self.bytes,
            ),
            (
                "lacuna_migration_cuts_total",
                "Cuts of the connection after the hand-over.",
                Counter,
                self.cuts.into(),
            ),
            (
                "lacuna_migration_round",
                "Round in progress; 0 before the first and after the hand-over.",
                Gauge,
                self.round.into(),
            ),
            (
                "lacuna_migration_remaining_pages",
                "Pages of this round that are not sent yet.",
                Gauge,
                self.remaining,
            ),
            (
                "lacuna_migration_dirty_pages_per_second",
                "Pages a second that the guest has written during the last round.",
                Gauge,
                self.dirty_rate,
            ),
            (
                "lacuna_migration_throttle_percent",
                "Percent of the time for which the vCPUs are held.",
                Gauge,
                self.throttle.into(),
            ),
        ] {
            to.add((name, help, kind), &[], Value::Whole(value));
        }
    }
}

/// Where a moving guest is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutgoingStage {
    /// It runs here, until it is paused for the last pages.
    #[default]
    Here,
    /// It runs there, and the rest of its memory is sent.
    There,
    /// It runs there, and the connection was cut while the rest of its memory was sent.
    Cut,
    /// The connection was cut while it was handed over.
    Unknown,
}

/// A guest that another process sends, or has sent.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct IncomingProgress {
    /// The address at which it arrives.
    pub at: String,
    /// The order in which the guest and its memory are sent.
    pub mode: Mode,
    /// Its stage.
    pub stage: IncomingStage,
    /// Pages with content that arrived before the guest, some of them several times.
    pub came: u64,
    /// Missing pages at the guest's arrival; 0 before.
    pub late: u64,
    /// Pages that arrived again: in all rounds and late, less the guest's pages; 0 without a round,
    /// and before the guest arrived.
    pub again: u64,
    /// The guest's downtime in microseconds; 0 before it arrived.
    pub downtime_us: u64,
    /// Seconds from its announcement until it ran here, or until now.
    pub seconds: f64,
    /// Pages that only the source has; null before this is known.
    pub missing: Option<u64>,
    /// Where they are in the guest's memory, while the connection is cut or they are lost: as many
    /// ranges as the caller asked for.
    pub ranges: Vec<MissingRange>,
    /// Bytes over the connections so far.
    pub bytes: u64,
    /// Bytes a second, lately.
    pub rate: f64,
    /// How often the connection was cut after the guest had been prepared.
    pub cuts: u32,
    /// How the last one was cut; null before.
    pub cut: Option<String>,
}

/// Pages sent again, in these rounds and of `late` pages after the guest, which has `pages`.
pub(super) fn again(rounds: &[u64], late: u64, pages: u64) -> u64 {
    // The numbers of a destination come from its peer.
    let sum = |sum: u64, pages: &u64| sum.saturating_add(*pages);
    match rounds {
        [] => 0,
        rounds => rounds.iter().fold(late, sum).saturating_sub(pages),
    }
}

/// Consecutive pages of a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MissingRange {
    /// Guest-physical address of the first one.
    pub address: u64,
    /// How many.
    pub pages: u64,
}

/// The stage of an incoming guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IncomingStage {
    /// Its memory arrives, and it runs at its source.
    #[default]
    Memory,
    /// It is prepared, and the connection was cut before the source could hand it over.
    Unknown,
    /// It runs here, and the rest of its memory arrives.
    Rest,
    /// It runs here, and the connection was cut before all of its memory had arrived.
    Cut,
    /// It runs here, and the missing pages are lost: a client has ended the wait for the source.
    Lost,
    /// It has all of its memory.
    Whole,
}

/// A moved guest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Migrated {
    /// Where to.
    pub to: String,
    /// The order in which the guest and its memory were sent.
    pub mode: Mode,
    /// Pages that each round has sent. Pages of zeros count, though they take no bytes.
    pub rounds: Vec<u64>,
    /// Pages sent after the guest.
    pub late: u64,
    /// Sent pages with content, some of them several times.
    pub pages: u64,
    /// What has detected the guest's writes between the rounds, in the words of
    /// [`DetectedBy`](lacuna_machine::DetectedBy); null without a round.
    #[serde(default)]
    pub detected_by: Option<String>,
    /// Pages sent again: in all rounds but the first, and the late ones if there was a round.
    pub again: u64,
    /// How often the connection was cut after the hand-over, attempts to connect again
    /// included.
    pub cuts: u32,
    /// Bytes over the connections.
    pub bytes: u64,
    /// The guest's downtime in microseconds.
    pub downtime_us: u64,
    /// How long it took in all.
    pub seconds: f64,
    /// How the guest has ended there, if that was before all of its memory had arrived; null
    /// otherwise.
    #[serde(default)]
    pub ended: Option<String>,
}

impl Migrated {
    /// The outcome for the guest, in words.
    pub fn outcome(&self) -> String {
        match &self.ended {
            None => format!("moved to {}", self.to),
            Some(why) => format!("moved to {}, where it has ended: {why}", self.to),
        }
    }
}

impl MissingRange {
    /// The first `most` ranges of `pages`.
    pub fn of(layout: &MemoryLayout, pages: &PageSet, most: usize) -> Vec<Self> {
        let mut ranges = Vec::new();
        for run in pages.runs() {
            let mut at = run.start;
            while at < run.end {
                let Some((gpa, now)) = layout.place(SourcePage(at), run.end - at) else {
                    return ranges;
                };
                if ranges.len() == most {
                    return ranges;
                }
                ranges.push(Self {
                    address: gpa.get(),
                    pages: now,
                });
                at += now;
            }
        }
        ranges
    }
}

/// The addresses of its first and its last byte.
impl fmt::Display for MissingRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, pages } = self;
        write!(f, "{address:#x}-{:#x}", address + pages * PAGE - 1)
    }
}
