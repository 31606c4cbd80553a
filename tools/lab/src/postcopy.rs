//! `lacuna lab postcopy`: a guest whose memory is still with a peer, with exits, asynchronous page
//! faults, or both.
//!
//! A process that computes (a worker) shares the vCPU with one that touches random pages of the
//! peer (a faulter). Four arms differ in the effect of a missing page on the vCPU:
//!
//! ```text
//! neither  vCPU sleeps until the page has arrived; the engine asks the peer
//! exits    vCPU exits; the VMM asks the peer, and the vCPU sleeps until the page has arrived
//! async    vCPU notifies the guest, which runs the other process; the engine asks the peer
//! both     vCPU exits; the VMM accepts, so the guest is notified; the VMM asks, and says ready
//! ```
//! | id | what is compared |
//! |---|---|
//! | `postcopy.worker_ratio.LATENCY` | speed of the worker, both / exits |
//! | `postcopy.memory_ratio.LATENCY` | accesses of the faulter, both / exits |
//! | `postcopy.pages_kept_percent.LATENCY` | pages a second on demand, both / exits |
//! | `postcopy.worker_kept_percent.LATENCY` | speed of the worker, both / async |
//! | `postcopy.crowd_ratio.1ms` | accesses of four faulters, both / exits |
//! | `postcopy.demand_p99_ratio.1ms` | p99 of a demand, beside a fill / without |
//! | `postcopy.fill_kept_percent.1ms` | pages a second of the fill, beside demands / alone |
//! | `postcopy.*.1ms_window256` | the last two, with 256 pushed pages in flight instead of 64 |
//!
//! The arms are switched while one guest runs (`session`). A run of
//! [`crate::demand_paging`] is for one way to provide pages, and ends with its guest.
//!
//! Each is measured for Linux memory, which a userfaultfd fills, and for the soft backend's own
//! pool of frames, with ids that begin with `postcopy.pool`. The guest has one vCPU, so a core is
//! left for the peer. In practice the peer is another machine.

mod arms;
mod experiments;
mod peer;
mod push;

use crate::apf::{SLICE_US, TICK_US};
use crate::demand_paging::{self, DemandPaging};
use crate::experiment::{LabError, LabResult, Options};
use crate::result::{Measurement, Report};
use arms::Scene;
use lacuna::memory::MemoryKind;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment. Results that this machine cannot measure are skipped.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    options.begin(2 * experiments::ALL.len() as u64);
    report.say(
        "postcopy: memory that is still with a peer. The guest has one vCPU. A process that \
         computes (a worker) shares it with processes that touch random pages (faulters). A vCPU \
         that needs a page waits for it or exits, and the guest gets an event or not. All arms \
         ask the same peer, and pages are pushed at the same rate.",
    );
    for kind in [MemoryKind::Linux, MemoryKind::Budget] {
        if let Some(why) = unavailable(kind) {
            report.skip(format!("{}.*", prefix(kind)), why);
            continue;
        }
        for experiment in &experiments::ALL {
            experiment.measure(kind, options, report)?;
        }
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["worker", "push"];

/// The beginning of the result ids for this kind of memory.
const fn prefix(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Budget => "postcopy.pool",
        _ => "postcopy",
    }
}

/// A kind of memory, for people.
const fn about(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Budget => "the pool",
        _ => "Linux memory",
    }
}

/// Why pages of this kind of memory cannot be missing on this host.
fn unavailable(memory_kind: MemoryKind) -> Option<LabError> {
    let mut guest = DemandPaging::default();
    guest.guest.memory_kind = memory_kind;
    demand_paging::unavailable(&guest)
}

/// `result` with the parameters of `scene`.
fn with_params(result: Measurement, scene: &Scene) -> Measurement {
    let [workers, faulters] = scene.processes;
    let push = match scene.push {
        push::Speed::Rate(rate) => format!("{rate} pages a second"),
        push::Speed::Full => "as fast as pages come".into(),
    };
    scene
        .pace
        .with_params(result)
        .param("memory_mib", scene.memory_mib)
        .param("vcpus", 1)
        .param("workers", workers)
        .param("faulters", faulters)
        .param("write_percent", 50)
        .param("latency_us", scene.latency.as_micros() as u64)
        .param("push", push)
        .param("pushed_in_flight", scene.window)
        .param("demanded_in_flight", lacuna::source::Peer::IN_FLIGHT)
        .param("guest_slice_us", SLICE_US)
        .param("guest_tick_us", TICK_US)
}
