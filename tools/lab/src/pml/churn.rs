//! `churn` VMs in turns, with a monitor that harvests once a second of the guest's own time.
//!
//! A rate is transactions over the time that the threads of the vCPUs have run. So the monitor,
//! which may have no core of its own, and other programs do not count as a cost. The rate by the
//! wall clock is in the results, too.
//!
//! At the end of logging, unwritten pages stay write-protected until they are written. Each would
//! cost the next arm a fault. So the guest writes to all of its pages in between, uncounted
//! ([`Churn::watch`]).
//!
//! The exits of dirty logging on hardware are counted, and each can be charged ([`exits`],
//! [`crate::exit_cost`]).

use crate::experiment::{LabError, LabResult};
use crate::fixture::resident;
use crate::players::{Cast, Done, InBackground, Player, TURN, turns_of, with_players};
use crate::turns::{Last, round, shifts};
use lacuna::dirty::{
    Delivery, Detection, DetectionChoice as _, DirtyStats, Logging, harvest, set_logging_everywhere,
};
use lacuna::soft::VmBuilder;
use lacuna::{Arch, GuestMemory, Vm as _};
use lacuna_guest::status::SETTING_AT;
use std::time::{Duration, Instant};

/// The most cold transactions, of 65536.
pub const COLD_MAX: u32 = 1 << 16;
/// With this setting, a transaction writes to every page of the process.
const SWEEP: u32 = u32::MAX;

/// Counts of a measurement: the counters of all vCPUs together; exits because a ring was full;
/// harvests of the monitor, and dirty pages that the harvests found.
pub type Counted = [u64; 8];
pub const FAULTS: usize = 0;
pub const FAST_FAULTS: usize = 1;
pub const LOG_FULL: usize = 2;
pub const FLUSHES: usize = 3;
pub const LOGGED: usize = 4;
pub const RINGS_FULL: usize = 5;
pub const HARVESTS: usize = 6;
pub const DIRTIED: usize = 7;

/// The counters of all vCPUs together.
pub fn counted(vcpus: &[DirtyStats]) -> Counted {
    let mut all = DirtyStats::default();
    vcpus.iter().for_each(|one| all.merge(one));
    let DirtyStats {
        faults,
        fast_page_faults,
        log_full,
        flushes,
        logged,
    } = all;
    [faults, fast_page_faults, log_full, flushes, logged, 0, 0, 0]
}

/// The exits that `vcpus` vCPUs would have had on hardware: one for each write fault, for 512
/// logged pages (our log is flushed more often: at every exit) and for each full ring. A harvest,
/// also by a vCPU with a full ring, has a shoot-down of each vCPU and, with PML, a kick.
pub fn exits(counted: &Counted, detection: Detection, vcpus: u64) -> u64 {
    let kicks = match detection {
        Detection::WriteProtect => 1,
        Detection::Pml => 2,
    };
    let full = counted[LOG_FULL].max(counted[LOGGED] / 512);
    let harvests = counted[HARVESTS] + counted[RINGS_FULL];
    let faults = counted[FAULTS] + counted[FAST_FAULTS];
    faults + full + counted[RINGS_FULL] + kicks * harvests * vcpus
}

/// The VMs of an experiment, and its pace.
pub struct Setup {
    pub builder: VmBuilder,
    /// Where writes are recorded, in ids.
    pub suffix: &'static str,
    /// The time from one harvest to the next, in a VM's own time.
    pub period: Duration,
    /// Counted periods of each VM in each arm.
    pub rounds: usize,
}

impl Setup {
    /// VMs with `mib` MiB, all resident, for one counted period.
    pub fn new(arch: Arch, mib: u64, vcpus: usize, delivery: Delivery) -> Self {
        Self {
            builder: VmBuilder {
                arch,
                delivery,
                command_line: format!("hot={}M writes=100 frees=0 seconds=1000000", mib / 32),
                ..resident(mib, vcpus)
            },
            suffix: if delivery == Delivery::Bitmap {
                ""
            } else {
                "_ring"
            },
            period: Duration::from_millis(100),
            rounds: 1,
        }
    }
}

/// Whether slots log, and what detects writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch {
    /// No slot logs.
    Nothing(Detection),
    /// All slots log, and a monitor harvests.
    Dirty(Detection),
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Period {
    pub done: Done,
    pub counted: Counted,
    /// The time of the monitor's harvest.
    pub harvesting: Duration,
}

impl Period {
    /// Transactions a second of the time that the vCPUs ran.
    pub fn rate(&self) -> f64 {
        self.done.transactions as f64 / self.done.cpu
    }

    pub fn wall_rate(&self) -> f64 {
        self.done.transactions as f64 / self.done.wall
    }

