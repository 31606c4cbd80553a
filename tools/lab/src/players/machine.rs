//! A VM that takes turns: its vCPUs' threads, and their start and stop.

use super::gate::Gate;
use super::{Cast, Done, InBackground, Player, reap};
use crate::experiment::LabError;
use crate::fixture::boot;
use crate::session::{Guest, LastWords, image};
use lacuna_machine::{Ending, Exit, Kick as _, PlatformDevices, Vcpu as _, VcpuError, dispatch};
use lacuna_soft::{Background, Vcpu, Vm, VmBuilder};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The longest time until a guest has announced its status page.
const LIMIT: Duration = Duration::from_secs(60);

pub(super) struct Machine {
    pub(super) vm: Arc<Vm>,
    pub(super) devices: PlatformDevices,
    pub(super) words: LastWords,
    background: InBackground,
    gate: Gate,
    rings_full: AtomicU64,
    reaped: AtomicU64,
}

impl Machine {
    pub(super) fn new(builder: &VmBuilder, cast: Cast) -> Result<(Self, Vec<Vcpu>), LabError> {
        let command_line = builder.full_command_line();
        let (vm, vcpus) = boot(
            builder,
            cast.delivery,
            &image(builder.arch, cast.guest)?,
            &command_line,
        )?;
        let words = LastWords::default();
        let machine = Self {
            devices: PlatformDevices::new(words.console()),
            vm,
            words,
            background: cast.background,
            gate: Gate::default(),
            rings_full: AtomicU64::new(0),
            reaped: AtomicU64::new(0),
        };
        Ok((machine, vcpus))
    }

    /// Lets the vCPUs run.
    pub(super) fn open(&self) {
        self.gate.open();
    }

    /// Stops the vCPUs; on return, none runs. If a vCPU is kicked outside of the guest, its next
    /// run returns at once, and the run after that continues.
    pub(super) fn close(&self) {
        self.gate.shut();
        self.vm.kick_all();
        self.gate.wait();
    }

    /// The threads of the host, which work until they are dropped.
    pub(super) fn background(&self) -> Result<Option<Background>, LabError> {
        Ok(match self.background {
            InBackground::Nothing => None,
            InBackground::Reclaim => Some(self.vm.host().spawn_background()?),
        })
    }

    /// The guest, which has announced its status page.
    pub(super) fn guest(&self) -> Result<Guest<'_>, LabError> {
        let guest = Guest::attach(&*self.vm, &self.devices);
        guest.ok_or_else(|| LabError::Guest("the guest did not announce its status page".into()))
    }

    /// How often a vCPU found its ring full, and how many pages such vCPUs reaped.
    pub(super) fn full_rings(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.rings_full), read(&self.reaped))
    }

    /// The time of its vCPUs in finished turns: by the wall clock, and by their threads' clocks.
    pub(super) fn spent_ns(&self) -> [f64; 2] {
        self.gate.spent_ns()
    }

    /// The work of one vCPU's thread.
    pub(super) fn drive(&self, mut vcpu: Vcpu) {
        let _end = End(self);
        let mut turn = Some(self.gate.enter());
        while self.devices.ending().is_none() {
            self.gate.pass(&mut turn);
            let exit = vcpu.run();
            self.exit(&mut vcpu, exit);
        }
    }

    /// Handles an exit. A vCPU whose ring is full reaps itself, as QEMU's vCPU threads do.
    fn exit(&self, vcpu: &mut Vcpu, exit: Result<Exit, VcpuError>) {
        if let Ok(Exit::DirtyRingFull) = exit {
            self.rings_full.fetch_add(1, Ordering::Relaxed);
            self.reaped.fetch_add(reap(&self.vm), Ordering::Relaxed);
        } else {
            // The loop asks the devices whether to continue.
            let _ = dispatch(vcpu, exit, &self.devices, &*self.vm);
        }
    }

    /// Lets the guest boot and prepare itself, and stops it.
    pub(super) fn attach(&self) -> Result<Player<'_>, LabError> {
        let background = self.background()?;
        let deadline = Instant::now() + LIMIT;
        while self.devices.status_page().is_none() {
            if self.devices.ending().is_some() || Instant::now() > deadline {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        let guest = self.guest()?;
        guest.prepared()?;
        self.close();
        drop(background);
        let mut player = Player {
            machine: self,
            guest,
            last: Done::default(),
        };
        player.last = player.done()?;
        Ok(player)
    }
}

/// Ends the guest when it is dropped, also after an error or a panic.
pub(super) struct End<'a>(pub(super) &'a Machine);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.devices.end(Ending::Stopped, &*self.0.vm);
        self.0.gate.open();
    }
}
