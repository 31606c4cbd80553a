//! Both ends of a migration, on threads of this process, with connections between them.

use super::route::{Route, Source};
use crate::backed::back;
use crate::experiment::LabError;
use crate::interrupt;
use crate::restore::GuestBuilder;
use crate::session::{self, LastWords};
use lacuna_guest::status::{Kind, Status};
use lacuna_machine::{Ending, Machine, PlatformDevices, Running, Vm};
use lacuna_migrate::stream::{Arrived, Connections, Incoming, Mode, Plan, Sent, send};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
}

/// An arrived, running guest.
pub struct Here<'a, V> {
    /// Its VM.
    pub vm: &'a V,
    /// Its devices.
    pub devices: &'a PlatformDevices,
    /// Pushed pages that have arrived since then.
    pub come: &'a AtomicU64,
    /// Its printed lines.
    pub lines: Receiver<(Instant, String)>,
}

/// How a guest is moved.
pub struct Way {
    /// The order in which the guest and its memory are sent.
    pub mode: Mode,
    /// The route of its connections.
    pub route: Route,
    /// Whether it runs there.
    pub runs: bool,
}

impl Way {
    /// The guest runs at the destination.
    pub const fn new(mode: Mode, route: Route) -> Self {
        Self {
            mode,
            route,
            runs: true,
        }
    }
}

