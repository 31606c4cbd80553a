//! A run on threads, with a control socket if there is one.

use super::attend::Attended;
use super::incoming::{has_not_come, receive};
use super::profile::Samples;
use super::restored::{prefetch, restore, restore_lazily};
use super::{Job, Refusal, Start, disk};
use crate::exit::Exit;
use crate::observe::{Watched, copy_status, count_threads};
use crate::pages::GuestPages;
use crate::sample::{Before, LazyPages};
use lacuna::device::Console;
use lacuna::metrics::Metrics;
use lacuna::migrate::session::{Arrival, IncomingHandle};
use lacuna::migrate::stream::Arrived;
use lacuna::{BackendError, Builder, Ending, Machine, Nanos, PlatformDevices, RunEnd, Running, Vm};
use lacuna_control::{ControlSocket, Controlled, PageCounts};
use std::error::Error;
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

/// The time between two looks at an ending thread.
const LOOK: Duration = Duration::from_millis(10);
/// The time between two looks at the guest.
const WATCH: Duration = Duration::from_millis(100);

/// Looks at a running guest at a time of its.
pub(super) type Watch<'w, V> = &'w mut dyn FnMut(&V, &PlatformDevices, Nanos);

/// An ended guest.
pub(super) struct Ended<V> {
    pub end: RunEnd<V>,
    /// Its status pages, if it announced them.
    pub status: Option<Vec<u8>>,
    /// The hash of everything that happened in a seeded run.
    pub trace_hash: Option<u64>,
    /// Where its vCPUs were, with `--profile`.
    pub profile: Option<Samples>,
}

impl<V: Vm> Ended<V> {
    /// Reads the status pages, so no latency is simulated any more.
    pub fn of(end: RunEnd<V>) -> Self {
        Self {
            status: copy_status(&end.devices, |gpa, pages| end.vm.read(gpa, pages).is_ok()),
            end,
            trace_hash: None,
            profile: None,
        }
    }
}

/// Makes the VM and runs it to its end. Also returns the status page at the end, and describes the
/// preparation.
pub(super) fn run<B: Builder>(
    job: &Job<'_>,
    builder: &B,
    console: impl Console + 'static,
    watch: Watch<'_, B::Vm>,
) -> Result<(Ended<B::Vm>, Before), Refusal>
where
    B::Vm: Watched,
{
    let vm = builder.build().map_err(|error| refusal(&error))?;
    if let Start::Image(_) = job.start {
        // The pages of other guests arrive one by one, and the guest waits for them.
        prefault(job, &*vm)?;
    }
    let devices = Arc::new(PlatformDevices::of(vm.config().arch, console));
    disk::add(job, &vm, &devices)?;
    let control = job.control;
    let attended = Attended::default();
    thread::scope(|scope| {
        let _attending = attended.start(scope, job, &devices).map_err(failed)?;
        let (mut before, running) = (Before::default(), OnceLock::new());
        let mut profile = None;
        let threads = |to: &mut Metrics| count_threads(&*vm, &devices, to);
        let owned = control.map(|socket| controlled(socket, job, &*vm, &devices, &threads));
        let controlled = owned.as_ref();
        let read = || match controlled {
            Some(guest) => guest.counters(),
            None => counters(&*vm, job.pages.as_deref(), &threads),
        };
        thread::scope(|scope| {
            let counted = job.metrics.map(|socket| socket.start(scope, &read));
            let _counted = counted.transpose().map_err(failed)?;
            if let Some(guest) = controlled {
                let named = thread::Builder::new().name("lacuna-control".into());
                let started = named.spawn_scoped(scope, || guest.serve());
                started.map_err(failed)?;
            }
            let end = EndServing {
                control,
                incoming_guest: incoming_guest(job),
            };
            let machine = make_machine(job, Arc::clone(&vm), Arc::clone(&devices));
            let begun =
                machine.and_then(|machine| begin(scope, job, builder, machine, &mut before));
            let run = attended.runs(job).and(begun).and_then(|begun| {
                if let Some(guest) = controlled {
                    guest.wait_to_start(&|| job.signals.caught().is_some());
                }
                run_begun(job, begun, &running, controlled, watch, &mut profile)
            });
            // Clients wait until the run begins or ends.
            let run = run.inspect_err(|_| devices.end(Ending::Stopped, &*vm));
            if run.is_err() && job.args.wait_again {
                end.hand_over();
            }
            let lazy = run?;
            if let Some(restored) = &mut before.restored {
                restored.lazy = lazy;
            }
            Ok::<_, Refusal>(())
        })?;
        drop(owned);
        let end = running.into_inner().expect("it has run").wait();
        // The status page may be swapped out, or missing.
        vm.end_latency();
        let mut ended = Ended::of(end);
        ended.profile = profile;
        Ok((ended, before))
    })
}

