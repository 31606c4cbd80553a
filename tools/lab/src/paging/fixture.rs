//! VMs whose memory is missing: the guest `touch` needs each of its pages once, and an arm says how
//! the pages come.
//!
//! A VM's pages are provided once, so each slice has a VM of its own. Its host lives on, so that
//! the frames of a later slice are those of an earlier one and the kernel has backed them. The
//! guest boots, waits at a gate until the host opens it, and times the touching itself.

use super::machine::Machine;
use super::queue::Queues;
use crate::experiment::LabError;
use crate::fixture::resident;
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{Apf, CpuModel, PageSource, VmConfig};
use lacuna_soft::{BootMemory, Host, MemoryKind, Vm, VmBuilder};
use lacuna_sync::{Clock, HostClock};
use std::sync::Arc;
use std::thread;

/// MiB of a guest beside the pages that it touches: its kernel, and the page tables of its arena.
const BESIDE_MIB: u64 = 32;

/// The beginning of the result ids for this kind of memory.
pub const fn prefix(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Budget => "paging.pool",
        MemoryKind::Linux => "paging",
    }
}

/// Why this host has no memory of this kind whose pages can be missing.
pub fn unavailable(kind: MemoryKind) -> Option<LabError> {
    let work = Work {
        vcpus: 1,
        pages: 512,
        share: Share::Own,
    };
    let source = Arc::new(Queues::new(1));
    let vm = Fixture::new(kind, work).and_then(|fixture| fixture.vm(Apf::Off, source));
    vm.err()
}

/// How a missing page comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arm {
    /// All vCPUs put their requests into one queue. This number of threads read it.
    Queue(usize),
    /// Each vCPU has a queue with one reader.
    QueueEach,
    /// The vCPU exits, its own thread provides the page, and enters it again.
    Exits,
    /// The vCPU exits, the guest is told, and another thread provides the page.
    ExitsTold,
}

impl Arm {
    /// Its name in results.
    pub fn name(self) -> String {
        match self {
            Self::Queue(readers) => format!("queue_{readers}_readers"),
            Self::QueueEach => "queue_each".into(),
            Self::Exits => "exits".into(),
            Self::ExitsTold => "exits_apf".into(),
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
pub enum Place {
    /// Where the kernel's scheduler puts them.
    Anywhere,
    /// Each on a core of its own, as long as there are cores.
    Pinned,
}

/// What the guest does.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The number of vCPUs, with a thread of the guest each.
    pub vcpus: usize,
    /// Pages that are touched, of all vCPUs together.
    pub pages: u64,
    /// How the vCPUs share them.
    pub share: Share,
}

/// A host, and what the guests in it do.
pub struct Fixture {
    pub(super) builder: VmBuilder,
    host: Arc<Host>,
    clock: Arc<dyn Clock>,
}

impl Fixture {
    /// A host with frames for one guest.
    ///
    /// # Errors
    /// The host could not be made.
    pub fn new(kind: MemoryKind, work: Work) -> Result<Self, LabError> {
        let bytes = work.pages * PAGE_SIZE as u64;
        let overlap = u8::from(work.share == Share::Same);
        let vcpus = work.vcpus;
        let mut builder = resident((bytes >> 20) + BESIDE_MIB, vcpus);
        builder.memory_kind = kind;
        builder.command_line = format!("gate=1 threads={vcpus} bytes={bytes} overlap={overlap}");
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(Arc::clone(&clock))?;
        Ok(Self {
            builder,
            host,
            clock,
        })
    }

    /// A VM whose pages `source` provides.
    ///
    /// # Errors
    /// The VM could not be made.
    pub fn vm(&self, apf: Apf, source: Arc<dyn PageSource>) -> Result<Arc<Vm>, LabError> {
        let config = VmConfig {
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
        };
        Ok(Vm::with_memory(host, clock, config, memory)?)
    }

    /// Pages a second of a fresh VM.
    ///
    /// # Errors
    /// As [`together`].
    pub fn rate(&self, arm: Arm) -> Result<f64, LabError> {
        together(&[self], arm, Place::Anywhere)
    }
}

/// Pages a second of fresh VMs that touch at the same time, one for each of `fixtures`.
///
/// # Errors
/// A VM could not be made, or its guest failed.
pub fn together(fixtures: &[&Fixture], arm: Arm, place: Place) -> Result<f64, LabError> {
    let machines = fixtures
        .iter()
        .map(|fixture| Machine::new(fixture, arm))
        .collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        let _ends: Vec<_> = machines.iter().map(Machine::end_when_dropped).collect();
        let mut core = 0;
        for (machine, fixture) in machines.iter().zip(fixtures) {
            let first = (place == Place::Pinned).then_some(core);
            machine.start(scope, &fixture.builder.full_command_line(), first)?;
            core += fixture.builder.vcpus;
        }
        let guests = machines
            .iter()
            .map(Machine::prepared)
            .collect::<Result<Vec<_>, _>>()?;
        guests.iter().try_for_each(|guest| guest.set(1))?;
        machines.iter().try_for_each(Machine::wait)
    })?;
    let touched = machines.iter().map(Machine::touched);
    let touched = touched.collect::<Result<Vec<_>, _>>()?;
    let pages: f64 = touched.iter().map(|touched| touched.0).sum();
    // Until the last page of the last VM: vCPUs of one VM are timed in the same way.
    let ns = touched.iter().map(|touched| touched.1).fold(0.0, f64::max);
    Ok(pages * 1e9 / ns)
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
            vcpus: 2,
            pages: 512,
            share,
        }
    }

    /// Every arm brings in all pages, in a host that is used again and again.
    #[test]
    fn every_arm_touches_all_pages() {
        needs_guests();
        for share in [Share::Own, Share::Same] {
            let fixture = Fixture::new(MemoryKind::Budget, work(share)).unwrap();
            for arm in ARMS {
                let before = fixture.host.stats().provided;
                assert!(fixture.rate(arm).unwrap() > 0.0, "{arm:?}");
                let provided = fixture.host.stats().provided - before;
                assert!(provided >= 512, "{arm:?}: {provided} pages were provided");
            }
        }
    }

    /// The same VMs with Linux memory, one after the other in the same addresses.
    #[test]
    fn every_arm_touches_linux_memory() {
        needs_guests();
        if let Some(why) = unavailable(MemoryKind::Linux) {
            lacuna_skip::skip_test(why.to_string());
        }
        let fixture = Fixture::new(MemoryKind::Linux, work(Share::Own)).unwrap();
        for arm in ARMS {
            assert!(fixture.rate(arm).unwrap() > 0.0, "{arm:?}");
        }
    }

    #[test]
    fn two_vms_touch_together() {
        needs_guests();
        let [a, b] = [Share::Own; 2].map(|share| Fixture::new(MemoryKind::Budget, work(share)));
        let (a, b) = (a.unwrap(), b.unwrap());
        let rate = together(&[&a, &b], Arm::Exits, Place::Pinned).unwrap();
        assert!(rate > 0.0);
    }

    #[test]
    fn a_guest_that_refuses_says_why() {
        needs_guests();
        let mut fixture = Fixture::new(MemoryKind::Budget, work(Share::Own)).unwrap();
        fixture.builder.command_line = "gate=1 threads=100".into();
        let error = fixture.rate(Arm::Exits).unwrap_err().to_string();
        assert!(error.contains("cannot run with"), "{error}");
    }
}
