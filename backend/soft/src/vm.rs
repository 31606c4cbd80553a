//! One VM: the state that its vCPUs share.

use crate::code::CodeMap;
use crate::error::SoftError;
use crate::eventfds::{Controller, EventFds};
use crate::exclusive::Exclusive;
use crate::ioeventfd::IoEventFds;
use crate::meter::Meter;
use crate::mmu::VmMmu;
use crate::park::Parker;
use crate::stall::{FaultTimes, Stalls};
use crate::tokens::Tokens;
use lacuna_addr::{BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_apf::Stats as ApfStats;
use lacuna_cpu::Wake;
use lacuna_host::{
    Background, Host, HostError, LinuxBacking, MemoryKind, PageSource, SharedMemory, SourcePage,
};
use lacuna_machine::{
    Apf, Arch, CpuModel, Delivery, HandlerRegion, InterruptLines, Kick, Layout, LogReaders,
    VCPUS_MAX, VmConfig,
};
use lacuna_mmu::SlotSpec;
use lacuna_slots::{SlotFlags, SlotId};
use lacuna_sync::{Clock, Mutex, Qsbr, VcpuSlot, lock_order};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Gets the attention of vCPUs: sets a flag for a running vCPU, unparks the thread of a sleeping
/// one.
pub(crate) struct VcpuKicks {
    pub(crate) qsbr: Arc<Qsbr>,
    parkers: Box<[Parker]>,
}

impl VcpuKicks {
    pub(crate) fn parker(&self, index: usize) -> &Parker {
        &self.parkers[index]
    }
}

impl Wake for VcpuKicks {
    fn wake(&self, index: usize) {
        self.qsbr.vcpu(index).request(VcpuSlot::KICK);
        self.parkers[index].wake();
    }
}

/// The memory of a VM's boot layout.
#[derive(Clone, Debug, Default)]
pub struct BootMemory {
    /// The place of its pages.
    pub kind: MemoryKind,
    /// Provides its pages; without it they are zeros.
    pub source: Option<Arc<dyn PageSource>>,
    /// The VMM's own memory in place of memory of `kind`, which has no effect then. A file has the
    /// slots' pages one after the other. `None`: the VM makes memory of `kind`.
    pub backing: Option<LinuxBacking>,
}

/// One virtual machine.
pub struct Vm {
    pub(crate) config: VmConfig,
    pub(crate) layout: Layout,
    pub(crate) host: Arc<Host>,
    pub(crate) mmu: VmMmu,
    pub(crate) kicks: Arc<VcpuKicks>,
    pub(crate) code: CodeMap,
    pub(crate) exclusive: Exclusive,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) meters: Box<[Meter]>,
    /// Whether its vCPUs are made.
    pub(crate) booted: AtomicBool,
    pub(crate) apf_paused: AtomicBool,
    pub(crate) log_readers: LogReaders,
    /// Whether its time is stopped, because it was built with a seed for the VMM's own run loop.
    pub(crate) stands_still: bool,
    /// Whether it has the state shared by its vCPUs, by a boot or a restore.
    pub(crate) has_shared_state: AtomicBool,
    /// The state shared by the processors of an AArch64 VM, made at its first use.
    #[cfg(feature = "arm64")]
    arm64: OnceLock<Arc<lacuna_arm64::Fabric>>,
    /// The same of an x86-64 VM.
    x86: OnceLock<Arc<lacuna_x86::ApicBus>>,
    pub(crate) interrupt_lines: InterruptLines,
    pub(crate) eventfds: EventFds,
    pub(crate) ioeventfds: IoEventFds,
    /// Each vCPU's exits on missing memory.
    pub(crate) tokens: Box<[Arc<Tokens>]>,
    /// The Linux memory of the boot layout; `None`: its pages are in frames.
    pub(crate) backing: Option<LinuxBacking>,
    /// Provides the pages of the boot layout; without it they are zeros.
    pub(crate) source: Option<Arc<dyn PageSource>>,
    /// Regions of the host with this VM's memory. A region with a slot number is removed with that
    /// slot.
    pub(crate) regions: Mutex<Vec<(Option<SlotId>, BackingRange)>, lock_order::SoftBacking>,
    /// The host's background thread, if it works for this VM alone. It ends with the VM.
    pub(crate) background: Option<Background>,
}

