//! What a body asks of a backend.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::Duration;

use lacuna_addr::GfnRange;
use lacuna_machine::{Apf, GuestMemory, Image, Kick, Vcpu};
use lacuna_soft::SlotId;

/// Why a backend cannot do what a body needs, on this machine or at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lacks(String);

impl Lacks {
    /// With the reason.
    pub fn because(reason: impl Display) -> Self {
        Self(reason.to_string())
    }
}

impl Display for Lacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How writes are detected and recorded, for the whole life of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Tracking {
    /// A bit a page; how writes are detected is the backend's choice.
    #[default]
    Bitmap,
    /// A bit a page, writes detected by write protection.
    WriteProtectBitmap,
    /// A bit a page, writes detected by page-modification logging.
    PmlBitmap,
    /// A ring for each vCPU, as large as the backend has them.
    Ring,
    /// The smallest ring for each vCPU, writes detected by write protection.
    WriteProtectRing,
    /// The smallest ring for each vCPU, writes detected by page-modification logging.
    PmlRing,
    /// The host kernel's page tables.
    PageMap,
}

/// A VM to make.
#[derive(Clone, Debug)]
pub struct Request {
    /// Memory that the guest believes it has, in MiB.
    pub memory: u64,
    /// How much of it may be resident, in MiB.
    pub resident: u64,
    /// How many processors it has.
    pub vcpus: usize,
    /// How long a page takes that is not resident, beyond what the backend's own transfer takes.
    pub latency: Duration,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: Apf,
    /// How its writes are tracked, once a slot is logged.
    pub tracking: Tracking,
    /// The guest kernel's parameters.
    pub command_line: String,
}

impl Request {
    /// A VM of `memory` MiB, `resident` of them resident, without latency or async faults.
    pub fn new(memory: u64, resident: u64, vcpus: usize, command_line: &str) -> Self {
        Self {
            memory,
            resident,
            vcpus,
            latency: Duration::ZERO,
            apf: Apf::Off,
            tracking: Tracking::default(),
            command_line: command_line.to_owned(),
        }
    }
}

/// A VM about to execute its first instruction.
pub struct Made<B: Backend> {
    /// The VM.
    pub vm: Arc<B::Vm>,
    /// Its processors.
    pub vcpus: Vec<B::Vcpu>,
    /// What must live as long as the VM runs.
    pub beside: Box<dyn Any + Send>,
}

/// Makes VMs, and does with them what the common traits have no method for.
pub trait Backend: Clone + Send + 'static {
    /// Its VM.
    type Vm: GuestMemory + Kick + Send + Sync + 'static;
    /// Its vCPU.
    type Vcpu: Vcpu + 'static;

    /// Makes a VM and boots `image` in it.
    fn make(&self, request: &Request, image: &Image<'_>) -> Result<Made<Self>, Lacks>;

    /// Whether its processors have INS and OUTS.
    fn has_string_ports(&self) -> Result<(), Lacks>;

    /// The slots, ascending by guest address.
    fn slots(vm: &Self::Vm) -> Vec<(SlotId, GfnRange)>;

    /// Tracks the writes to every slot from here on.
    fn start_tracking(vm: &Self::Vm);

    /// Ends that.
    fn stop_tracking(vm: &Self::Vm);

    /// The pages that were written since the last call, by slot. They can be copied when it
    /// returns: a later write is in a later harvest.
    fn harvest(vm: &Self::Vm) -> BTreeSet<(SlotId, usize)>;

    /// How many pages have been brought back so far, from wherever they were.
    fn brought_back(vm: &Self::Vm) -> u64;
}
