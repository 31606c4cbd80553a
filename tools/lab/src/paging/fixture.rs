//! VMs with missing memory. The guest `touch` needs each of its pages once. An arm says how the
//! pages are provided.
//!
//! A VM's pages are provided once, so each slice has a VM of its own. Its host stays, so a later
//! slice has the frames of an earlier one, and the kernel has backed them. The guest boots, waits
//! at a gate until the host opens it, and times the touching itself.

use super::machine::Machine;
use super::queue::Queues;
use crate::experiment::LabError;
use crate::fixture::resident;
use crate::session::Guest;
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_machine::{Apf, Arch, CpuModel, PageSource, SourcePage, Vm, VmConfig};
use lacuna_soft::{BootMemory, Host, MemoryKind, VmBuilder};
use lacuna_sync::{Clock, HostClock};
use std::sync::{Arc, OnceLock};
use std::thread;

/// MiB of a guest beside the pages that it touches: its kernel, and the page tables of its arena.
const BESIDE_MIB: u64 = 32;

/// The beginning of the result ids for this kind of memory.
pub const fn prefix(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Budget => "paging.pool",
        MemoryKind::Linux | MemoryKind::Shared => "paging",
        MemoryKind::Hugetlbfs => "paging.hugetlb",
    }
}

/// Why pages of this kind of memory cannot be missing on this host.
pub fn unavailable(kind: MemoryKind) -> Option<LabError> {
    let work = Work {
        arch: Arch::X86_64,
        vcpus: 1,
        pages: 512,
        share: Share::Own,
        batch: 1,
    };
    unavailable_for(kind, work)
}

/// As [`unavailable`], for guests with this `work`.
pub fn unavailable_for(kind: MemoryKind, work: Work) -> Option<LabError> {
    let source = Arc::new(Queues::new(1));
    let vm = Fixture::new(kind, work).and_then(|fixture| fixture.maker.vm(Apf::Off, source));
    vm.err()
}

/// How a missing page is provided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arm {
    /// All vCPUs put their requests into one queue. This number of threads read it.
    Queue(usize),
    /// Each vCPU has a queue with one reader.
    QueueEach,
    /// The vCPU exits, its own thread provides the page, and enters it again.
    Exits,
    /// The vCPU exits, the guest gets the event, and another thread provides the page.
    ExitsTold,
    /// No exit: the backend asks a page source, which answers at once.
    Source,
}

impl Arm {
    /// Its name in results.
    pub fn name(self) -> String {
        match self {
            Self::Queue(readers) => format!("queue_{readers}_readers"),
            Self::QueueEach => "queue_each".into(),
            Self::Exits => "exits".into(),
            Self::ExitsTold => "exits_apf".into(),
            Self::Source => "source".into(),
        }
    }
}

/// Which pages a vCPU touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Share {
    /// A part of its own.
    Own,
    /// The same as all others.
    Same,
}

/// Where the threads of the vCPUs run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CorePlace {
    /// Where the kernel's scheduler puts them.
    Anywhere,
    /// Each on a core of its own from this one on, as long as there are cores.
    From(usize),
}

/// The work of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The processor of the guest.
    pub arch: Arch,
    /// The number of vCPUs, with a thread of the guest each.
    pub vcpus: usize,
    /// Touched pages, of all vCPUs together.
    pub pages: u64,
    /// How the vCPUs share them.
    pub share: Share,
    /// Pages provided for each fault: the aligned run around the page. A power of two.
    pub batch: usize,
}

impl Work {
    /// The MiB of its guest.
    const fn mib(self) -> u64 {
        ((self.pages * PAGE_SIZE as u64) >> 20) + BESIDE_MIB
    }

    /// The memory of its guest.
    pub const fn memory(self) -> PageCount {
        PageCount::from_bytes(self.mib() << 20)
    }

