//! VMs that take turns: one runs, for some milliseconds, and the others are paused.
//!
//! Machines are noisy at every scale. On the test machine a guest's rates in two adjacent slices of
//! 10 ms differ by 6 to 10 %, and in one second by as much (docs/speed-pml.md). Therefore long
//! slices show no more than short ones, and it helps to change arms often.
//!
//! But an arm has its own rhythm, such as a harvest every second, or a mapping that is restored
//! page by page. Turns must not interrupt it. Hence there is a VM for each arm, and between two
//! turns its time is stopped:
//!
//! ```text
//! core time   a b c c b a b c a a c b ...     each letter a turn of a VM, some ms
//! VM a        a─────────a─────a─a─── ...       its second is fifty turns of its own
//! ```
//! A VM without a turn has no vCPU and no background thread at work. So each VM pays for its own
//! work only. Its vCPUs leave by a kick, and their threads wait (`machine`). Frames differ in speed
//! by where they lie in memory, so arms change VMs, too ([`crate::turns::shifts`]).

mod machine;

use crate::experiment::LabResult;
use crate::session::Guest;
use crate::slices::Pace;
use lacuna::dirty::DirtyRings as _;
use lacuna::memory::HostStats;
use lacuna::soft::{Vm, VmBuilder};
use lacuna::{Ending, PlatformDevices, Vm as _};
use machine::{Closed, End, Machine};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

/// The longest turn.
pub const TURN: Duration = Duration::from_millis(20);

/// What a host does in the background while its VM has a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InBackground {
    /// Nothing: all memory is resident, and no block is to become huge.
    Nothing,
    /// It reclaims pages and collapses blocks.
    Reclaim,
}

/// What all players have in common.
#[derive(Clone, Copy, Debug)]
pub struct Cast {
    /// The guest image.
    pub guest: &'static str,
    /// What their hosts do in the background.
    pub background: InBackground,
}

/// The counts of a slice.
pub struct Took {
    /// Steps a second of the processes that access memory.
    pub rate: f64,
    /// Pages a second read from swap.
    pub swap_ins: f64,
    /// The host's counters at the end.
    pub host: HostStats,
}

/// The work of a VM in its turns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Done {
    /// Transactions of all its processes.
    pub transactions: u64,
    /// Seconds of its turns, the mean of its vCPUs.
    pub wall: f64,
    /// Seconds that the threads of its vCPUs ran, the mean of them.
    pub cpu: f64,
}

impl Done {
    /// The sum of both.
    #[must_use]
    pub fn and(&self, more: &Self) -> Self {
        Self {
            transactions: self.transactions + more.transactions,
            wall: self.wall + more.wall,
            cpu: self.cpu + more.cpu,
        }
    }
}

