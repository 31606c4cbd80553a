//! Runs all vCPUs of one or more VMs on one thread, in virtual time and from a seed. A run repeats
//! bit for bit.
//!
//! ```text
//! loop: wake the vCPUs that can run -> draw one of them and a number of instructions -> step it
//!       -> advance the time by 1 ns an instruction -> deliver I/O that is due
//!       -> sometimes one step of background reclaim, or of making pages huge
//!       -> the caller's operations between slices: harvests, switches, checks
//!       no vCPU can run: jump to the next completion, timer, or act of a page source; if there is
//!       none, the guest hangs
//! ```
//! The same code runs in thread mode. Only time, I/O and the choice of the next vCPU come from this
//! file. The [`Trace`] hashes every choice and every vCPU's state after each slice. So if two runs
//! with the same seed have different hashes, there is a bug.

use crate::either::Vcpu;
use crate::step::{Step, Wait};
use crate::vm::Vm;
use fastrand::Rng;
use lacuna_host::{Host, Ticket};
use lacuna_machine::{Ending, Exit, Next, PlatformDevices, Vcpu as _, VcpuError, dispatch};
use lacuna_sync::{Clock, Nanos, VirtualClock};
use std::sync::Arc;

/// Longest slice, in instructions.
const SLICE_MAX: u64 = 4000;
/// The cost of a slice in addition to its instructions, so that time advances even if none retires.
const SLICE_NS: u64 = 50;

/// The parts of a simulator.
pub struct SimulatorConfig {
    /// All choices follow from this seed.
    pub seed: u64,
    /// The clock of the VMs and the host.
    pub clock: Arc<VirtualClock>,
    /// Their memory manager, with a virtual executor.
    pub host: Arc<Host>,
}

/// One VM to run.
pub struct SimulatedVm {
    /// The VM.
    pub vm: Arc<Vm>,
    /// Its vCPUs, from [`Vm::boot`](lacuna_machine::Vm::boot).
    pub vcpus: Vec<Vcpu>,
    /// Its devices.
    pub devices: Arc<PlatformDevices>,
}

/// The result of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trace {
    /// FNV-1a over every slice: the vCPU, its progress, its final state and the time.
    pub hash: u64,
    /// Slices run.
    pub slices: u64,
    /// Virtual time at the end.
    pub end: Nanos,
}

/// Something outside the VMs that acts at times of the virtual clock, such as a page source. The
/// simulator's thread makes all calls, between two slices.
pub trait Timed {
    /// The time of its next act; `None` if it waits for something else.
    fn next_due(&self) -> Option<Nanos>;

    /// Performs the acts that are due at `now`.
    fn act(&self, now: Nanos);
}

enum RunnerState {
    Ready,
    Halted(Option<Nanos>),
    Page(Ticket),
    /// Out of frames; try again when the next write-out has completed.
    Memory(Nanos),
    Over,
}

struct Runner {
    guest: usize,
    vcpu: Vcpu,
    state: RunnerState,
}

/// The single-threaded simulator.
pub struct Simulator {
    rng: Rng,
    clock: Arc<VirtualClock>,
    host: Arc<Host>,
    guests: Vec<(Arc<Vm>, Arc<PlatformDevices>)>,
    runners: Vec<Runner>,
    timed: Vec<Arc<dyn Timed>>,
    trace: Trace,
}

impl Simulator {
    /// A simulator without VMs.
    pub fn new(config: SimulatorConfig) -> Self {
        let SimulatorConfig { seed, clock, host } = config;
        let trace = Trace {
            hash: 0xcbf2_9ce4_8422_2325,
            slices: 0,
            end: Nanos(0),
        };
        let rng = Rng::with_seed(seed);
        Self {
            rng,
            clock,
            host,
            guests: Vec::new(),
            runners: Vec::new(),
            timed: Vec::new(),
            trace,
        }
    }

    /// Adds a VM.
    pub fn add(&mut self, guest: SimulatedVm) {
        guest.devices.resume();
        let index = self.guests.len();
        let runner = |vcpu| Runner {
            guest: index,
            vcpu,
            state: RunnerState::Ready,
        };
        self.runners.extend(guest.vcpus.into_iter().map(runner));
        self.guests.push((guest.vm, guest.devices));
    }

    /// Adds an actor beside the VMs.
    pub fn add_timed(&mut self, timed: Arc<dyn Timed>) {
        self.timed.push(timed);
    }

    /// Runs until every guest has an ending. Calls `watch` now and then, for live views.
    pub fn run(&mut self, mut watch: impl FnMut()) -> Trace {
        let mut slices = 0u64;
        self.run_beside(|| {
            slices += 1;
            if slices.is_multiple_of(1024) {
                watch();
            }
        })
    }

    /// Runs until every guest has an ending. Calls `between` after every slice, while all vCPUs are
    /// out of guest code. `between` is a part of the run: for the same trace it must do the same.
    /// If writes are recorded in rings, only `between` makes room in them.
    pub fn run_beside(&mut self, mut between: impl FnMut()) -> Trace {
        while self.run_slice() {
            between();
        }
        self.guests.iter().for_each(|(_, devices)| devices.flush());
        self.trace.end = self.clock.now();
        self.trace
    }

