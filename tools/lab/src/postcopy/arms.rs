//! The arms, and the slices of time in which they take turns in one guest.
//!
//! Arms differ in the flag of the memory slot, in the switch of async page faults, in the paused
//! processes, and in whether pages are pushed. All are switched while the guest runs. Memory is
//! missing only once, so each round has a VM of its own. Its guest boots before the peer is asked.

use super::peer::{Pages, Remote};
use super::push::{Push, Speed};
use crate::apf::{SLICE_US, TICK_US};
use crate::experiment::LabResult;
use crate::fixture::resident;
use crate::session::{Session, image, on};
use crate::slices::{self, Arm, Pace, Role, slice};
use crate::stalls::add_stalls;
use crate::stats::collected;
use crate::turns;
use lacuna::memory::{MemoryKind, SlotFlags};
use lacuna::soft::{Stalls, Vm, VmBuilder};
use lacuna::source::PageSource;
use lacuna::{Apf, Arch, MemorySlots as _, Vm as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What all arms of an experiment have in common.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The processor of the guest.
    pub arch: Arch,
    /// The memory of the guest.
    pub kind: MemoryKind,
    /// Its size in MiB.
    pub memory_mib: u64,
    /// The numbers of the guest's computing and faulting processes.
    pub processes: [usize; 2],
    /// The peer's distance.
    pub latency: Duration,
    /// How fast pages are pushed.
    pub push: Speed,
    /// The most pushed pages in flight.
    pub window: u64,
    /// The rounds, and the times of a slice.
    pub pace: Pace,
}

/// Workers, faulters, demanded and pushed pages a second, and the 99th percentile of the stalls.
type Figures = [f64; 5];
/// What was counted in all arms.
pub type Runs = slices::Runs<5>;

impl Scene {
    /// Lets `arms` take turns. The first round is not counted.
    pub fn measure(&self, arms: &[Arm]) -> LabResult<Runs> {
        let remote = Remote::start(self.latency)?;
        let (mut stalls, mut is_counted) = (vec![Vec::new(); arms.len()], false);
        let figures = collected(self.pace.rounds, || {
            let round = self.round(&remote, arms)?.into_iter();
            let (figures, took): (_, Vec<Vec<Stalls>>) = round.unzip();
            if std::mem::replace(&mut is_counted, true) {
                let sums = stalls.iter_mut().zip(&took);
                sums.for_each(|(sum, took)| add_stalls(sum, took));
            }
            Ok(figures)
        })?;
        Ok(Runs::new(arms, figures, stalls))
    }

    /// The VM of a round.
    fn builder(&self, source: Arc<dyn PageSource>) -> VmBuilder {
        let [workers, faulters] = self.processes;
        VmBuilder {
            arch: self.arch,
            memory_kind: self.kind,
            source: Some(source),
            apf: Apf::On,
            command_line: format!(
                "workers={workers} faulters={faulters} seconds=1000000 slice_us={SLICE_US} \
                 tick_us={TICK_US}"
            ),
            ..resident(self.memory_mib, 1)
        }
    }

    /// One turn of all arms, there and back, in a fresh VM: the means, and the stalls.
    fn round(&self, remote: &Remote, arms: &[Arm]) -> LabResult<Vec<(Figures, Vec<Stalls>)>> {
        let memory = resident(self.memory_mib, 1).memory;
        let pages = remote.connect(memory, self.window)?;
        let builder = self.builder(Arc::clone(&pages) as Arc<dyn PageSource>);
        on(&builder, &image(builder.arch, "bm")?, |session| {
            session.guest.prepared()?;
            pages.set_far();
            let memory = session.vm.missing_memory().expect("it has a source");
            let push = Push {
                memory,
                arch: self.arch,
                pages: &pages,
                speed: self.push,
                is_on: AtomicBool::new(false),
            };
            push.during(|| {
                let mut took = vec![(Figures::default(), Vec::new()); arms.len()];
                turns::round(arms.len(), 1, |arm, _| {
                    self.slice(session, &pages, &push, arms[arm], &mut took[arm])
                })?;
                for (figures, stalls) in &mut took {
                    let p99 = stalls
                        .iter()
                        .map(|stalls: &Stalls| stalls.quantile_ns(0.99));
                    figures[Role::P99.place()] = p99.max().unwrap_or(0) as f64;
                }
                Ok(took)
            })
        })
    }

    fn slice(
        &self,
        session: &Session<'_, Vm>,
        pages: &Pages,
        push: &Push<'_>,
        arm: Arm,
        (means, waited): &mut (Figures, Vec<Stalls>),
    ) -> LabResult {
        let mut flags = SlotFlags::empty();
        flags.set(SlotFlags::EXIT_ON_MISSING, arm.exits);
        for slot in session.vm.memory_slots() {
            session.vm.set_slot_flags(slot.id, flags)?;
        }
        push.is_on.store(arm.pushes, Ordering::Relaxed);
        let (processes, pages) = slice(session, arm, self.pace, waited, || pages.provided())?;
        let rates = [processes, pages].concat();
        means
            .iter_mut()
            .zip(rates)
            .for_each(|(mean, rate)| *mean += rate / 2.0);
        Ok(())
    }
}