impl Vm {
    /// A VM without an image; `host` provides its memory, and other VMs may share `host`. The
    /// caller starts the host's background thread, once for all VMs: [`Host::spawn_background`].
    pub fn new(
        host: Arc<Host>,
        clock: Arc<dyn Clock>,
        config: VmConfig,
    ) -> Result<Arc<Self>, SoftError> {
        Self::with_memory(host, clock, config, BootMemory::default())
    }

    /// As [`Vm::new`], with a page source for the memory of the boot layout.
    pub fn with_source(
        host: Arc<Host>,
        clock: Arc<dyn Clock>,
        config: VmConfig,
        source: Arc<dyn PageSource>,
    ) -> Result<Arc<Self>, SoftError> {
        let memory = BootMemory {
            source: Some(source),
            ..BootMemory::default()
        };
        Self::with_memory(host, clock, config, memory)
    }

    /// As [`Vm::new`], with `memory` for the boot layout. For [`MemoryKind::Linux`] the
    /// host must have room ([`Host::with_linux_memory`],
    /// [`VmBuilder::host`](crate::VmBuilder::host)).
    pub fn with_memory(
        host: Arc<Host>,
        clock: Arc<dyn Clock>,
        config: VmConfig,
        memory: BootMemory,
    ) -> Result<Arc<Self>, SoftError> {
        Self::make(host, clock, config, memory).map(Arc::new)
    }

    /// As [`Vm::new`], before the VM is shared.
    pub(crate) fn make(
        host: Arc<Host>,
        clock: Arc<dyn Clock>,
        config: VmConfig,
        boot: BootMemory,
    ) -> Result<Self, SoftError> {
        let VmConfig {
            memory, vcpus, apf, ..
        } = config;
        check_vcpus(vcpus)?;
        check_processor(config.arch, config.cpu)?;
        let layout = Layout::of(config.arch, memory)?;
        let qsbr = Arc::new(Qsbr::new(vcpus));
        let mmu = VmMmu::new(
            config.arch,
            Arc::clone(&host),
            Arc::clone(&qsbr),
            TABLES_MAX,
        )?;
        if config.delivery != Delivery::Bitmap {
            mmu.set_delivery(config.delivery)?;
        }
        let parkers = (0..vcpus).map(|_| Parker::default()).collect();
        let kicks = Arc::new(VcpuKicks { qsbr, parkers });
        let ends = layout.ranges().iter().map(|range| range.end_raw());
        let end = ends.max().unwrap_or(0);
        CodeMap::check_room(end)?;
        let backing = match boot.backing {
            Some(backing) => Some(backing),
            None => boot.kind.backing(memory).map_err(HostError::from)?,
        };
        let vm = Self {
            backing,
            code: CodeMap::new(end, vcpus),
            exclusive: Exclusive::default(),
            meters: (0..vcpus).map(|_| Meter::default()).collect(),
            booted: AtomicBool::new(false),
            has_shared_state: AtomicBool::new(false),
            #[cfg(feature = "arm64")]
            arm64: OnceLock::new(),
            x86: OnceLock::new(),
            interrupt_lines: InterruptLines::new(config.arch),
            eventfds: EventFds::default(),
            ioeventfds: IoEventFds::default(),
            apf_paused: AtomicBool::new(apf == Apf::Off),
            log_readers: LogReaders::default(),
            stands_still: false,
            regions: Mutex::new(Vec::new()),
            background: None,
            tokens: (0..vcpus).map(|_| Arc::default()).collect(),
            source: boot.source,
            config,
            layout,
            host,
            mmu,
            kicks,
            clock,
        };
        vm.add_boot_memory()?;
        vm.begin_external()?;
        Ok(vm)
    }

