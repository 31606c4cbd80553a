//! Describes a VM, makes it, and runs an image in it: the counterpart of `lacuna_soft::VmBuilder`.

use crate::error::KvmError;
use crate::memory::MemoryConfig;
use crate::tracker::Tracker;
use crate::vm::Vm;
use lacuna_addr::PageCount;
use lacuna_host::{HugePages, LinuxBacking, MemoryKind, Swap};
use lacuna_machine::{Apf, Arch, Builder, CpuModel, Delivery, PageSource, VmConfig};
use lacuna_sync::LatencySetting;
use std::path::Path;
use std::sync::Arc;

/// The description of a VM and of a run.
#[derive(Clone, Debug)]
pub struct VmBuilder {
    /// The memory that the guest sees.
    pub memory: PageCount,
    /// How many of these pages may be resident, at least 2 MiB. The others are on the swap device.
    pub resident: PageCount,
    /// The kind of memory for the guest's pages. Only [`MemoryKind::Budget`] is ever swapped out,
    /// and only if `resident` is less than `memory`: otherwise it is as [`MemoryKind::Linux`].
    pub memory_kind: MemoryKind,
    /// The VMM's own memory for the guest's pages, such as a file, which has the slots' pages one
    /// after the other. It is all resident: `memory_kind` and `resident` have no effect on it.
    pub backing: Option<LinuxBacking>,
    /// Whether the guest's memory may be in huge pages: the manager's where `resident` is less than
    /// `memory`, otherwise transparent ones of Linux. Those are for private memory without a page
    /// source.
    pub huge: HugePages,
    /// The number of its processors.
    pub vcpus: usize,
    /// Where the other pages are.
    pub swap: Swap,
    /// The delay added to every swap transfer. Reads may have a sequence of delays.
    pub latency: LatencySetting,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: Apf,
    /// Where dirty logging records writes.
    pub delivery: Delivery,
    /// The detector of writes.
    pub tracker: Tracker,
    /// Which processor the guest sees.
    pub cpu: CpuModel,
    /// Provides the pages of the guest's memory when they are first needed, numbered from 0 in the
    /// order of the memory slots; `None`: they are zeros.
    pub source: Option<Arc<dyn PageSource>>,
    /// The guest kernel's command line, to which the run adds `smp=`, `ap=` and the words for the
    /// host's KVM.
    pub command_line: String,
}

/// This directory exists if the host's KVM is PVM, which needs no hardware support. PVM runs guest
/// kernels in its instruction emulator, and guest programs cannot make system calls by `SYSCALL`.
const PVM: &str = "/sys/module/kvm_pvm";

impl VmBuilder {
    /// A guest of one vCPU with `memory` pages, at most `resident` of them resident. Its pages
    /// arrive without delay, and asynchronous page faults are offered. Every field may be changed
    /// before the VM is built.
    pub fn new(memory: PageCount, resident: PageCount) -> Self {
        Self {
            memory,
            resident,
            memory_kind: MemoryKind::default(),
            backing: None,
            huge: HugePages::Never,
            vcpus: 1,
            swap: Swap::Memory,
            latency: LatencySetting::default(),
            apf: Apf::On,
            delivery: Delivery::default(),
            tracker: Tracker::default(),
            cpu: CpuModel::default(),
            source: None,
            command_line: String::new(),
        }
    }
}

impl Builder for VmBuilder {
    type Vm = Vm;

    fn build(&self) -> Result<Arc<Vm>, KvmError> {
        let config = VmConfig {
            arch: Arch::X86_64,
            memory: self.memory,
            vcpus: self.vcpus,
            apf: self.apf,
            delivery: self.delivery,
            cpu: self.cpu,
        };
        let memory = MemoryConfig {
            size: self.memory,
            kind: self.memory_kind,
            backing: self.backing.clone(),
            huge: self.huge,
            resident: self.resident,
            swap: self.swap.clone(),
            latency: self.latency.clone(),
            source: self.source.clone(),
            tracker: self.tracker,
        };
        Vm::new(config, memory)
    }

    fn full_command_line(&self) -> String {
        let host = if Path::new(PVM).exists() {
            "syscall=ud2 "
        } else {
            ""
        };
        format!("smp={} ap=direct {host}{}", self.vcpus, self.command_line)
            .trim_end()
            .to_owned()
    }
}
