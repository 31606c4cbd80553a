//! A VM that takes turns: its vCPUs' threads, and their start and stop.
//!
//! The threads are not a [`lacuna::Machine`]'s: they report the processor time of their
//! turns, and a vCPU with a full ring reaps it.

use super::{Cast, Done, InBackground, Player, reap};
use crate::experiment::LabResult;
use crate::fixture::boot;
use crate::native::thread_cpu_ns;
use crate::session::{Guest, LastWords, image};
use lacuna::device::dispatch;
use lacuna::soft::{Background, Vcpu, Vm, VmBuilder};
use lacuna::{Ending, Exit, Kick as _, PlatformDevices, Vcpu as _};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Instant;

pub(super) struct Machine {
    pub(super) vm: Arc<Vm>,
    pub(super) devices: PlatformDevices,
    pub(super) words: LastWords,
    background: InBackground,
    /// A vCPU's thread reads during a turn. The lock for writing is the time between two turns.
    turn: RwLock<()>,
    /// The vCPUs shall leave.
    closed: AtomicBool,
    /// Nanoseconds of the vCPUs' finished turns: by the wall clock, and by their threads' clocks.
    pub(super) ns: [AtomicU64; 2],
    /// How often a vCPU found its ring full, and how many pages such vCPUs reaped.
    pub(super) full_rings: [AtomicU64; 2],
}

/// The time between two turns.
pub(super) type Closed<'a> = RwLockWriteGuard<'a, ()>;

impl Machine {
    pub(super) fn new(builder: &VmBuilder, cast: Cast) -> LabResult<(Self, Vec<Vcpu>)> {
        let command_line = builder.full_command_line();
        let image = image(builder.arch, cast.guest)?;
        let (vm, vcpus) = boot(builder, &image, &command_line)?;
        let words = LastWords::default();
        let machine = Self {
            devices: PlatformDevices::of(builder.arch, words.console()),
            vm,
            words,
            background: cast.background,
            turn: RwLock::default(),
            closed: AtomicBool::new(false),
            ns: Default::default(),
            full_rings: Default::default(),
        };
        Ok((machine, vcpus))
    }

    /// Lets the vCPUs run.
    pub(super) fn open(&self, closed: Option<Closed<'_>>) {
        self.closed.store(false, Relaxed);
        drop(closed);
    }

    /// Stops the vCPUs; on return, none runs. If a vCPU is kicked outside of the guest, its next
    /// run returns at once, and the run after that continues.
    pub(super) fn close(&self) -> Closed<'_> {
        self.closed.store(true, Relaxed);
        self.vm.kick_all();
        self.turn.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The threads of the host, which work until they are dropped.
    pub(super) fn background(&self) -> LabResult<Option<Background>> {
        Ok(match self.background {
            InBackground::Nothing => None,
            InBackground::Reclaim => Some(self.vm.host().spawn_background()?),
        })
    }

    /// The work of one vCPU's thread.
    pub(super) fn drive(&self, mut vcpu: Vcpu) {
        let _end = End(self);
        while self.devices.ending().is_none() {
            let _turn = self.turn.read().unwrap_or_else(PoisonError::into_inner);
            let (wall, cpu_ns) = (Instant::now(), thread_cpu_ns());
            while !self.closed.load(Relaxed) && self.devices.ending().is_none() {
                self.step(&mut vcpu);
            }
            let wall = wall.elapsed().as_nanos();
            let wall = u64::try_from(wall).expect("a turn is shorter than centuries");
            self.ns[0].fetch_add(wall, Relaxed);
            self.ns[1].fetch_add(thread_cpu_ns() - cpu_ns, Relaxed);
        }
    }

    /// Runs a vCPU to its next exit. A vCPU whose ring is full reaps itself, as QEMU's vCPU threads
    /// do.
    fn step(&self, vcpu: &mut Vcpu) {
        let exit = vcpu.run();
        if let Ok(Exit::DirtyRingFull) = exit {
            self.full_rings[0].fetch_add(1, Relaxed);
            self.full_rings[1].fetch_add(reap(&self.vm), Relaxed);
        } else {
            // The loop asks the devices whether to continue.
            let _ = dispatch(vcpu, exit, &self.devices, &*self.vm);
        }
    }

    /// Lets the guest boot and prepare itself, and stops it.
    pub(super) fn attach(&self) -> LabResult<Player<'_>> {
        let background = self.background()?;
        let guest = Guest::wait_for(&*self.vm, &self.devices)?;
        guest.prepared()?;
        let closed = Some(self.close());
        drop(background);
        let mut player = Player {
            machine: self,
            guest,
            closed,
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
    }
}
