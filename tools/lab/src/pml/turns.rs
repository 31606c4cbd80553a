//! VMs that take turns: one runs, for some milliseconds, and the others stand still.
//!
//! Machines are noisy at every scale: on the test machine a guest's rate in one 10 ms differs from
//! that in the next by 6 to 10 %, and in one second as much (docs/speed-pml.md). So long
//! slices tell no more than short ones, and what helps is to change arms often. But an arm has its
//! own rhythm, a harvest a second, a mapping that comes back page by page, that must not be cut.
//! Hence a VM for each arm, and between two turns time stands still for it:
//!
//! ```text
//! core time   a b c c b a b c a a c b ...     each letter a turn of a VM, some ms
//! VM a        a─────────a─────a─a─── ...       its second is fifty turns of its own
//! ```
//! Frames lie where they lie, some better than others: so arms change VMs too ([`shifts`]).

use crate::experiment::LabError;
use crate::native::thread_cpu_ns;
use crate::session::{Guest, LastWords, image};
use crate::stats::Summary;
use lacuna_machine::{Ending, Exit, PlatformDevices, VcpuError, dispatch};
use lacuna_soft::{Delivery, Step, Vcpu, Vm, VmBuilder, VmConfig, Wait};
use lacuna_sync::{Clock, HostClock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How long a turn is at most.
pub const TURN: Duration = Duration::from_millis(20);

/// What a guest may take until it has announced its status page.
const LIMIT: Duration = Duration::from_secs(60);
/// Instructions between two looks at whose turn it is: some 100 us.
const FUEL: u64 = 35_000;

/// What a VM did in turns of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Done {
    /// Transactions of all its processes.
    pub transactions: u64,
    /// Seconds of turns, in the mean of its vCPUs.
    pub wall: f64,
    /// Seconds that its vCPUs' threads ran in them, in the mean.
    pub cpu: f64,
}

impl Done {
    /// Both together.
    #[must_use]
    pub fn and(&self, more: &Self) -> Self {
        Self {
            transactions: self.transactions + more.transactions,
            wall: self.wall + more.wall,
            cpu: self.cpu + more.cpu,
        }
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            transactions: self.transactions - before.transactions,
            wall: self.wall - before.wall,
            cpu: self.cpu - before.cpu,
        }
    }
}

/// A VM with a guest that counts transactions. It stands still unless it has a [`Player::turn`].
pub struct Player<'a> {
    machine: &'a Machine,
    guest: Guest<'a>,
    last: Done,
}

impl Player<'_> {
    /// The VM.
    pub fn vm(&self) -> &Vm {
        &self.machine.vm
    }

    /// Its devices.
    pub fn devices(&self) -> &PlatformDevices {
        &self.machine.devices
    }

    /// How often one of its vCPUs found its ring full, and how many pages those reaped.
    pub fn full_rings(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.machine.rings_full), read(&self.machine.reaped))
    }

    /// Lets it run until `during` has returned; what it did.
    ///
    /// # Errors
    /// Those of `during`; and when the guest ends.
    pub fn turn(
        &mut self,
        during: impl FnOnce(&Vm) -> Result<(), LabError>,
    ) -> Result<Done, LabError> {
        self.machine.gate.open();
        let result = during(&self.machine.vm);
        self.machine.gate.close();
        result?;
        if let Some(ending) = self.machine.devices.ending() {
            let text = format!("the guest ended while it was measured: {ending:?}");
            return Err(LabError::Guest(text));
        }
        let now = self.done()?;
        let done = now.since(&self.last);
        self.last = now;
        Ok(done)
    }

    /// A turn of some length.
    ///
    /// # Errors
    /// When the guest ends.
    pub fn run_for(&mut self, time: Duration) -> Result<Done, LabError> {
        self.turn(|_| {
            thread::sleep(time);
            Ok(())
        })
    }

    fn done(&self) -> Result<Done, LabError> {
        let vcpus = self.machine.vm.config().vcpus as f64;
        let [wall, cpu] = self.machine.gate.spent_ns().map(|ns| ns / vcpus / 1e9);
        Ok(Done {
            transactions: self.guest.count()?.workers,
            wall,
            cpu,
        })
    }
}