    fn add_boot_memory(&self) -> Result<(), SoftError> {
        let mut first = SourcePage(0);
        for (id, range) in (0..).map(SlotId).zip(self.layout.ranges()) {
            let origin = self.source.clone().map(|source| (source, first));
            let linux = self.backing.as_ref().map(|backing| backing.part(first.0));
            let backing = self.add_backing(linux, PageCount::new(range.pages()), origin)?;
            first.0 += range.pages();
            self.keep_backing(None, backing);
            self.mmu.add_slot(SlotSpec {
                id,
                guest: range.start().gpa().get(),
                backing: backing.start(),
                bytes: range.pages() * PAGE_SIZE as u64,
                flags: SlotFlags::empty(),
            })?;
        }
        Ok(())
    }

    /// Sends the addresses of the boot memory to the handler that fills it from outside, if there
    /// is one.
    fn begin_external(&self) -> Result<(), SoftError> {
        let Some(external) = self.source.as_ref().and_then(|source| source.external()) else {
            return Ok(());
        };
        let backing = self
            .regions
            .lock()
            .expect("no panic under this lock")
            .clone();
        let shared = self.shared_memory();
        let page = shared.map_or(Level::L4K, SharedMemory::page_size);
        let mut regions = Vec::with_capacity(backing.len());
        let mut first = SourcePage(0);
        for (_, range) in backing {
            let memory = self.host.addresses(range);
            let memory = memory.ok_or(SoftError::HandlerMemory)?;
            regions.push(HandlerRegion {
                memory,
                first,
                page,
            });
            first.0 += range.pages();
        }
        Ok(external.begin(&regions)?)
    }

    /// Adds a region of new memory, and advises the host to use huge pages for it, as VMMs do for
    /// guest memory. `origin` provides its pages, from the given page on; without it they are
    /// zeros. `linux` selects Linux memory; otherwise the region is in the resident budget.
    pub(crate) fn add_backing(
        &self,
        linux: Option<LinuxBacking>,
        pages: PageCount,
        origin: Option<(Arc<dyn PageSource>, SourcePage)>,
    ) -> Result<BackingRange, HostError> {
        let notifier = self.mmu.notifier();
        let host = &self.host;
        let backing = match (linux, origin) {
            (Some(linux), origin) => host.add_linux_region_in(linux, origin, pages, notifier)?,
            (None, None) => host.add_region(pages, notifier)?,
            (None, Some((source, first))) => {
                self.host.add_region_from(source, first, pages, notifier)?
            }
        };
        self.host.advise_huge(backing)?;
        Ok(backing)
    }

    pub(crate) fn keep_backing(&self, slot: Option<SlotId>, backing: BackingRange) {
        let mut all = self.regions.lock().expect("no panic under this lock");
        all.push((slot, backing));
    }

    /// The shared file with its boot memory.
    pub(crate) fn shared_memory(&self) -> Option<&SharedMemory> {
        self.backing.as_ref()?.shared()
    }

    /// Its memory-management unit.
    pub fn mmu(&self) -> &VmMmu {
        &self.mmu
    }

    /// The host, which supplies its memory.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Each vCPU's stalls so far.
    pub fn stalls(&self) -> Vec<Stalls> {
        let times = self.fault_times().into_iter();
        times.map(|times| times.stalls).collect()
    }

    /// The times of each vCPU's faults so far.
    pub(crate) fn fault_times(&self) -> Vec<FaultTimes> {
        let faults = self.meters.iter().map(|meter| meter.faults.lock());
        let read = faults.map(|faults| faults.expect("no panic under this lock").clone());
        read.collect()
    }

    pub(crate) fn apf(&self) -> Apf {
        if self.apf_paused.load(Ordering::Relaxed) {
            Apf::Off
        } else {
            Apf::On
        }
    }

