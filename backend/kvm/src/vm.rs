//! One VM on `/dev/kvm`: descriptors, memory, page source.
//!
//! UNSAFETY: memory slots give addresses of this process to KVM. They are those of the guest's
//! mapping, which outlives the VM's descriptors: fields are dropped in the order of their
//! declaration.

use crate::available::open;
use crate::dirty::{Delivery, Dirty};
use crate::kick::VcpuKicks;
use crate::memory::Memory;
use crate::pages::Pages;
use crate::ring::{self, Ring};
use crate::setup::Features;
use crate::source::{Source, SourceConfig, SourceStats};
use crate::{KvmError, Vcpu};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use lacuna_addr::{Gpa, HvaRange, PAGE_SIZE, PageCount};
use lacuna_machine::{Apf, Boot, GuestMemory, Image, Kick, MemoryError};
use lacuna_slots::{RingSize, SlotId};
use std::sync::Arc;

/// The configuration of a VM.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// The memory that the guest sees.
    pub memory: PageCount,
    /// The number of its processors.
    pub vcpus: usize,
    /// Whether it is offered asynchronous page faults.
    pub apf: Apf,
    /// Where its pages come from.
    pub source: SourceConfig,
    /// How its writes are recorded while a slot logs.
    pub delivery: Delivery,
}

/// One virtual machine.
pub struct Vm {
    /// First, with its rings: a mapping of a vCPU's descriptor keeps the VM alive.
    pub(crate) dirty: Dirty,
    /// Before the memory: KVM's workers may wait for pages until the descriptor is closed.
    pub(crate) fd: VmFd,
    pub(crate) source: Source,
    pub(crate) memory: Arc<Memory>,
    features: Features,
    vcpus: usize,
    pub(crate) kicks: Arc<VcpuKicks>,
}

/// The address at which hardware without unrestricted guests keeps three pages for itself: in the
/// hole below 4 GiB, where firmware would be.
const TSS_ADDRESS: usize = 0xfffb_d000;
/// The same limit as in `lacuna_soft`.
const VCPUS_MAX: usize = 64;

impl Vm {
    /// A VM without an image.
    ///
    /// # Errors
    /// What this machine or its KVM lacks.
    pub fn new(config: VmConfig) -> Result<Arc<Self>, KvmError> {
        let kvm = open()?;
        let most = kvm.get_max_vcpus().min(VCPUS_MAX);
        if !(1..=most).contains(&config.vcpus) {
            return Err(KvmError::Vcpus {
                asked: config.vcpus,
                most,
            });
        }
        let resident = config.source.resident.get().min(config.memory.get());
        if resident < Pages::BUDGET_MIN as u64 {
            return Err(KvmError::Resident {
                pages: resident,
                least: Pages::BUDGET_MIN as u64,
            });
        }
        if config.delivery == Delivery::Pagemap && resident < config.memory.get() {
            return Err(KvmError::Away);
        }
        let features =
            Features::of(&kvm, config.apf).map_err(KvmError::step("read its features"))?;
        if config.apf == Apf::On && !features.has_apf() {
            return Err(KvmError::NoApf);
        }
        let memory = Arc::new(Memory::new(config.memory)?);
        let kicks = Arc::new(VcpuKicks::new(config.vcpus));
        let dirty = Dirty::new(config.delivery, &memory)?;
        let uffd = Source::open(config.delivery);
        let source = uffd
            .and_then(|uffd| {
                Source::start(uffd, Arc::clone(&memory), config.source, Arc::clone(&kicks))
            })
            .map_err(|(step, errno)| KvmError::Userfaultfd { step, errno })?;
        let fd = make(&kvm, &memory)?;
        if let Delivery::Ring(size) = config.delivery {
            use_rings(&fd, size)?;
        }
        Ok(Arc::new(Self {
            dirty,
            fd,
            source,
            memory,
            features,
            vcpus: config.vcpus,
            kicks,
        }))
    }

