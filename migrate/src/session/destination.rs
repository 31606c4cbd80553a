//! The destination's session: waits for a guest, takes it, and takes the pages that are left.
//!
//! ```text
//! wait ─► a connection ─► its first message ─► Arrival: receive ─► start ─► take_rest
//!   ▲                          │ is none
//!   └──── refused, reason ◄────┘
//! ```
//! All connections are watched at the same time. A connection that announces no machine is refused,
//! and the wait continues. The first connection that announces one brings the guest.

use super::incoming_handle::{Decision, IncomingEvent, IncomingHandle, OnEvent};
use crate::stream::{Arrived, Arriving, Incoming, Prepared};
use crate::transport::{Accepted, Address, Candidate, Listener, TransportError};
use crate::{MachineConfig, MigrateError};
use lacuna_machine::{Ending, Machine, PageSource, PlatformDevices, RunEnd, Running, Vm};
use lacuna_sync::{Mutex, lock, lock_order};
use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// The time between two attempts to take a connection.
const LOOK: Duration = Duration::from_millis(10);

/// Waits for guests, one at a time.
pub struct Destination {
    listener: Listener,
    on_event: OnEvent,
}

/// An announced guest. When the value is dropped, its [`Destination`] may wait for another one.
pub struct Arrival<'a> {
    machine: MachineConfig,
    devices: BTreeMap<String, u32>,
    connections: Accepted<'a>,
    handle: IncomingHandle,
    /// `None`: the guest has been taken.
    incoming: Mutex<Option<Incoming>, lock_order::FirstConnection>,
}

impl Destination {
    /// Waits at the address of `listener`. `on_event` gets reports, on any thread.
    pub fn new(
        listener: Listener,
        on_event: impl Fn(IncomingEvent<'_>) + Send + Sync + 'static,
    ) -> Self {
        let on_event = Arc::new(on_event);
        Self { listener, on_event }
    }

    /// Where it waits.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// Ends [`Destination::wait`]. Any thread may call this.
    pub fn end_wait(&self) {
        self.listener.link().cut();
    }

    /// Waits until a connection has announced a guest. Other connections are refused. `None`: the
    /// wait was ended.
    ///
    /// # Errors
    /// [`TransportError::Accept`]: for [`Address::Fd`] and [`Address::Exec`] also if their only
    /// connection announces no guest. [`TransportError::Single`]: a second wait at an
    /// [`Address::Fd`]. [`TransportError::Listen`]: the command cannot be started.
    pub fn wait(&self) -> Result<Option<Arrival<'_>>, TransportError> {
        let (at, link) = (self.address(), self.listener.link());
        let failed = |error| TransportError::Accept {
            at: at.clone(),
            error,
        };
        self.listener.begin()?;
        while link.is_open() {
            let next = self.listener.next().map_err(failed)?;
            let Some(Candidate { from, connection }) = next else {
                continue;
            };
            let announced = connection.map_err(MigrateError::Cut).and_then(|first| {
                let connections = Accepted::new(&self.listener, first);
                Ok((Incoming::accept(&connections)?, connections))
            });
            match announced {
                Ok((incoming, connections)) => {
                    let on_event = Arc::clone(&self.on_event);
                    return Ok(Some(Arrival {
                        handle: IncomingHandle::new(at.to_string(), &incoming, link, on_event),
                        machine: incoming.machine().clone(),
                        devices: incoming.devices().clone(),
                        connections,
                        incoming: Mutex::new(Some(incoming)),
                    }));
                }
                Err(why) if self.listener.is_single() => {
                    return Err(failed(io::Error::other(why)));
                }
                Err(why) => (self.on_event)(IncomingEvent::Refused {
                    from: &from,
                    why: &why,
                }),
            }
        }
        Ok(None)
    }
}

