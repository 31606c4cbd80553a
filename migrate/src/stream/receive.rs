//! The destination of a migration, until it runs the guest.

use super::arrive::{Arrived, Arriving, Late};
use super::connection::Connections;
use super::early::EarlyPages;
use super::frame::Kind;
use super::frames::{Frames, unexpected};
use super::remote::RemotePages;
use super::take::Early;
use super::{Departure, Hello, MigrationId, Mode, Role, STREAMS_MAX, Stage};
use crate::copy::OnPages;
use crate::state::{MachineState, check_devices, restore_state};
use crate::{MachineConfig, MemoryLayout, MigrateError};
use lacuna_addr::{Gfn, GfnRange};
use lacuna_machine::{
    MissingMemory, PageSource, PlatformDevices, ProcessorFeatures, SaveRestore as _, Vm,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// How a guest has left its source, and when its state arrived.
type Came = (Departure, Instant);

/// An incoming guest.
pub struct Incoming {
    main: Frames,
    id: MigrationId,
    mode: Mode,
    /// Connections that take pages before the guest arrives.
    streams: u32,
    machine: MachineConfig,
    /// The VMM's devices at the source, and the versions of their states.
    devices: BTreeMap<String, u32>,
    processor: ProcessorFeatures,
    /// `None`: all memory arrives before the guest. Dropped, it fails requests of the VM.
    late: Option<Late>,
}

/// A restored guest that does not run yet.
#[must_use = "the source waits: start it, or drop it to leave the guest to the source"]
pub struct Prepared<V: Vm> {
    vcpus: Vec<V::Vcpu>,
    arriving: Arriving<V>,
}

/// A restored guest that must not run here: the connection was cut before `Go` arrived. The guest
/// runs at the source, or stays paused there.
#[must_use = "the source may connect again: resume it, or drop it to leave the guest to the source"]
pub struct Waiting<V: Vm> {
    prepared: Prepared<V>,
    why: MigrateError,
}

impl Incoming {
    /// Takes a connection, and waits there for the source's first message.
    ///
    /// # Errors
    /// There is no connection, it is cut, or its other end is no source of this version.
    pub fn accept(connections: &dyn Connections) -> Result<Self, MigrateError> {
        let mut main = Frames::open(connections)?;
        let first = main.read().and_then(|kind| {
            match kind {
                Kind::Hello => main.check_version()?,
                Kind::Join => return Err(MigrateError::NotHere),
                other => return Err(unexpected(other, Kind::Hello)),
            }
            let hello: Hello = main.json()?;
            hello.machine.layout.check()?;
            if !(1..=STREAMS_MAX).contains(&hello.streams) {
                return Err(MigrateError::Streams(hello.streams));
            }
            hello.compression.check()?;
            let late = match hello.mode {
                Mode::PreCopy => None,
                Mode::PostCopy | Mode::Hybrid => Some(Late::new(RemotePages::new())),
            };
            Ok((hello, late))
        });
        match first {
            Ok((hello, late)) => Ok(Self {
                main,
                id: hello.id,
                mode: hello.mode,
                streams: hello.streams,
                machine: hello.machine,
                devices: hello.devices,
                processor: hello.processor,
                late,
            }),
            Err(why) => {
                main.refuse(&why);
                Err(why)
            }
        }
    }

    /// The incoming guest's machine: make a VM of this configuration for [`Incoming::receive`].
    pub fn machine(&self) -> &MachineConfig {
        &self.machine
    }

    /// The names of the VMM's devices at the source, and the versions of their states. The
    /// devices for [`Incoming::receive`] must be the same, and accept these versions.
    pub fn devices(&self) -> &BTreeMap<String, u32> {
        &self.devices
    }

    /// When the guest is sent: before, between, or after its pages.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The page source for the new VM; `None` if all memory arrives before the guest.
    pub fn page_source(&self) -> Option<Arc<dyn PageSource>> {
        let late = self.late.as_ref()?;
        Some(Arc::<RemotePages>::clone(late.pages()))
    }

    /// Refuses the guest, and sends the reason to the source. The source keeps running the guest.
    pub fn refuse(mut self, why: &MigrateError) {
        self.main.refuse(why);
    }

    /// Takes memory and state into `vm`, a new VM without an image, and `devices`, new ones. The
    /// VMM's devices stay paused until the guest runs ([`PlatformDevices::resume`]). Calls
    /// `each` with the number of pages since the last call. `connections` accepted this migration's
    /// first connection.
    ///
    /// # Errors
    /// [`MigrateError`]. The source gets the reason, and keeps running the guest. The VM is of no
    /// use.
    pub fn receive<V: Vm>(
        mut self,
        connections: &dyn Connections,
        vm: &Arc<V>,
        devices: &PlatformDevices,
        each: OnPages<'_>,
    ) -> Result<Prepared<V>, MigrateError> {
        match self.take(connections, vm, devices, each) {
            Ok((vcpus, left)) => Ok(Prepared {
                vcpus,
                arriving: Arriving::new(
                    Arc::clone(vm),
                    self.main,
                    (self.id, self.machine.layout),
                    left,
                    self.late,
                ),
            }),
            Err(why) => {
                self.main.refuse(&why);
                Err(why)
            }
        }
    }

    fn take<V: Vm>(
        &mut self,
        connections: &dyn Connections,
        vm: &Arc<V>,
        devices: &PlatformDevices,
        each: OnPages<'_>,
    ) -> Result<(Vec<V::Vcpu>, Came), MigrateError> {
        check_devices(devices, &self.devices)?;
        let missing = self.prepare(&**vm)?;
        let bare = vm.bare_vcpus();
        let mut vcpus = bare.map_err(|error| MigrateError::Vcpus(error.to_string()))?;
        if let Some(vcpu) = vcpus.first_mut() {
            self.processor.check_in(&vcpu.save()?.features())?;
        }
        self.main.welcome(None, missing.map(MissingMemory::unit))?;
        let lanes = self.accept_others(connections)?;
        let place = Early {
            vm: &**vm,
            layout: &self.machine.layout,
            late: missing.zip(self.late.as_ref()).map(|(missing, late)| {
                EarlyPages::new((&**vm, missing), &self.machine.layout, late.pages())
            }),
        };
        let awaited = place.take_all(&mut self.main, lanes, each)?;
        if let Some(late) = place.late {
            late.make_missing(&awaited, &mut self.main)?;
        }
        let came = Instant::now();
        let (machine, state, departure): (MachineConfig, MachineState, Departure) =
            self.main.json()?;
        if machine.layout != self.machine.layout {
            return Err(MigrateError::SlotsChanged);
        }
        machine.check(&**vm)?;
        match &mut self.late {
            None if !awaited.is_empty() => {
                return Err(MigrateError::stream("pages are left after a pre-copy"));
            }
            None => {}
            Some(late) => {
                late.pages().set_awaited(awaited);
                late.begin(&self.main)?;
            }
        }
        let restored = restore_state(&**vm, &mut vcpus, devices, &state);
        // The restore of the state may have needed a page that a cut has lost, so the cut is the
        // cause.
        self.late.iter().try_for_each(Late::outlive_cuts)?;
        restored?;
        Ok((vcpus, (departure, came)))
    }

    /// Takes the connections beside the first one. Returns those for pages before the guest.
    fn accept_others(
        &mut self,
        connections: &dyn Connections,
    ) -> Result<Vec<Frames>, MigrateError> {
        let accept = |_| {
            let (mut frames, _) = Frames::accept(connections, &self.id, &[Role::Pages])?;
            frames.welcome(None, None)?;
            Ok(frames)
        };
        let lanes: Result<_, MigrateError> = (1..self.streams).map(accept).collect();
        let lanes = lanes?;
        if let Some(late) = &mut self.late
            && late.accept(connections, &self.id)?.is_some()
        {
            return Err(MigrateError::stream("a new first connection before Go"));
        }
        Ok(lanes)
    }

    /// Makes the memory of `vm` ready for pages. Returns its missing memory, if pages arrive after
    /// the guest.
    fn prepare<'v>(&self, vm: &'v impl Vm) -> Result<Option<&'v dyn MissingMemory>, MigrateError> {
        self.machine.check(vm)?;
        if self.late.is_none() {
            return self.machine.layout.apply(vm).map(|()| None);
        }
        // A VM asks its page source for its first slots, by their order.
        if MemoryLayout::of(vm) != self.machine.layout {
            return Err(MigrateError::OtherSlots);
        }
        let missing = vm.missing_memory().ok_or(MigrateError::NoSource)?;
        // A slot that was added after boot has no page source, and refuses this.
        for slot in self.machine.layout.slots() {
            let pages = slot.pages.min(missing.unit().get());
            let unit = Gfn::new(slot.gfn).and_then(|first| GfnRange::new(first, pages));
            missing.make_missing(unit.ok_or(MigrateError::OtherSlots)?)?;
        }
        Ok(Some(missing))
    }
}