    /// The rate that its `vcpus` vCPUs together would have reached in `watch`, if each exit had
    /// taken `exit_ns` of one of them.
    pub fn charged(&self, watch: Watch, vcpus: u64, exit_ns: f64) -> f64 {
        let Watch::Dirty(detection) = watch else {
            return self.rate();
        };
        let exits = exits(&self.counted, detection, vcpus);
        let lost = exits as f64 * exit_ns / 1e9 / vcpus as f64;
        self.rate() * self.done.cpu / (self.done.cpu + lost)
    }

    pub fn and(&self, more: &Self) -> Self {
        Self {
            done: self.done.and(&more.done),
            counted: std::array::from_fn(|i| self.counted[i] + more.counted[i]),
            harvesting: self.harvesting + more.harvesting,
        }
    }
}

pub struct Churn<'a> {
    player: Player<'a>,
    watch: Watch,
}

impl Churn<'_> {
    /// From now on the VM logs as `watch` says, and `cold` of 65536 transactions go to the cold
    /// part of the heap.
    fn watch(&mut self, watch: Watch, cold: u32) -> LabResult {
        set_logging_everywhere(self.player.vm(), Logging::Off)?;
        if self.watch == Watch::Dirty(Detection::WriteProtect) && watch != self.watch {
            self.write_all()?;
        }
        self.write_setting(1 + cold)?;
        let (Watch::Nothing(detection) | Watch::Dirty(detection)) = watch;
        self.player.vm().set_detection(detection);
        if let Watch::Dirty(_) = watch {
            set_logging_everywhere(self.player.vm(), Logging::LAZY)?;
        }
        self.watch = watch;
        Ok(())
    }

    /// Lets the guest write to all of its pages.
    fn write_all(&mut self) -> LabResult {
        self.write_setting(SWEEP)?;
        // The first transaction of a process may be an ordinary one, begun before, and the
        // processes are not equally fast.
        let enough = 4 * self.player.vm().config().vcpus as u64;
        let mut sweeps = 0;
        while sweeps < enough {
            sweeps += self.player.run_for(TURN)?.transactions;
        }
        Ok(())
    }

    /// Call it only while no slot logs: a VM with rings alone refuses host writes to a logging
    /// slot.
    fn write_setting(&self, to: u32) -> LabResult {
        let page = self.player.devices().status_page();
        let page = page.expect("the guest was attached by it").gpa();
        let at = page.checked_add(SETTING_AT as u64);
        let memory: &dyn GuestMemory = self.player.vm();
        Ok(memory.write(at.expect("inside the status page"), &to.to_le_bytes())?)
    }

    /// One turn. The last of a period has a harvest at its end, if slots log.
    fn turn(&mut self, length: Duration, last: Last) -> LabResult<Period> {
        let before = self.counted();
        let due = last == Last::Yes && matches!(self.watch, Watch::Dirty(_));
        let (mut dirtied, mut harvesting) = (0, Duration::ZERO);
        let done = self.player.turn(|vm| {
            std::thread::sleep(length);
            if due {
                let start = Instant::now();
                dirtied = harvest(vm, |_, _| ())? as u64;
                harvesting = start.elapsed();
            }
            Ok(())
        })?;
        let now = self.counted();
        let mut counted: Counted = std::array::from_fn(|i| now[i] - before[i]);
        counted[HARVESTS] += u64::from(due);
        counted[DIRTIED] += dirtied;
        Ok(Period {
            done,
            counted,
            harvesting,
        })
    }

    fn counted(&self) -> Counted {
        let mut all = counted(&self.player.vm().dirty_stats());
        // Pages that vCPUs with full rings have reaped themselves.
        (all[RINGS_FULL], all[DIRTIED]) = self.player.full_rings();
        all
    }
}

