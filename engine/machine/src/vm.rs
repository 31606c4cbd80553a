//! The interface of a virtual machine and of its builder, common to all backends.
//!
//! Backends are a closed set, so callers are generic over [`Vm`] or [`Builder`], and no access of a
//! guest goes through a `dyn`. A power that some backends lack is a small trait, which a method
//! returns as an `Option`.

use crate::settings::{self, MemorySettings, SettingError, Settings, SettingsChange};
use crate::{
    Apf, Arch, Balloon, DirtyTracking, Ending, ErrorKind, ExitCounts, ExitKind, GuestMemory,
    GuestWrite, Image, InterruptController, Interrupts, IoBus, IoEventFd, IoEventFdError, Kick,
    Machine, MachineError, MemorySlots, MissingMemory, PageMap, PageOut, PlatformDevices, Running,
    SaveRestore, SharedState, StateError,
};
use lacuna_addr::{GfnRange, PAGE_SIZE, PageCount, PageStates};
use lacuna_metrics::{Kind, Metrics, Value};
use lacuna_slots::Delivery;
use lacuna_sync::Nanos;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum CpuModel {
    /// The processor with all features of the backend.
    #[default]
    Host,
    /// A processor common to all backends: long mode and integer instructions, no FPU. The state of
    /// such a vCPU can move between backends.
    Common {
        /// Frequency of the TSC; `None` for the backend's own. A guest keeps it when it moves, and
        /// KVM without TSC scaling has only the host's: `kvm::tsc_khz` at the destination.
        tsc_khz: Option<u32>,
    },
}

/// The most vCPUs of a VM. An interrupt message of a device has 8 bits for an x86-64 vCPU's number.
pub const VCPUS_MAX: usize = 256;

/// The configuration common to VMs of all backends.
#[derive(Clone, Copy, Debug, Default)]
pub struct VmConfig {
    /// The architecture of its processors.
    pub arch: Arch,
    /// The memory that the guest believes it has.
    pub memory: PageCount,
    /// The number of its processors, 1 to [`VCPUS_MAX`].
    pub vcpus: usize,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: Apf,
    /// Where dirty logging records writes.
    pub delivery: Delivery,
    /// Which processor the guest sees.
    pub cpu: CpuModel,
}

/// The error of a backend.
pub trait BackendError: std::error::Error + From<MachineError> + Send + Sync + 'static {
    /// The kind of the cause.
    fn kind(&self) -> ErrorKind;
}

/// Counters of a VM, common to all backends.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct VmStats {
    /// Guest pages in the host's memory at present.
    pub resident: PageCount,
    /// Pages supplied as zeros at the guest's first touch.
    pub first_touches: u64,
    /// Evicted pages brought back.
    pub pages_in: u64,
    /// Pages evicted.
    pub pages_out: u64,
    /// Counters of each vCPU.
    pub vcpus: Vec<VcpuStats>,
}

/// Counters of a vCPU, common to all backends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct VcpuStats {
    /// Exits that the VMM had to handle. A halt stays inside the backend, so it is none.
    pub exits: ExitCounts,
    /// Instructions retired; `None` if the backend does not count them.
    pub instructions: Option<u64>,
    /// Pages that Linux has read inside of guest code, so the guest was not notified: Linux had
    /// paged them out unasked, or they were first touched and are a file's. `None` if the backend
    /// does not count them, or its pages are not Linux memory.
    pub major_faults: Option<u64>,
    /// What the vCPU has done with its time; `None` if the backend does not know.
    pub times: Option<VcpuTimes>,
}

/// The time of a vCPU by what it did, since it first ran, without the time when its guest was
/// paused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VcpuTimes {
    /// In the guest, and in its VMM's handling of exits.
    pub running: Duration,
    /// In faults that needed no wait. One in 64 is measured.
    pub faulting: Duration,
    /// Halted by the guest, or because no other process of the guest could run during a fault.
    pub halted: Duration,
    /// Waiting for a page, or for free memory.
    pub waiting: Duration,
}

