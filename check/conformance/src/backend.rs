//! The requests of a body to a backend.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use lacuna_machine::{
    Apf, Arch, CpuModel, Image, Logging, MemorySlotError, PageSource, SlotFlags, SlotId, Vm,
    set_logging_everywhere,
};
use lacuna_soft::LinuxBacking;

/// Why a backend cannot run a body, on this machine or at all.
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
    /// A small ring for each vCPU, with the backend's detection. The guest fills it faster than the
    /// monitor harvests it.
    SmallRing,
    /// The smallest ring for each vCPU, writes detected by write protection.
    WriteProtectRing,
    /// The smallest ring for each vCPU, writes detected by page-modification logging.
    PmlRing,
    /// The host kernel's page tables.
    PageMap,
}

/// The origin of a guest's pages, if they are elsewhere at its start.
#[derive(Clone, Debug)]
pub struct Origin {
    /// Provides the pages.
    pub source: Arc<dyn PageSource>,
    /// How a vCPU acts when it needs a missing page.
    pub missing: Missing,
}

/// How a vCPU acts when it needs a missing page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Missing {
    /// It waits for the source.
    Waits,
    /// It exits to its VMM.
    Exits,
    /// It exits, also for pages that were evicted.
    ExitsIfNonresident,
}

impl Missing {
    /// The flags of all slots of the boot layout.
    const fn flags(self) -> SlotFlags {
        match self {
            Self::Waits => SlotFlags::empty(),
            Self::Exits => SlotFlags::EXIT_ON_MISSING,
            Self::ExitsIfNonresident => SlotFlags::EXIT_ON_NONRESIDENT,
        }
    }
}

/// The size in which pages are provided and discarded, as a body needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Unit {
    /// Any: the body leaves that to the backend and the source.
    #[default]
    Any,
    /// 4 KiB: the body provides or discards single pages, or counts them.
    Page,
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
    /// The time to bring an evicted page, beyond the backend's own transfer.
    pub latency: Duration,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: Apf,
    /// How writes to a logged slot are tracked.
    pub tracking: Tracking,
    /// The processor that the guest sees.
    pub cpu: CpuModel,
    /// The origin of its pages; `None`: they are zeros.
    pub origin: Option<Origin>,
    /// The size in which pages are provided and discarded.
    pub unit: Unit,
    /// The VMM's own memory for the guest; `None`: the backend's.
    pub backing: Option<LinuxBacking>,
    /// The guest kernel's parameters.
    pub command_line: String,
}

impl Request {
    /// A VM of `memory` MiB, with `resident` MiB resident, without latency or async faults.
    pub fn new(memory: u64, resident: u64, vcpus: usize, command_line: &str) -> Self {
        Self {
            memory,
            resident,
            vcpus,
            latency: Duration::ZERO,
            apf: Apf::Off,
            tracking: Tracking::default(),
            cpu: CpuModel::default(),
            origin: None,
            unit: Unit::default(),
            backing: None,
            command_line: command_line.to_owned(),
        }
    }
}

/// A backend's vCPU.
pub type VcpuOf<B> = <<B as Backend>::Vm as Vm>::Vcpu;

/// A VM about to execute its first instruction.
pub struct Made<B: Backend> {
    /// The VM.
    pub vm: Arc<B::Vm>,
    /// Its processors.
    pub vcpus: Vec<VcpuOf<B>>,
    /// What must live as long as the VM runs.
    pub beside: Box<dyn Any + Send>,
}

/// A VM without content.
pub struct Built<B: Backend> {
    /// The VM.
    pub vm: Arc<B::Vm>,
    /// The whole command line of a guest's kernel.
    pub command_line: String,
    /// What must live as long as the VM runs.
    pub beside: Box<dyn Any + Send>,
}

/// Makes VMs.
pub trait Backend: Clone + Send + 'static {
    /// Its VM.
    type Vm: Vm + 'static;

    /// The architecture of its guests.
    fn arch(&self) -> Arch;

    /// A lock that a test holds while it runs. On KVM, a guest spins while it waits for another
    /// vCPU: two such guests side by side take ten times as long as one after the other.
    fn turn(&self) -> Option<MutexGuard<'static, ()>> {
        None
    }

    /// Makes a VM.
    fn build(&self, request: &Request) -> Result<Built<Self>, Lacks>;

    /// Refuses AArch64 guests. `why` says what AArch64 lacks.
    fn x86_only(&self, why: &str) -> Result<(), Lacks> {
        match self.arch() {
            Arch::X86_64 => Ok(()),
            other => Err(Lacks::because(format!("{other}: {why}"))),
        }
    }

    /// Whether its processors have INS and OUTS.
    fn has_string_ports(&self) -> Result<(), Lacks>;

    /// Makes a VM and boots `image` in it.
    fn make(&self, request: &Request, image: &Image<'_>) -> Result<Made<Self>, Lacks> {
        let built = self.build(request)?;
        let vcpus = Vm::boot(&built.vm, image, &built.command_line);
        if let Some(origin) = &request.origin {
            match set_slot_flags(&*built.vm, origin.missing.flags()) {
                Err(error) if origin.missing == Missing::ExitsIfNonresident => {
                    return Err(Lacks::because(error));
                }
                changed => changed.expect("slots of this VM"),
            }
        }
        Ok(Made {
            vcpus: vcpus.expect("room for the image"),
            vm: built.vm,
            beside: built.beside,
        })
    }

    /// Makes a VM whose vCPUs wait for a restored state.
    fn make_bare(&self, request: &Request) -> Result<Made<Self>, Lacks> {
        let built = self.build(request)?;
        Ok(Made {
            vcpus: built.vm.bare_vcpus().expect("its first vCPUs"),
            vm: built.vm,
            beside: built.beside,
        })
    }
}

/// Sets the flags of every slot of the boot layout.
pub fn exit_on_missing(vm: &impl Vm, flags: SlotFlags) {
    set_slot_flags(vm, flags).expect("slots of this VM");
}

fn set_slot_flags(vm: &impl Vm, flags: SlotFlags) -> Result<(), MemorySlotError> {
    let mut slots = vm.memory_slots().into_iter();
    slots.try_for_each(|slot| vm.set_slot_flags(slot.id, flags))
}

/// Tracks the writes to every slot from here on.
pub fn start_tracking(vm: &impl Vm) {
    set_logging_everywhere(vm, Logging::LAZY).expect("slots of this VM");
}

/// Ends [`start_tracking`].
pub fn stop_tracking(vm: &impl Vm) {
    set_logging_everywhere(vm, Logging::Off).expect("slots of this VM");
}

/// The pages written since the last call, by slot. The caller can copy them after the return: a
/// later write is in a later harvest.
pub fn harvest(vm: &impl Vm) -> BTreeSet<(SlotId, usize)> {
    let mut dirty = BTreeSet::new();
    let note = |id, page| {
        dirty.insert((id, page));
    };
    lacuna_machine::harvest(vm, note).expect("a harvest of this VM");
    dirty
}
