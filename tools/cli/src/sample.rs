//! The counters of a run at one moment, and how it ended: the data behind the summary and
//! `--json`.

use std::collections::BTreeMap;
use std::time::Duration;

use lacuna::migrate::session::{Migrated, MissingRange};
use lacuna::migrate::stream::Mode;
use lacuna_control::Pages;
use lacuna_lab::host_info::HostInfo;
use lacuna_lab::stalls::VcpuStalls;
use serde::Serialize;

/// The counters of a run at one moment. All counts are since its start.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct RunSample {
    /// Time since the guest started: the virtual clock's in a seeded run.
    #[serde(rename = "elapsed_seconds", serialize_with = "seconds")]
    pub elapsed: Duration,
    /// The guest's threads, in the order it made them.
    pub threads: Vec<Thread>,
    /// Memory that the guest sees, in bytes.
    pub memory_bytes: u64,
    /// Host memory that the guest may have, in bytes.
    pub budget_bytes: u64,
    /// Host memory that the guest has, in bytes.
    pub resident_bytes: u64,
    /// The highest resident memory of this process, with the swap page cache, in bytes.
    pub peak_bytes: u64,
    /// Evicted pages that were read back.
    pub swap_in: u64,
    /// Pages that were written to swap, or that Linux has paged out.
    pub swap_out: u64,
    /// Pages that Linux has read inside of guest code; `None` where it does not have the guest's
    /// memory, or this is not counted.
    pub major_faults: Option<u64>,
    /// Faults by kind, in the order to show them.
    pub faults: Vec<Faults>,
    /// The exits of each vCPU to the VMM, by the names of [`lacuna::ExitKind`].
    pub exits: Vec<BTreeMap<&'static str, u64>>,
    /// How long each vCPU was stopped by missing pages.
    pub stalls: Vec<VcpuStalls>,
    /// Pages of 2 MiB; `None` where the host makes none (`--thp never`).
    pub huge: Option<Huge>,
    /// Asynchronous page faults; `None` where the guest is not offered them.
    pub apf: Option<Apf>,
    /// The tracking of the guest's writes.
    pub dirty: Dirty,
    /// Pages of the page source; `None` without `--pages-from`.
    pub pages: Option<Pages>,
}

/// Host memory in pages of 2 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Huge {
    /// How many there are.
    pub pages: u64,
    /// Faults that made one.
    pub faults: u64,
    /// Faults that got a 4 KiB page, because no 2 MiB were free in one piece.
    pub fallbacks: u64,
    /// Pages that reclaim has split.
    pub splits: u64,
    /// Pages collapsed from 4 KiB pages.
    pub collapses: u64,
}

/// The tracking of the guest's writes while it is saved or moved.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Dirty {
    /// What detects a write: `page-modification logging`, `write protection` or `the page map`.
    pub detected_by: String,
    /// Where a write is recorded: `bitmap` or `ring`.
    pub delivery: String,
    /// What soft's vCPUs have counted; `None` on kvm.
    pub vcpus: Option<DirtyCounts>,
}

/// Counts of all vCPUs together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct DirtyCounts {
    /// Pages in the vCPUs' logs.
    pub logged: u64,
    /// Exits because a log was full.
    pub log_full: u64,
    /// Write faults of protected pages, with and without a lock.
    pub faults: u64,
}

/// Asynchronous page faults of all vCPUs, as the host and as the guest counted them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Apf {
    /// Faults with a delivered page-not-present.
    pub taken: u64,
    /// Faults without an event: the vCPU halted until the page had arrived.
    pub halted: u64,
    /// Faults on a page already in flight: the vCPU halted for it.
    pub repeated: u64,
    /// The shortest time from a fault to its page, in nanoseconds.
    pub swap_in_min_ns: u64,
    /// The mean of these times.
    pub swap_in_mean_ns: u64,
    /// The longest of them.
    pub swap_in_max_ns: u64,
    /// The guest's own counts.
    pub guest: GuestApf,
}

/// Asynchronous page faults as the guest counted them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct GuestApf {
    /// Page-not-present events.
    pub not_present: u32,
    /// Page-ready events, each for one page.
    pub ready: u32,
    /// Events among them that arrived before a thread waited.
    pub ready_before_wait: u32,
    /// Page-ready events for all waiting threads.
    pub wake_all: u32,
    /// Events that no thread of the guest was waiting for.
    pub lost: u32,
}

/// A thread of the guest.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Thread {
    /// The name the guest gave it.
    pub name: String,
    /// What it does: `fault`, `work` or `other`.
    pub kind: String,
    /// Steps it has done.
    pub counter: u64,
    /// Steps that it will do; 0 if it runs until it is stopped.
    pub goal: u64,
    /// Steps that it had done when this process took the guest over.
    #[serde(skip)]
    pub before: u64,
    /// Steps a second since the sample before.
    pub rate: f64,
}

/// Faults of one kind.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Faults {
    /// What answered them: `zero-fill`, `resident`, `swap-in`, `shared` or `rescued`.
    pub kind: String,
    /// How many.
    pub count: u64,
}

