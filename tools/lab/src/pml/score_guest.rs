//! `churn` VMs in turns, with a monitor that harvests once a second of the guest's own time.
//!
//! A rate is transactions over the time that the threads of the vCPUs have run. So the monitor,
//! which may have no core of its own, and other programs do not count as a cost. The rate by the
//! wall clock is in the results, too.
//!
//! At the end of logging, unwritten pages stay write-protected until they are written. Each would
//! cost the next arm a fault. So the guest writes to all of its pages in between, uncounted
//! ([`Churn::watch`]).

use super::score_charge::Counted;
use crate::experiment::LabError;
use crate::players::{Cast, Done, InBackground, Player, TURN, reap, turns_of, with_players};
use crate::turns::{Last, round, shifts};
use lacuna_guest::status::SETTING_AT;
use lacuna_machine::{DetectionChoice as _, DirtyTracking as _, GuestMemory, Vm as _};
use lacuna_soft::{Delivery, Detection, DirtyStats, Logging, SlotId, Vm, VmBuilder};
use std::time::{Duration, Instant};

/// The VMs of an experiment.
pub struct Setup {
    /// Their memory, vCPUs and guest parameters.
    pub builder: VmBuilder,
    /// Where writes are recorded.
    pub delivery: Delivery,
    /// The time from one harvest to the next, in a VM's own time.
    pub period: Duration,
}

/// With this setting, a transaction writes to every page of the process.
const SWEEP: u32 = u32::MAX;

/// Whether slots log, and what detects writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch {
    /// No slot logs.
    Nothing(Detection),
    /// All slots log, and a monitor harvests.
    Dirty(Detection),
}

impl Watch {
    const fn detection(self) -> Detection {
        match self {
            Self::Nothing(detection) | Self::Dirty(detection) => detection,
        }
    }
}

/// One period of a guest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Period {
    /// The guest's transactions and times.
    pub done: Done,
    /// Counts of dirty logging.
    pub counted: Counted,
    /// The time of the monitor's harvest.
    pub harvesting: Duration,
}

impl Period {
    /// Transactions a second of the time that the vCPUs ran.
    pub fn rate(&self) -> f64 {
        self.done.transactions as f64 / self.done.cpu
    }

    /// Transactions a second by the wall clock.
    pub fn wall_rate(&self) -> f64 {
        self.done.transactions as f64 / self.done.wall
    }

    /// The sum of both.
    #[must_use]
    pub fn and(&self, more: &Self) -> Self {
        Self {
            done: self.done.and(&more.done),
            counted: self.counted.and(&more.counted),
            harvesting: self.harvesting + more.harvesting,
        }
    }
}

/// One of the guests.
pub struct Churn<'a> {
    player: Player<'a>,
    watch: Watch,
    slots: Vec<(SlotId, Vec<u64>)>,
}

impl<'a> Churn<'a> {
    fn new(player: Player<'a>) -> Self {
        let words = |pages: u64| vec![0; pages.div_ceil(64) as usize];
        let snapshot = player.vm().mmu().slots();
        let slots = snapshot
            .iter()
            .map(|slot| (slot.id, words(slot.gfns.pages())));
        Self {
            slots: slots.collect(),
            watch: Watch::Nothing(Detection::WriteProtect),
            player,
        }
    }

    /// From now on the VM logs as `watch` says, and `cold` of 65536 transactions go to the cold
    /// part of the heap.
    ///
    /// # Errors
    /// The guest ends, or its memory cannot be written.
    pub fn watch(&mut self, watch: Watch, cold: u32) -> Result<(), LabError> {
        self.log(Logging::Off)?;
        let protected = self.watch == Watch::Dirty(Detection::WriteProtect) && watch != self.watch;
        if protected {
            self.write_all()?;
        }
        self.write_setting(1 + cold)?;
        self.player.vm().set_detection(watch.detection());
        if let Watch::Dirty(_) = watch {
            self.log(Logging::LAZY)?;
        }
        self.watch = watch;
        Ok(())
    }

