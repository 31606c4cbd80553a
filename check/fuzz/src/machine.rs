//! Whole machines on one thread, under a virtual clock: everything follows from the seed.
//!
//! ```text
//! loop: wake the vCPUs that can run -> step one of them -> answer its exit -> advance the time
//!       -> sometimes an operation of the host (`monitor`), a reset, another VM
//!       -> verify: stage 2, MMU, host, async faults, leaks into registers
//!       no vCPU can run: jump to the next completion or timer; if there is none: reset
//! ```

use crate::monitor::Monitor;
use crate::plan::{Mode, Plan};
use crate::run::Run;
use crate::shadow::read_all;
use crate::subject::Subject;
use fastrand::Rng;
use lacuna_host::Ticket;
use lacuna_machine::{Exit, Vcpu as _};
use lacuna_soft::{Host, Step, Vcpu, Wait};
use lacuna_sync::{Clock, Nanos, VirtualClock};
use std::sync::Arc;

/// Slices for each seed.
const SLICES: u64 = 600;
/// Longest step, in instructions.
const FUEL_MAX: u64 = 6000;
/// The most steps of a slice.
const STEPS_MAX: u8 = 24;
/// Virtual time of a step, in addition to its instructions.
const STEP_NS: u64 = 50;
/// The most virtual time that one check of a halted vCPU takes.
const HALT_NS: u64 = 50_000;
/// The most steps in a row in which a vCPU makes no progress. Also the number of checks of a halted
/// vCPU.
const PATIENCE: u32 = 100;
const HALT_PATIENCE: u32 = 24;
/// The most instructions of a step beyond its fuel: to the end of a basic block.
const BLOCK_MAX: u64 = 4096;

enum VcpuPhase {
    Ready,
    Halted,
    Page(Ticket),
    Memory(Nanos),
}

/// Whether the vCPU must be reset after this exit.
pub fn ends_vcpu(exit: &Exit) -> bool {
    matches!(exit, Exit::Shutdown(_) | Exit::PoweredOff | Exit::Reset)
}

/// The program counter, the flags and the general registers.
fn registers(vcpu: &Vcpu) -> Vec<u64> {
    let mut all = Vec::new();
    vcpu.note_registers(|value| all.push(value));
    all
}

/// Whether an AArch64 vCPU is at its own vectors. There, an instruction with an exception raises it
/// for ever. (On x86-64 that is a triple fault.)
fn is_at_its_vectors(vcpu: &Vcpu) -> bool {
    let Some(vcpu) = vcpu.as_arm64() else {
        return false;
    };
    let (pc, vectors) = (vcpu.regs().pc, vcpu.vectors());
    pc.wrapping_sub(vectors) < 0x800
}

struct Runner {
    vm: usize,
    vcpu: Vcpu,
    state: VcpuPhase,
    /// Slices in a row without a retired instruction.
    stuck: u32,
}

struct Simulator {
    rng: Rng,
    plan: Plan,
    clock: Arc<VirtualClock>,
    host: Arc<Host>,
    vms: Vec<(Subject, Monitor)>,
    runners: Vec<Runner>,
    hash: u64,
}

/// Runs one seed. Returns the hash of everything that happened.
pub fn run(run: &mut Run<'_>) -> u64 {
    let mut simulator = Simulator::new(run);
    for slice in 0..SLICES {
        run.pulse.beat();
        simulator.turn(run);
        if slice % 64 == 63 {
            simulator.compare();
        }
        simulator.verify(run);
    }
    simulator.finish(run)
}

impl Simulator {
    fn new(run: &Run<'_>) -> Self {
        let mut rng = Rng::with_seed(run.seed);
        let vcpus = rng.usize(1..=3);
        let plan = Plan::draw(&mut rng, Mode::Seeded(run.seed), vcpus);
        run.pulse.doing(&format!("{plan:?}"));
        let clock = Arc::new(VirtualClock::default());
        let host = plan.host(Arc::clone(&clock) as Arc<dyn Clock>);
        let mut simulator = Self {
            rng,
            plan,
            clock,
            host,
            vms: Vec::new(),
            runners: Vec::new(),
            hash: 0xcbf2_9ce4_8422_2325,
        };
        for _ in 0..simulator.plan.vms {
            simulator.add_vm();
        }
        simulator
    }

    fn add_vm(&mut self) {
        let owner = self.vms.len();
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let (subject, vcpus) = Subject::new(&self.plan, owner, &self.host, clock, &mut self.rng);
        let latency = self.plan.builder.latency.clone();
        let monitor = Monitor::new(&self.host, &subject, latency, self.rng.fork());
        self.runners.extend(vcpus.into_iter().map(|vcpu| Runner {
            vm: owner,
            vcpu,
            state: VcpuPhase::Ready,
            stuck: 0,
        }));
        self.vms.push((subject, monitor));
    }

