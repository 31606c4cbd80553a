//! `churn` under a monitor: one VM, whose detection and logging are switched while it runs. Where
//! its marks go is settled before it boots.
//!
//! ```text
//! slice   [heal] ─ switch on ─┬─ 1 s ─ harvest ─ 1 s ─ harvest ─┬─ switch off
//!                             └─────────── counted ─────────────┘
//! ```
//! Counted are transactions in the time that the vCPUs' threads have run, so that neither the
//! monitor, which may have no core of its own, nor another program on the machine is taken for a
//! cost to the guest; by the clock on the wall it is told beside that.
//!
//! A harvest is at the end of its second, so a slice has all of what it costs. Pages that write
//! protection has armed and nobody has written since stay read-only when logging ends, and each
//! would cost whoever comes next one more fault. To *heal* is to let the guest write all of its
//! heap, uncounted.

use super::score_charge::{Counted, DIAL_MOST};
use crate::experiment::LabError;
use crate::session::{Guest, LastWords, image};
use lacuna_guest::status::DIAL_AT;
use lacuna_machine::{Board, Ending, Exit, GuestMemory, Next, Vcpu as _, dispatch};
use lacuna_soft::{
    Delivery, Detection, DirtyError, DirtyStats, Launch, Logging, SlotId, Vcpu, Vm, VmConfig,
};
use lacuna_sync::{Clock, HostClock};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// What a guest may take until it has announced its status page.
const LIMIT: Duration = Duration::from_secs(60);

/// A VM to be measured.
pub struct Setup {
    /// Its memory, vCPUs and guest parameters.
    pub launch: Launch,
    /// Where marks go.
    pub delivery: Delivery,
    /// From one harvest to the next.
    pub period: Duration,
    /// How long it writes at the highest rate after each slice of write protection.
    pub heal: Duration,
}

/// How a slice is watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch {
    /// Not at all.
    Nothing(Detection),
    /// Slots log, and a monitor harvests.
    Dirty(Detection),
}

impl Watch {
    const fn detection(self) -> Detection {
        match self {
            Self::Nothing(detection) | Self::Dirty(detection) => detection,
        }
    }
}

/// What a slice found.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// Transactions a second of all vCPUs, as long as these ran.
    pub rate: f64,
    /// The same by the clock on the wall.
    pub wall_rate: f64,
    /// How long each vCPU ran, in the mean.
    pub ran: f64,
    /// How long it was.
    pub seconds: f64,
    /// What was counted meanwhile.
    pub counted: Counted,
    /// The monitor's time in harvests.
    pub harvesting: Duration,
}

/// The guest, running.
pub struct Churn<'a> {
    guest: Guest<'a>,
    machine: &'a Machine,
    setup: &'a Setup,
    slots: Vec<(SlotId, Vec<u64>)>,
    dial: u32,
    /// Whether there may be pages that write protection has left armed.
    armed: bool,
}