/// How a run ended, as `lacuna run --json` writes it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RunReport {
    /// Version of the form ([`SCHEMA`](lacuna_lab::result::SCHEMA)).
    pub schema: u32,
    /// Where it ran.
    pub host: HostInfo,
    /// The command line that reproduces it.
    pub command: String,
    /// All options, defaults included.
    pub options: RunOptions,
    /// `done`, or the reason why the guest did not succeed, in words.
    pub outcome: String,
    /// The exit code of the command.
    pub exit_code: u8,
    /// Digest of the whole run, if it was seeded.
    pub trace_hash: Option<String>,
    /// The snapshot from which it was restored; `None` for a guest that began with its image.
    pub restored: Option<Restored>,
    /// The guest that arrived from another process; `None` without `--incoming`.
    pub received: Option<Received>,
    /// How the guest moved to another process; `None` if it stayed.
    pub migrated: Option<Migrated>,
    /// The functions in which the vCPUs were, the most frequent first; `None` without `--profile`.
    pub profile: Option<Vec<ProfileRow>>,
    /// The run at its end.
    pub last: RunSample,
}

/// A row of a profile.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProfileRow {
    /// The share of all samples, in percent.
    pub percent: f64,
    /// Samples.
    pub samples: u64,
    /// `kernel` or `user`; `None`: the vCPU had no program counter to sample, as `symbol` says.
    pub privilege: Option<&'static str>,
    /// The function of the image, or the address of the 4 KiB of code without a symbol.
    pub symbol: String,
}

/// The snapshot read before a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Restored {
    /// The snapshot.
    pub from: String,
    /// Read pages with content; 0 for a lazy restore.
    pub pages: u64,
    /// The time until the guest could run.
    pub seconds: f64,
    /// Whether the pages that the guest has not written are in the snapshot's memory file.
    pub in_place: bool,
    /// Pages that arrived while the guest ran; `None` for an eager restore.
    pub lazy: Option<LazyPages>,
}

impl Restored {
    /// Why the record of first touches is not written.
    pub fn record_error(&self) -> Option<&str> {
        self.lazy.as_ref()?.record_error.as_deref()
    }
}

/// The pages of a lazy restore, by the reason for their arrival.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct LazyPages {
    /// Pages that the guest needed before they had arrived.
    pub demand_faults: u64,
    /// Pages with content of a record of first touches that arrived before the guest needed them;
    /// `None` without `--replay`.
    pub replayed: Option<u64>,
    /// Other pages read in the background.
    pub prefetched: u64,
    /// First touches written to the record; `None` without `--record`.
    pub recorded: Option<u64>,
    /// Why the record is not written.
    pub record_error: Option<String>,
}

impl LazyPages {
    /// A line of the summary.
    pub fn text(&self) -> String {
        let mut text = format!("pages     {} on demand, ", self.demand_faults);
        if let Some(replayed) = self.replayed {
            text.push_str(&format!("{replayed} replayed, "));
        }
        text.push_str(&format!("{} in the background", self.prefetched));
        if let Some(recorded) = self.recorded {
            text.push_str(&format!("; {recorded} first touches recorded"));
        }
        text + "\n"
    }
}

/// A guest that arrived from another process before its run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Received {
    /// The address at which it arrived.
    pub at: String,
    /// The order in which the guest and its memory were sent.
    pub mode: Mode,
    /// Pages with content that arrived before it, some of them several times.
    pub pages: u64,
    /// Missing pages at its arrival.
    pub late: u64,
    /// Missing pages that never arrived.
    pub missing: u64,
    /// The first thousand ranges of pages that never arrived.
    pub ranges: Vec<MissingRange>,
    /// How often the connection was cut after the guest had been prepared.
    pub cuts: u32,
    /// Bytes over the connections.
    pub bytes: u64,
    /// Pages that arrived again: in all rounds and late, less the guest's pages; 0 without a round.
    pub again: u64,
    /// Its downtime in microseconds, without the time that its state took on the way.
    pub downtime_us: u64,
    /// The time from its announcement until it could run.
    pub seconds: f64,
}

/// The preparation of a run that does not begin with an image.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Before {
    /// A snapshot was read.
    pub restored: Option<Restored>,
    /// A guest has arrived.
    pub received: Option<Received>,
}

/// What a run was started with.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RunOptions {
    /// The image.
    pub image: String,
    /// The hypervisor: soft or kvm.
    pub backend: String,
    /// Guest memory, in bytes.
    pub memory_bytes: u64,
    /// Where the guest's memory is, as `--memory-kind` takes it.
    pub memory_kind: String,
    /// How much of it may be resident, in bytes.
    pub resident_bytes: u64,
    /// Virtual processors.
    pub vcpus: u32,
    /// The swap device, as `--swap` takes it.
    pub swap: String,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: bool,
    /// Where host memory is allocated in 2 MiB pages, as `--thp` takes it.
    pub thp: String,
    /// Where the guest's memory comes from, as `--pages-from` takes it.
    pub pages_from: Option<String>,
    /// Whether vCPUs exit for missing pages.
    pub exit_on_missing: bool,
    /// The seed of a deterministic run.
    pub seed: Option<u64>,
    /// The guest's command line.
    pub append: String,
}

fn seconds<S: serde::Serializer>(elapsed: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(elapsed.as_secs_f64())
}
