//! Both ends of a migration, on threads of this process, with connections between them.

use super::route::{Route, refused};
use crate::backed::back;
use crate::experiment::{LabError, LabResult};
use crate::guests::{GuestBuilder, attached, machine_for};
use crate::interrupt;
use crate::session::Count;
use lacuna::migrate::session::{Destination, IncomingHandle};
use lacuna::migrate::stream::{Plan, Sent, send};
use lacuna::migrate::transport::Connector;
use lacuna::{Running, Vm};
use lacuna_guest::status::{Kind, Status};
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How often the destination looks at the guest's counters.
const LOOK: Duration = Duration::from_micros(100);
/// The longest time until they have moved.
const LIMIT: Duration = Duration::from_secs(60);

/// How a guest has moved.
pub struct Moved {
    /// When its pause on the source began: no instruction ran there afterwards.
    pub paused: Instant,
    /// When the source knew that the destination runs the guest.
    pub ran: Instant,
    /// Seconds until the destination had every page.
    pub total: f64,
    /// Seconds of `total` in which the destination made its VM.
    pub made: f64,
    /// Sent pages with content.
    pub pages: u64,
    /// Steps a second of the guest's workers on the source, from the beginning to `paused`.
    pub rate: f64,
}

/// An arrived, running guest.
pub struct Here<'a, B: GuestBuilder> {
    pub guest: &'a Running<B::Vm>,
    /// How many of its pages are present.
    pub handle: &'a IncomingHandle,
    /// Its printed lines.
    pub lines: &'a Receiver<(Instant, String)>,
}