impl Churn<'_> {
    /// Turns the dial: of 65536 transactions so many go to the cold part.
    ///
    /// # Errors
    /// When the guest's memory cannot be written.
    pub fn turn(&mut self, mark: u32) -> Result<(), LabError> {
        self.dial = mark;
        self.write_dial(mark)
    }

    /// How many vCPUs.
    pub fn vcpus(&self) -> u64 {
        self.setup.launch.vcpus as u64
    }

    // Only while nothing logs: a VM with rings alone takes no writes of the host's then.
    fn write_dial(&self, mark: u32) -> Result<(), LabError> {
        let page = self.machine.board.status_page();
        let page = page.expect("the guest was attached by it").gpa();
        let at = page
            .checked_add(DIAL_AT as u64)
            .expect("inside the status page");
        Ok(self.machine.vm.write(at, &u32::to_le_bytes(mark + 1))?)
    }

    fn heal(&mut self) -> Result<(), LabError> {
        if std::mem::take(&mut self.armed) {
            self.write_dial(DIAL_MOST)?;
            self.guest.run_for(self.setup.heal)?;
            self.write_dial(self.dial)?;
        }
        Ok(())
    }

    /// One slice of so many harvest periods.
    ///
    /// # Errors
    /// When the guest ends, or its memory cannot be read.
    pub fn slice(&mut self, watch: Watch, periods: u32) -> Result<Slice, LabError> {
        self.heal()?;
        let vm = &self.machine.vm;
        vm.set_detection(watch.detection());
        if let Watch::Dirty(detection) = watch {
            self.log(Logging::LAZY)?;
            self.armed = detection == Detection::WriteProtect;
        }
        let (before, ran, then) = (self.guest.count()?, self.ran()?, self.counted());
        let mut found = Counted::default();
        let mut harvesting = Duration::ZERO;
        for period in 1..=periods {
            let due = before.at + self.setup.period * period;
            self.guest
                .run_for(due.saturating_duration_since(Instant::now()))?;
            if let Watch::Dirty(_) = watch {
                let start = Instant::now();
                found.dirtied += self.harvest()?;
                found.harvests += 1;
                harvesting += start.elapsed();
            }
        }
        let (after, ran, now) = (self.guest.count()?, self.ran()? - ran, self.counted());
        self.log(Logging::Off)?;
        let counted = now.since(&then).and(&found);
        Ok(Slice {
            rate: (after.workers - before.workers) as f64 / ran,
            wall_rate: after.rates_since(&before)[0],
            ran,
            seconds: (after.at - before.at).as_secs_f64(),
            counted,
            harvesting,
        })
    }

    fn log(&self, logging: Logging) -> Result<(), LabError> {
        for (id, _) in &self.slots {
            self.machine.vm.set_logging(*id, logging).map_err(refused)?;
        }
        Ok(())
    }

    /// What a monitor does: asks which pages were written, and arms them again. How many.
    fn harvest(&mut self) -> Result<u64, LabError> {
        let vm = &self.machine.vm;
        if self.setup.delivery != Delivery::Bitmap {
            return Ok(self.machine.reap());
        }
        let mut pages = 0;
        for (id, words) in &mut self.slots {
            vm.get_dirty(*id, words).map_err(refused)?;
            pages += words.iter().map(|w| u64::from(w.count_ones())).sum::<u64>();
        }
        Ok(pages)
    }

    /// Seconds that each vCPU's thread has run, in the mean. Behind by a tick at most.
    fn ran(&self) -> Result<f64, LabError> {
        let threads = self.machine.threads.lock();
        let threads = threads.expect("no panic under this lock");
        let mut ns = 0.0;
        for thread in &*threads {
            let path = format!("/proc/self/task/{thread}/schedstat");
            let text = std::fs::read_to_string(&path).map_err(|source| LabError::Io {
                what: path.clone(),
                source,
            })?;
            let first = text.split_whitespace().next();
            let spent = first.and_then(|word| word.parse::<f64>().ok());
            ns += spent.ok_or_else(|| LabError::Guest(format!("{path} says {text:?}")))?;
        }
        Ok(ns / 1e9 / self.vcpus() as f64)
    }

    fn counted(&self) -> Counted {
        let machine = self.machine;
        let all = machine.vm.dirty_stats();
        Counted {
            stats: all
                .iter()
                .fold(DirtyStats::default(), |sum, one| DirtyStats {
                    faults: sum.faults + one.faults,
                    repairs: sum.repairs + one.repairs,
                    log_full: sum.log_full + one.log_full,
                    flushes: sum.flushes + one.flushes,
                    logged: sum.logged + one.logged,
                }),
            rings_full: machine.rings_full.load(Ordering::Relaxed),
            harvests: 0,
            // What vCPUs with full rings have reaped themselves.
            dirtied: machine.reaped.load(Ordering::Relaxed),
        }
    }
}

fn refused(error: DirtyError) -> LabError {
    LabError::Guest(error.to_string())
}

struct Machine {
    vm: Arc<Vm>,
    board: Board,
    words: LastWords,
    /// Of each vCPU, as the system knows it.
    threads: Mutex<Vec<i32>>,
    rings_full: AtomicU64,
    reaped: AtomicU64,
}

impl Machine {
    fn new(setup: &Setup) -> Result<(Self, Vec<Vcpu>), LabError> {
        let launch = &setup.launch;
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let config = VmConfig {
            memory: launch.memory,
            vcpus: launch.vcpus,
            apf: launch.apf,
        };
        let vm = Vm::new(launch.host(Arc::clone(&clock))?, clock, config)?;
        vm.set_delivery(setup.delivery).map_err(refused)?;
        let vcpus = vm.boot(&image("churn")?, &launch.full_command_line())?;
        let words = LastWords::default();
        let machine = Self {
            board: Board::new(words.console()),
            vm,
            words,
            threads: Mutex::default(),
            rings_full: AtomicU64::new(0),
            reaped: AtomicU64::new(0),
        };
        Ok((machine, vcpus))
    }

    /// Empties all rings; how many pages were in them.
    fn reap(&self) -> u64 {
        let pages = self.vm.collect_rings(|_, _| ());
        self.vm.reset_rings();
        pages as u64
    }

    /// One vCPU's thread. A vCPU whose ring is full reaps for itself, as QEMU's do.
    fn drive(&self, mut vcpu: Vcpu) {
        let _end = End(self);
        let thread = rustix::thread::gettid().as_raw_pid();
        let mut threads = self.threads.lock().expect("no panic under this lock");
        threads.push(thread);
        drop(threads);
        while self.board.ending().is_none() {
            let exit = vcpu.run();
            if let Ok(Exit::DirtyRingFull) = exit {
                self.rings_full.fetch_add(1, Ordering::Relaxed);
                self.reaped.fetch_add(self.reap(), Ordering::Relaxed);
                continue;
            }
            if dispatch(&mut vcpu, exit, &self.board, &*self.vm) == Next::Stop {
                break;
            }
        }
    }