/// The guest of `vm` under control of the clients of `socket`.
fn controlled<'a, V: Vm>(
    socket: &'a ControlSocket,
    job: &Job<'_>,
    vm: &'a V,
    devices: &'a PlatformDevices,
    more: &'a (dyn Fn(&mut Metrics) + Sync),
) -> Controlled<'a, V> {
    let mut controlled = Controlled::new(socket, vm, devices);
    controlled.more = Some(more);
    controlled.incoming = incoming_guest(job).cloned();
    controlled.pages = job.pages.clone().map(|pages| pages as Arc<dyn PageCounts>);
    if job.args.on.paused {
        controlled.start_paused();
    }
    controlled
}

/// The counters of a guest without a control socket.
fn counters<V: Vm>(vm: &V, pages: Option<&GuestPages>, more: &dyn Fn(&mut Metrics)) -> Metrics {
    let mut metrics = vm.metrics();
    if let Some(pages) = pages {
        pages.fill(&mut metrics);
    }
    more(&mut metrics);
    metrics
}

/// Starts the threads of the vCPUs, each on its processor.
fn make_machine<V: Vm>(
    job: &Job<'_>,
    vm: Arc<V>,
    devices: Arc<PlatformDevices>,
) -> Result<Machine<V>, Refusal> {
    let machine = match job.args.pin.clone() {
        None => Machine::new(vm, devices),
        Some(cores) => Machine::with_threads(vm, devices, move |vcpu| cores.pin(vcpu)),
    };
    machine.map_err(|error| (error.kind().into(), cannot_start(&error)))
}

/// Backs the budget of a new guest with memory. A signal ends it, and then the run.
fn prefault<V: Watched>(job: &Job<'_>, vm: &V) -> Result<(), Refusal> {
    let done = vm.prefault(&mut || match job.signals.caught() {
        None => ControlFlow::Continue(()),
        Some(_) => ControlFlow::Break(()),
    });
    done.map_err(|error| (Exit::Host, error.to_string()))
}

pub(super) fn failed(error: io::Error) -> Refusal {
    (Exit::Host, cannot_start(&error))
}

fn cannot_start(error: &dyn Error) -> String {
    format!("the run cannot start: {error}")
}

/// Runs a guest to its end, while its missing pages arrive. Returns the result of a lazy restore.
fn run_begun<'a, V: Vm>(
    job: &Job<'_>,
    begun: Begun<'_, V>,
    running: &'a OnceLock<Running<V>>,
    controlled: Option<&Controlled<'a, V>>,
    watch: Watch<'_, V>,
    profile: &mut Option<Samples>,
) -> Result<Option<LazyPages>, Refusal> {
    let (vm, devices) = (
        Arc::clone(begun.machine.vm()),
        Arc::clone(begun.machine.devices()),
    );
    let (vm, devices) = (&*vm, &*devices);
    thread::scope(|scope| {
        let mut background = None;
        if let Start::Lazily(lazy) = job.start {
            let (waits, may_run) = mpsc::channel();
            let named = thread::Builder::new().name("lacuna-prefetch".into());
            let work = move || prefetch(job, lazy, vm, devices, waits);
            background = Some(named.spawn_scoped(scope, work).map_err(failed)?);
            // Nothing is sent: the call returns when the thread has dropped `waits`.
            let _ = may_run.recv();
        }
        let start = || begun.machine.start(begun.vcpus);
        let running = running.get_or_init(start);
        if let Some(guest) = controlled {
            guest.runs(running);
        }
        if job.args.profile {
            let named = thread::Builder::new().name("lacuna-profile".into());
            let work = || *profile = Some(Samples::take(running, devices));
            named.spawn_scoped(scope, work).map_err(failed)?;
        }
        loop {
            watch(vm, devices, running.now());
            if running.wait_timeout(WATCH) {
                break;
            }
        }
        if let Start::Lazily(lazy) = job.start {
            // The thread that brings pages may wait for an object store.
            lazy.interrupt.store(true, Ordering::Relaxed);
        }
        if let (Some(incoming_guest), Some(arriving)) = (incoming_guest(job), begun.arriving) {
            end_arriving(job, incoming_guest, devices, &arriving);
            join(arriving);
        }
        Ok(background.map(join))
    })
}