/// Moves `guest` to a VM of `builder`, and calls `watch` when it runs there. That VM ends when
/// `watch` has returned and all memory has arrived. The guest then resumes here.
///
/// # Errors
/// It could not be moved, or an error of `watch`.
pub fn move_guest<B: GuestBuilder + Sync, T: Send>(
    builder: &B,
    guest: &Running<B::Vm>,
    way: Way,
    watch: impl FnOnce(&Here<'_, B::Vm>) -> Result<T, LabError> + Send,
) -> Result<(Moved, T), LabError>
where
    LabError: From<<B::Vm as Vm>::Error>,
{
    move_and(builder, guest, way, watch, || Ok(()))
}

/// As [`move_guest`], and calls `meanwhile` when all memory was sent. The guest runs on both sides
/// then.
///
/// # Errors
/// As [`move_guest`], and an error of `meanwhile`.
pub fn move_and<B: GuestBuilder + Sync, T: Send>(
    builder: &B,
    guest: &Running<B::Vm>,
    way: Way,
    watch: impl FnOnce(&Here<'_, B::Vm>) -> Result<T, LabError> + Send,
    meanwhile: impl FnOnce() -> Result<(), LabError>,
) -> Result<(Moved, T), LabError>
where
    LabError: From<<B::Vm as Vm>::Error>,
{
    interrupt::check()?;
    let Way { mode, route, runs } = way;
    let Route { source, listening } = route;
    back(guest.vm().config().memory.bytes())?;
    thread::scope(|scope| {
        // It owns the listening end: after an error there, the source is refused.
        let arriving = scope.spawn(move || arrive(builder, &*listening, runs, watch));
        let sent = send_all(guest, &source, mode);
        let sent = sent.and_then(|moved| meanwhile().map(|()| moved));
        let arrived = arriving.join().expect("the thread does not panic");
        // An error at the destination is the cause of a cut here.
        match (sent, arrived) {
            (Ok(moved), Ok((made, found))) => Ok((Moved { made, ..moved }, found)),
            (_, Err(why)) | (Err(why), _) => Err(why),
        }
    })
}

fn send_all<V: Vm>(guest: &Running<V>, to: &Source, mode: Mode) -> Result<Moved, LabError> {
    let plan = Plan {
        mode,
        ..Plan::default()
    };
    let began = Instant::now();
    let sent = send(guest, &**to, &plan, &mut |_| ControlFlow::Continue(()));
    let total = began.elapsed().as_secs_f64();
    match sent? {
        Sent::Moved(outgoing) => {
            let moved = Moved {
                paused: outgoing.paused().since(),
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

/// Receives a guest, and lets it run until `watch` returns and all of its memory has arrived. Also
/// returns the seconds in which its VM was made.
fn arrive<B: GuestBuilder, T>(
    builder: &B,
    connections: &dyn Connections,
    runs: bool,
    watch: impl FnOnce(&Here<'_, B::Vm>) -> Result<T, LabError>,
) -> Result<(f64, T), LabError>
where
    LabError: From<<B::Vm as Vm>::Error>,
{
    let progress = &mut |_| ControlFlow::Continue(());
    let incoming = Incoming::accept(connections)?;
    let began = Instant::now();
    let vm = builder.coming(incoming.page_source()).build()?;
    let made = began.elapsed().as_secs_f64();
    let last = LastWords::default();
    let (sender, lines) = channel();
    let mut keep = last.console();
    let console = move |line: &str| {
        keep(line);
        // The experiment may not listen any more.
        let _ = sender.send((Instant::now(), line.to_owned()));
    };
    let devices = PlatformDevices::of(vm.config().arch, console);
    let machine = Machine::new(vm, devices)?;
    let (vm, devices) = (Arc::clone(machine.vm()), Arc::clone(machine.devices()));
    let prepared = incoming.receive(connections, &vm, &devices, progress)?;
    let Arrived {
        vcpus,
        mut arriving,
    } = prepared
        .start()
        .map_err(|waiting| LabError::Guest(waiting.why().to_string()))?;
    let come = AtomicU64::new(0);
    let here = Here {
        vm: &*vm,
        devices: &devices,
        come: &come,
        lines,
    };
    let running = runs.then(|| machine.start(vcpus));
    let found = thread::scope(|scope| {
        let coming = scope.spawn(|| {
            arriving.finish(&mut |pages| {
                come.fetch_add(pages, Ordering::Relaxed);
                ControlFlow::Continue(())
            })
        });
        let found = watch(&here);
        coming.join().expect("the thread does not panic")?;
        found
    });
    devices.end(Ending::Stopped, &*vm);
    let ending = running.map_or(Ending::Stopped, |running| running.wait().ending);
    last.settle(Some(found.map(|found| (made, found))), &ending)
}

/// For each vCPU, when a process on it had made progress.
pub fn counted<V: Vm>(here: &Here<'_, V>) -> Result<Vec<Instant>, LabError> {
    let guest = session::Guest::attach(here.vm, here.devices);
    let guest = guest.ok_or_else(|| LabError::Guest("it has no status page".into()))?;
    let vcpus = here.vm.config().vcpus;
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
        if at > deadline || here.devices.ending().is_some() {
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
    use super::super::link::Speed;
    use super::*;
    use crate::fixture::{needs_guests, resident};
    use crate::restore::beside;
    use lacuna_addr::Gpa;
    use lacuna_machine::GuestMemory as _;
    use lacuna_skip::test;

    const PACED: &str = "rate=2000 hot=1M seconds=1000000";

    #[test]
    fn a_guest_goes_on_by_every_way() {
        needs_guests();
        let folder = tempfile::tempdir().unwrap();
        let link = Route::link(Speed {
            latency: Duration::from_micros(100),
            bytes_per_second: 1e9,
        });
        let ways = [
            (Mode::PreCopy, Route::tcp().unwrap()),
            (
                Mode::Hybrid,
                Route::unix(&folder.path().join("moves")).unwrap(),
            ),
            (Mode::PostCopy, link),
        ];
        let builder = resident(16, 2);
        beside(&builder, "paced", PACED, |guest| {
            for (mode, route) in ways {
                let watch = |here: &Here<'_, lacuna_soft::Vm>| {
                    let mut beats = Beats::new(2);
                    assert_eq!(beats.listen(&here.lines, LIMIT), Seen::All);
                    assert!(!beats.is_damaged_later(&here.lines));
                    Ok((beats.last_first().unwrap(), counted(here)?))
                };
                let (moved, (printed, counted)) =
                    move_guest(&builder, guest, Way::new(mode, route), watch)?;
                assert!(moved.ran > moved.paused && printed > moved.paused);
                assert_eq!(counted.len(), 2);
                assert!(moved.pages > 2000 && moved.made < moved.total);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_guest_whose_pages_are_lost_finds_that() {
        needs_guests();
        let lost = beside(&resident(16, 2), "paced", PACED, |guest| {
            let at = Gpa::new(6 << 20).unwrap();
            guest.vm().write(at, &vec![0; 4 << 20])?;
            while !guest.wait_timeout(LIMIT) {}
            Ok(())
        });
        let text = lost.unwrap_err().to_string();
        assert!(text.contains("verdict=FAILED"), "{text}");
    }
}
