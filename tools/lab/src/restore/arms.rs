//! A guest is saved at its gate, and resumes from there in several ways.

use crate::backed::back;
use crate::experiment::LabError;
use crate::interrupt;
use crate::session::{Guest, LastWords, image};
use lacuna_machine::{
    Builder, Console, Ending, Machine, PageSource, PlatformDevices, Policy, Running, Vm,
};
use lacuna_migrate::{MigrateError, PausedGuest, Recorder, Snapshot, Touches, save_paused};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

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

/// The settings of a backend's builder that experiments change for one guest.
pub trait GuestBuilder: Builder + Clone {
    /// The same, with these words of the guest's command line.
    fn with(&self, words: &str) -> Self;

    /// The same for an incoming guest, as `lacuna run --incoming` and `lacuna snapshot restore`
    /// make it.
    fn coming(&self, source: Option<Arc<dyn PageSource>>) -> Self;
}

impl GuestBuilder for lacuna_soft::VmBuilder {
    fn with(&self, words: &str) -> Self {
        Self {
            command_line: words.into(),
            ..self.clone()
        }
    }

    fn coming(&self, source: Option<Arc<dyn PageSource>>) -> Self {
        Self {
            source,
            prefault: false,
            ..self.clone()
        }
    }
}

impl GuestBuilder for lacuna_kvm::VmBuilder {
    fn with(&self, words: &str) -> Self {
        let mut builder = self.clone();
        builder.command_line = words.into();
        builder
    }

    fn coming(&self, source: Option<Arc<dyn PageSource>>) -> Self {
        let mut builder = self.clone();
        builder.source = source;
        builder
    }
}

/// A guest, saved at its gate.
pub struct Scene<'a, B> {
    builder: &'a B,
    path: PathBuf,
}

/// The longest time that a guest may take to its gate.
const PREPARE: Duration = Duration::from_secs(300);

/// Runs `guest` with `words` until it waits at its gate, and then `work` beside it.
///
/// # Errors
/// The guest could not be run, or an error of `work`.
pub fn beside<B: GuestBuilder, T>(
    builder: &B,
    guest: &str,
    words: &str,
    work: impl FnOnce(&Running<B::Vm>) -> Result<T, LabError>,
) -> Result<T, LabError>
where
    LabError: From<<B::Vm as Vm>::Error>,
{
    let starts = builder.with(words);
    let vm = starts.build()?;
    let arch = vm.config().arch;
    let last = LastWords::default();
    let machine = Machine::new(vm, PlatformDevices::of(arch, last.console()))?;
    let line = starts.full_command_line();
    let vcpus = machine.vm().boot(&image(arch, guest)?, &line)?;
    let guest = machine.start(vcpus);
    let done = wait_at_gate(&guest).and_then(|()| work(&guest));
    guest.stop();
    last.settle(Some(done), &guest.wait().ending)
}

impl<'a, B: GuestBuilder> Scene<'a, B>
where
    LabError: From<<B::Vm as Vm>::Error>,
{
    /// Runs `guest` with `words` until it waits at its gate, and saves it in `folder`.
    ///
    /// # Errors
    /// The guest could not be run or saved.
    pub fn save(builder: &'a B, guest: &str, words: &str, folder: &Path) -> Result<Self, LabError> {
        let path = folder.join(guest);
        beside(builder, guest, words, |guest| {
            let paused = PausedGuest::pause(guest)?;
            save_paused(guest, &paused, &path, &mut |_| ControlFlow::Continue(()))?;
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
    ///
    /// # Errors
    /// It could not be restored, or has failed.
    pub fn restore(&self, arm: &Arm<'_>, seed: u32) -> Result<Took, LabError> {
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
        let vm = self.builder.coming(source).build()?;
        let first = FirstLine::default();
        let devices = PlatformDevices::of(vm.config().arch, first.console());
        let machine = Machine::new(vm, devices)?;
        let (vm, devices) = (machine.vm(), machine.devices());
        let progress = &mut |_| ControlFlow::Continue(());
        let vcpus = match arm {
            Arm::Eager => snapshot.restore(vm, devices, progress)?,
            _ => snapshot.restore_lazily(vm, devices)?,
        };
        let guest = Guest::attach(&**vm, devices);
        let guest = guest.ok_or_else(|| LabError::Guest("it has no status page".into()))?;
        guest.set(seed)?;
        let mut begins = 0.0;
        let (vm, devices) = (Arc::clone(vm), Arc::clone(devices));
        let prefetched = thread::scope(|scope| {
            let (waits, may_run) = mpsc::channel();
            let (snapshot, vm, devices) = (&snapshot, &*vm, &*devices);
            let background = scope.spawn(move || background(arm, snapshot, vm, devices, waits));
            // Nothing is sent: the call returns when the thread has dropped `waits`.
            let _ = may_run.recv();
            begins = began.elapsed().as_secs_f64();
            machine.start(vcpus).wait();
            background.join().expect("the thread does not panic")
        });
        let end = began.elapsed().as_secs_f64();
        prefetched?;
        interrupt::check()?;
        first.took(began, (begins, end), &recorder, devices.ending())
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

/// Waits until all processes of the guest wait at its gate.
fn wait_at_gate(guest: &Running<impl Vm>) -> Result<(), LabError> {
    let deadline = Instant::now() + PREPARE;
    let (vm, devices) = (&**guest.vm(), guest.devices());
    let guest = loop {
        if let Some(guest) = Guest::attach(vm, devices) {
            break guest;
        }
        if Instant::now() > deadline || devices.ending().is_some() {
            return Err(LabError::Guest("the guest does not start".into()));
        }
        thread::yield_now();
    };
    guest.run_until(PREPARE, |status| {
        let [main, members @ ..] = &*status.threads else {
            return None;
        };
        // `verify`: each thread has made one of its two passes. `zipf`: the first entry says so.
        let half = |thread: &lacuna_guest::status::Thread| {
            thread.goal.is_some_and(|goal| 2 * thread.counter >= goal)
        };
        let all = members.len() == vm.config().vcpus && members.iter().all(half);
        let is_there = main.counter > 0 || all;
        is_there.then_some(())
    })
}

/// When a guest has printed its first line, and its last line.
#[derive(Clone, Default)]
struct FirstLine(Arc<Mutex<(Option<Instant>, String)>>);

impl FirstLine {
    fn console(&self) -> impl Console + 'static {
        let kept = Arc::clone(&self.0);
        move |line: &str| {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.0.get_or_insert_with(Instant::now);
            line.clone_into(&mut kept.1);
        }
    }

    /// The result of an ended guest.
    fn took(
        &self,
        began: Instant,
        (begins, end): (f64, f64),
        recorder: &Recorder,
        ending: Option<Ending>,
    ) -> Result<Took, LabError> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (kept.0, ending) {
            (Some(first), Some(Ending::Exited(0))) => Ok(Took {
                first_output: (first - began).as_secs_f64(),
                begins,
                end,
                touches: recorder.touches(),
            }),
            (_, ending) => Err(LabError::Guest(format!(
                "the guest ended with {ending:?}; its last line: {:?}",
                kept.1
            ))),
        }
    }
}