    /// One slice, and the operations between it and the next.
    fn turn(&mut self, run: &mut Run<'_>) {
        let ready = self.wake();
        match ready.is_empty() {
            true => self.idle(run),
            false => {
                let chosen = ready[self.rng.usize(..ready.len())];
                self.slice(chosen, run);
            }
        }
        if self.rng.u8(..4) == 0 {
            self.operate(run);
        }
        if self.rng.u8(..) == 0 {
            let chosen = self.rng.usize(..self.runners.len());
            self.reset(chosen);
            run.tally.note("host operations", "reset");
        }
        if self.rng.u16(..600) == 0 {
            self.replace_vm(run);
        }
    }

    fn operate(&mut self, run: &mut Run<'_>) {
        let chosen = self.rng.usize(..self.vms.len());
        let (subject, monitor) = &mut self.vms[chosen];
        run.note_operation(|| monitor.act(subject));
    }

    fn wake(&mut self) -> Vec<usize> {
        let now = self.clock.now();
        let mut ready = Vec::new();
        for (index, runner) in self.runners.iter().enumerate() {
            let awake = match &runner.state {
                VcpuPhase::Ready => true,
                VcpuPhase::Memory(until) => *until <= now,
                // Only a step shows whether the vCPU has been woken.
                VcpuPhase::Halted => true,
                VcpuPhase::Page(ticket) => ticket.is_done(),
            };
            if awake {
                ready.push(index);
            }
        }
        ready
    }

    /// Runs a vCPU for some steps, across exits.
    fn slice(&mut self, index: usize, run: &mut Run<'_>) {
        if matches!(self.runners[index].state, VcpuPhase::Memory(_)) {
            let freed = self.runners[index].vcpu.reclaim();
            freed.expect("the budget is the least that suffices, or more");
        }
        for _ in 0..self.rng.u8(1..=STEPS_MAX) {
            if !self.step(index, run) {
                break;
            }
        }
        let patience = match self.runners[index].state {
            VcpuPhase::Halted => HALT_PATIENCE,
            _ => PATIENCE,
        };
        if self.runners[index].stuck > patience {
            self.unstick(index, run);
        }
    }

    /// Makes one step. Returns whether the vCPU can continue at once.
    fn step(&mut self, index: usize, run: &mut Run<'_>) -> bool {
        let fuel = self.rng.u64(1..=FUEL_MAX);
        let runner = &mut self.runners[index];
        let before = runner.vcpu.retired();
        let step = runner.vcpu.step(fuel);
        let retired = runner.vcpu.retired() - before;
        assert!(
            retired < fuel + BLOCK_MAX,
            "{retired} instructions for {fuel}"
        );
        self.clock.advance(retired + STEP_NS);
        runner.stuck = match retired {
            0 => runner.stuck + 1,
            _ => 0,
        };
        let before = std::mem::replace(&mut runner.state, VcpuPhase::Ready);
        run.tally.instructions += retired;
        let mut goes_on = false;
        match step {
            Step::Ran => {
                goes_on = true;
                run.tally.note("steps", "ran");
            }
            Step::Wait(wait) => self.wait(index, wait, &before, run),
            Step::Exit(exit) => {
                goes_on = !ends_vcpu(&exit) && exit != Exit::DirtyRingFull;
                self.exit(index, exit, run);
            }
            Step::Failed(error) => panic!("{error}"),
        }
        self.host.poll(self.clock.now());
        self.note(index, fuel);
        goes_on
    }

    fn wait(&mut self, index: usize, wait: Wait, before: &VcpuPhase, run: &mut Run<'_>) {
        let runner = &mut self.runners[index];
        match wait {
            Wait::Busy => run.tally.note("steps", "wait: busy"),
            Wait::Halt(until) => {
                match (before, until) {
                    // No event has woken the vCPU yet, so the time advances faster.
                    (VcpuPhase::Halted, Some(until)) => {
                        let soon = self.clock.now().after(HALT_NS);
                        self.clock.advance_to(until.min(soon));
                    }
                    (VcpuPhase::Halted, None) => {}
                    _ => run.tally.note("steps", "wait: halt"),
                }
                runner.state = VcpuPhase::Halted;
            }
            Wait::Memory => {
                run.tally.note("steps", "wait: memory");
                let due = self.host.next_completion().unwrap_or_default();
                runner.state = VcpuPhase::Memory(due);
            }
            Wait::Page(ticket) => {
                run.tally.note("steps", "wait: page");
                self.host.start(&ticket);
                runner.state = VcpuPhase::Page(ticket);
                runner.stuck = 0;
            }
            Wait::Provided(ticket) => runner.state = VcpuPhase::Page(ticket),
        }
    }