impl VcpuTimes {
    fn fill(&self, to: &mut Metrics, vcpu: &str) {
        let help = "The vCPU's time, by what it did.";
        let of = ("lacuna_vcpu_state_seconds_total", help, Kind::Counter);
        for (state, time) in [
            ("running", self.running),
            ("faulting", self.faulting),
            ("halted", self.halted),
            ("waiting", self.waiting),
        ] {
            let labels = &[("vcpu", vcpu), ("state", state)];
            to.add(of, labels, Value::Real(time.as_secs_f64()));
        }
    }
}

impl VmStats {
    /// Puts the counters into `to`.
    pub fn fill(&self, to: &mut Metrics) {
        let resident = (
            "lacuna_vm_resident_bytes",
            "Bytes of guest memory that are in the host's memory.",
            Kind::Gauge,
        );
        to.add(resident, &[], Value::Whole(self.resident.bytes()));
        // On kvm, Linux may take untouched pages back where it fills the memory itself.
        let touches = "Pages that the guest has touched first, and got as zeros.";
        let touches = ("lacuna_vm_first_touches", touches, Kind::Gauge);
        to.add(touches, &[], Value::Whole(self.first_touches));
        for (name, help, value) in [
            (
                "lacuna_vm_pages_in_total",
                "Evicted pages brought back.",
                self.pages_in,
            ),
            (
                "lacuna_vm_pages_out_total",
                "Pages evicted.",
                self.pages_out,
            ),
        ] {
            to.add((name, help, Kind::Counter), &[], Value::Whole(value));
        }
        for (vcpu, stats) in self.vcpus.iter().enumerate() {
            let vcpu = &*vcpu.to_string();
            for kind in ExitKind::ALL {
                let help = "Exits to the VMM, by kind.";
                let exits = ("lacuna_vcpu_exits_total", help, Kind::Counter);
                let labels = &[("vcpu", vcpu), ("kind", kind.name())];
                to.add(exits, labels, Value::Whole(stats.exits.of(kind)));
            }
            if let Some(retired) = stats.instructions {
                let help = "Instructions retired.";
                let of = ("lacuna_vcpu_instructions_total", help, Kind::Counter);
                to.add(of, &[("vcpu", vcpu)], Value::Whole(retired));
            }
            if let Some(times) = &stats.times {
                times.fill(to, vcpu);
            }
            if let Some(read) = stats.major_faults {
                let help = "Pages that Linux has read inside of guest code.";
                let of = ("lacuna_vcpu_major_faults_total", help, Kind::Counter);
                to.add(of, &[("vcpu", vcpu)], Value::Whole(read));
            }
        }
    }
}

/// A file with a VM's memory. A process that gets the descriptor maps the guest's memory, as a
/// vhost-user device does.
///
/// * No log of writes has the writes of that process, so a snapshot or a migration may lack them.
///   The VMM reports their pages by [`DirtyTracking::put_back_dirty`], the last ones before
///   [`Device::pause`](crate::Device::pause) of its device returns. It is refused where no copy is
///   made that could lack them (`DirtyError::NotLogging`).
/// * With a page source, a missing page is a hole in the file. If that process writes the page
///   first, the file's content counts, and not the source's. [`GuestMemory::read`] of a byte of the
///   page returns when it has arrived.
#[derive(Clone, Copy, Debug)]
pub struct SharedFile<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// The byte at which the first slot of the boot layout begins. The others follow one after the
    /// other, by their addresses. Slots that were added later are not in the file.
    pub offset: u64,
}