/// Starts `count` VMs, carries out `experiment` when they are prepared, and ends them.
pub fn with_churns<T>(
    setup: &Setup,
    count: usize,
    experiment: impl FnOnce(&mut [Churn<'_>]) -> LabResult<T>,
) -> LabResult<T> {
    let cast = Cast {
        guest: "churn",
        background: InBackground::Nothing,
    };
    let builders = vec![setup.builder.clone(); count];
    with_players(&builders, cast, |players| {
        let watch = Watch::Nothing(Detection::WriteProtect);
        let churns = players.into_iter().map(|player| Churn { player, watch });
        experiment(&mut churns.collect::<Vec<_>>())
    })
}

/// Lets each VM play each of `arms` for `rounds` periods; returns the periods of each arm. Each VM
/// has one uncounted period before these.
pub fn play(
    churns: &mut [Churn<'_>],
    setup: &Setup,
    arms: &[Watch],
    cold: u32,
    rounds: usize,
) -> LabResult<Vec<Vec<Period>>> {
    let mut periods = vec![Vec::new(); arms.len()];
    for vms in shifts(arms.len()) {
        for (watch, vm) in arms.iter().zip(&vms) {
            churns[*vm].watch(*watch, cold)?;
        }
        for counted in 0..=rounds {
            let round = period(churns, setup, &vms)?;
            if counted > 0 {
                periods
                    .iter_mut()
                    .zip(round)
                    .for_each(|(all, one)| all.push(one));
            }
        }
    }
    Ok(periods)
}

/// A period of each of `vms`, in turns.
fn period(churns: &mut [Churn<'_>], setup: &Setup, vms: &[usize]) -> LabResult<Vec<Period>> {
    let mut periods = vec![Period::default(); vms.len()];
    let (pairs, length) = turns_of(setup.period);
    round(vms.len(), pairs, |arm, last| {
        let part = churns[vms[arm]].turn(length, last)?;
        periods[arm] = periods[arm].and(&part);
        Ok::<_, LabError>(())
    })?;
    Ok(periods)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use crate::options::Recorder;
    use lacuna::dirty::Backup;
    use lacuna_skip::test;

    const WP: Watch = Watch::Dirty(Detection::WriteProtect);
    const PML: Watch = Watch::Dirty(Detection::Pml);

    fn small(arch: Arch, delivery: Delivery) -> Setup {
        Setup {
            period: Duration::from_millis(200),
            ..Setup::new(arch, 48, 2, delivery)
        }
    }

    #[test]
    fn every_watch_sees_what_it_should() {
        needs_guests();
        for delivery in [Delivery::Bitmap, Recorder::Ring.delivery(Backup::None)] {
            let setup = small(Arch::X86_64, delivery);
            let arms = [WP, PML, Watch::Nothing(Detection::Pml)];
            let done = with_churns(&setup, 3, |churns| play(churns, &setup, &arms, COLD_MAX, 2));
            let periods = done.unwrap();
            for (arm, periods) in arms.iter().zip(&periods) {
                assert_eq!(periods.len(), 2 * arms.len());
                for period in periods {
                    let counted = period.counted;
                    assert!(
                        period.rate() > 0.0 && period.wall_rate() > 0.0,
                        "{period:?}"
                    );
                    match arm {
                        Watch::Nothing(_) => assert_eq!(counted, Counted::default()),
                        _ => assert!(counted[HARVESTS] == 1 && counted[DIRTIED] > 0),
                    }
                    assert_eq!(counted[LOGGED] > 0, *arm == PML, "{period:?}");
                    // Without write-protection only pages of the guest's kernel fault, because no
                    // process writes to those.
                    assert_eq!(counted[FAST_FAULTS] > 100, *arm == WP, "{period:?}");
                }
            }
        }
    }

    /// Few cold transactions dirty fewer pages.
    #[test]
    fn the_setting_determines_the_dirty_rate() {
        needs_guests();
        let setup = small(Arch::Arm64, Delivery::Bitmap);
        let [few, many] = [1, COLD_MAX].map(|cold| {
            let periods = with_churns(&setup, 1, |churns| play(churns, &setup, &[PML], cold, 1));
            periods.unwrap()[0][0].counted[DIRTIED]
        });
        assert!(few * 2 < many, "{few} and {many}");
    }

    #[test]
    fn exits_are_those_of_hardware_and_a_charge_is_time_of_all_vcpus() {
        let mut counted = Counted::default();
        counted[HARVESTS] = 3;
        assert_eq!(exits(&counted, Detection::WriteProtect, 2), 6);
        assert_eq!(exits(&counted, Detection::Pml, 2), 12);
        [counted[FAULTS], counted[FAST_FAULTS], counted[RINGS_FULL]] = [10, 1000, 1];
        assert_eq!(exits(&counted, Detection::WriteProtect, 2), 1019);
        // 2048 pages would have filled four logs on hardware.
        [counted[LOG_FULL], counted[FLUSHES], counted[LOGGED]] = [2, 300, 2048];
        assert_eq!(exits(&counted, Detection::Pml, 2), 1011 + 4 + 16);
        let mut period = Period::default();
        (period.done.transactions, period.done.cpu) = (200, 2.0);
        period.counted[FAULTS] = 4_000_000;
        assert_eq!(
            period.charged(Watch::Nothing(Detection::Pml), 2, 500.0),
            100.0
        );
        // Two vCPUs have four seconds, and so many exits take two of them.
        let rate = period.charged(WP, 2, 500.0);
        assert!((rate - 100.0 * 2.0 / 3.0).abs() < 0.01);
    }
}