/// The guest has ended. Waits until its source knows that, or a signal ends the wait.
fn end_arriving(
    job: &Job<'_>,
    incoming_guest: &IncomingHandle,
    devices: &PlatformDevices,
    arriving: &ScopedJoinHandle<'_, ()>,
) {
    match devices.ending() {
        None | Some(Ending::Stopped) => incoming_guest.end(Some(&job.why_stopped())),
        Some(ending) => {
            incoming_guest.end(None);
            while !arriving.is_finished() && job.signals.caught().is_none() {
                thread::sleep(LOOK);
            }
            if !arriving.is_finished() {
                incoming_guest.end(Some(&ending.to_string()));
            }
        }
    }
}

/// The return value of a thread; its panic continues here.
fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    let joined = thread.join();
    joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A runnable guest.
struct Begun<'scope, V: Vm> {
    machine: Machine<V>,
    vcpus: Vec<V::Vcpu>,
    /// Takes the pages that the source of the guest still has.
    arriving: Option<ScopedJoinHandle<'scope, ()>>,
}

/// Puts the guest into `machine`, and starts the thread that it needs on `scope`. `before` gets the
/// preparation.
fn begin<'scope, 'a: 'scope, B: Builder>(
    scope: &'scope Scope<'scope, '_>,
    job: &Job<'a>,
    builder: &B,
    machine: Machine<B::Vm>,
    before: &mut Before,
) -> Result<Begun<'scope, B::Vm>, Refusal> {
    let (vm, devices) = (machine.vm(), machine.devices());
    let vcpus = match job.start {
        Start::Image(image) => {
            let vcpus = vm.boot(image, &builder.full_command_line());
            vcpus.map_err(|error| refusal(&error))?
        }
        Start::Snapshot(snapshot) => {
            let (vcpus, restored) = restore(job, snapshot, vm, devices)?;
            before.restored = Some(restored);
            vcpus
        }
        Start::Lazily(lazy) => {
            let (vcpus, restored) = restore_lazily(job, lazy.snapshot, vm, devices)?;
            before.restored = Some(restored);
            vcpus
        }
        Start::Incoming(arrival) => return begin_arrived(scope, job, arrival, machine),
    };
    Ok(Begun {
        machine,
        vcpus,
        arriving: None,
    })
}

/// As [`begin`], for an incoming guest.
///
/// All threads are started before the guest is taken. If the host refuses one, the source gets the
/// reason, and keeps running the guest. Once the source knows that the guest runs here, the source
/// may end, so nothing may fail then.
fn begin_arrived<'scope, 'a: 'scope, V: Vm>(
    scope: &'scope Scope<'scope, '_>,
    job: &Job<'_>,
    arrival: &'a Arrival<'a>,
    machine: Machine<V>,
) -> Result<Begun<'scope, V>, Refusal> {
    let (gate, given) = mpsc::channel();
    let named = thread::Builder::new().name("lacuna-arriving".into());
    let taking = named.spawn_scoped(scope, move || {
        // An error says that the guest does not arrive.
        if let Ok(arriving) = given.recv() {
            arrival.take_rest(arriving);
        }
    });
    let taking = taking.map_err(failed)?;
    let prepared = receive(job, arrival, machine.vm(), machine.devices())?;
    // A client that asks to keep the guest waits for the end of this call.
    let started = arrival.start(prepared);
    let Arrived { vcpus, arriving } = started.map_err(|why| has_not_come(job, &why))?;
    // The other thread waits for this value, so it has not ended.
    let _ = gate.send(arriving);
    Ok(Begun {
        machine,
        vcpus,
        arriving: Some(taking),
    })
}

/// The incoming guest.
fn incoming_guest<'j>(job: &'j Job<'_>) -> Option<&'j IncomingHandle> {
    job.start.arrival().map(|arrival| arrival.handle())
}

pub(super) fn refusal(error: &impl BackendError) -> Refusal {
    (error.kind().into(), error.to_string())
}

/// Ends the control socket's thread. After a panic it also ends the waits for a guest's source, of
/// a thread and of clients.
pub(super) struct EndServing<'a> {
    control: Option<&'a ControlSocket>,
    incoming_guest: Option<&'a IncomingHandle>,
}

impl<'a> EndServing<'a> {
    /// Ends the thread of `socket` and no other wait.
    pub const fn of(socket: &'a ControlSocket) -> Self {
        Self {
            control: Some(socket),
            incoming_guest: None,
        }
    }

    /// The clients stay connected, and are served when the guest's machine is made, or during the
    /// next wait for a guest.
    pub fn hand_over(mut self) {
        if let Some(socket) = self.control.take() {
            socket.hand_over();
        }
    }
}

impl Drop for EndServing<'_> {
    fn drop(&mut self) {
        if let Some(incoming_guest) = self.incoming_guest
            && thread::panicking()
        {
            incoming_guest.end(Some("a thread has panicked"));
        }
        if let Some(socket) = self.control {
            socket.end();
        }
    }
}
