//! VMs that take turns: one runs, for some milliseconds, and the others stand still.
//!
//! Machines are noisy at every scale: on the test machine a guest's rate in one 10 ms differs from
//! that in the next by 6 to 10 %, and in one second as much (docs/speed-pml.md). So long slices
//! tell no more than short ones, and what helps is to change arms often. But an arm has its own
//! rhythm, such as a harvest a second, or a mapping that comes back page by page. Turns must not
//! cut it. Hence a VM for each arm, and between two turns time stands still for it:
//!
//! ```text
//! core time   a b c c b a b c a a c b ...     each letter a turn of a VM, some ms
//! VM a        a─────────a─────a─a─── ...       its second is fifty turns of its own
//! ```
//! A VM without a turn has no vCPU and no background thread at work, so each pays for all of its
//! own work and for nothing of the other's. Its vCPUs' threads wait at a gate; the gate closes by a
//! kick of all vCPUs. Frames lie where they lie, some better than others: so arms change VMs too
//! ([`crate::turns::shifts`]).

use crate::experiment::LabError;
use crate::fixture::boot;
use crate::native::thread_cpu_ns;
use crate::session::{Guest, LastWords, image};
use lacuna_machine::{Ending, Exit, Kick as _, PlatformDevices, Vcpu as _, VcpuError, dispatch};
use lacuna_soft::{Background, Delivery, HostStats, Vcpu, Vm, VmBuilder};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How long a turn is at most.
pub const TURN: Duration = Duration::from_millis(20);

/// What a guest may take until it has announced its status page.
const LIMIT: Duration = Duration::from_secs(60);

/// Whether a host works in the background while its VM has a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InBackground {
    /// It does nothing: all memory is resident, and no block is to become huge.
    Nothing,
    /// It reclaims pages and collapses blocks.
    Reclaim,
}

/// What all players have in common.
#[derive(Clone, Copy, Debug)]
pub struct Cast {
    /// The guest image.
    pub guest: &'static str,
    /// Where dirty tracking records.
    pub delivery: Delivery,
    /// What their hosts do meanwhile.
    pub background: InBackground,
}

/// A turn of which a part is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slice {
    /// What goes before it, while caches become warm.
    pub settle: Duration,
    /// What is counted.
    pub counted: Duration,
}

