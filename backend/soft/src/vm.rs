//! One VM: the state that its vCPUs share.

use crate::code::CodeMap;
use crate::exclusive::Exclusive;
use crate::park::Parker;
use crate::platform::Platform;
use crate::stall::Stalls;
use crate::vcpu::{Vcpu, VcpuOf};
use lacuna_addr::{BackingRange, NoRoom, PAGE_SIZE, PageCount, room_for_threads};
use lacuna_apf::Stats as ApfStats;
use lacuna_cpu::Wake;
use lacuna_host::{Host, HostError};
use lacuna_machine::{
    Apf, BootError, CpuModel, Delivery, DirtyError, Image, Kick, Layout, VmConfig,
};
use lacuna_mmu::{Mmu, MmuError, SlotSpec};
use lacuna_slots::{SlotError, SlotFlags, SlotId};
use lacuna_sync::{Clock, Mutex, Qsbr, VcpuSlot, lock_order};
use lacuna_x86::Cpu;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Why a VM cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SoftError {
    /// The configuration is not valid.
    #[error("{0} vCPUs: give 1 to 64")]
    Vcpus(usize),
    /// No TSC has that frequency.
    #[error("a TSC of 0 kHz: give a frequency, or none for 1 GHz")]
    TscFrequency,
    /// The host's memory manager refuses.
    #[error(transparent)]
    Host(#[from] HostError),
    /// There is no memory for tables.
    #[error(transparent)]
    Mmu(#[from] MmuError),
    /// The VM's own tables do not fit.
    #[error(transparent)]
    Tables(#[from] NoRoom),
    /// The memory does not fit into slots.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The image does not fit.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The VM does not support this delivery of dirty pages.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
    /// [`Vm::boot`] has already made its vCPUs.
    #[error("this VM was booted before; make another one, or reload the image and reset its vCPUs")]
    Booted,
}

/// Gets the attention of vCPUs: sets a flag for a vCPU that runs, unparks the thread of one that
/// sleeps.
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

/// The counters that a vCPU publishes while it runs, and its pending kick. Each vCPU's are on cache
/// lines of their own.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Meter {
    pub(crate) retired: AtomicU64,
    pub(crate) exits: AtomicU64,
    /// A kick that no run has taken yet.
    pub(crate) kicked: AtomicBool,
    pub(crate) stalls: Mutex<Stalls, lock_order::SoftStalls>,
    pub(crate) apf: Mutex<ApfStats, lock_order::SoftApfStats>,
}

/// One virtual machine.
pub struct Vm {
    pub(crate) config: VmConfig,
    pub(crate) layout: Layout,
    pub(crate) host: Arc<Host>,
    pub(crate) mmu: Arc<Mmu>,
    pub(crate) kicks: Arc<VcpuKicks>,
    pub(crate) code: CodeMap,
    pub(crate) exclusive: Exclusive,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) meters: Box<[Meter]>,
    booted: AtomicBool,
    apf_paused: AtomicBool,
    /// Regions of the host that hold this VM's memory. A region that has a slot number is removed
    /// with that slot.
    pub(crate) backing: Mutex<Vec<(Option<SlotId>, BackingRange)>, lock_order::SoftBacking>,
}

impl Vm {
    /// A VM without an image; its memory comes from `host`, which other VMs may share.
    pub fn new(
        host: Arc<Host>,
        clock: Arc<dyn Clock>,
        config: VmConfig,
    ) -> Result<Arc<Self>, SoftError> {
        let VmConfig {
            memory, vcpus, apf, ..
        } = config;
        if !(1..=64).contains(&vcpus) {
            return Err(SoftError::Vcpus(vcpus));
        }
        if config.cpu == (CpuModel::Common { tsc_khz: Some(0) }) {
            return Err(SoftError::TscFrequency);
        }
        let layout = Layout::new(memory)?;
        let qsbr = Arc::new(Qsbr::new(vcpus));
        let mmu = Mmu::new(Arc::clone(&host), Arc::clone(&qsbr), TABLES_MAX)?;
        if config.delivery != Delivery::Bitmap {
            mmu.set_delivery(config.delivery)?;
        }
        let parkers = (0..vcpus).map(|_| Parker::default()).collect();
        let kicks = Arc::new(VcpuKicks { qsbr, parkers });
        let end = layout
            .ranges()
            .iter()
            .map(|r| r.end_raw())
            .max()
            .unwrap_or(0);
        CodeMap::check_room(end)?;
        let vm = Self {
            code: CodeMap::new(end, vcpus),
            exclusive: Exclusive::default(),
            meters: (0..vcpus).map(|_| Meter::default()).collect(),
            booted: AtomicBool::new(false),
            apf_paused: AtomicBool::new(apf == Apf::Off),
            backing: Mutex::new(Vec::new()),
            config,
            layout,
            host,
            mmu,
            kicks,
            clock,
        };
        vm.add_boot_memory()?;
        Ok(Arc::new(vm))
    }

    fn add_boot_memory(&self) -> Result<(), SoftError> {
        for (id, range) in (0..).map(SlotId).zip(self.layout.ranges()) {
            let backing = self.add_backing(PageCount::new(range.pages()))?;
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

    /// Adds a region of new memory, and advises the host to use huge pages for it, as VMMs do for
    /// guest memory.
    pub(crate) fn add_backing(&self, pages: PageCount) -> Result<BackingRange, HostError> {
        let notifier = Arc::clone(&self.mmu) as Arc<dyn lacuna_host::MmuNotifier>;
        let backing = self.host.add_region(pages, notifier)?;
        self.host.advise_huge(backing)?;
        Ok(backing)
    }

    pub(crate) fn keep_backing(&self, slot: Option<SlotId>, backing: BackingRange) {
        let mut all = self.backing.lock().expect("no panic under this lock");
        all.push((slot, backing));
    }

    /// Loads `image` and makes the vCPUs, each about to execute its first instruction. It works
    /// once: a second set of vCPUs would share the interrupt controllers, the shoot-down slots and
    /// the dirty rings with the first.
    ///
    /// # Errors
    /// [`SoftError::Booted`], or the reason why the image cannot be loaded or a vCPU cannot be
    /// made; after such an error it may be tried again.
    pub fn boot(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<Vcpu>, SoftError> {
        self.boot_on::<Cpu>(image, command_line)
    }

    /// [`Vm::boot`] with processors of another architecture.
    ///
    /// # Errors
    /// As [`Vm::boot`].
    pub fn boot_on<P: Platform>(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<VcpuOf<P>>, SoftError> {
        self.make_once(|| {
            let boot = P::load(self, image, command_line)?;
            self.make_vcpus(Some(boot))
        })
    }

    /// Makes the vCPUs without an image, in long mode with all registers zero: their states are to
    /// be restored. It works once, as [`Vm::boot`].
    ///
    /// # Errors
    /// As [`Vm::boot`].
    pub fn bare_vcpus(self: &Arc<Self>) -> Result<Vec<Vcpu>, SoftError> {
        self.make_once(|| self.make_vcpus::<Cpu>(None))
    }

    fn make_once<V>(
        &self,
        make: impl FnOnce() -> Result<Vec<V>, SoftError>,
    ) -> Result<Vec<V>, SoftError> {
        if self.booted.swap(true, Ordering::AcqRel) {
            return Err(SoftError::Booted);
        }
        let vcpus = make();
        if vcpus.is_err() {
            self.booted.store(false, Ordering::Release);
        }
        vcpus
    }

    /// For a reset of the machine: loads the image of the boot a second time. The vCPUs continue
    /// where they are until [`Vcpu::reset`].
    ///
    /// # Errors
    /// The reason why the image cannot be loaded.
    pub fn reload(&self, image: &Image<'_>, command_line: &str) -> Result<(), SoftError> {
        Cpu::load(self, image, command_line)?;
        Ok(())
    }

    fn make_vcpus<P: Platform>(
        self: &Arc<Self>,
        boot: Option<P::Boot>,
    ) -> Result<Vec<VcpuOf<P>>, SoftError> {
        // After the VM's tables are allocated, there may be too little address space for the
        // threads of the vCPUs. The tables of a vCPU need no check of their own: they fit into
        // the rest of the mapping that a thread's malloc arena reserves.
        room_for_threads(self.config.vcpus + THREADS_BESIDE)?;
        let wake: Arc<dyn Wake> = Arc::clone(&self.kicks) as Arc<dyn Wake>;
        let fabric = Arc::new(P::fabric(self.config.vcpus, wake));
        (0..self.config.vcpus)
            .map(|index| VcpuOf::new(Arc::clone(self), index, Arc::clone(&fabric), boot))
            .collect()
    }

    /// Its configuration.
    pub fn config(&self) -> VmConfig {
        VmConfig {
            delivery: self.mmu.delivery(),
            ..self.config
        }
    }

    /// Its memory-management unit.
    pub fn mmu(&self) -> &Arc<Mmu> {
        &self.mmu
    }

    /// The host, which supplies its memory.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Each vCPU's stalls so far.
    pub fn stalls(&self) -> Vec<Stalls> {
        let read = |meter: &Meter| {
            meter
                .stalls
                .lock()
                .expect("no panic under this lock")
                .clone()
        };
        self.meters.iter().map(read).collect()
    }

    /// Sets whether a guest that has enabled asynchronous page faults gets them from now on. The
    /// guest sees no other difference. No effect on a VM that did not offer them at its start.
    pub fn set_apf(&self, apf: Apf) {
        let off = apf == Apf::Off || self.config.apf == Apf::Off;
        self.apf_paused.store(off, Ordering::Relaxed);
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

    /// Instructions that each vCPU has retired, as of its last step.
    pub fn retired(&self) -> Vec<u64> {
        self.meters
            .iter()
            .map(|meter| meter.retired.load(Ordering::Relaxed))
            .collect()
    }

    pub(crate) fn qsbr(&self) -> &Qsbr {
        &self.kicks.qsbr
    }

    /// Forgets every kick that no run has taken yet.
    pub fn withdraw_kicks(&self) {
        for meter in &self.meters {
            meter.kicked.store(false, Ordering::Release);
        }
    }
}

/// The most table pages that one VM may have: leaf tables for 2 TiB. Only pages of slots are
/// mapped, so a guest cannot make the tables grow beyond that. The number bounds a reserved address
/// range, not memory.
const TABLES_MAX: u32 = 1 << 20;

/// Threads of a VMM besides those of the vCPUs: one that watches the guest, one that reads its
/// console, one that ends the run after a time, one for signals.
const THREADS_BESIDE: usize = 4;

impl Kick for Vm {
    fn kick(&self, index: usize) {
        if let Some(meter) = self.meters.get(index) {
            meter.kicked.store(true, Ordering::Release);
            self.kicks.wake(index);
        }
    }

    fn kick_all(&self) {
        (0..self.config.vcpus).for_each(|index| self.kick(index));
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        for (_, range) in self
            .backing
            .get_mut()
            .expect("no panic under this lock")
            .drain(..)
        {
            let removed = self.host.remove_region(range);
            debug_assert!(removed.is_ok(), "this VM added it");
        }
    }
}