    /// Runs one slice of one vCPU. Returns `false` if every guest has an ending.
    pub fn run_slice(&mut self) -> bool {
        loop {
            self.retire();
            if self
                .runners
                .iter()
                .all(|r| matches!(r.state, RunnerState::Over))
            {
                return false;
            }
            let ready = self.wake();
            if ready.is_empty() {
                self.idle();
                continue;
            }
            let chosen = ready[self.rng.usize(..ready.len())];
            self.slice(chosen);
            match self.rng.u8(..) {
                ..32 => drop(self.host.balance()),
                32..48 => drop(self.host.collapse_step()),
                _ => {}
            }
            return true;
        }
    }

    /// The vCPUs' final counters, by guest in the order added.
    pub fn vcpus(&self, guest: usize) -> impl Iterator<Item = &Vcpu> {
        self.runners
            .iter()
            .filter(move |r| r.guest == guest)
            .map(|r| &r.vcpu)
    }

    /// The vCPUs of one guest, between two slices: to save their states.
    pub fn vcpus_mut(&mut self, guest: usize) -> impl Iterator<Item = &mut Vcpu> {
        self.runners
            .iter_mut()
            .filter(move |r| r.guest == guest)
            .map(|r| &mut r.vcpu)
    }

    fn retire(&mut self) {
        for runner in &mut self.runners {
            if self.guests[runner.guest].1.ending().is_some() {
                runner.state = RunnerState::Over;
            }
        }
    }

    /// The indices of the vCPUs that can run now.
    fn wake(&mut self) -> Vec<usize> {
        let now = self.clock.now();
        let mut ready = Vec::with_capacity(self.runners.len());
        for (index, runner) in self.runners.iter_mut().enumerate() {
            let awake = match &runner.state {
                RunnerState::Ready => true,
                RunnerState::Memory(until) => *until <= now,
                RunnerState::Halted(until) => {
                    runner.vcpu.is_poked() || until.is_some_and(|at| at <= now)
                }
                RunnerState::Page(ticket) => ticket.is_done(),
                RunnerState::Over => false,
            };
            if awake {
                ready.push(index);
            }
        }
        ready
    }

    fn slice(&mut self, index: usize) {
        let fuel = self.rng.u64(1..=SLICE_MAX);
        let runner = &mut self.runners[index];
        let before = runner.vcpu.retired();
        if matches!(runner.state, RunnerState::Memory(_))
            && let Err(error) = runner.vcpu.reclaim()
        {
            let (vm, devices) = &self.guests[runner.guest];
            devices.end(Ending::Failed(error), &**vm);
            return;
        }
        runner.state = RunnerState::Ready;
        let step = runner.vcpu.step(fuel);
        self.clock
            .advance(runner.vcpu.retired() - before + SLICE_NS);
        let (vm, devices) = &self.guests[runner.guest];
        if let Step::Exit(exit) = &step {
            vm.meters[runner.vcpu.index()].exits.count(exit);
        }
        match step {
            Step::Ran | Step::Wait(Wait::Busy) => {}
            Step::Wait(Wait::Halt(until)) => runner.state = RunnerState::Halted(until),
            Step::Wait(Wait::Memory) => {
                runner.state = RunnerState::Memory(self.host.next_completion().unwrap_or_default());
            }
            Step::Wait(Wait::Page(ticket)) => {
                self.host.start(&ticket);
                runner.state = RunnerState::Page(ticket);
            }
            Step::Wait(Wait::Provided(ticket)) => runner.state = RunnerState::Page(ticket),
            // The vCPU need not sleep: its ring is emptied between slices.
            Step::Exit(Exit::DirtyRingFull) => {}
            Step::Exit(exit) => {
                if dispatch(&mut runner.vcpu, Ok(exit), devices, &**vm) == Next::Stop {
                    runner.state = RunnerState::Over;
                }
            }
            Step::Failed(error) => devices.end(Ending::Failed(error), &**vm),
        }
        self.deliver();
        self.note(index, fuel);
    }

    /// Makes all due events happen.
    fn deliver(&self) {
        let now = self.clock.now();
        self.host.poll(now);
        self.timed.iter().for_each(|timed| timed.act(now));
    }

    fn note(&mut self, index: usize, fuel: u64) {
        let vcpu = &self.runners[index].vcpu;
        let head = [index as u64, fuel, vcpu.retired(), self.clock.now().0];
        let mut hash = self.trace.hash;
        let mut note = |word: u64| hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        head.into_iter().for_each(&mut note);
        vcpu.note_registers(note);
        self.trace.hash = hash;
        self.trace.slices += 1;
    }

    /// No vCPU can run: the time jumps to the next event.
    fn idle(&mut self) {
        let timers = self.runners.iter().filter_map(|r| match r.state {
            RunnerState::Halted(until) => until,
            RunnerState::Memory(until) => Some(until),
            RunnerState::Ready | RunnerState::Page(_) | RunnerState::Over => None,
        });
        let timed = self.timed.iter().filter_map(|timed| timed.next_due());
        let events = timers.chain(timed).chain(self.host.next_completion());
        match events.min() {
            Some(at) => {
                self.clock.advance_to(at);
                self.deliver();
            }
            None => {
                for (vm, devices) in &self.guests {
                    devices.end(Ending::Failed(VcpuError::Hang), &**vm);
                }
            }
        }
    }
}
