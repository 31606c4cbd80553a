//! A run on threads, with a control socket if there is one.

use super::arriving::{start, take_rest};
use super::incoming::{Arrival, receive};
use super::restored::{prefetch, restore, restore_lazily};
use super::{Job, Refusal, Start};
use crate::control::{ControlSocket, Controlled};
use crate::exit::Exit;
use crate::observe::Watched;
use crate::sample::{Before, LazyPages};
use lacuna_machine::{
    BackendError, Builder, Console, Ending, Observed, Pause, PlatformDevices, RunEnd, Vm,
    run_watched_pausable, status_page,
};
use lacuna_migrate::Guest;
use lacuna_migrate::stream::Arrived;
use lacuna_sync::{Clock as _, HostClock};
use std::io;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

/// Makes the VM and runs it to its end. The second value says what was done before.
pub(super) fn run<B: Builder>(
    job: &Job<'_>,
    builder: &B,
    console: impl Console + 'static,
    watch: &mut dyn FnMut(&Observed<'_, B::Vm>),
) -> Result<(RunEnd<B::Vm>, Before), Refusal>
where
    B::Vm: Watched,
{
    let vm = builder.build().map_err(|error| refusal(&error))?;
    let devices = PlatformDevices::of(vm.config().arch, console);
    let pause = Pause::default();
    let controls = Guest {
        vm: &*vm,
        devices: &devices,
        pause: &pause,
    };
    let control = job.control.as_ref();
    let controlled = control.map(|socket| {
        let coming = job
            .start
            .arrival()
            .map(|arrival| Arc::clone(arrival.coming()));
        (socket, Controlled::new(controls, socket.ends(), coming))
    });
    let (mut before, mut clock) = (Before::default(), HostClock::default());
    thread::scope(|scope| {
        if let Some((socket, guest)) = &controlled {
            let named = thread::Builder::new().name("lacuna-control".into());
            let started = named.spawn_scoped(scope, || socket.serve(guest));
            started.map_err(failed)?;
        }
        let _end = EndServing(control);
        let run = begin(job, builder, &vm, &devices, &mut before).and_then(|begun| {
            clock = HostClock::default();
            controlled.iter().for_each(|(_, guest)| guest.begins());
            run_begun(job, begun, &controls, &clock, watch)
        });
        // Clients wait until the run begins or ends.
        let lazy = run.inspect_err(|_| devices.end(Ending::Stopped, &*vm))?;
        if let Some(restored) = &mut before.restored {
            restored.lazy = lazy;
        }
        Ok::<_, Refusal>(())
    })?;
    drop(controlled);
    // The status page may be swapped out.
    vm.end_latency();
    let end = RunEnd {
        ending: devices.ending().unwrap_or(Ending::Stopped),
        end: clock.now(),
        status: status_page(&*vm, &devices),
        trace_hash: None,
        vm,
    };
    Ok((end, before))
}

fn failed(error: io::Error) -> Refusal {
    (Exit::Host, format!("the run cannot start: {error}"))
}

/// Runs a guest to its end, while pages come that it lacks. Returns what came of a lazy restore.
fn run_begun<V: Vm>(
    job: &Job<'_>,
    begun: Begun<'_, V>,
    guest: &Guest<'_, V>,
    clock: &HostClock,
    watch: &mut dyn FnMut(&Observed<'_, V>),
) -> Result<Option<LazyPages>, Refusal> {
    let (vm, devices) = (guest.vm, guest.devices);
    thread::scope(|scope| {
        let mut background = None;
        if let Start::Lazily(lazy) = job.start {
            let named = thread::Builder::new().name("lacuna-prefetch".into());
            let started = named.spawn_scoped(scope, || prefetch(job, lazy, vm, devices));
            background = Some(started.map_err(failed)?);
        }
        let vcpus = match begun {
            Begun::Here(vcpus) => vcpus,
            Begun::Given(arrival, arrived) => {
                let Arrived { vcpus, arriving } = *arrived;
                let named = thread::Builder::new().name("lacuna-arriving".into());
                let started = named.spawn_scoped(scope, || take_rest(arrival, vm, arriving));
                started.map_err(failed)?;
                vcpus
            }
        };
        let ran = run_watched_pausable(vm, vcpus, devices, clock, guest.pause, watch);
        if let Some(arrival) = job.start.arrival() {
            let stopped = matches!(devices.ending(), None | Some(Ending::Stopped));
            arrival.coming().end(stopped);
        }
        ran.map_err(failed)
            .inspect_err(|_| devices.end(Ending::Stopped, vm))?;
        let join = |thread: ScopedJoinHandle<'_, LazyPages>| {
            let came = thread.join();
            came.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        Ok(background.map(join))
    })
}

/// A guest that can run.
enum Begun<'a, V: Vm> {
    /// All of it is here, or in a snapshot.
    Here(Vec<V::Vcpu>),
    /// Its source has given it away, and may have pages of it.
    Given(&'a Arrival<'a>, Box<Arrived<V>>),
}

/// Puts the guest into `vm` and `devices`. `before` gets what was done.
fn begin<'a, B: Builder>(
    job: &Job<'a>,
    builder: &B,
    vm: &Arc<B::Vm>,
    devices: &PlatformDevices,
    before: &mut Before,
) -> Result<Begun<'a, B::Vm>, Refusal> {
    Ok(Begun::Here(match job.start {
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
        Start::Incoming(arrival) => {
            let prepared = receive(job, arrival, vm, devices)?;
            let arrived = start(job, arrival, prepared)?;
            return Ok(Begun::Given(arrival, Box::new(arrived)));
        }
    }))
}

fn refusal(error: &impl BackendError) -> Refusal {
    (error.kind().into(), error.to_string())
}

/// Ends the control socket's thread, also after a panic.
struct EndServing<'a>(Option<&'a ControlSocket<'a>>);

impl Drop for EndServing<'_> {
    fn drop(&mut self) {
        if let Some(socket) = self.0 {
            socket.end();
        }
    }
}
