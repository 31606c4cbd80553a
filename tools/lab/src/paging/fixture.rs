//! VMs with missing memory. The guest `touch` needs each of its pages once. An arm says how the
//! pages are provided.
//!
//! A VM's pages are provided once, so each slice has a VM of its own. Its host stays, so a later
//! slice has the frames of an earlier one, and the kernel has backed them. The guest boots, waits
//! at a gate until the host opens it, and times the touching itself.

use super::machine::Machine;
use super::queue::Listed;
use crate::experiment::{LabError, LabResult};
use crate::fixture::resident;
use crate::session::Guest;
use lacuna::memory::MemoryKind;
use lacuna::soft::BootMemory;
use lacuna::source::{PageSource, SourcePage};
use lacuna::{Apf, Arch, Clock, HostClock, PAGE_SIZE, PageCount, Vm, VmConfig};
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

/// Why pages of this kind of memory cannot be missing on this host, for guests with this `work`.
pub fn unavailable(kind: MemoryKind, work: Work) -> Option<LabError> {
    let vm = Fixture::new(kind, work).and_then(|fixture| fixture.empty_vm());
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

    /// The number of readers of each queue.
    pub const fn readers(self) -> usize {
        match self {
            Self::Queue(readers) => readers,
            Self::QueueEach => 1,
            Self::Exits | Self::ExitsTold | Self::Source => 0,
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
    /// Each vCPU has a share of its own, and each fault brings one page.
    pub const fn new(arch: Arch, vcpus: usize, pages: u64) -> Self {
        Self {
            arch,
            vcpus,
            pages,
            share: Share::Own,
            batch: 1,
        }
    }

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

/// Makes a VM whose pages a source provides.
pub type Make<V> = Box<dyn Fn(Apf, Arc<dyn PageSource>) -> LabResult<Arc<V>>>;

/// Makes a VM for each slice, and its guest's work.
pub struct Fixture<V = lacuna::soft::Vm> {
    pub make: Make<V>,
    /// What their memory is made from.
    pub kind: MemoryKind,
    /// The command line of the guests.
    pub line: String,
    pub work: Work,
    /// The first page that the guest touches, once a guest has booted.
    arena: OnceLock<u64>,
}

impl Fixture {
    /// A host on soft with frames for one guest.
    pub fn new(kind: MemoryKind, work: Work) -> LabResult<Self> {
        let mut builder = resident(work.mib(), work.vcpus);
        builder.arch = work.arch;
        builder.memory_kind = kind;
        builder.command_line = work.words();
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(Arc::clone(&clock))?;
        let line = builder.full_command_line();
        let make = move |apf, source| {
            let config = VmConfig {
                arch: work.arch,
                memory: work.memory(),
                vcpus: work.vcpus,
                apf,
                ..VmConfig::default()
            };
            let memory = BootMemory {
                kind,
                source: Some(source),
                backing: None,
            };
            let (host, clock) = (Arc::clone(&host), Arc::clone(&clock));
            Ok(lacuna::soft::Vm::with_memory(host, clock, config, memory)?)
        };
        Ok(Self::of(Box::new(make), kind, line, work))
    }
}

impl<V: Vm<Error: Into<LabError>>> Fixture<V> {
    /// VMs of `make`, whose guests have this `work`.
    pub const fn of(make: Make<V>, kind: MemoryKind, line: String, work: Work) -> Self {
        Self {
            make,
            kind,
            line,
            work,
            arena: OnceLock::new(),
        }
    }

    /// A VM without a guest.
    pub fn empty_vm(&self) -> LabResult<Arc<V>> {
        (self.make)(Apf::Off, Arc::new(Listed::new(1, self.work.arch)))
    }

    /// The first pages of the vCPUs' shares, without the first vCPU's. Boots a guest if none has
    /// booted yet, because the guest's kernel decides where its arena begins.
    pub fn shares(&self) -> LabResult<Vec<SourcePage>> {
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

    fn note_arena(&self, guest: &Guest<'_>) -> LabResult {
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
    pub fn rate(&self, arm: Arm) -> LabResult<f64> {
        let machine = Machine::new(self, arm)?;
        self.run(&machine, None, || Ok(()))?;
        let (pages, ns) = machine.touched()?;
        Ok(pages * 1e9 / ns)
    }

    /// Runs `machine` until its guest has touched its pages. `gate` is called when the guest is
    /// ready to touch, and it touches when `gate` returns. The thread of the first vCPU runs on the
    /// core `first_core`, and the others on the cores after it, as long as there are cores.
    pub fn run(
        &self,
        machine: &Machine<V>,
        first_core: Option<usize>,
        gate: impl FnOnce() -> LabResult,
    ) -> LabResult {
        thread::scope(|scope| {
            let _end = machine.end_when_dropped();
            machine.start(scope, &self.line, first_core)?;
            let guest = machine.prepared()?;
            self.note_arena(&guest)?;
            gate()?;
            guest.set(1)?;
            machine.wait()
        })
    }
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
    const WORK: Work = Work::new(Arch::X86_64, 2, 512);
    /// 512 pages for each fault.
    const BATCHES: Work = Work {
        batch: 512,
        ..Work::new(Arch::X86_64, 2, 2048)
    };

    fn needs(kind: MemoryKind, work: Work) {
        needs_guests();
        if let Some(why) = unavailable(kind, work) {
            lacuna_skip::skip_test(why.to_string());
        }
    }

    /// Faults that the kernel's queues have answered, each.
    fn filled(fixture: &Fixture, arm: Arm) -> Vec<u64> {
        let machine = Machine::new(fixture, arm).unwrap();
        fixture.run(&machine, None, || Ok(())).unwrap();
        machine.filled().unwrap()
    }

    /// Brings in all pages by exits and by a reader. Returns how many faults the reader answered.
    fn faults(kind: MemoryKind) -> u64 {
        let fixture = Fixture::new(kind, BATCHES).unwrap();
        assert!(fixture.rate(Arm::Exits).unwrap() > 0.0);
        filled(&fixture, Arm::Queue(1))[0]
    }

    /// Runs of pages are provided at once, also where the guest's kernel has brought in some of
    /// them.
    #[test]
    fn a_fault_brings_in_a_run_of_pages() {
        needs(MemoryKind::Linux, BATCHES);
        let faults = faults(MemoryKind::Linux);
        assert!(faults < 2048, "{faults} for 2048 pages and the kernel's");
    }

    /// Huge pages are provided as a whole, by exits and through the kernel's queue.
    #[test]
    fn huge_pages_come_as_a_whole() {
        // 8 MiB, and the guest's other memory.
        let _reserved = lacuna_skip::HugePages::reserve(4 + BESIDE_MIB / 2);
        needs(MemoryKind::Hugetlbfs, BATCHES);
        let faults = faults(MemoryKind::Hugetlbfs);
        assert!(faults <= 512, "{faults} faults for 2048 pages");
    }

    /// Every arm brings in all pages, in a reused host.
    fn every_arm_touches(kind: MemoryKind) {
        needs(kind, WORK);
        for share in [Share::Own, Share::Same] {
            let fixture = Fixture::new(kind, Work { share, ..WORK }).unwrap();
            let host = Arc::clone(fixture.empty_vm().unwrap().host());
            for arm in ARMS {
                let before = host.stats().provided;
                assert!(fixture.rate(arm).unwrap() > 0.0, "{arm:?}");
                let provided = host.stats().provided - before;
                assert!(provided >= 512, "{arm:?}: {provided} pages were provided");
            }
        }
    }

    #[test]
    fn every_arm_touches_the_pool() {
        every_arm_touches(MemoryKind::Budget);
    }

    #[test]
    fn every_arm_touches_linux_memory() {
        every_arm_touches(MemoryKind::Linux);
    }

    /// In the arms with a queue, all pages are provided through the userfaultfd; with one for each
    /// vCPU, each vCPU's share through its own.
    #[test]
    fn pages_of_linux_memory_come_through_the_kernels_queues() {
        needs(MemoryKind::Linux, WORK);
        let fixture = Fixture::new(MemoryKind::Linux, WORK).unwrap();
        for (arm, queues) in [(Arm::Queue(1), 1), (Arm::Queue(3), 1), (Arm::QueueEach, 2)] {
            let filled = filled(&fixture, arm);
            assert_eq!(filled.len(), queues, "{arm:?}");
            assert!(filled.iter().sum::<u64>() >= 512, "{arm:?}: {filled:?}");
            // The second vCPU's share, and nothing of the kernel's.
            assert!(queues == 1 || filled[1] == 256, "{filled:?}");
        }
    }

    #[test]
    fn a_guest_that_refuses_says_why() {
        needs_guests();
        let mut fixture = Fixture::new(MemoryKind::Budget, WORK).unwrap();
        fixture.line = "gate=1 threads=100".into();
        let error = fixture.rate(Arm::Exits).unwrap_err().to_string();
        assert!(error.contains("cannot run with"), "{error}");
    }
}
