//! `lacuna lab migrate`: a running guest moves to another VM over a TCP connection of this host.
//!
//! ```text
//! source                 its last instruction            all pages sent
//! ──────── rounds ───────┤                               │
//! destination            │ state ─► a process on each    │
//!                        │          vCPU has gone on     │
//!                        ├─ blackout ─┤                  │
//! ├────────────────────── total ─────────────────────────┤
//! ```
//! | id | what is measured |
//! |---|---|
//! | `migrate.blackout.precopy`, `.postcopy`, `.hybrid` | the blackout above |
//! | `migrate.total.precopy`, `.postcopy`, `.hybrid` | the total above |
//! | `migrate.blackout.postcopy_2g` | blackout of a guest of 2 GiB, and p99 of its vCPUs |
//! | `migrate.rate` | bytes a second, of the rate of plain copies |
//! | `migrate.pml.*_share_percent` | speed of a guest, during a pre-copy / without one (`pml`) |
//! | `migrate.worker_kept_percent.1ms` | speed of a process, pages missing / present |
//! | `migrate.vs_qemu.*` | the same moves by QEMU (`against`) |
//!
//! A blackout ends when the counter of a user process has moved on every vCPU of the destination.
//! The guest of `migrate.rate` is full of incompressible pages. A plain copy goes into untouched
//! memory over such a connection.
//!
//! The ids of the same results on `/dev/kvm` begin with `migrate.kvm`. Guests have two vCPUs,
//! except one vCPU for `migrate.worker_kept_percent` (`worker`). Blackout and total are measured
//! with the guest `churn`, which continues its transactions. Both ends are in this process, on
//! threads of their own.

mod against;
mod beats;
mod ends;
mod modes;
mod plain;
mod pml;
mod qemu;
mod route;
mod worker;

use crate::experiment::{LabResult, Options};
use crate::guests::{self, GuestBuilder, beside};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, measures, paired};
use ends::move_guest;
use lacuna::migrate::stream::Mode;
use route::Route;

/// The separately measurable parts.
pub const PARTS: &[&str] = &["modes", "large", "rate", "pml", "worker", "qemu"];

/// Memory of the guests in MiB.
const MEMORY: u64 = 512;
/// The size for a quick run.
const QUICK: u64 = 64;
const VCPUS: usize = 2;
/// The least share of the plain rate for the move of a guest.
const RATE: f64 = 0.8;
/// Rounds of `migrate.rate`: on kvm, two runs of one arm differ by a third.
const RATE_ROUNDS: usize = 15;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    options.begin(2 * PARTS.len() as u64 - 2);
    report.say(
        "migrate: a running guest moves to another VM over a TCP connection of this host. \
         Pre-copy: its memory goes first; post-copy: the guest goes first; hybrid: the guest goes \
         before what it has written again.",
    );
    let soft = guests::soft(options);
    measure("migrate", &soft, options, report)?;
    if options.wants("pml") {
        options.step("guests during a pre-copy, by both detections of writes")?;
        pml::measure(&soft, options, report)?;
    }
    if options.wants("worker") {
        options.step("a process that computes, beside pages 1 ms away")?;
        worker::measure(&soft, options, report)?;
    }
    match guests::kvm(options) {
        Ok(kvm) => measure("migrate.kvm", &kvm, options, report),
        Err(why) => {
            report.skip("migrate.kvm.*", why);
            Ok(())
        }
    }
}

/// Measures all results of one backend. `builder` makes a VM with so many MiB and vCPUs.
fn measure<B: GuestBuilder>(
    prefix: &str,
    builder: &impl Fn(u64, usize) -> B,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let memory = if options.quick { QUICK } else { MEMORY };
    let guests = builder(memory, VCPUS);
    let rounds = Rounds::Count(if options.quick { 2 } else { Rounds::LEAST });
    if options.wants("modes") {
        options.step(format!("{prefix}: pre-copy, post-copy and hybrid"))?;
        modes::measure(prefix, &guests, memory, rounds, report)?;
    }
    if options.wants("large") {
        let memory = if options.quick { QUICK } else { modes::LARGE };
        options.step(format!("{prefix}: post-copy of {memory} MiB"))?;
        modes::large(prefix, &builder(memory, VCPUS), memory, options, report)?;
    }
    if options.wants("rate") {
        options.step(format!(
            "{prefix}: the rate of a guest, and of plain copies"
        ))?;
        let rounds = Rounds::Count(if options.quick { 2 } else { RATE_ROUNDS });
        rate(prefix, &guests, memory, rounds, report)?;
    }
    let ids = against::ids(prefix);
    if options.wants_x86("qemu", ids, report) {
        options.step(format!("{prefix}: the same moves by QEMU"))?;
        against::measure(prefix, &guests, options, report)?;
    }
    Ok(())
}

/// The command line of a guest that fills its memory with incompressible words, and then sleeps.
const FULL: &str = "rate=0 hot=1M period_us=1000000 beat_us=1000000 seconds=1000000";

fn rate<B: GuestBuilder>(
    prefix: &str,
    builder: &B,
    memory: u64,
    rounds: Rounds,
    report: &mut Report,
) -> LabResult {
    let bytes = (memory << 20) as f64;
    let runs = beside(builder, "paced", FULL, |session| {
        measures(3, rounds, |arm| match arm {
            0 | 1 => Ok([bytes / plain::copy(memory << 20)?, 0.0]),
            _ => {
                let way = (Mode::PreCopy, Route::tcp()?);
                let (moved, ()) = move_guest(builder, session.running, way, |_| Ok(()))?;
                let rate = moved.pages as f64 * 4096.0 / moved.total;
                Ok([rate, moved.made / moved.total])
            }
        })
    })?;
    let [plain, null, guest] = [0, 1, 2].map(|arm| &runs[arm][0]);
    let id = format!("{prefix}.rate");
    let found = Measurement::new(id, "x", Better::Higher, paired(plain, guest))
        .bar(RATE)
        .param("memory_mib", memory)
        .param("guest", format!("paced {FULL}"))
        .arm("plain_bytes_per_s", Summary::of(plain))
        .arm("guest_bytes_per_s", Summary::of(guest))
        .arm("time_to_make_the_vm", Summary::of(&runs[2][1]))
        .arm("null", paired(plain, null));
    report.push(found);
    Ok(())
}
