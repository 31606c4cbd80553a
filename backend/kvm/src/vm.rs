//! One VM on `/dev/kvm`: descriptors, memory, page source.
//!
//! UNSAFETY: memory slots tell KVM addresses of this process. They are the guest's mapping, which
//! outlives the VM's descriptors: fields are dropped in the order in which they stand.

use crate::available::open;
use crate::kick::Bells;
use crate::memory::Memory;
use crate::pages::Pages;
use crate::setup::Features;
use crate::source::{Source, SourceConfig, SourceStats};
use crate::{KvmError, Vcpu};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use lacuna_addr::{Gpa, PageCount};
use lacuna_machine::{Apf, Boot, GuestMemory, Image, Kick, MemoryError};
use std::sync::Arc;

/// What a VM has.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// The memory that the guest believes it has.
    pub memory: PageCount,
    /// Its processors.
    pub vcpus: usize,
    /// Whether it is offered asynchronous page faults.
    pub apf: Apf,
    /// Where its pages come from.
    pub source: SourceConfig,
}

/// One virtual machine.
pub struct Vm {
    /// First: KVM's workers may wait for pages until the descriptor is closed.
    fd: VmFd,
    source: Source,
    memory: Arc<Memory>,
    features: Features,
    vcpus: usize,
    pub(crate) bells: Arc<Bells>,
}

/// Where hardware without unrestricted guests keeps three pages for itself: in the hole below 4
/// GiB, where firmware would be.
const TSS_ADDRESS: usize = 0xfffb_d000;
/// As many as `lacuna_soft` takes.
const VCPUS_MAX: usize = 64;

impl Vm {
    /// A VM without content.
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
        let features =
            Features::of(&kvm, config.apf).map_err(KvmError::step("read its features"))?;
        if config.apf == Apf::On && !features.has_apf() {
            return Err(KvmError::NoApf);
        }
        let memory = Arc::new(Memory::new(config.memory)?);
        let bells = Arc::new(Bells::new(config.vcpus));
        let source = Source::start(Arc::clone(&memory), config.source, Arc::clone(&bells))
            .map_err(|(step, errno)| KvmError::Userfaultfd { step, errno })?;
        Ok(Arc::new(Self {
            fd: make(&kvm, &memory)?,
            source,
            memory,
            features,
            vcpus: config.vcpus,
            bells,
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
            Ok(Vcpu::new(Arc::clone(self), fd, index))
        };
        (0..self.vcpus).map(vcpu).collect()
    }

    /// What its page source has done.
    pub fn source_stats(&self) -> SourceStats {
        self.source.stats()
    }

    /// Why the guest cannot go on without a page, once that is so.
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
    for (slot, (gpa, hva, bytes)) in (0..).zip(memory.slots()) {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: gpa.get(),
            memory_size: bytes,
            userspace_addr: hva.get(),
        };
        // SAFETY: 1. the range is the guest's mapping, touched by atomics only. 2. It stays mapped
        // until the descriptor is closed: see the fields' order.
        unsafe { fd.set_user_memory_region(region) }
            .map_err(KvmError::step("add a memory slot"))?;
    }
    Ok(fd)
}

impl Kick for Vm {
    fn kick_all(&self) {
        self.bells.stop();
        self.source.ring();
    }
}

impl Drop for Vm {
    /// KVM waits for its workers, and they for pages.
    fn drop(&mut self) {
        self.kick_all();
    }
}

impl GuestMemory for Vm {
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        self.memory.write(gpa, bytes)
    }

    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.read(gpa, into)
    }

    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.memory.peek(gpa, into)
    }
}