    /// Loads `image` and makes the vCPUs, each about to execute its first instruction.
    ///
    /// # Errors
    /// The image does not fit, or KVM refuses.
    pub fn boot(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<Vcpu>, KvmError> {
        let boot = Boot::load(image, &self.memory.layout, command_line, &*self.memory)?;
        let vcpu = |index| {
            let fd = self
                .fd
                .create_vcpu(index as u64)
                .map_err(KvmError::step("make a vCPU"))?;
            self.features
                .start(&fd, index, &boot)
                .map_err(KvmError::step("set up a vCPU"))?;
            self.map_ring(&fd)?;
            Ok(Vcpu::new(Arc::clone(self), fd, index))
        };
        (0..self.vcpus).map(vcpu).collect()
    }

    fn map_ring(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        if let Delivery::Ring(size) = self.dirty.delivery() {
            let step = "map a dirty ring";
            let ring = Ring::map(vcpu, size).map_err(|errno| KvmError::Kvm { step, errno })?;
            self.dirty.add_ring(ring);
        }
        Ok(())
    }

    /// The counters of its page source.
    pub fn source_stats(&self) -> SourceStats {
        self.source.stats()
    }

    /// Why the guest cannot continue without a page, if that is so.
    pub(crate) fn source_failure(&self) -> Option<String> {
        self.source.failure()
    }
}

/// The VM's descriptor, with interrupt controllers and memory.
fn make(kvm: &Kvm, memory: &Memory) -> Result<VmFd, KvmError> {
    let fd = kvm.create_vm().map_err(KvmError::step("make a VM"))?;
    fd.set_tss_address(TSS_ADDRESS)
        .map_err(KvmError::step("place the TSS"))?;
    fd.create_irq_chip()
        .map_err(KvmError::step("make interrupt controllers"))?;
    for (id, (gpa, hva, bytes)) in (0..).map(SlotId).zip(memory.slots()) {
        let hvas = HvaRange::new(hva, bytes / PAGE_SIZE as u64).expect("a slot is a range");
        // SAFETY: 1. the range is the guest's mapping, touched by atomics only. 2. It stays mapped
        // until the descriptor is closed: see the fields' order.
        unsafe { fd.set_user_memory_region(region(id, gpa, hvas, 0)) }
            .map_err(KvmError::step("add a memory slot"))?;
    }
    Ok(fd)
}

/// A memory slot in KVM's format.
pub(crate) fn region(
    id: SlotId,
    gpa: Gpa,
    hvas: HvaRange,
    flags: u32,
) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot: u32::from(id.0),
        flags,
        guest_phys_addr: gpa.get(),
        memory_size: hvas.pages() * PAGE_SIZE as u64,
        userspace_addr: hvas.start().get(),
    }
}

/// Gives a ring to every vCPU that is made from now on. On a host whose stores are seen in order,
/// as on x86, the older of the two capabilities is equivalent.
fn use_rings(fd: &VmFd, size: RingSize) -> Result<(), KvmError> {
    let caps = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING];
    let most = |cap: u32| usize::try_from(fd.check_extension_raw(cap.into())).unwrap_or(0);
    let cap = caps.into_iter().find(|cap| most(*cap) > 0);
    let cap = cap.ok_or(KvmError::NoRing)?;
    let (bytes, most) = (ring::bytes(size), most(cap));
    if bytes > most {
        return Err(KvmError::Ring { bytes, most });
    }
    let mut enable = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    enable.args[0] = bytes as u64;
    fd.enable_cap(&enable)
        .map_err(KvmError::step("use dirty rings"))
}

impl Kick for Vm {
    fn kick(&self, index: usize) {
        self.kicks.request(index);
    }

    fn kick_all(&self) {
        self.kicks.request_all();
    }
}

impl Drop for Vm {
    /// KVM waits for its workers, and they wait for pages.
    fn drop(&mut self) {
        self.kicks.stop();
        self.source.wake();
    }
}

impl GuestMemory for Vm {
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        self.memory.write(gpa, bytes)?;
        self.dirty.wrote(&self.memory, gpa, bytes.len());
        Ok(())
    }

    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.read(gpa, into)
    }

    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.memory.peek(gpa, into)
    }
}