/// Whether vCPUs may run, and how long they have.
#[derive(Default)]
struct Gate {
    /// A hint of `state`, so that a vCPU that runs has nothing to lock.
    closed: AtomicBool,
    state: Mutex<Inside>,
    changed: Condvar,
}

/// What the gate's lock guards.
#[derive(Default)]
struct Inside {
    closed: bool,
    /// vCPUs that have not seen it close.
    vcpus: usize,
    /// By the wall's clock and by their threads', of all turns that are over.
    ns: [u64; 2],
}

impl Gate {
    /// For a vCPU's thread between two steps: it is out for as long as the gate is closed.
    fn pass<'a>(&'a self, turn: &mut Option<Turn<'a>>) {
        if self.closed.load(Ordering::Relaxed) {
            drop(turn.take());
            *turn = Some(self.enter());
        }
    }

    fn enter(&self) -> Turn<'_> {
        let state = self.state.lock().expect("no panic under this lock");
        let opened = self.changed.wait_while(state, |state| state.closed);
        opened.expect("no panic under this lock").vcpus += 1;
        Turn {
            gate: self,
            wall: Instant::now(),
            cpu_ns: thread_cpu_ns(),
        }
    }

    fn open(&self) {
        let mut state = self.state.lock().expect("no panic under this lock");
        state.closed = false;
        self.closed.store(false, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// On return, no vCPU runs.
    fn close(&self) {
        let mut state = self.state.lock().expect("no panic under this lock");
        state.closed = true;
        self.closed.store(true, Ordering::Relaxed);
        let closed = self.changed.wait_while(state, |state| state.vcpus > 0);
        drop(closed.expect("no panic under this lock"));
    }

    fn spent_ns(&self) -> [f64; 2] {
        let state = self.state.lock().expect("no panic under this lock");
        state.ns.map(|ns| ns as f64)
    }
}

/// A vCPU's turn, from where it began to where it is dropped.
struct Turn<'a> {
    gate: &'a Gate,
    wall: Instant,
    cpu_ns: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let wall = u64::try_from(self.wall.elapsed().as_nanos()).expect("not for centuries");
        let cpu = thread_cpu_ns() - self.cpu_ns;
        let mut state = self.gate.state.lock().expect("no panic under this lock");
        state.vcpus -= 1;
        for (sum, ns) in state.ns.iter_mut().zip([wall, cpu]) {
            *sum += ns;
        }
        self.gate.changed.notify_all();
    }
}

struct Machine {
    vm: Arc<Vm>,
    devices: PlatformDevices,
    words: LastWords,
    gate: Gate,
    rings_full: AtomicU64,
    reaped: AtomicU64,
}

impl Machine {
    fn new(builder: &VmBuilder, delivery: Delivery) -> Result<(Self, Vec<Vcpu>), LabError> {
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let config = VmConfig {
            memory: builder.memory,
            vcpus: builder.vcpus,
            apf: builder.apf,
            ..VmConfig::default()
        };
        let vm = Vm::new(builder.host(Arc::clone(&clock))?, clock, config)?;
        vm.set_delivery(delivery)?;
        let vcpus = vm.boot(&image("churn")?, &builder.full_command_line())?;
        let words = LastWords::default();
        let machine = Self {
            devices: PlatformDevices::new(words.console()),
            vm,
            words,
            gate: Gate::default(),
            rings_full: AtomicU64::new(0),
            reaped: AtomicU64::new(0),
        };
        Ok((machine, vcpus))
    }

    /// One vCPU's thread.
    fn drive(&self, mut vcpu: Vcpu) {
        let _end = End(self);
        let mut turn = Some(self.gate.enter());
        while self.devices.ending().is_none() {
            self.gate.pass(&mut turn);
            match vcpu.step(FUEL) {
                Step::Ran => {}
                // Nothing is ever swapped, so whatever it waits for is near.
                Step::Wait(Wait::Page(ticket)) => drop(self.vm.host().wait(&ticket)),
                Step::Wait(_) => thread::yield_now(),
                Step::Exit(exit) => self.exit(&mut vcpu, Ok(exit)),
                Step::Failed(error) => self.exit(&mut vcpu, Err(error)),
            }
        }
    }