    /// Lets the guest write to all of its pages.
    fn write_all(&mut self) -> Result<(), LabError> {
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
    fn write_setting(&self, to: u32) -> Result<(), LabError> {
        let page = self.player.devices().status_page();
        let page = page.expect("the guest was attached by it").gpa();
        let at = page
            .checked_add(SETTING_AT as u64)
            .expect("inside the status page");
        let memory: &dyn GuestMemory = self.player.vm();
        Ok(memory.write(at, &to.to_le_bytes())?)
    }

    fn log(&self, logging: Logging) -> Result<(), LabError> {
        for (id, _) in &self.slots {
            self.player.vm().set_logging(*id, logging)?;
        }
        Ok(())
    }

    /// One turn. The last of a period has a harvest at its end, if slots log.
    fn turn(&mut self, length: Duration, last: Last) -> Result<Period, LabError> {
        let before = self.counted();
        let Self {
            player,
            watch,
            slots,
        } = self;
        let due = last == Last::Yes && matches!(watch, Watch::Dirty(_));
        let (mut found, mut harvesting) = (Counted::default(), Duration::ZERO);
        let done = player.turn(|vm| {
            std::thread::sleep(length);
            if due {
                let start = Instant::now();
                found.dirtied = match vm.mmu().delivery() {
                    Delivery::Bitmap => harvest(vm, slots)?,
                    Delivery::Ring { .. } => reap(vm),
                };
                found.harvests = 1;
                harvesting = start.elapsed();
            }
            Ok(())
        })?;
        Ok(Period {
            done,
            counted: self.counted().since(&before).and(&found),
            harvesting,
        })
    }

    fn counted(&self) -> Counted {
        let all = self.player.vm().dirty_stats();
        let (rings_full, reaped) = self.player.full_rings();
        let stats = all
            .iter()
            .fold(DirtyStats::default(), |sum, one| DirtyStats {
                faults: sum.faults + one.faults,
                fast_page_faults: sum.fast_page_faults + one.fast_page_faults,
                log_full: sum.log_full + one.log_full,
                flushes: sum.flushes + one.flushes,
                logged: sum.logged + one.logged,
            });
        Counted {
            stats,
            rings_full,
            harvests: 0,
            // Pages that vCPUs with full rings have reaped themselves.
            dirtied: reaped,
        }
    }
}

/// The monitor's harvest: asks which pages were written, and re-arms them. Returns how many.
fn harvest(vm: &Vm, slots: &mut [(SlotId, Vec<u64>)]) -> Result<u64, LabError> {
    let mut pages = 0;
    for (id, words) in slots {
        vm.get_dirty(*id, words)?;
        pages += words.iter().map(|w| u64::from(w.count_ones())).sum::<u64>();
    }
    Ok(pages)
}

/// Starts `count` VMs, carries out `experiment` when they are prepared, and ends them.
///
/// # Errors
/// An error of the experiment or the builder; and a guest that ends before the experiment does.
pub fn with_churns<T>(
    setup: &Setup,
    count: usize,
    experiment: impl FnOnce(&mut [Churn<'_>]) -> Result<T, LabError>,
) -> Result<T, LabError> {
    let cast = Cast {
        guest: "churn",
        delivery: setup.delivery,
        background: InBackground::Nothing,
    };
    let builders = vec![setup.builder.clone(); count];
    with_players(&builders, cast, |players| {
        let mut churns: Vec<_> = players.into_iter().map(Churn::new).collect();
        experiment(&mut churns)
    })
}

/// Lets each VM play each of `arms` for `rounds` periods; returns the periods of each arm. Each VM
/// has one uncounted period before these.
///
/// # Errors
/// A guest ends.
///
/// # Panics
/// If there is not a VM for each arm.
pub fn play(
    churns: &mut [Churn<'_>],
    setup: &Setup,
    arms: &[Watch],
    cold: u32,
    rounds: usize,
) -> Result<Vec<Vec<Period>>, LabError> {
    let mut periods = vec![Vec::new(); arms.len()];
    for vms in shifts(arms.len()) {
        for (watch, vm) in arms.iter().zip(&vms) {
            churns[*vm].watch(*watch, cold)?;
        }
        period(churns, setup, &vms)?;
        for _ in 0..rounds {
            for (all, one) in periods.iter_mut().zip(period(churns, setup, &vms)?) {
                all.push(one);
            }
        }
    }
    Ok(periods)
}

/// A period of each of `vms`, in turns.
///
/// # Errors
/// A guest ends.
fn period(churns: &mut [Churn<'_>], setup: &Setup, vms: &[usize]) -> Result<Vec<Period>, LabError> {
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
    use crate::fixture::{needs_guests, resident};
    use crate::pml::score::rings;
    use crate::pml::score_charge::COLD_MAX;
    use lacuna_skip::test;

    const WP: Watch = Watch::Dirty(Detection::WriteProtect);
    const PML: Watch = Watch::Dirty(Detection::Pml);

    fn small(delivery: Delivery) -> Setup {
        let mut builder = resident(48, 2);
        builder.command_line = "hot=4M writes=100 seconds=1000000".into();
        Setup {
            builder,
            delivery,
            period: Duration::from_millis(200),
        }
    }

    #[test]
    fn every_watch_sees_what_it_should() {
        needs_guests();
        for delivery in [Delivery::Bitmap, rings()] {
            let setup = small(delivery);
            let arms = [WP, PML, Watch::Nothing(Detection::Pml)];
            let done = with_churns(&setup, 3, |churns| play(churns, &setup, &arms, COLD_MAX, 2));
            let periods = done.unwrap();
            for (arm, periods) in arms.iter().zip(&periods) {
                assert_eq!(periods.len(), 2 * arms.len());
                for period in periods {
                    assert!(
                        period.rate() > 0.0 && period.wall_rate() > 0.0,
                        "{period:?}"
                    );
                    let Counted {
                        stats,
                        harvests,
                        dirtied,
                        ..
                    } = period.counted;
                    match arm {
                        Watch::Nothing(_) => {
                            assert_eq!(period.counted, Counted::default(), "no slot logs");
                        }
                        _ => assert!(harvests == 1 && dirtied > 0, "{period:?}"),
                    }
                    assert_eq!(stats.logged > 0, *arm == PML, "{period:?}");
                    // Without write-protection only pages of the guest's kernel fault, because no
                    // process writes to those.
                    let found_by_faults = stats.fast_page_faults > 100;
                    assert_eq!(found_by_faults, *arm == WP, "{period:?}");
                }
            }
        }
    }

    /// Few cold transactions dirty fewer pages.
    #[test]
    fn the_setting_determines_the_dirty_rate() {
        needs_guests();
        let setup = small(Delivery::Bitmap);
        let done = with_churns(&setup, 1, |churns| {
            let mut pages = [0; 2];
            for (pages, cold) in pages.iter_mut().zip([1, COLD_MAX]) {
                let periods = play(churns, &setup, &[PML], cold, 1)?;
                *pages = periods[0][0].counted.dirtied;
            }
            Ok(pages)
        });
        let [few, many] = done.unwrap();
        assert!(few * 2 < many, "{few} and {many}");
    }
}