/// What happened in a [`Slice`].
pub struct Took {
    /// Steps a second of the processes that access memory.
    pub rate: f64,
    /// Pages a second read from swap.
    pub swap_ins: f64,
    /// The host's counters at the end.
    pub host: HostStats,
}

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
        let background = self.machine.background()?;
        self.machine.gate.open();
        let result = during(&self.machine.vm);
        self.machine.close();
        drop(background);
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

    /// A turn of which a part is counted.
    ///
    /// # Errors
    /// When the guest ends.
    pub fn slice(&mut self, slice: Slice) -> Result<Took, LabError> {
        let machine = self.machine;
        let guest = machine.guest()?;
        let mut took = None;
        self.turn(|vm| {
            guest.run_for(slice.settle)?;
            let (before, swapped_in) = (guest.count()?, vm.host().stats().swapped_in);
            guest.run_for(slice.counted)?;
            let (count, host) = (guest.count()?, vm.host().stats());
            let [_, rate] = count.rates_since(&before);
            let swapped_in = (host.swapped_in - swapped_in) as f64;
            took = Some(Took {
                rate,
                swap_ins: swapped_in / (count.at - before.at).as_secs_f64(),
                host,
            });
            Ok(())
        })?;
        Ok(took.expect("the turn was counted"))
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

    /// From now on no vCPU passes.
    fn shut(&self) {
        self.state.lock().expect("no panic under this lock").closed = true;
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Waits until no vCPU is inside.
    fn wait(&self) {
        let state = self.state.lock().expect("no panic under this lock");
        let left = self.changed.wait_while(state, |state| state.vcpus > 0);
        drop(left.expect("no panic under this lock"));
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
    background: InBackground,
    gate: Gate,
    rings_full: AtomicU64,
    reaped: AtomicU64,
}

impl Machine {
    fn new(builder: &VmBuilder, cast: Cast) -> Result<(Self, Vec<Vcpu>), LabError> {
        let command_line = builder.full_command_line();
        let (vm, vcpus) = boot(builder, cast.delivery, &image(cast.guest)?, &command_line)?;
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

    /// On return, no vCPU runs. A kick that a vCPU did not need makes its next run return at once,
    /// and the run after that goes on.
    fn close(&self) {
        self.gate.shut();
        self.vm.kick_all();
        self.gate.wait();
    }

    fn background(&self) -> Result<Option<Background>, LabError> {
        Ok(match self.background {
            InBackground::Nothing => None,
            InBackground::Reclaim => Some(self.vm.host().spawn_background()?),
        })
    }

    fn guest(&self) -> Result<Guest<'_>, LabError> {
        let guest = Guest::attach(&*self.vm, &self.devices);
        guest.ok_or_else(|| LabError::Guest("the guest did not begin".into()))
    }

    /// One vCPU's thread.
    fn drive(&self, mut vcpu: Vcpu) {
        let _end = End(self);
        let mut turn = Some(self.gate.enter());
        while self.devices.ending().is_none() {
            self.gate.pass(&mut turn);
            let exit = vcpu.run();
            self.exit(&mut vcpu, exit);
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

/// Ends the guest, whatever happens to its threads or to the experiment.
struct End<'a>(&'a Machine);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.devices.end(Ending::Stopped, &*self.0.vm);
        self.0.gate.open();
    }
}

/// Starts a VM with the guest of `cast` for each of `builders`, one after the other: the next when
/// this one is prepared and stands still. Then carries out `experiment`, and ends them.
///
/// # Errors
/// Those of the experiment and of the builders; and a guest that ends before the experiment does.
pub fn with_players<T>(
    builders: &[VmBuilder],
    cast: Cast,
    experiment: impl FnOnce(Vec<Player<'_>>) -> Result<T, LabError>,
) -> Result<T, LabError> {
    let made = builders.iter().map(|builder| Machine::new(builder, cast));
    let made = made.collect::<Result<Vec<_>, _>>()?;
    let (machines, vcpus): (Vec<_>, Vec<_>) = made.into_iter().unzip();
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
    let pages = vm.reap_rings(|_, _| ());
    vm.reset_rings();
    pages as u64
}

/// How many turns there and back `time` is for one VM, and how long each of them.
pub fn turns_of(time: Duration) -> (usize, Duration) {
    let pairs = time.div_duration_f64(2 * TURN).ceil().max(1.0) as u32;
    (pairs as usize, time / (2 * pairs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::resident;
    use lacuna_soft::HugePages;

    const CHURN: Cast = Cast {
        guest: "churn",
        delivery: Delivery::Bitmap,
        background: InBackground::Nothing,
    };

    #[test]
    fn a_time_is_as_many_turns() {
        assert_eq!(turns_of(Duration::from_secs(1)), (25, TURN));
        assert_eq!(turns_of(TURN), (1, TURN / 2));
    }

    /// Between two turns a VM does nothing, and its time does not pass.
    #[test]
    fn who_has_no_turn_stands_still() {
        let mut builder = resident(48, 2);
        builder.command_line = "hot=4M seconds=1000000".into();
        let done = with_players(&[builder.clone(), builder], CHURN, |mut players| {
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
        let ended = with_players(&[builder], CHURN, |mut players| {
            loop {
                players[0].run_for(TURN)?;
            }
        });
        let text = Result::<(), _>::unwrap_err(ended).to_string();
        assert!(text.contains("ended with Exited(0)"), "{text}");
    }

    #[test]
    fn a_slice_tells_what_its_vm_did_and_what_its_host_has() {
        let builder = |huge| VmBuilder {
            huge,
            command_line: "huge=1 seconds=1000000".into(),
            ..resident(32, 1)
        };
        let cast = Cast {
            guest: "zipf",
            background: InBackground::Reclaim,
            ..CHURN
        };
        let slice = Slice {
            settle: Duration::from_millis(30),
            counted: Duration::from_millis(50),
        };
        let builders = [HugePages::Never, HugePages::Always].map(builder);
        let done = with_players(&builders, cast, |mut players| {
            let resting = players[1].guest.count()?.faulters;
            let took = players[0].slice(slice)?;
            assert!(took.rate > 0.0 && took.host.huge_pages == 0);
            assert_eq!(players[1].guest.count()?.faulters, resting);
            let took = players[1].slice(slice)?;
            assert!(took.rate > 0.0 && took.host.huge_pages > 4);
            Ok(())
        });
        done.unwrap();
    }

    #[test]
    fn a_guest_that_refuses_says_why() {
        let builder = VmBuilder {
            command_line: "processes=0".into(),
            ..resident(32, 1)
        };
        let cast = Cast {
            guest: "zipf",
            ..CHURN
        };
        let error = with_players(&[builder], cast, |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("cannot run with"), "{error}");
    }
}