    /// Each vCPU's asynchronous page faults so far.
    pub fn apf_stats(&self) -> Vec<ApfStats> {
        let read = |meter: &Meter| *meter.apf.lock().expect("no panic under this lock");
        self.meters.iter().map(read).collect()
    }

    /// The instructions retired by each vCPU, as of its last step.
    pub fn retired(&self) -> Vec<u64> {
        self.meters
            .iter()
            .map(|meter| meter.retired.load(Ordering::Relaxed))
            .collect()
    }

    /// The state shared by the processors of an AArch64 VM. Each VM has one, even if making its
    /// vCPUs fails and is tried again.
    #[cfg(feature = "arm64")]
    pub(crate) fn arm64_fabric(&self) -> &Arc<lacuna_arm64::Fabric> {
        self.arm64.get_or_init(|| {
            let wake = Arc::clone(&self.kicks) as Arc<dyn Wake>;
            Arc::new(lacuna_arm64::Fabric::new(self.config.vcpus, wake))
        })
    }

    /// The interrupt controllers of an x86-64 VM, as [`Vm::arm64_fabric`].
    pub(crate) fn apic_bus(&self) -> &Arc<lacuna_x86::ApicBus> {
        self.x86.get_or_init(|| {
            let wake = Arc::clone(&self.kicks) as Arc<dyn Wake>;
            Arc::new(lacuna_x86::ApicBus::new(self.config.vcpus, wake))
        })
    }

    /// Its interrupt controller.
    pub(crate) fn controller(&self) -> Controller {
        match self.config.arch {
            #[cfg(feature = "arm64")]
            Arch::Arm64 => Controller::Arm64(Arc::clone(self.arm64_fabric())),
            _ => Controller::X86(Arc::clone(self.apic_bus())),
        }
    }

    pub(crate) fn qsbr(&self) -> &Qsbr {
        &self.kicks.qsbr
    }

    /// Forgets every kick that no run has taken.
    pub fn withdraw_kicks(&self) {
        for meter in &self.meters {
            meter.kicked.store(false, Ordering::Release);
        }
    }
}

/// Refuses processors that this build does not have, and clocks that they do not have.
const fn check_processor(arch: Arch, cpu: CpuModel) -> Result<(), SoftError> {
    match (arch, cpu) {
        (Arch::X86_64, CpuModel::Common { tsc_khz: Some(0) }) => Err(SoftError::TscFrequency),
        (Arch::Arm64, _) if !cfg!(feature = "arm64") => Err(SoftError::NoArm64),
        (Arch::Arm64, CpuModel::Common { tsc_khz: Some(_) }) => Err(SoftError::NoTsc),
        _ => Ok(()),
    }
}

const _: () = assert!(VCPUS_MAX <= lacuna_x86::ApicBus::VCPUS_MAX);

/// Refuses an impossible number of vCPUs.
pub(crate) fn check_vcpus(vcpus: usize) -> Result<(), SoftError> {
    match vcpus {
        1..=VCPUS_MAX => Ok(()),
        _ => Err(SoftError::Vcpus(vcpus)),
    }
}

/// The largest number of table pages of one VM: leaf tables for 2 TiB. Only pages of slots are
/// mapped, so a guest cannot make the tables grow beyond that. The number bounds a reserved address
/// range, not memory.
const TABLES_MAX: u32 = 1 << 20;

impl Kick for Vm {
    fn kick(&self, index: usize) {
        if let Some(meter) = self.meters.get(index) {
            meter.kicked.store(true, Ordering::Release);
            self.kicks.wake(index);
            meter.toucher.interrupt();
        }
    }

    fn kick_all(&self) {
        (0..self.config.vcpus).for_each(|index| self.kick(index));
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.eventfds.end();
        for (_, range) in self
            .regions
            .get_mut()
            .expect("no panic under this lock")
            .drain(..)
        {
            let removed = self.host.remove_region(range);
            debug_assert!(removed.is_ok(), "this VM added it");
        }
        if let Some(external) = self.source.as_ref().and_then(|source| source.external()) {
            external.finish();
        }
    }
}