impl Arrival<'_> {
    /// The machine of the incoming guest. Make such a VM for it.
    pub fn machine(&self) -> &MachineConfig {
        &self.machine
    }

    /// The names of the VMM's devices at the source, and the versions of their states. The
    /// devices for [`Arrival::receive`] must be the same, and accept these versions.
    pub fn devices(&self) -> &BTreeMap<String, u32> {
        &self.devices
    }

    /// Its progress, and the decisions about it.
    pub fn handle(&self) -> &IncomingHandle {
        &self.handle
    }

    /// The page source of its VM; `None` if all pages arrive before the guest.
    pub fn page_source(&self) -> Option<Arc<dyn PageSource>> {
        lock(&self.incoming).as_ref()?.page_source()
    }

    fn take(&self) -> Option<Incoming> {
        lock(&self.incoming).take()
    }

    /// Sends the source the reason why no VM is made for its guest. Does nothing after
    /// [`Arrival::receive`].
    pub fn refuse(&self, why: impl Into<String>) {
        if let Some(incoming) = self.take() {
            incoming.refuse(&MigrateError::NoVm(why.into()));
        }
    }

    /// Takes memory and state of the guest into `vm` and `devices`. Some pages may remain at the
    /// source. `each` is called after each part, and may end it.
    ///
    /// # Errors
    /// The guest keeps running at its source.
    ///
    /// # Panics
    /// The guest was taken or refused before.
    pub fn receive<V: Vm>(
        &self,
        vm: &Arc<V>,
        devices: &PlatformDevices,
        each: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Prepared<V>, MigrateError> {
        let incoming = self.take().expect("a guest is taken once");
        let received = incoming.receive(&self.connections, vm, devices, &mut |more| {
            self.handle.count_arrived(more);
            each()
        });
        received.inspect_err(|_| self.handle.notify())
    }

    /// Waits until the guest may run here: its source says so, or [`IncomingHandle::keep`]. The
    /// caller starts its vCPUs afterwards, so all pages that arrive after it are missing now.
    ///
    /// # Errors
    /// The guest does not run here.
    pub fn start<V: Vm>(&self, prepared: Prepared<V>) -> Result<Arrived<V>, MigrateError> {
        let arrived = self.until_started(prepared);
        match &arrived {
            Ok(Arrived { arriving, .. }) => self.handle.set_running(
                arriving.awaited_now(),
                arriving.downtime(),
                arriving.rounds(),
            ),
            Err(_) => self.handle.end(Some("it has not come")),
        }
        arrived
    }

    fn until_started<V: Vm>(&self, prepared: Prepared<V>) -> Result<Arrived<V>, MigrateError> {
        let mut started = prepared.start();
        loop {
            let waiting = match started {
                Ok(arrived) => return Ok(arrived),
                Err(waiting) => waiting,
            };
            // A refusing source has not handed the guest over.
            if let MigrateError::Refused(_) = waiting.why() {
                return Err(waiting.give_up());
            }
            match self.handle.was_cut_while_prepared(waiting.why()) {
                None => started = waiting.resume(&self.connections),
                Some(Decision::Keep) => return Ok(waiting.decide_to_run()),
                Some(Decision::Cancel | Decision::End) => return Err(waiting.give_up()),
            }
        }
    }

    /// Takes the remaining pages, as often as the source connects, until all have arrived and the
    /// run has ended ([`IncomingHandle::end`]).
    pub fn take_rest<V: Vm>(&self, mut arriving: Arriving<V>) {
        let handle = &self.handle;
        loop {
            match arriving.finish(&mut |_| ControlFlow::Continue(())) {
                Ok(()) => handle.set_whole(),
                Err(why) => handle.was_cut_while_running(&why),
            }
            let mut failed = false;
            loop {
                if let Some(decision) = handle.next(failed) {
                    if decision == Decision::End {
                        self.say_that_it_has_ended(&mut arriving);
                    }
                    // Missing pages are lost from here on.
                    drop(arriving);
                    return handle.set_lost();
                }
                failed = arriving.resume(&self.connections).is_err();
                if !failed {
                    break;
                }
            }
            handle.reconnected();
        }
    }

    /// Takes the guest into the VM and the devices of `machine`, and runs it to its end. Calls
    /// `beside` on this thread as soon as the guest runs here, while another thread takes its
    /// remaining pages: a VMM's loop over a [`Running`] may be `beside`. `each` as in
    /// [`Arrival::receive`].
    ///
    /// # Errors
    /// The guest does not run here.
    pub fn run<V: Vm>(
        &self,
        machine: Machine<V>,
        each: &mut dyn FnMut() -> ControlFlow<()>,
        beside: impl FnOnce(&Running<V>),
    ) -> Result<RunEnd<V>, MigrateError> {
        // Nothing may fail once the source has handed the guest over, so the thread comes first.
        let (gate, given) = mpsc::channel();
        thread::scope(|scope| {
            let named = thread::Builder::new().name("lacuna-arriving".into());
            let take_rest = move || given.recv().map(|arriving| self.take_rest(arriving));
            let taking = named.spawn_scoped(scope, take_rest);
            taking.map_err(MigrateError::Thread)?;
            let prepared = self.receive(machine.vm(), machine.devices(), each)?;
            let Arrived { vcpus, arriving } = self.start(prepared)?;
            // After a panic of `beside`, the other thread must not wait for the source.
            let panicked = EndOnPanic(&self.handle);
            let running = machine.start(vcpus);
            let _ = gate.send(arriving);
            beside(&running);
            let end = running.wait();
            drop(panicked);
            let is_stopped = end.ending == Ending::Stopped;
            let why = is_stopped.then(|| end.ending.to_string());
            self.handle.end(why.as_deref());
            Ok(end)
        })
    }

    /// Sends the source the reason why the guest has ended here, if the source waits for more.
    fn say_that_it_has_ended<V: Vm>(&self, arriving: &mut Arriving<V>) {
        let Some(why) = self.handle.has_ended() else {
            return;
        };
        let connections = &self.connections;
        while connections.link().is_open() && arriving.end(connections, &why).is_err() {
            thread::sleep(LOOK);
        }
    }
}

struct EndOnPanic<'a>(&'a IncomingHandle);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.end(Some("a thread has panicked"));
        }
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.connections.link().begin_again();
    }
}