impl<V: Vm> Prepared<V> {
    /// Sends `Prepared` to the source, and waits for `Go`.
    ///
    /// # Errors
    /// [`Waiting`]: the connection was cut before `Go` arrived. The guest must not run here.
    pub fn start(mut self) -> Result<Arrived<V>, Box<Waiting<V>>> {
        match self.arriving.until_go() {
            Ok(()) => Ok(self.run()),
            Err(why) => {
                self.arriving.disconnect();
                let prepared = self;
                Err(Box::new(Waiting { prepared, why }))
            }
        }
    }

    fn run(mut self) -> Arrived<V> {
        self.arriving.run();
        Arrived {
            vcpus: self.vcpus,
            arriving: self.arriving,
        }
    }
}

impl<V: Vm> Waiting<V> {
    /// How the connection has ended.
    pub fn why(&self) -> &MigrateError {
        &self.why
    }

    /// Leaves the guest to its source.
    pub fn give_up(self) -> MigrateError {
        self.why
    }

    /// Takes a new connection of the source, and waits for its `Go`.
    ///
    /// # Errors
    /// [`Waiting`] again.
    pub fn resume(mut self, connections: &dyn Connections) -> Result<Arrived<V>, Box<Self>> {
        let arriving = &mut self.prepared.arriving;
        match arriving.reconnect(connections, Stage::Prepared) {
            Ok(()) => self.prepared.start(),
            Err(why) => {
                arriving.disconnect();
                self.why = why;
                Err(Box::new(self))
            }
        }
    }

    /// Runs the guest here without the source's `Go`: a person has seen that the source does not
    /// run it, and never will.
    pub fn decide_to_run(self) -> Arrived<V> {
        self.prepared.run()
    }
}
