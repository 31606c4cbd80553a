//! The speed that a computing process keeps while the pages of its guest arrive.
//!
//! The guest `bm` has one vCPU, a computing process (the worker) and one that touches random pages
//! (the faulter). It has moved by post-copy over a link that is 0.5 ms long in each direction and
//! carries 128 MiB a second. Arms:
//!
//! ```text
//! alone     all pages are here, the faulter rests ─┐ the same pages arrive over the same link for
//! present   all pages are here                    ─┘ another VM, which is paused
//! missing   the pages arrive; the guest gets an event for a missing page, and runs the worker
//! waiting   the pages arrive; the vCPU waits for a missing page
//! ```
//! `migrate.worker_kept_percent.1ms` is the worker's speed in *missing*, as a share of its speed in
//! *alone*. It is counted from the first step on the destination until three quarters of the pages
//! have arrived.

use super::QUICK;
use super::ends::{Here, counted, move_and, move_guest};
use super::route::{Route, Speed};
use crate::experiment::{LabError, LabResult, Options};
use crate::guests::{attached, beside, folder};
use crate::interrupt;
use crate::result::{Better, Measurement, Report};
use crate::session::{Count, Guest};
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna::migrate::stream::Mode;
use lacuna::soft::{Vm, VmBuilder};
use lacuna::{Apf, Running, Vm as _};
use lacuna_guest::status::{Kind, Thread};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

const MEMORY: u64 = 256;
/// Rounds: the speed of a process varies by several percent from one to the next.
const ROUNDS: usize = 20;
/// The part of the speed that the worker has to keep, in percent.
const KEPT: f64 = 90.0;
const SPEED: Speed = Speed {
    latency: Duration::from_micros(500),
    bytes_per_second: (128 << 20) as f64,
};
const BM: &str = "workers=1 faulters=1 populate=1 seconds=1000000 slice_us=4000 tick_us=1000";
/// How often the arrived pages are counted.
const LOOK: Duration = Duration::from_micros(500);
/// The longest time that pages may take, and the pause of a paused process.
const LIMIT: Duration = Duration::from_secs(60);

/// What differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arm {
    Alone,
    Null,
    Present,
    Missing,
    Waiting,
}

const ARMS: [Arm; 5] = [
    Arm::Alone,
    Arm::Null,
    Arm::Present,
    Arm::Missing,
    Arm::Waiting,
];

/// The worker's steps a second, the faulter's, and arrived bytes a second.
type Rates = [f64; 3];

/// `migrate.worker_kept_percent.1ms`.
pub fn measure(
    builder: &impl Fn(u64, usize) -> VmBuilder,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let memory = if options.quick { QUICK } else { MEMORY };
    let builder = VmBuilder {
        apf: Apf::On,
        ..builder(memory, 1)
    };
    let rounds = Rounds::Count(if options.quick { 1 } else { ROUNDS });
    let runs = beside(&builder, "bm", BM, |session| {
        session.guest.run_until(LIMIT, |status| {
            let mut threads = status.threads.iter();
            let counts = |kind| move |t: &Thread| t.kind == kind && t.counter > 0;
            let all =
                threads.clone().any(counts(Kind::Worker)) && threads.any(counts(Kind::Faulter));
            all.then_some(())
        })?;
        measures(ARMS.len(), rounds, |arm| {
            one(&builder, session.running, ARMS[arm])
        })
    })?;
    let of = |arm: Arm| &runs[ARMS.iter().position(|a| *a == arm).expect("it took part")];
    let kept = |arm| paired(&of(Arm::Alone)[0], &of(arm)[0]).scaled(100.0);
    let id = "migrate.worker_kept_percent.1ms";
    let mut found = Measurement::new(id, "%", Better::Higher, kept(Arm::Missing))
        .bar(KEPT)
        .param("memory_mib", memory)
        .param("vcpus", 1)
        .param("guest", format!("bm {BM}"))
        .param("round_trip_us", 2 * SPEED.latency.as_micros() as u64)
        .param("link_bytes_per_s", SPEED.bytes_per_second)
        .arm("null", kept(Arm::Null));
    for (arm, name) in [
        (Arm::Alone, "alone"),
        (Arm::Present, "present"),
        (Arm::Missing, "missing"),
        (Arm::Waiting, "waiting"),
    ] {
        let [worker, faulter, came] = of(arm).each_ref().map(|rates| Summary::of(rates));
        let mut value = serde_json::Value::from(worker);
        value["kept_percent"] = kept(arm).into();
        value["faulter_per_s"] = faulter.into();
        value["bytes_per_s"] = came.into();
        found = found.arm(name, value);
    }
    report.push(found);
    Ok(())
}