    /// A vCPU whose ring is full reaps for itself, as QEMU's do.
    fn exit(&self, vcpu: &mut Vcpu, exit: Result<Exit, VcpuError>) {
        if let Ok(Exit::DirtyRingFull) = exit {
            self.rings_full.fetch_add(1, Ordering::Relaxed);
            self.reaped.fetch_add(reap(&self.vm), Ordering::Relaxed);
        } else {
            // Whether to go on, the loop asks the devices itself.
            let _ = dispatch(vcpu, exit, &self.devices, &*self.vm);
        }
    }

    /// Lets it boot and prepare, and stops it.
    fn attach(&self) -> Result<Player<'_>, LabError> {
        let deadline = Instant::now() + LIMIT;
        let guest = loop {
            if let Some(guest) = Guest::attach(&*self.vm, &self.devices) {
                break guest;
            }
            if self.devices.ending().is_some() || Instant::now() > deadline {
                return Err(LabError::Guest("the guest did not begin".into()));
            }
            thread::sleep(Duration::from_millis(1));
        };
        guest.prepared()?;
        let mut player = Player {
            machine: self,
            guest,
            last: Done::default(),
        };
        self.gate.close();
        player.last = player.done()?;
        Ok(player)
    }
}

/// Ends the guest, whatever happens to its threads or to the experiment.
struct End<'a>(&'a Machine);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.devices.end(Ending::Stopped, &*self.0.vm);
        self.0.gate.open();
    }
}

/// Starts so many VMs with `churn`, one after the other, carries out `experiment` when all are
/// prepared and stand still, and ends them.
///
/// # Errors
/// Those of the experiment and of the builder; and a guest that ends before the experiment does.
pub fn with_players<T>(
    builder: &VmBuilder,
    delivery: Delivery,
    count: usize,
    experiment: impl FnOnce(Vec<Player<'_>>) -> Result<T, LabError>,
) -> Result<T, LabError> {
    let (mut machines, mut vcpus) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (machine, its) = Machine::new(builder, delivery)?;
        machines.push(machine);
        vcpus.push(its);
    }
    let result = thread::scope(|scope| {
        let _ends: Vec<_> = machines.iter().map(End).collect();
        let mut players = Vec::new();
        for (machine, vcpus) in machines.iter().zip(vcpus) {
            for vcpu in vcpus {
                scope.spawn(|| machine.drive(vcpu));
            }
            players.push(machine.attach()?);
        }
        experiment(players)
    });
    let mut result = Some(result);
    for machine in &machines {
        let ending = machine.devices.ending().unwrap_or(Ending::Stopped);
        if !matches!(ending, Ending::Stopped) {
            return machine.words.settle(result.take(), &ending);
        }
    }
    result.take().expect("not taken above")
}

/// Empties all of a VM's rings; how many pages were in them.
pub fn reap(vm: &Vm) -> u64 {
    let pages = vm.collect_rings(|_, _| ());
    vm.reset_rings();
    pages as u64
}

/// Every way to give `count` arms to as many VMs by turning: VM `shift[arm]` plays `arm`.
pub fn shifts(count: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..count).map(move |shift| (0..count).map(|arm| (arm + shift) % count).collect())
}

/// Figures of `rounds` rounds in each of the [`shifts`], one shift after the other: one a round,
/// the mean over the shifts. As every VM has played every arm, what makes one VM differ from
/// another cancels.
pub fn across_shifts(figures: &[f64], rounds: usize) -> Vec<f64> {
    let mean = |round: usize| {
        let all: Vec<f64> = figures
            .iter()
            .skip(round)
            .step_by(rounds)
            .copied()
            .collect();
        all.iter().sum::<f64>() / all.len() as f64
    };
    (0..rounds).map(mean).collect()
}

/// `b` over `a` in percent, the geometric mean [`across_shifts`].
pub fn percent_across(a: &[f64], b: &[f64], rounds: usize) -> Summary {
    let logs: Vec<f64> = a.iter().zip(b).map(|(a, b)| (b / a).ln()).collect();
    let means = across_shifts(&logs, rounds).into_iter();
    Summary::of(&means.map(|log| 100.0 * log.exp()).collect::<Vec<_>>())
}

/// Whether a turn is the last of its round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Last {
    /// It is.
    Yes,
    /// More will come.
    No,
}

/// How many turns there and back `time` is for one VM, and how long each of them.
pub fn turns_of(time: Duration) -> (usize, Duration) {
    let pairs = time.div_duration_f64(2 * TURN).ceil().max(1.0) as u32;
    (pairs as usize, time / (2 * pairs))
}