/// Moves `guest` to a VM of `builder`, and calls `watch` when it runs there. That VM ends when
/// `watch` has returned and all memory has arrived. The guest then resumes here.
pub fn move_guest<B: GuestBuilder, T: Send>(
    builder: &B,
    guest: &Running<B::Vm>,
    way: (impl Into<Plan>, Route),
    watch: impl FnOnce(&Here<'_, B>) -> LabResult<T> + Send,
) -> LabResult<(Moved, T)> {
    move_and(builder, guest, way, watch, || Ok(()))
}

/// As [`move_guest`], and calls `meanwhile` when all memory was sent. The guest runs on both sides
/// then.
pub fn move_and<B: GuestBuilder, T: Send>(
    builder: &B,
    guest: &Running<B::Vm>,
    (plan, route): (impl Into<Plan>, Route),
    watch: impl FnOnce(&Here<'_, B>) -> LabResult<T> + Send,
    meanwhile: impl FnOnce() -> LabResult,
) -> LabResult<(Moved, T)> {
    interrupt::check()?;
    back(guest.vm().config().memory.bytes())?;
    let plan = plan.into();
    let Route {
        source,
        destination,
        ..
    } = &route;
    thread::scope(|scope| {
        let (needed, may_end) = channel::<()>();
        let arriving = scope.spawn(move || arrive(builder, destination, watch, &may_end));
        let sent = send_all(guest, source, &plan);
        if sent.is_err() {
            destination.end_wait();
        }
        let sent = sent.and_then(|moved| meanwhile().map(|()| moved));
        drop(needed);
        let arrived = arriving.join().expect("the thread does not panic");
        // An error at the destination is the cause of a cut here.
        match (sent, arrived) {
            (Ok(moved), Ok((made, found))) => Ok((Moved { made, ..moved }, found)),
            (_, Err(why)) | (Err(why), _) => Err(why),
        }
    })
}

fn send_all<V: Vm>(guest: &Running<V>, to: &Connector, plan: &Plan) -> LabResult<Moved> {
    let count = || attached(guest)?.count();
    let began = count()?;
    let sent = send(guest, to, plan, &mut |_| ControlFlow::Continue(()));
    let total = began.at.elapsed().as_secs_f64();
    match sent? {
        Sent::Moved(outgoing) => {
            // The guest is still paused here.
            let at = outgoing.paused().since();
            let [rate, _] = Count { at, ..count()? }.rates_since(&began);
            let moved = Moved {
                paused: at,
                rate,
                ran: outgoing.ran().expect("the destination has said so"),
                total,
                made: 0.0,
                pages: outgoing.pages(),
            };
            // The experiment moves the same guest again. Its copy at the destination has no effect
            // outside of its VM.
            outgoing.take_back();
            Ok(moved)
        }
        Sent::Cut { why, .. } | Sent::Unknown { why, .. } => Err(why.into()),
    }
}

/// Receives a guest, and lets it run until `watch` and the sender of `may_end` have ended. Also
/// returns the seconds in which its VM was made.
fn arrive<B: GuestBuilder, T>(
    builder: &B,
    destination: &Destination,
    watch: impl FnOnce(&Here<'_, B>) -> LabResult<T>,
    may_end: &Receiver<()>,
) -> LabResult<(f64, T)> {
    let arrival = destination.wait().map_err(refused)?;
    let arrival = arrival.ok_or_else(|| LabError::Guest("no guest has arrived".into()))?;
    let began = Instant::now();
    let (machine, lines) = machine_for(builder, arrival.page_source())?;
    let made = began.elapsed().as_secs_f64();
    let mut found = None;
    let each = &mut || ControlFlow::Continue(());
    let end = arrival.run(machine, each, |guest| {
        let here = Here {
            guest,
            handle: arrival.handle(),
            lines: &lines.received,
        };
        let watched = watch(&here);
        if watched.is_ok() {
            // Nothing is sent: the source knows now that all pages have arrived.
            let _ = may_end.recv();
        }
        guest.stop();
        found = Some(watched.map(|watched| (made, watched)));
    })?;
    lines.last.settle(found, &end.ending)
}

/// For each vCPU, when a process on it had made progress.
pub fn counted<B: GuestBuilder>(here: &Here<'_, B>) -> LabResult<Vec<Instant>> {
    let guest = attached(here.guest)?;
    let vcpus = here.guest.vm().config().vcpus;
    // Each vCPU has one such process.
    let counters = |status: &Status| -> Vec<u64> {
        let workers = status.threads.iter().filter(|t| t.kind == Kind::Worker);
        workers.map(|thread| thread.counter).collect()
    };
    let before = counters(&guest.status()?);
    let mut moved = vec![None; before.len()];
    if moved.len() != vcpus {
        let text = format!("{} processes that count, and {vcpus} vCPUs", moved.len());
        return Err(LabError::Guest(text));
    }
    let deadline = Instant::now() + LIMIT;
    loop {
        let now = counters(&guest.status()?);
        let at = Instant::now();
        for (moved, (now, before)) in moved.iter_mut().zip(now.iter().zip(&before)) {
            if now > before {
                moved.get_or_insert(at);
            }
        }
        if let Some(all) = moved.iter().copied().collect() {
            return Ok(all);
        }
        if at > deadline || here.guest.devices().ending().is_some() {
            return Err(LabError::Guest(
                "the guest does not run at its destination".into(),
            ));
        }
        interrupt::check()?;
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::super::beats::{Beats, Seen};
    use super::super::route::Speed;
    use super::*;
    use crate::fixture::{needs_guests, resident};
    use crate::guests::beside;
    use crate::session::Session;
    use lacuna::Gpa;
    use lacuna::GuestMemory as _;
    use lacuna::migrate::stream::Mode;
    use lacuna::soft::VmBuilder;
    use lacuna_skip::test;

    const PACED: &str = "rate=2000 hot=1M seconds=1000000";

    #[test]
    fn a_guest_goes_on_by_every_way() {
        needs_guests();
        let folder = tempfile::tempdir().unwrap();
        let at = |name| folder.path().join(name);
        let speed = Speed {
            latency: Duration::from_micros(100),
            bytes_per_second: 1e9,
        };
        let ways = [
            (Mode::PreCopy, Route::tcp().unwrap()),
            (Mode::Hybrid, Route::unix(&at("moves"), None).unwrap()),
            (
                Mode::PostCopy,
                Route::unix(&at("far"), Some(speed)).unwrap(),
            ),
        ];
        let builder = resident(16, 2);
        beside(
            &builder,
            "paced",
            PACED,
            |Session { running: guest, .. }| {
                for way in ways {
                    let watch = |here: &Here<'_, VmBuilder>| {
                        let mut beats = Beats::new(2);
                        assert_eq!(beats.listen(here.lines, LIMIT), Seen::All);
                        assert!(!beats.is_damaged_later(here.lines));
                        Ok((beats.last_first().unwrap(), counted(here)?))
                    };
                    let (moved, (printed, counted)) = move_guest(&builder, guest, way, watch)?;
                    assert!(moved.ran > moved.paused && printed > moved.paused);
                    assert_eq!(counted.len(), 2);
                    assert!(moved.pages > 2000 && moved.made < moved.total);
                }
                Ok(())
            },
        )
        .unwrap();
    }

    #[test]
    fn a_guest_whose_pages_are_lost_finds_that() {
        needs_guests();
        let lost = beside(
            &resident(16, 2),
            "paced",
            PACED,
            |Session { running: guest, .. }| {
                let at = Gpa::new(6 << 20).unwrap();
                guest.vm().write(at, &vec![0; 4 << 20])?;
                while !guest.wait_timeout(LIMIT) {}
                Ok(())
            },
        );
        let text = lost.unwrap_err().to_string();
        assert!(text.contains("verdict=FAILED"), "{text}");
    }
}