    /// The parameters of its guest.
    pub fn words(self) -> String {
        let bytes = self.pages * PAGE_SIZE as u64;
        let overlap = u8::from(self.share == Share::Same);
        let threads = self.vcpus;
        format!("gate=1 threads={threads} bytes={bytes} overlap={overlap}")
    }
}

/// Makes a VM for each slice.
pub trait Maker {
    /// The type of the VMs.
    type Vm: Vm<Error: Into<LabError>>;

    /// A VM whose pages `source` provides.
    ///
    /// # Errors
    /// The VM could not be made.
    fn vm(&self, apf: Apf, source: Arc<dyn PageSource>) -> Result<Arc<Self::Vm>, LabError>;

    /// What its memory is made from.
    fn kind(&self) -> MemoryKind;

    /// The command line of its guest.
    fn command_line(&self) -> String;
}

/// Makes VMs on soft, with one host after the other.
pub struct OnSoft {
    pub(super) builder: VmBuilder,
    host: Arc<Host>,
    clock: Arc<dyn Clock>,
}

impl Maker for OnSoft {
    type Vm = lacuna_soft::Vm;

    fn vm(&self, apf: Apf, source: Arc<dyn PageSource>) -> Result<Arc<Self::Vm>, LabError> {
        let config = VmConfig {
            arch: self.builder.arch,
            memory: self.builder.memory,
            vcpus: self.builder.vcpus,
            apf,
            cpu: CpuModel::Host,
            ..VmConfig::default()
        };
        let (host, clock) = (Arc::clone(&self.host), Arc::clone(&self.clock));
        let memory = BootMemory {
            kind: self.builder.memory_kind,
            source: Some(source),
            backing: None,
        };
        Ok(lacuna_soft::Vm::with_memory(host, clock, config, memory)?)
    }

    fn kind(&self) -> MemoryKind {
        self.builder.memory_kind
    }

    fn command_line(&self) -> String {
        self.builder.full_command_line()
    }
}

/// A host, and the work of its guests.
pub struct Fixture<M = OnSoft> {
    pub(super) maker: M,
    work: Work,
    /// The first page that the guest touches, once a guest has booted.
    arena: OnceLock<u64>,
}

impl Fixture {
    /// A host with frames for one guest.
    ///
    /// # Errors
    /// The host could not be made.
    pub fn new(kind: MemoryKind, work: Work) -> Result<Self, LabError> {
        let mut builder = resident(work.mib(), work.vcpus);
        builder.arch = work.arch;
        builder.memory_kind = kind;
        builder.command_line = work.words();
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(Arc::clone(&clock))?;
        let maker = OnSoft {
            builder,
            host,
            clock,
        };
        Ok(Self::of(maker, work))
    }
}

impl<M: Maker> Fixture<M> {
    /// VMs of `maker`, whose guests have this `work`.
    pub const fn of(maker: M, work: Work) -> Self {
        let arena = OnceLock::new();
        Self { maker, work, arena }
    }

    /// The work of its guests.
    pub const fn work(&self) -> Work {
        self.work
    }

    /// The first pages of the vCPUs' shares, without the first vCPU's. Boots a guest if none has
    /// booted yet, because the guest's kernel decides where its arena begins.
    ///
    /// # Errors
    /// As [`together`].
    pub fn shares(&self) -> Result<Vec<SourcePage>, LabError> {
        if self.arena.get().is_none() {
            self.rate(Arm::Exits)?;
        }
        let first = *self.arena.get().expect("a guest has booted");
        let share = self.work.pages / self.work.vcpus as u64;
        let shares = 1..self.work.vcpus as u64;
        Ok(shares
            .map(|vcpu| SourcePage(first + vcpu * share))
            .collect())
    }

    fn booted(&self, guest: &Guest<'_>) -> Result<(), LabError> {
        let (arena, memory) = (guest.arena_bytes()?, self.work.memory());
        let first = memory.get().checked_sub(arena / PAGE_SIZE as u64);
        let first = first.filter(|first| first + self.work.pages <= memory.get());
        let first = first.ok_or_else(|| {
            LabError::Guest(format!(
                "its arena has {arena} bytes, its memory {memory} pages"
            ))
        })?;
        let _ = self.arena.set(first);
        Ok(())
    }

