//! A guest is saved at its gate, and resumes from there in several ways.

use crate::backed::back;
use crate::experiment::{LabError, LabResult};
use crate::guests::{GuestBuilder, beside, machine_for};
use crate::interrupt;
use crate::session::Guest;
use lacuna::migrate::{MigrateError, PausedGuest, Snapshot, Touches, save_paused};
use lacuna::source::{PageSource, Policy};
use lacuna::{Ending, PlatformDevices, Vm};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

/// How a guest's pages are provided.
pub enum Arm<'a> {
    /// All before it runs.
    Eager,
    /// When it needs them, and in the background in the order of the file.
    Lazy,
    /// As [`Arm::Lazy`], these first, and the first of these before the guest runs.
    Replay(&'a Touches),
    /// When it needs them.
    Demand,
}

/// The times and touches of a restored guest. Times are in seconds, from before the snapshot was
/// opened.
pub struct Took {
    /// Until its first line.
    pub first_output: f64,
    /// Until it could run.
    pub begins: f64,
    /// Until its end.
    pub end: f64,
    /// The pages that it requested.
    pub touches: Touches,
}

/// A guest, saved at its gate.
pub struct Scene<'a, B> {
    builder: &'a B,
    path: PathBuf,
}

impl<'a, B: GuestBuilder> Scene<'a, B> {
    /// Runs `guest` with `words` until it waits at its gate, and saves it in `folder`.
    pub fn save(builder: &'a B, guest: &str, words: &str, folder: &Path) -> LabResult<Self> {
        let path = folder.join(guest);
        beside(builder, guest, words, |session| {
            let paused = PausedGuest::pause(session.running)?;
            save_paused(session.running, &paused, &path, &mut |_| {
                ControlFlow::Continue(())
            })?;
            Ok(())
        })?;
        Ok(Self { builder, path })
    }

    /// Memory of the guest.
    pub fn memory_mib(&self) -> u64 {
        let snapshot = Snapshot::open(&self.path);
        snapshot.map_or(0, |snapshot| snapshot.machine().memory >> 20)
    }

    /// Runs the guest to its end, with `seed` as its setting.
    pub fn restore(&self, arm: &Arm<'_>, seed: u32) -> LabResult<Took> {
        back(self.memory_mib() << 20)?;
        let began = Instant::now();
        let snapshot = Snapshot::open(&self.path)?;
        let recorder = snapshot.recorder();
        let source = match arm {
            Arm::Eager => None,
            _ => {
                let pages = snapshot.pages_on_demand(Policy::default())?;
                Some(Arc::new(pages.recorded(&recorder)) as Arc<dyn PageSource>)
            }
        };
        let (machine, lines) = machine_for(self.builder, source)?;
        let (vm, devices) = (Arc::clone(machine.vm()), Arc::clone(machine.devices()));
        let vcpus = match arm {
            Arm::Eager => snapshot.restore(&vm, &devices, &mut |_| ControlFlow::Continue(()))?,
            _ => snapshot.restore_lazily(&vm, &devices)?,
        };
        let guest = Guest::attach(&*vm, &devices);
        let guest = guest.ok_or_else(|| LabError::Guest("it has no status page".into()))?;
        guest.set(seed)?;
        let (begins, prefetched) = thread::scope(|scope| {
            let (waits, may_run) = mpsc::channel();
            let (snapshot, vm, devices) = (&snapshot, &*vm, &*devices);
            let background = scope.spawn(move || background(arm, snapshot, vm, devices, waits));
            // Nothing is sent: the call returns when the thread has dropped `waits`.
            let _ = may_run.recv();
            let begins = began.elapsed().as_secs_f64();
            machine.start(vcpus).wait();
            (
                begins,
                background.join().expect("the thread does not panic"),
            )
        });
        let end = began.elapsed().as_secs_f64();
        prefetched?;
        interrupt::check()?;
        let ending = devices.ending().expect("it has ended");
        match lines.received.try_recv() {
            Ok((first, _)) if ending == Ending::Exited(0) => Ok(Took {
                first_output: (first - began).as_secs_f64(),
                begins,
                end,
                touches: recorder.touches(),
            }),
            _ => lines.last.settle(None, &ending),
        }
    }
}

/// Brings pages, most of them while the guest runs. Drops `waits` when the guest may run.
fn background<V: Vm>(
    arm: &Arm<'_>,
    snapshot: &Snapshot,
    vm: &V,
    devices: &PlatformDevices,
    waits: mpsc::Sender<()>,
) -> Result<(), MigrateError> {
    let waits = matches!(arm, Arm::Replay(_)).then_some(waits);
    let each = &mut |_| match devices.ending() {
        None => ControlFlow::Continue(()),
        Some(_) => ControlFlow::Break(()),
    };
    let done = match arm {
        Arm::Eager | Arm::Demand => Ok(()),
        Arm::Lazy => snapshot.prefetch(vm, each),
        Arm::Replay(touches) => {
            let (first, others) = touches.split_at(Touches::HEAD_START);
            let replayed = snapshot.replay(vm, &first, each);
            drop(waits);
            replayed
                .and_then(|()| snapshot.replay(vm, &others, each))
                .and_then(|()| snapshot.prefetch_rest(vm, touches, each))
        }
    };
    match done {
        Err(MigrateError::Cancelled) => Ok(()),
        done => done,
    }
}