/// One virtual machine.
pub trait Vm:
    GuestMemory
    + MemorySlots
    + DirtyTracking
    + Kick
    + InterruptController
    + IoBus
    + fmt::Debug
    + Send
    + Sync
    + Sized
    + 'static
{
    /// The type of its processors.
    type Vcpu: SaveRestore + 'static;
    /// The type of its errors.
    type Error: BackendError;

    /// Which backend it belongs to.
    const BACKEND: Backend;

    /// The configuration with which it was made.
    fn config(&self) -> VmConfig;

    /// Loads `image` and makes the vCPUs, each about to execute its first instruction. A VM gets
    /// its vCPUs once. After a refused image, another one may be tried.
    ///
    /// # Errors
    /// The image does not fit, or the VM has its vCPUs already.
    fn boot(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<Self::Vcpu>, Self::Error>;

    /// Makes the vCPUs without an image, for [`SaveRestore::restore`]. A VM gets its vCPUs once.
    ///
    /// # Errors
    /// The VM has its vCPUs already.
    fn bare_vcpus(self: &Arc<Self>) -> Result<Vec<Self::Vcpu>, Self::Error>;

    /// Saves the state shared by its vCPUs. No vCPU runs meanwhile.
    ///
    /// # Errors
    /// The hypervisor below refuses.
    fn save_shared(&self) -> Result<SharedState, StateError>;

    /// Takes over the state shared by another VM's vCPUs. No vCPU runs meanwhile, and the vCPUs get
    /// their own states afterwards.
    ///
    /// # Errors
    /// [`StateError`], with the name of the field; the VM keeps its state.
    fn restore_shared(&self, state: &SharedState) -> Result<(), StateError>;

    /// The interrupts of its devices.
    fn interrupts(self: &Arc<Self>) -> Interrupts {
        Interrupts::of(self)
    }

    /// Adds 1 to an eventfd at each of these writes of the guest. They reach neither a device nor
    /// the VMM, as long as the value lives. Other writes do, as before. The guest may run.
    ///
    /// A slot that is added over the address later gets the writes, until it is removed. A pause
    /// changes nothing. No state has the connection or the count: the VMM connects the eventfd to a
    /// restored or moved VM again, before that one runs, and its device takes the count before its
    /// own state is saved.
    ///
    /// # Errors
    /// [`IoEventFdError`].
    fn ioeventfd(
        self: &Arc<Self>,
        write: GuestWrite,
        eventfd: OwnedFd,
    ) -> Result<IoEventFd, IoEventFdError> {
        IoEventFd::new(self, self.config().arch, write, eventfd)
    }

    /// Its counters.
    fn stats(&self) -> VmStats;

    /// Reads all counters of the VM and of its memory by name. With 2 vCPUs, a request for them to
    /// `lacuna run --metrics` takes 0.24 ms with its text and its connection. On kvm with memory
    /// that Linux fills, the page table of all guest memory is walked too: 2.7 ms a GiB.
    fn metrics(&self) -> Metrics;

    /// The file with its memory, if other processes can map it too.
    fn shared_file(&self) -> Option<SharedFile<'_>>;

    /// The policy of huge pages for its memory, if the VMM may set it.
    fn huge_page_policy(&self) -> Option<&dyn HugePagePolicy>;

    /// Memory that the VMM provides, if the VM was made with a page source.
    fn missing_memory(&self) -> Option<&dyn MissingMemory>;

    /// Memory that the VMM may take back, if the backend can discard pages of this VM.
    fn balloon(&self) -> Option<&dyn Balloon> {
        None
    }

    /// Memory that the VMM may page out, if the VM has Linux memory whose pages can leave.
    fn page_out(&self) -> Option<&dyn PageOut> {
        None
    }

    /// The switch of asynchronous page faults, if the VMM may use it while the VM runs.
    fn apf_switch(&self) -> Option<&dyn ApfSwitch>;

    /// What the VMM may change while the VM runs, and the values at present.
    fn settings(&self) -> Settings;

    /// The settings of its memory, for [`Vm::change_settings`].
    fn memory_settings(&self) -> &dyn MemorySettings;

    /// Changes settings while the VM runs, and returns them. Any thread may call this at any time.
    ///
    /// # Errors
    /// A setting is fixed, or its value is impossible. Nothing has changed then.
    fn change_settings(&self, change: &SettingsChange) -> Result<Settings, SettingError> {
        settings::change(self, change)
    }

    /// Counts the pages of `gfns`, which lie in one slot, by their state; none is dirty. Pages of
    /// no slot are in no count. No vCPU waits for it.
    fn page_states(&self, gfns: GfnRange) -> PageStates;

    /// A map of the guest's memory in at most `cells` cells. It reads 8 bytes for each page that
    /// is in no untouched or huge block of 2 MiB. On kvm, it reads the page table of memory that
    /// Linux fills. No vCPU waits for it.
    fn page_map(&self, cells: usize) -> PageMap {
        PageMap::of(self, cells)
    }
}

/// The host's policy of huge pages, set while a VM runs.
pub trait HugePagePolicy {
    /// From now on, no huge leaf maps frames of `gfns`. Existing huge leaves there are split. A
    /// slot may have huge leaves again if it is added later, moves or changes its flags.
    ///
    /// # Errors
    /// There is no memory for the tables.
    fn disallow_huge(&self, gfns: GfnRange) -> Result<(), String>;

    /// Ends one [`HugePagePolicy::disallow_huge`] of the same range. Does nothing if none is in
    /// effect.
    fn allow_huge(&self, gfns: GfnRange);
}

/// Asynchronous page faults, switched while a VM runs.
pub trait ApfSwitch {
    /// Whether they are delivered at present.
    fn apf(&self) -> Apf;

    /// Sets whether asynchronous page faults are delivered from now on to a guest that has enabled
    /// them.
    fn set_apf(&self, apf: Apf);
}

/// An ended guest. The VM still exists, so its counters and its memory can be read.
#[non_exhaustive]
pub struct RunEnd<V> {
    /// The VM.
    pub vm: Arc<V>,
    /// Its devices.
    pub devices: Arc<PlatformDevices>,
    /// Why the guest ended.
    pub ending: Ending,
    /// The guest's time at the end.
    pub end: Nanos,
}

impl<V: Vm> RunEnd<V> {
    /// The end of a guest with these `devices`. For backends.
    pub fn new(vm: Arc<V>, devices: Arc<PlatformDevices>, end: Nanos) -> Self {
        Self {
            ending: devices.ending().unwrap_or(Ending::Stopped),
            vm,
            devices,
            end,
        }
    }

    /// A copy of the status page, if the guest announced one. If the page is swapped out, it is
    /// read back first.
    pub fn status(&self) -> Option<Vec<u8>> {
        let mut page = vec![0; PAGE_SIZE];
        let gpa = self.devices.status_page()?.gpa();
        self.vm.read(gpa, &mut page).ok()?;
        Some(page)
    }
}

impl<V> fmt::Debug for RunEnd<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunEnd")
            .field("ending", &self.ending)
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

/// Describes a VM. [`Builder::build`] makes the VM alone; [`Builder::start`] also runs an image in
/// it.
///
/// Each backend's builder has its own fields. Code that is generic over backends takes a function
/// that makes the builder.
pub trait Builder {
    /// The type of the VM.
    type Vm: Vm;

    /// Makes the VM, without content.
    ///
    /// # Errors
    /// The reason why the VM cannot be made.
    fn build(&self) -> Result<Arc<Self::Vm>, <Self::Vm as Vm>::Error>;

    /// The whole command line of the guest's kernel, for [`Vm::boot`]: the builder's own words, and
    /// words that describe the VM to the kernel.
    fn full_command_line(&self) -> String;

    /// Makes a [`Machine`] with a VM and these devices, and runs `image` in it. Each machine needs
    /// devices of its own. In a machine, the time of a seeded VM of the backend `soft` stands
    /// still, and a guest that waits for it ends with an error: `soft::VmBuilder::run_seeded` runs
    /// it.
    ///
    /// # Errors
    /// The reason why the guest cannot start.
    fn start(
        &self,
        image: &Image<'_>,
        devices: impl Into<Arc<PlatformDevices>>,
    ) -> Result<Running<Self::Vm>, <Self::Vm as Vm>::Error> {
        let machine = Machine::new(self.build()?, devices)?;
        let vcpus = machine.vm().boot(image, &self.full_command_line())?;
        Ok(machine.start(vcpus))
    }
}