    /// Pages a second of a fresh VM.
    ///
    /// # Errors
    /// As [`together`].
    pub fn rate(&self, arm: Arm) -> Result<f64, LabError> {
        together(&[self], arm, CorePlace::Anywhere)
    }
}

/// Pages a second of fresh VMs that touch at the same time, one for each of `fixtures`.
///
/// # Errors
/// A VM could not be made, or its guest failed.
pub fn together<M: Maker>(
    fixtures: &[&Fixture<M>],
    arm: Arm,
    place: CorePlace,
) -> Result<f64, LabError> {
    let machines = fixtures
        .iter()
        .map(|fixture| Machine::new(fixture, arm))
        .collect::<Result<Vec<_>, _>>()?;
    run(&machines, fixtures, place)?;
    let touched = machines.iter().map(Machine::touched);
    let touched = touched.collect::<Result<Vec<_>, _>>()?;
    let pages: f64 = touched.iter().map(|touched| touched.0).sum();
    // Until the last page of the last VM: vCPUs of one VM are timed in the same way.
    let ns = touched.iter().map(|touched| touched.1).fold(0.0, f64::max);
    Ok(pages * 1e9 / ns)
}

/// Runs the VMs until all of their guests have touched their pages.
fn run<M: Maker>(
    machines: &[Machine<M::Vm>],
    fixtures: &[&Fixture<M>],
    place: CorePlace,
) -> Result<(), LabError> {
    run_gated(machines, fixtures, place, || Ok(()))
}