fn one(builder: &VmBuilder, guest: &Running<Vm>, arm: Arm) -> LabResult<Rates> {
    let folder = folder()?;
    let way = |name, link| {
        let route = Route::unix(&folder.path().join(name), link)?;
        Ok::<_, LabError>((Mode::PostCopy, route))
    };
    let pages = builder.memory.get();
    match arm {
        Arm::Missing | Arm::Waiting => {
            let (_, rates) = move_guest(builder, guest, way("far", Some(SPEED))?, |here| {
                if arm == Arm::Waiting {
                    let switch = here.guest.vm().apf_switch();
                    switch.expect("soft has one").set_apf(Apf::Off);
                }
                counted(here)?;
                let counting = Counting::begin(here, here.handle.present())?;
                let come = wait_for(here, pages * 3 / 4)?;
                counting.end(come)
            })?;
            Ok(rates)
        }
        Arm::Alone | Arm::Null | Arm::Present => {
            let (sender, receiver) = channel();
            let watch = move |here: &Here<'_, VmBuilder>| count_beside(here, arm, &receiver);
            let meanwhile = || {
                let way = way("far", Some(SPEED))?;
                // The same pages for a paused VM.
                let (..) = move_guest(builder, guest, way, |here| {
                    let _paused = here.guest.pause();
                    let send = |come| _ = sender.send(come);
                    send(here.handle.present());
                    send(wait_for(here, pages * 3 / 4)?);
                    Ok(())
                })?;
                Ok(())
            };
            let (_, rates) = move_and(builder, guest, way("near", None)?, watch, meanwhile)?;
            Ok(rates)
        }
    }
}

/// Counts in a guest that has all of its pages, while pages arrive for another VM. `receiver` gets
/// the number of these pages when the first ones arrive, and when counting ends.
fn count_beside(
    here: &Here<'_, VmBuilder>,
    arm: Arm,
    receiver: &Receiver<u64>,
) -> LabResult<Rates> {
    counted(here)?;
    if arm != Arm::Present {
        attached(here.guest)?.pause(&[Kind::Faulter])?;
    }
    let counting = Counting::begin(here, next(receiver)?)?;
    counting.end(next(receiver)?)
}

fn next(receiver: &Receiver<u64>) -> LabResult<u64> {
    let found = receiver.recv_timeout(LIMIT);
    found.map_err(|error| LabError::Guest(format!("the pages did not come: {error}")))
}

/// Waits until `pages` pages are present, and returns how many are.
fn wait_for(here: &Here<'_, VmBuilder>, pages: u64) -> LabResult<u64> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let come = here.handle.present();
        if come >= pages {
            return Ok(come);
        }
        if Instant::now() > deadline || here.guest.devices().ending().is_some() {
            return Err(LabError::Guest(format!(
                "{come} pages came, and {pages} were due"
            )));
        }
        interrupt::check()?;
        thread::sleep(LOOK);
    }
}

/// A span of time in which steps and pages are counted.
struct Counting<'a> {
    guest: Guest<'a>,
    began: Count,
    come: u64,
}

impl<'a> Counting<'a> {
    fn begin(here: &Here<'a, VmBuilder>, come: u64) -> LabResult<Self> {
        let guest = attached(here.guest)?;
        let began = guest.count()?;
        Ok(Self { guest, began, come })
    }

    fn end(self, come: u64) -> LabResult<Rates> {
        let now = self.guest.count()?;
        let seconds = (now.at - self.began.at).as_secs_f64();
        let [worker, faulter] = now.rates_since(&self.began);
        let bytes = (come - self.come) as f64 * 4096.0 / seconds;
        Ok([worker, faulter, bytes])
    }
}