    fn exit(&mut self, index: usize, exit: Exit, run: &mut Run<'_>) {
        let runner = &mut self.runners[index];
        run.note_exit(&exit);
        let owner = runner.vm;
        let (subject, monitor) = &mut self.vms[owner];
        match exit {
            Exit::IoOut { port, width, value } => subject.write_port(port, width, value),
            Exit::IoIn { port, width } => {
                let value = subject.read_port(port, width);
                runner.vcpu.complete_read(value);
            }
            Exit::MmioRead { .. } => runner.vcpu.complete_read(self.rng.u64(..)),
            Exit::MmioWrite { gpa, width, value } => subject.write_device(gpa, width, value),
            Exit::Interrupted => {}
            Exit::DirtyRingFull => {
                // A monitor harvests, sooner or later.
                if self.rng.u8(..8) == 0 {
                    match &mut monitor.shadow {
                        Some(shadow) => drop(shadow.harvest(&subject.vm)),
                        None => monitor.end_log(subject),
                    }
                }
                runner.stuck = 0;
            }
            exit if ends_vcpu(&exit) => self.revive(index),
            other => panic!("no such exit in this VM: {other:?}"),
        }
    }

    /// Loads the runtime again and restarts the vCPU.
    fn revive(&mut self, index: usize) {
        let (subject, monitor) = &mut self.vms[self.runners[index].vm];
        if subject.reload(&mut self.rng).is_err() {
            // A slot that logs only into rings refuses writes of the VMM.
            monitor.end_log(subject);
            let reloaded = subject.reload(&mut self.rng);
            reloaded.expect("nothing logs");
        }
        self.reset(index);
    }

    fn reset(&mut self, index: usize) {
        let runner = &mut self.runners[index];
        runner.vcpu.reset();
        runner.state = VcpuPhase::Ready;
        runner.stuck = 0;
    }

    /// Handles a vCPU without progress: it has halted for ever, or it is in a livelock.
    fn unstick(&mut self, index: usize, run: &mut Run<'_>) {
        let runner = &self.runners[index];
        let is_halted = matches!(runner.state, VcpuPhase::Halted);
        let pc = registers(&runner.vcpu)[0];
        let is_lost = is_halted || is_at_its_vectors(&runner.vcpu);
        assert!(is_lost, "a vCPU makes no progress at {pc:#x}");
        run.tally.note("steps", "halted for good");
        self.revive(index);
    }

    /// If no vCPU can run, jumps to the time of the next event.
    fn idle(&mut self, run: &mut Run<'_>) {
        run.tally.note("steps", "idle");
        let waits = self.runners.iter().filter_map(|runner| match runner.state {
            VcpuPhase::Memory(until) => Some(until),
            _ => None,
        });
        let next = waits.chain(self.host.next_completion()).min();
        let at = next.expect("a page that is waited for is on its way");
        self.clock.advance_to(at);
        self.host.poll(self.clock.now());
    }

    /// Ends a VM while the others run, and puts another one in its place.
    fn replace_vm(&mut self, run: &mut Run<'_>) {
        if self.vms.len() < 2 {
            return;
        }
        run.tally.note("host operations", "another VM");
        let last = self.vms.len() - 1;
        self.runners.retain(|runner| runner.vm != last);
        let (subject, monitor) = self.vms.pop().expect("two at least");
        subject.count(run.tally);
        monitor.dismantle(&subject);
        subject.dismantle();
        self.add_vm();
    }

    fn compare(&mut self) {
        for (subject, monitor) in &mut self.vms {
            monitor.compare(subject);
            subject.assert_guards();
        }
    }

    fn verify(&self, run: &mut Run<'_>) {
        run.tally.verified += 1;
        self.host.verify();
        for (subject, _) in &self.vms {
            subject.vm.mmu().verify();
        }
        for runner in &self.runners {
            runner.vcpu.verify();
            Subject::assert_own_registers(runner.vm, &runner.vcpu);
        }
    }

    fn note(&mut self, index: usize, fuel: u64) {
        let vcpu = &self.runners[index].vcpu;
        let now = self.clock.now().0;
        let head = [index as u64, fuel, vcpu.retired(), now];
        for word in head.into_iter().chain(registers(vcpu)) {
            self.hash = (self.hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn finish(mut self, run: &mut Run<'_>) -> u64 {
        self.compare();
        self.runners.clear();
        while let Some((subject, monitor)) = self.vms.pop() {
            subject.count(run.tally);
            read_all(&subject.vm, subject.owner);
            monitor.dismantle(&subject);
            subject.dismantle();
            self.host.verify();
        }
        Subject::count_host(&self.host, run.tally);
        self.hash
    }
}