/// As [`together`], without the rates. `gate` is called when all guests are ready to touch, and
/// they touch when it returns.
///
/// # Errors
/// As [`together`], and an error of `gate`.
pub fn run_gated<M: Maker>(
    machines: &[Machine<M::Vm>],
    fixtures: &[&Fixture<M>],
    place: CorePlace,
    gate: impl FnOnce() -> Result<(), LabError>,
) -> Result<(), LabError> {
    thread::scope(|scope| {
        let _ends: Vec<_> = machines.iter().map(Machine::end_when_dropped).collect();
        let mut core = match place {
            CorePlace::Anywhere => None,
            CorePlace::From(core) => Some(core),
        };
        for (machine, fixture) in machines.iter().zip(fixtures) {
            machine.start(scope, &fixture.maker.command_line(), core)?;
            core = core.map(|core| core + fixture.work.vcpus);
        }
        let guests = machines
            .iter()
            .map(Machine::prepared)
            .collect::<Result<Vec<_>, _>>()?;
        for (guest, fixture) in guests.iter().zip(fixtures) {
            fixture.booted(guest)?;
        }
        gate()?;
        guests.iter().try_for_each(|guest| guest.set(1))?;
        machines.iter().try_for_each(Machine::wait)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    const ARMS: [Arm; 5] = [
        Arm::Queue(1),
        Arm::Queue(3),
        Arm::QueueEach,
        Arm::Exits,
        Arm::ExitsTold,
    ];

    fn work(share: Share) -> Work {
        Work {
            arch: Arch::X86_64,
            vcpus: 2,
            pages: 512,
            share,
            batch: 1,
        }
    }

    fn needs_linux_memory() {
        if let Some(why) = unavailable(MemoryKind::Linux) {
            lacuna_skip::skip_test(why.to_string());
        }
    }

    /// Two vCPUs, and 512 pages for each fault.
    fn batches() -> Work {
        Work {
            pages: 2048,
            batch: 512,
            ..work(Share::Own)
        }
    }

    /// Brings in all pages by exits and by a reader. Returns how many faults the reader answered.
    fn faults(kind: MemoryKind) -> u64 {
        let fixture = Fixture::new(kind, batches()).unwrap();
        assert!(fixture.rate(Arm::Exits).unwrap() > 0.0);
        let machines = [Machine::new(&fixture, Arm::Queue(1)).unwrap()];
        run(&machines, &[&fixture], CorePlace::Anywhere).unwrap();
        machines[0].filled().unwrap()[0]
    }

    /// Runs of pages are provided at once, also where the guest's kernel has brought in some of
    /// them.
    #[test]
    fn a_fault_brings_in_a_run_of_pages() {
        needs_guests();
        needs_linux_memory();
        let faults = faults(MemoryKind::Linux);
        assert!(faults < 2048, "{faults} for 2048 pages and the kernel's");
    }

    /// Every arm brings in all pages, in a reused host.
    #[test]
    fn every_arm_touches_all_pages() {
        needs_guests();
        every_arm_touches(MemoryKind::Budget);
    }

    /// The same VMs with Linux memory, one after the other in the same addresses.
    #[test]
    fn every_arm_touches_linux_memory() {
        needs_guests();
        needs_linux_memory();
        every_arm_touches(MemoryKind::Linux);
    }

    fn every_arm_touches(kind: MemoryKind) {
        for share in [Share::Own, Share::Same] {
            let fixture = Fixture::new(kind, work(share)).unwrap();
            for arm in ARMS {
                let before = fixture.maker.host.stats().provided;
                assert!(fixture.rate(arm).unwrap() > 0.0, "{arm:?}");
                let provided = fixture.maker.host.stats().provided - before;
                assert!(provided >= 512, "{arm:?}: {provided} pages were provided");
            }
        }
    }

    /// In the arms with a queue, all pages are provided through the userfaultfd; with one for each
    /// vCPU, each vCPU's share through its own.
    #[test]
    fn pages_of_linux_memory_come_through_the_kernels_queues() {
        needs_guests();
        needs_linux_memory();
        let fixture = Fixture::new(MemoryKind::Linux, work(Share::Own)).unwrap();
        for (arm, queues) in [(Arm::Queue(1), 1), (Arm::Queue(3), 1), (Arm::QueueEach, 2)] {
            let machines = [Machine::new(&fixture, arm).unwrap()];
            run(&machines, &[&fixture], CorePlace::Anywhere).unwrap();
            let filled = machines[0].filled().unwrap();
            assert_eq!(filled.len(), queues, "{arm:?}");
            assert!(filled.iter().sum::<u64>() >= 512, "{arm:?}: {filled:?}");
            // The second vCPU's share, and nothing of the kernel's.
            assert!(queues == 1 || filled[1] == 256, "{filled:?}");
        }
    }

    /// Huge pages are provided as a whole, by exits and through the kernel's queue.
    #[test]
    fn huge_pages_come_as_a_whole() {
        needs_guests();
        // 8 MiB, and the guest's other memory.
        let _reserved = lacuna_skip::HugePages::reserve(4 + BESIDE_MIB / 2);
        if let Some(why) = unavailable_for(MemoryKind::Hugetlbfs, batches()) {
            lacuna_skip::skip_test(why.to_string());
        }
        let faults = faults(MemoryKind::Hugetlbfs);
        assert!(faults <= 512, "{faults} faults for 2048 pages");
    }

    #[test]
    fn two_vms_touch_together() {
        needs_guests();
        let [a, b] = [Share::Own; 2].map(|share| Fixture::new(MemoryKind::Budget, work(share)));
        let (a, b) = (a.unwrap(), b.unwrap());
        let rate = together(&[&a, &b], Arm::Exits, CorePlace::From(0)).unwrap();
        assert!(rate > 0.0);
    }

    #[test]
    fn a_guest_that_refuses_says_why() {
        needs_guests();
        let mut fixture = Fixture::new(MemoryKind::Budget, work(Share::Own)).unwrap();
        fixture.maker.builder.command_line = "gate=1 threads=100".into();
        let error = fixture.rate(Arm::Exits).unwrap_err().to_string();
        assert!(error.contains("cannot run with"), "{error}");
    }
}