    fn attach<'a>(&'a self, setup: &'a Setup) -> Result<Churn<'a>, LabError> {
        let deadline = Instant::now() + LIMIT;
        let guest = loop {
            if let Some(guest) = Guest::attach(&*self.vm, &self.board) {
                break guest;
            }
            if self.board.ending().is_some() || Instant::now() > deadline {
                return Err(LabError::Guest("the guest did not begin".into()));
            }
            thread::sleep(Duration::from_millis(1));
        };
        guest.prepared()?;
        let snapshot = self.vm.mmu().slots().snapshot();
        let words = |pages: u64| vec![0; pages.div_ceil(64) as usize];
        let slots = snapshot
            .iter()
            .map(|slot| (slot.id, words(slot.gfns.pages())));
        Ok(Churn {
            guest,
            machine: self,
            setup,
            slots: slots.collect(),
            dial: 0,
            armed: false,
        })
    }
}

/// Ends the guest, whatever happens to its threads or to the experiment.
struct End<'a>(&'a Machine);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.board.end(Ending::Stopped, &*self.0.vm);
    }
}

/// Starts the guest, carries out `experiment` when it is prepared, and ends it.
///
/// # Errors
/// Those of the experiment and of the launch; and a guest that ends before the experiment does.
pub fn with_churn<T>(
    setup: &Setup,
    experiment: impl FnOnce(&mut Churn<'_>) -> Result<T, LabError>,
) -> Result<T, LabError> {
    let (machine, vcpus) = Machine::new(setup)?;
    let result = thread::scope(|scope| {
        let _end = End(&machine);
        for vcpu in vcpus {
            scope.spawn(|| machine.drive(vcpu));
        }
        experiment(&mut machine.attach(setup)?)
    });
    let ending = machine.board.ending().unwrap_or(Ending::Stopped);
    machine.words.settle(Some(result), &ending)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pml::score::rings;
    use lacuna_addr::PageCount;
    use lacuna_soft::{Apf, Dial, HugePages, Swap};

    fn small(delivery: Delivery) -> Setup {
        Setup {
            launch: Launch {
                memory: PageCount::from_bytes(48 << 20),
                resident: PageCount::from_bytes(128 << 20),
                vcpus: 2,
                huge: HugePages::Never,
                swap: Swap::Memory,
                latency: Dial::default(),
                apf: Apf::Off,
                seed: None,
                command_line: "hot=4M writes=100 seconds=1000000".into(),
            },
            delivery,
            period: Duration::from_millis(50),
            heal: Duration::from_millis(20),
        }
    }

    #[test]
    fn every_watch_sees_what_it_should() {
        for delivery in [Delivery::Bitmap, rings()] {
            let done = with_churn(&small(delivery), |churn| {
                churn.turn(DIAL_MOST)?;
                let all = churn.slice(Watch::Dirty(Detection::WriteProtect), 2)?;
                assert!(all.rate > 0.0 && all.seconds >= 0.1 && all.wall_rate > 0.0);
                assert!(
                    (0.0..=1.1 * all.seconds + 0.01).contains(&all.ran),
                    "{all:?}"
                );
                assert_eq!(all.counted.harvests, 2);
                assert!(all.counted.stats.repairs > 0 && all.counted.dirtied > 0);
                let pml = churn.slice(Watch::Dirty(Detection::Pml), 2)?;
                assert!(pml.counted.stats.logged > 0 && pml.counted.dirtied > 0);
                let nothing = churn.slice(Watch::Nothing(Detection::Pml), 1)?;
                assert!(nothing.rate > 0.0);
                assert_eq!(nothing.counted, Counted::default(), "no slot logs");
                Ok(())
            });
            done.unwrap();
        }
    }

    /// Few cold transactions dirty fewer pages.
    #[test]
    fn the_dial_turns_the_dirty_rate() {
        let done = with_churn(&small(Delivery::Bitmap), |churn| {
            let mut pages = [0; 2];
            for (pages, mark) in pages.iter_mut().zip([1, DIAL_MOST]) {
                churn.turn(mark)?;
                // What the other mark has dirtied before is in no slice's count.
                *pages = churn
                    .slice(Watch::Dirty(Detection::Pml), 1)?
                    .counted
                    .dirtied;
            }
            Ok(pages)
        });
        let [few, many] = done.unwrap();
        assert!(few * 2 < many, "{few} and {many}");
    }
}