/// A VM with a guest that counts transactions. It runs only during a [`Player::turn`].
pub struct Player<'a> {
    machine: &'a Machine,
    guest: Guest<'a>,
    closed: Option<Closed<'a>>,
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

    /// How often a vCPU found its ring full, and how many pages such vCPUs reaped.
    pub fn full_rings(&self) -> (u64, u64) {
        let [found, reaped] = self.machine.full_rings.each_ref();
        (found.load(Relaxed), reaped.load(Relaxed))
    }

    /// Lets it run until `during` has returned; returns its work.
    pub fn turn(&mut self, during: impl FnOnce(&Vm) -> LabResult) -> LabResult<Done> {
        let background = self.machine.background()?;
        self.machine.open(self.closed.take());
        let result = during(&self.machine.vm);
        self.closed = Some(self.machine.close());
        drop(background);
        result?;
        self.guest.runs()?;
        let now = self.done()?;
        let before = std::mem::replace(&mut self.last, now);
        Ok(Done {
            transactions: now.transactions - before.transactions,
            wall: now.wall - before.wall,
            cpu: now.cpu - before.cpu,
        })
    }

    /// Lets it run for `time`; returns its work.
    pub fn run_for(&mut self, time: Duration) -> LabResult<Done> {
        self.turn(|_| {
            thread::sleep(time);
            Ok(())
        })
    }

    /// Lets it run for a slice of `pace`; returns the counts.
    pub fn slice(&mut self, pace: Pace) -> LabResult<Took> {
        let guest = self.guest;
        let mut took = None;
        self.turn(|vm| {
            guest.run_for(pace.settle)?;
            let (before, swapped_in) = (guest.count()?, vm.host().stats().swapped_in);
            guest.run_for(pace.slice)?;
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

    fn done(&self) -> LabResult<Done> {
        let vcpus = self.machine.vm.config().vcpus as f64;
        let ns = self.machine.ns.each_ref().map(|ns| ns.load(Relaxed));
        let [wall, cpu] = ns.map(|ns| ns as f64 / vcpus / 1e9);
        Ok(Done {
            transactions: self.guest.count()?.workers,
            wall,
            cpu,
        })
    }
}

/// Starts a VM with the guest of `cast` for each of `builders`. Each VM starts when the one before
/// it is prepared and paused. Then carries out `experiment`, and ends the VMs.
pub fn with_players<T>(
    builders: &[VmBuilder],
    cast: Cast,
    experiment: impl FnOnce(Vec<Player<'_>>) -> LabResult<T>,
) -> LabResult<T> {
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
    for machine in &machines {
        match machine.devices.ending() {
            None | Some(Ending::Stopped) => {}
            Some(ending) => return machine.words.settle(None, &ending),
        }
    }
    result
}

/// Reaps all rings of a VM; returns how many pages were in them.
pub fn reap(vm: &Vm) -> u64 {
    let pages = vm
        .reap_rings(&mut |_, _| ())
        .expect("its rings lose no page");
    vm.reset_rings().expect("its rings lose no page");
    pages as u64
}

/// How many pairs of turns, there and back, make `time` for one VM, and how long each turn is.
pub fn turns_of(time: Duration) -> (usize, Duration) {
    let pairs = time.div_duration_f64(2 * TURN).ceil().max(1.0) as u32;
    (pairs as usize, time / (2 * pairs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::LabError;
    use crate::fixture::{eventually, needs_guests, resident};
    use lacuna::memory::HugePages;
    use lacuna_skip::test;

    const CHURN: Cast = Cast {
        guest: "churn",
        background: InBackground::Nothing,
    };

    #[test]
    fn a_time_is_as_many_turns() {
        assert_eq!(turns_of(Duration::from_secs(1)), (25, TURN));
        assert_eq!(turns_of(TURN), (1, TURN / 2));
    }

    /// Between two turns a VM does nothing, and its time does not pass.
    #[test]
    fn a_vm_without_a_turn_stands_still() {
        needs_guests();
        let mut builder = resident(48, 2);
        builder.command_line = "hot=4M seconds=1000000".into();
        let done = with_players(&[builder.clone(), builder], CHURN, |mut players| {
            // On a busy machine a turn may pass without a transaction.
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

    /// If the guest ends by itself, the experiment ends with an error.
    #[test]
    fn a_guest_that_ends_is_an_error() {
        needs_guests();
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
        needs_guests();
        let builder = |huge| VmBuilder {
            huge,
            command_line: "huge=1 seconds=1000000".into(),
            ..resident(32, 1)
        };
        let cast = Cast {
            guest: "zipf",
            background: InBackground::Reclaim,
        };
        let slice = Pace::new(1, 50, 30);
        let builders = [HugePages::Never, HugePages::Always].map(builder);
        let done = with_players(&builders, cast, |mut players| {
            let until_some = |player: &mut Player<'_>| {
                eventually(|| {
                    let took = player.slice(slice).unwrap();
                    (took.rate > 0.0)
                        .then_some(took)
                        .ok_or("no step in a slice".into())
                })
            };
            let resting = players[1].guest.count()?.faulters;
            assert_eq!(until_some(&mut players[0]).host.huge_pages, 0);
            assert_eq!(players[1].guest.count()?.faulters, resting);
            assert!(until_some(&mut players[1]).host.huge_pages > 4);
            Ok(())
        });
        done.unwrap();
    }

    #[test]
    fn a_guest_that_refuses_says_why() {
        needs_guests();
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
