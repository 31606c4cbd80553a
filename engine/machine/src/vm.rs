//! A virtual machine as every backend has it, and the builder that makes one.
//!
//! Backends are a closed set, so callers are generic over [`Vm`] or [`Builder`]; no access of a
//! guest goes through a `dyn`. What one backend lacks is a small trait behind an `Option`.

use crate::{
    Apf, Console, DirtyTracking, Ending, ErrorKind, GuestMemory, Image, Kick, MemorySlots,
    PlatformDevices, SaveRestore,
};
use lacuna_addr::PageCount;
use lacuna_slots::Delivery;
use lacuna_sync::Nanos;
use std::sync::Arc;

/// Which backend a VM belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backend {
    /// A hypervisor in user space with software processors.
    Soft,
    /// Linux's `/dev/kvm`.
    Kvm,
}

impl Backend {
    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Kvm => "kvm",
        }
    }
}

/// Which processor the guest sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CpuModel {
    /// All that the backend has.
    #[default]
    Host,
    /// What every backend has: long mode and integer instructions, no FPU. The state of such a vCPU
    /// moves between backends. The TSC runs at this frequency; `None` for the backend's own.
    Common {
        /// Frequency of the TSC.
        tsc_khz: Option<u32>,
    },
}

/// What every VM has, whatever its backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct VmConfig {
    /// The memory that the guest believes it has.
    pub memory: PageCount,
    /// Its processors, 1 to 64.
    pub vcpus: usize,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: Apf,
    /// Where dirty logging records writes.
    pub delivery: Delivery,
    /// Which processor the guest sees.
    pub cpu: CpuModel,
}

/// The error of a backend.
pub trait BackendError: std::error::Error + Send + Sync + 'static {
    /// Where the cause lies.
    fn kind(&self) -> ErrorKind;
}

/// Counters of a VM that every backend has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct VmStats {
    /// Guest pages that have memory of the host now.
    pub resident: PageCount,
    /// Pages that the guest touched for the first time, and got as zeros.
    pub first_touches: u64,
    /// Pages that came back from where they had been evicted to.
    pub pages_in: u64,
    /// Pages evicted.
    pub pages_out: u64,
    /// Of each vCPU.
    pub vcpus: Vec<VcpuStats>,
}

/// Counters of a vCPU that every backend has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct VcpuStats {
    /// Exits that its VMM had to handle.
    pub exits: u64,
    /// Instructions retired, where the backend counts them.
    pub instructions: Option<u64>,
}

/// One virtual machine.
pub trait Vm: GuestMemory + MemorySlots + DirtyTracking + Kick + Send + Sync + Sized {
    /// Its processors.
    type Vcpu: SaveRestore;
    /// Why it refuses.
    type Error: BackendError;

    /// Which backend it belongs to.
    const BACKEND: Backend;

    /// What it was made with.
    fn config(&self) -> VmConfig;

    /// Loads `image` and makes the vCPUs, each about to execute its first instruction. Once.
    ///
    /// # Errors
    /// The image does not fit, or the VM has its vCPUs.
    fn boot(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<Self::Vcpu>, Self::Error>;

    /// Makes the vCPUs without an image, for [`SaveRestore::restore`]. Once.
    ///
    /// # Errors
    /// The VM has its vCPUs.
    fn bare_vcpus(self: &Arc<Self>) -> Result<Vec<Self::Vcpu>, Self::Error>;

    /// Its counters.
    fn stats(&self) -> VmStats;

    /// The host's policy of huge pages for its memory, where the VMM may set it.
    fn huge_page_policy(&self) -> Option<&dyn HugePagePolicy>;

    /// Whether asynchronous page faults may be switched while it runs.
    fn apf_switch(&self) -> Option<&dyn ApfSwitch>;
}

/// The host's policy of huge pages, set while a VM runs.
pub trait HugePagePolicy {
    /// Keeps `gfns` from being mapped by huge leaves from now on; those that are there are split.
    ///
    /// # Errors
    /// There is no memory for the tables.
    fn disallow_huge(&self, gfns: lacuna_addr::GfnRange) -> Result<(), String>;

    /// Takes one [`HugePagePolicy::disallow_huge`] of the same range back.
    fn allow_huge(&self, gfns: lacuna_addr::GfnRange);
}

/// Asynchronous page faults, switched while a VM runs.
pub trait ApfSwitch {
    /// From now on, whether a guest that asked for it is told of pages on their way.
    fn set_apf(&self, apf: Apf);
}

/// What [`Builder::run`] shows its watcher several times a second.
pub struct Observed<'a, V> {
    /// The VM.
    pub vm: &'a V,
    /// Its devices.
    pub devices: &'a PlatformDevices,
    /// The guest's time.
    pub now: Nanos,
}

/// How a run went. The VM is still there, and its counters can be read.
pub struct RunEnd<V> {
    /// The VM.
    pub vm: Arc<V>,
    /// Why the run ended.
    pub ending: Ending,
    /// The guest's time at the end.
    pub end: Nanos,
    /// The guest's status page, if it announced one.
    pub status: Option<Vec<u8>>,
    /// The hash of everything that happened, of a seeded run.
    pub trace_hash: Option<u64>,
}

/// The description of a VM and of a run in it, from which one or the other is made.
pub trait Builder {
    /// What it makes.
    type Vm: Vm;

    /// Makes the VM, without content.
    ///
    /// # Errors
    /// What keeps it from being made.
    fn build(&self) -> Result<Arc<Self::Vm>, <Self::Vm as Vm>::Error>;

    /// The whole command line of the guest's kernel.
    fn full_command_line(&self) -> String;

    /// Runs `image` to its end. `watch` is called several times a second on the calling thread.
    ///
    /// # Errors
    /// What keeps the run from starting. A run that started has an [`Ending`].
    fn run(
        &self,
        image: &Image<'_>,
        devices: Arc<PlatformDevices>,
        watch: &mut dyn FnMut(&Observed<'_, Self::Vm>),
    ) -> Result<RunEnd<Self::Vm>, <Self::Vm as Vm>::Error>;

    /// As [`Builder::run`], with the usual devices and the guest's lines for `console`.
    ///
    /// # Errors
    /// As [`Builder::run`].
    fn run_with_console(
        &self,
        image: &Image<'_>,
        console: impl Console + 'static,
        watch: &mut dyn FnMut(&Observed<'_, Self::Vm>),
    ) -> Result<RunEnd<Self::Vm>, <Self::Vm as Vm>::Error> {
        self.run(image, Arc::new(PlatformDevices::new(console)), watch)
    }
}