/// A round: `pairs` times the turns of all arms, there and back, each time with another one first:
/// an arm with two turns in a row finds its caches warm. Calls `turn` with an arm.
///
/// # Errors
/// The first of a turn.
pub fn round<E>(
    arms: usize,
    pairs: usize,
    mut turn: impl FnMut(usize, Last) -> Result<(), E>,
) -> Result<(), E> {
    for pair in 0..pairs {
        let order = (0..arms).map(|place| (pair + place) % arms);
        for arm in order.clone() {
            turn(arm, Last::No)?;
        }
        let last = if pair + 1 == pairs {
            Last::Yes
        } else {
            Last::No
        };
        for arm in order.rev() {
            turn(arm, last)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::resident;

    #[test]
    fn a_round_goes_there_and_back_and_begins_with_another_each_time() {
        let mut turns = Vec::new();
        let told: Result<(), ()> = round(3, 3, |arm, last| {
            turns.push((arm, last));
            Ok(())
        });
        told.unwrap();
        let arms: Vec<_> = turns.iter().map(|turn| turn.0).collect();
        assert_eq!(arms[..6], [0, 1, 2, 2, 1, 0]);
        assert_eq!(arms[6..], [1, 2, 0, 0, 2, 1, 2, 0, 1, 1, 0, 2]);
        let last: Vec<_> = turns.iter().map(|turn| turn.1 == Last::Yes).collect();
        assert_eq!(last, [[false; 15].as_slice(), &[true; 3]].concat());
    }

    #[test]
    fn a_time_is_as_many_turns() {
        assert_eq!(turns_of(Duration::from_secs(1)), (25, TURN));
        assert_eq!(turns_of(TURN), (1, TURN / 2));
    }

    /// Two VMs, one half again as fast, and arms of which one does nine tenths of the other, then
    /// eight.
    #[test]
    fn what_a_vm_is_faster_cancels() {
        let a = [100.0, 100.0, 150.0, 150.0];
        let b = [150.0 * 0.9, 150.0 * 0.8, 100.0 * 0.9, 100.0 * 0.8];
        let found = percent_across(&a, &b, 2);
        assert!((found.low - 80.0).abs() < 1e-9 && (found.high - 90.0).abs() < 1e-9);
        assert_eq!(across_shifts(&[1.0, 10.0, 3.0, 30.0], 2), [2.0, 20.0]);
    }

    #[test]
    fn every_vm_plays_every_arm() {
        let mut played = [[0; 3]; 3];
        for vms in shifts(3) {
            vms.iter()
                .enumerate()
                .for_each(|(arm, vm)| played[arm][*vm] += 1);
        }
        assert_eq!(played, [[1; 3]; 3]);
    }

    /// Between two turns a VM does nothing, and its time does not pass.
    #[test]
    fn who_has_no_turn_stands_still() {
        let mut builder = resident(48, 2);
        builder.command_line = "hot=4M seconds=1000000".into();
        let done = with_players(&builder, Delivery::Bitmap, 2, |mut players| {
            // However long it takes here until something is done.
            let until_some = |player: &mut Player<'_>| {
                let mut all = Done::default();
                while all.transactions == 0 {
                    all = all.and(&player.run_for(TURN)?);
                }
                Ok::<_, LabError>(all)
            };
            let mut before = players[1].done()?;
            for _ in 0..3 {
                let done = until_some(&mut players[0])?;
                assert!(done.cpu > 0.0 && done.wall > 0.0);
                assert_eq!(players[1].done()?, before, "it has had no turn");
                assert!(until_some(&mut players[1])?.wall > 0.0);
                before = players[1].done()?;
            }
            Ok(())
        });
        done.unwrap();
    }

    /// The guest's own end is an error, not an end of the experiment without one.
    #[test]
    fn a_guest_that_ends_is_told_of() {
        let mut builder = resident(48, 1);
        builder.command_line = "hot=4M transactions=1".into();
        let ended = with_players(&builder, Delivery::Bitmap, 1, |mut players| {
            loop {
                players[0].run_for(TURN)?;
            }
        });
        let text = Result::<(), _>::unwrap_err(ended).to_string();
        assert!(text.contains("ended with Exited(0)"), "{text}");
    }
}
