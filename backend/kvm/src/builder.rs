//! From a description of a run to its end: the counterpart of `lacuna_soft::VmBuilder`.

use crate::pages::FirstTouch;
use crate::source::{SourceConfig, SourceStats};
use crate::tracker::Tracker;
use crate::{KvmError, Vm};
use lacuna_addr::PageCount;
use lacuna_machine::{
    Apf, Console, CpuModel, Delivery, Ending, Image, Observed, PlatformDevices, RunEnd, VmConfig,
    run_watched, status_page,
};
use lacuna_sync::{Clock, HostClock, LatencySetting, Nanos};
use std::path::Path;
use std::sync::Arc;

/// The description of a run.
#[derive(Clone, Debug)]
pub struct VmBuilder {
    /// The memory that the guest sees.
    pub memory: PageCount,
    /// How much of it may be resident at a time, at least 2 MiB.
    pub resident: PageCount,
    /// The number of its processors.
    pub vcpus: usize,
    /// How long a page takes to arrive that is not resident.
    pub latency: LatencySetting,
    /// Whether this also holds for pages that were never touched.
    pub first_touch: FirstTouch,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: Apf,
    /// Where dirty logging records its writes.
    pub delivery: Delivery,
    /// What detects them.
    pub tracker: Tracker,
    /// Which processor the guest sees.
    pub cpu: CpuModel,
    /// For the guest kernel; `smp=` and `ap=` are added, and what the host's KVM makes necessary.
    pub command_line: String,
}

/// How a run went.
pub struct RunSummary {
    /// Why it ended.
    pub ending: Ending,
    /// What the page source did.
    pub stats: SourceStats,
    /// The time from the beginning of the run to its end.
    pub end: Nanos,
    /// The guest's status page, if it announced one.
    pub status: Option<Vec<u8>>,
}

/// There where the host's KVM is the one without hardware support (PVM), which runs guest kernels
/// in its instruction emulator and does not let guest programs make system calls of the usual kind.
const PVM: &str = "/sys/module/kvm_pvm";

impl VmBuilder {
    /// A guest with `memory` pages, of which `resident` may be in place at a time, of one vCPU. Its
    /// pages come without delay, and asynchronous page faults are offered. Every field may be
    /// changed before the VM is built.
    pub fn new(memory: PageCount, resident: PageCount) -> Self {
        Self {
            memory,
            resident,
            vcpus: 1,
            latency: LatencySetting::default(),
            first_touch: FirstTouch::default(),
            apf: Apf::On,
            delivery: Delivery::default(),
            tracker: Tracker::default(),
            cpu: CpuModel::default(),
            command_line: String::new(),
        }
    }

    /// The guest kernel's whole command line.
    pub fn full_command_line(&self) -> String {
        let host = if Path::new(PVM).exists() {
            "syscall=ud2 "
        } else {
            ""
        };
        format!("smp={} ap=direct {host}{}", self.vcpus, self.command_line)
            .trim_end()
            .to_owned()
    }

    /// As [`Builder::run_with_console`](lacuna_machine::Builder::run_with_console); the result has
    /// this backend's own counters.
    ///
    /// # Errors
    /// The reason why the run cannot start. A run that has started has an [`Ending`].
    pub fn run_to_summary(
        &self,
        image: &Image<'_>,
        console: impl Console + 'static,
        mut watch: impl FnMut(&Observed<'_, Vm>),
    ) -> Result<RunSummary, KvmError> {
        let end = self.run_with(image, &PlatformDevices::new(console), &mut watch)?;
        Ok(RunSummary {
            ending: end.ending,
            stats: end.vm.source_stats(),
            end: end.end,
            status: end.status,
        })
    }

    /// As [`VmBuilder::run_to_summary`], with devices of the caller's.
    pub(crate) fn run_with(
        &self,
        image: &Image<'_>,
        devices: &PlatformDevices,
        watch: &mut dyn FnMut(&Observed<'_, Vm>),
    ) -> Result<RunEnd<Vm>, KvmError> {
        let vm = self.vm()?;
        let vcpus = vm.boot(image, &self.full_command_line())?;
        let clock = HostClock::default();
        let run = run_watched(&vm, vcpus, devices, &clock, watch);
        run.map_err(|error| KvmError::Thread(error.to_string()))?;
        // The status page may be away.
        vm.end_latency();
        Ok(RunEnd {
            ending: devices.ending().unwrap_or(Ending::Stopped),
            end: clock.now(),
            status: status_page(&*vm, devices),
            trace_hash: None,
            vm,
        })
    }

    /// Its VM, not booted.
    ///
    /// # Errors
    /// As [`Vm::new`].
    pub fn vm(&self) -> Result<Arc<Vm>, KvmError> {
        let config = VmConfig {
            memory: self.memory,
            vcpus: self.vcpus,
            apf: self.apf,
            delivery: self.delivery,
            cpu: self.cpu,
        };
        let source = SourceConfig {
            resident: self.resident,
            latency: self.latency.clone(),
            first_touch: self.first_touch,
        };
        Vm::new(config, source, self.tracker)
    }
}
