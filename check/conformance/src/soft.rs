//! The soft backend.

use std::sync::Arc;

use lacuna_addr::PageCount;
use lacuna_machine::{Arch, Backup, Delivery, Detection, RingSize, VmConfig};
use lacuna_soft::{
    BootMemory, HostError, HugePages, LinuxError, MemoryKind, SoftError, Swap, Vm, VmBuilder,
};
use lacuna_sync::{Clock, HostClock};

use crate::backend::{Backend, Built, Lacks, Request, Tracking, Unit};
use crate::outside;

/// How to reserve huge pages on this machine: enough for the bodies of a few threads.
const RESERVE: &str = "as root: echo 200 > /proc/sys/vm/nr_hugepages";

/// VMs of the soft backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Soft {
    /// The architecture of their guests.
    pub arch: Arch,
    /// Where their pages are 2 MiB.
    pub huge: HugePages,
    /// Where their pages are.
    pub memory_kind: MemoryKind,
    /// How the memory of VMs without a page source is filled.
    pub filled: Filled,
}

/// How a VM's memory without a page source is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Filled {
    /// The backend, with zeros.
    #[default]
    ByBackend,
    /// A handler thread, with zeros, through a userfaultfd.
    FromOutside,
}

impl Soft {
    /// The same with guests of another architecture.
    #[must_use]
    pub fn on(self, arch: Arch) -> Self {
        Self { arch, ..self }
    }
}

impl Default for Soft {
    fn default() -> Self {
        Self {
            arch: Arch::X86_64,
            huge: HugePages::Never,
            memory_kind: MemoryKind::Budget,
            filled: Filled::default(),
        }
    }
}

fn ring(bytes: usize) -> Delivery {
    let size = RingSize::from_bytes(bytes).expect("a size of a ring");
    let backup = Backup::Bitmap;
    Delivery::Ring { size, backup }
}

/// The soft backend's names for `tracking`. `None` leaves the detection as it is.
fn modes(tracking: Tracking) -> Result<(Option<Detection>, Delivery), Lacks> {
    let (largest, smallest) = (RingSize::BYTES_MAX, RingSize::BYTES_MIN);
    Ok(match tracking {
        Tracking::Bitmap => (None, Delivery::Bitmap),
        Tracking::WriteProtectBitmap => (Some(Detection::WriteProtect), Delivery::Bitmap),
        Tracking::PmlBitmap => (Some(Detection::Pml), Delivery::Bitmap),
        Tracking::Ring => (None, ring(largest)),
        Tracking::SmallRing => (None, ring(smallest)),
        Tracking::WriteProtectRing => (Some(Detection::WriteProtect), ring(smallest)),
        Tracking::PmlRing => (Some(Detection::Pml), ring(smallest)),
        Tracking::PageMap => {
            let why = "soft: the memory is the backend's own, so Linux does not track it";
            return Err(Lacks::because(why));
        }
    })
}

impl Backend for Soft {
    type Vm = Vm;

    fn arch(&self) -> Arch {
        self.arch
    }

    fn build(&self, request: &Request) -> Result<Built<Self>, Lacks> {
        let (detection, delivery) = modes(request.tracking)?;
        if self.memory_kind == MemoryKind::Hugetlbfs && request.unit == Unit::Page {
            let why = "soft: pages of hugetlbfs are provided and discarded 2 MiB at a time";
            return Err(Lacks::because(why));
        }
        let evicts = self.memory_kind == MemoryKind::Budget;
        // A request with a source and a latency of evicted pages wants both.
        let wants_eviction = request.origin.is_none() || !request.latency.is_zero();
        if !evicts && wants_eviction && request.resident < request.memory {
            let why = "soft: only Linux evicts pages of Linux memory";
            return Err(Lacks::because(why));
        }
        let source = match (&request.origin, self.filled) {
            (Some(origin), _) => Some(Arc::clone(&origin.source)),
            (None, Filled::FromOutside) => Some(outside::zeros()?),
            (None, Filled::ByBackend) => None,
        };
        let mib = |mib| PageCount::from_bytes(mib << 20);
        let builder = VmBuilder {
            arch: self.arch,
            vcpus: request.vcpus,
            memory_kind: self.memory_kind,
            backing: request.backing.clone(),
            huge: self.huge,
            swap: Swap::File(std::env::temp_dir()),
            apf: request.apf,
            cpu: request.cpu,
            source,
            command_line: request.command_line.clone(),
            ..VmBuilder::new(mib(request.memory), mib(request.resident))
        };
        builder.latency.set(request.latency);
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(Arc::clone(&clock)).expect("a host");
        let config = VmConfig {
            arch: builder.arch,
            memory: builder.memory,
            vcpus: builder.vcpus,
            apf: builder.apf,
            delivery,
            cpu: request.cpu,
        };
        let memory = BootMemory {
            kind: self.memory_kind,
            source: builder.source.clone(),
            backing: builder.backing.clone(),
        };
        let vm = match Vm::with_memory(Arc::clone(&host), clock, config, memory) {
            Err(refused @ SoftError::Host(HostError::Linux(LinuxError::Userfaultfd(_)))) => {
                return Err(Lacks::because(refused));
            }
            Err(SoftError::Host(HostError::Linux(LinuxError::SharedMemory { reason })))
                if reason.contains("reserve more") =>
            {
                return Err(Lacks::because(format!("soft: {reason}; {RESERVE}")));
            }
            made => made.expect("a VM"),
        };
        if let Some(detection) = detection {
            vm.set_detection(detection);
        }
        let background = host.spawn_background().expect("a thread");
        Ok(Built {
            vm,
            command_line: builder.full_command_line(),
            beside: Box::new(background),
        })
    }

    fn has_string_ports(&self) -> Result<(), Lacks> {
        self.x86_only("its processors have no ports")?;
        let why = "soft: its processors have no INS and OUTS, which raise #UD";
        Err(Lacks::because(why))
    }
}
