//! Whole machines on threads: vCPUs in the VMMs' run loop, and monitors beside them.
//!
//! ```text
//! round: each vCPU's thread runs it until it is kicked       | monitors operate (`monitor`)
//!        a vCPU that shuts down waits for the end            |
//!        kick all vCPUs; all return                           -> quiet: verify, compare, resets
//! ```
//! The threads interleave differently in each run of a seed, so a finding may need several runs to
//! appear again.

use crate::machine::ends_vcpu;
use crate::monitor::Monitor;
use crate::plan::{Mode, Plan};
use crate::run::{Run, name_of};
use crate::shadow::read_all;
use crate::subject::Subject;
use crate::tally::Tally;
use fastrand::Rng;
use lacuna_machine::{Exit, Kick as _, Vcpu as _};
use lacuna_soft::{Host, Vcpu, Vm};
use lacuna_sync::{Clock, HostClock};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Rounds for each seed.
const ROUNDS: u64 = 16;
/// The time that a vCPU with a full ring sleeps, so that the monitor gets its core.
const NAP: Duration = Duration::from_micros(50);

/// A vCPU, and its events in a round.
struct Runner {
    vcpu: Vcpu,
    rng: Rng,
    must_revive: bool,
    exits: Tally,
}

struct Guest {
    subject: Subject,
    monitor: Monitor,
    runners: Vec<Runner>,
}

/// Runs one seed.
pub fn run(run: &mut Run<'_>) {
    let mut rng = Rng::with_seed(run.seed);
    let vcpus = rng.usize(2..=4);
    let plan = Plan::draw(&mut rng, Mode::Threads, vcpus);
    run.pulse.doing(&format!("{plan:?}"));
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = plan.host(Arc::clone(&clock));
    let mut guests: Vec<Guest> = (0..plan.vms)
        .map(|owner| Guest::new(&plan, owner, &host, Arc::clone(&clock), &mut rng))
        .collect();
    let background = match rng.bool() {
        true => Some(host.spawn_background().expect("a thread")),
        false => None,
    };
    for _ in 0..ROUNDS {
        round(&mut guests, &mut rng, run);
        quiet(&mut guests, &mut rng, run);
        if background.is_none() {
            verify(&host);
        }
    }
    drop(background);
    verify(&host);
    finish(guests, run);
    verify(&host);
    Subject::count_host(&host, run.tally);
}

/// Verifies the host, after the threads of its swap device have completed the operations of vCPUs
/// and monitors. A vCPU starts every needed read before it leaves `run`.
fn verify(host: &Host) {
    while host.stats().in_flight > 0 {
        thread::sleep(NAP);
    }
    host.verify();
}

impl Guest {
    fn new(
        plan: &Plan,
        owner: usize,
        host: &Arc<Host>,
        clock: Arc<dyn Clock>,
        rng: &mut Rng,
    ) -> Self {
        let (subject, vcpus) = Subject::new(plan, owner, host, clock, rng);
        let latency = plan.builder.latency.clone();
        let monitor = Monitor::new(host, &subject, latency, rng.fork());
        let runner = |vcpu| Runner {
            vcpu,
            rng: rng.fork(),
            must_revive: false,
            exits: Tally::default(),
        };
        let runners = vcpus.into_iter().map(runner).collect();
        Self {
            subject,
            monitor,
            runners,
        }
    }
}

/// Kicks all vCPUs, also if the monitor panics. Otherwise their threads could not be joined.
struct KickOnDrop(Vec<Arc<Vm>>);

impl Drop for KickOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(|vm| vm.kick_all());
    }
}

/// Runs all vCPUs while the monitors operate in turns.
fn round(guests: &mut [Guest], rng: &mut Rng, run: &mut Run<'_>) {
    let operations = rng.u32(1..60);
    let vms: Vec<_> = guests
        .iter()
        .map(|guest| Arc::clone(&guest.subject.vm))
        .collect();
    let before = retired(&vms);
    vms.iter().for_each(|vm| vm.withdraw_kicks());
    thread::scope(|scope| {
        let kick = KickOnDrop(vms.clone());
        let mut monitors = Vec::new();
        for guest in guests.iter_mut() {
            let Guest {
                subject,
                monitor,
                runners,
            } = guest;
            let subject = &*subject;
            for runner in runners {
                scope.spawn(move || runner.drive(subject));
            }
            monitors.push((subject, monitor));
        }
        for _ in 0..operations {
            let chosen = rng.usize(..monitors.len());
            let (subject, monitor) = &mut monitors[chosen];
            run.note_operation(|| monitor.act(subject));
            match rng.u8(..16) {
                0 => thread::sleep(Duration::from_micros(rng.u64(..2000))),
                1 => subject.vm.kick_all(),
                2 => subject.vm.withdraw_kicks(),
                _ => thread::yield_now(),
            }
        }
        run.pulse
            .doing("waiting for vCPUs to leave the guest after a kick");
        drop(kick);
    });
    run.tally.instructions += retired(&vms) - before;
}

fn retired(vms: &[Arc<Vm>]) -> u64 {
    vms.iter().flat_map(|vm| vm.retired()).sum()
}

impl Runner {
    /// Runs the vCPU until it is kicked.
    fn drive(&mut self, subject: &Subject) {
        loop {
            let exit = match self.vcpu.run() {
                Ok(exit) => exit,
                Err(error) => panic!("{error}"),
            };
            self.exits.note("exits", name_of(&exit));
            match exit {
                Exit::IoOut { port, width, value } => subject.write_port(port, width, value),
                Exit::IoIn { port, width } => {
                    self.vcpu.complete_read(subject.read_port(port, width));
                }
                Exit::MmioRead { .. } => self.vcpu.complete_read(self.rng.u64(..)),
                Exit::MmioWrite { gpa, width, value } => subject.write_device(gpa, width, value),
                Exit::DirtyRingFull => thread::sleep(NAP),
                Exit::Interrupted => return,
                exit if ends_vcpu(&exit) => {
                    self.must_revive = true;
                    return;
                }
                other => panic!("no such exit in this VM: {other:?}"),
            }
        }
    }
}

/// Verifies, compares and resets, while no vCPU runs.
fn quiet(guests: &mut [Guest], rng: &mut Rng, run: &mut Run<'_>) {
    run.pulse.doing("verifying while no vCPU runs");
    run.tally.verified += 1;
    for guest in guests {
        let Guest {
            subject,
            monitor,
            runners,
        } = guest;
        subject.vm.mmu().verify();
        monitor.compare(subject);
        subject.assert_guards();
        for runner in runners.iter_mut() {
            runner.vcpu.verify();
            Subject::assert_own_registers(subject.owner, &runner.vcpu);
            run.tally.absorb(std::mem::take(&mut runner.exits));
            // A vCPU that has halted for ever, or is in an endless loop, is restarted some time.
            if std::mem::take(&mut runner.must_revive) || rng.u8(..6) == 0 {
                revive(subject, monitor, rng);
                runner.vcpu.reset();
                run.tally.note("host operations", "reset");
            }
        }
    }
}

fn revive(subject: &Subject, monitor: &mut Monitor, rng: &mut Rng) {
    if subject.reload(rng).is_err() {
        // A slot that logs only into rings refuses writes of the VMM.
        monitor.end_log(subject);
        subject.reload(rng).expect("nothing logs");
    }
}

fn finish(guests: Vec<Guest>, run: &mut Run<'_>) {
    run.pulse.doing("the end of the run");
    for guest in guests {
        let Guest {
            subject,
            monitor,
            runners,
        } = guest;
        drop(runners);
        subject.count(run.tally);
        read_all(&subject.vm, subject.owner);
        monitor.dismantle(&subject);
        subject.dismantle();
    }
}
