//! This backend's implementation of the backend interface of `lacuna_machine`.

mod interrupts;
mod settings;

use crate::builder::VmBuilder;
use crate::either::Vcpu;
use crate::error::SoftError;
use crate::meter::Meter;
use crate::stall::FaultTimes;
use crate::vm::Vm;
use lacuna_addr::{GfnRange, PAGE_SIZE, PageCount, PageStates};
use lacuna_host::SharedMemory;
use lacuna_machine::settings::{MemorySettings, Settings};
use lacuna_machine::{
    Apf, ApfSwitch, Backend, BackendError, Balloon, Builder, ErrorKind, HugePagePolicy, Image,
    MissingMemory, PageOut, SharedFile, SharedState, StateError, VcpuStats, VmConfig, VmStats,
};
use lacuna_metrics::Metrics;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl BackendError for SoftError {
    fn kind(&self) -> ErrorKind {
        Self::kind(self)
    }
}

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("config", &lacuna_machine::Vm::config(self))
            .finish_non_exhaustive()
    }
}

impl lacuna_machine::Vm for Vm {
    type Vcpu = Vcpu;
    type Error = SoftError;

    const BACKEND: Backend = Backend::Soft;

    fn config(&self) -> VmConfig {
        VmConfig {
            delivery: self.mmu.delivery(),
            ..self.config
        }
    }

    fn boot(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<Vcpu>, SoftError> {
        self.boot_any(image, command_line)
    }

    fn bare_vcpus(self: &Arc<Self>) -> Result<Vec<Vcpu>, SoftError> {
        self.bare()
    }

    fn save_shared(&self) -> Result<SharedState, StateError> {
        self.eventfds.settle();
        Ok(self.save_any())
    }

    fn restore_shared(&self, state: &SharedState) -> Result<(), StateError> {
        self.restore_any(state)
    }

    fn stats(&self) -> VmStats {
        let host = self.host.stats();
        let mut stats = VmStats::default();
        let linux = self.host.linux_pages();
        stats.resident = PageCount::new(host.resident + linux.get());
        stats.first_touches = host.faults_zero_fill;
        stats.pages_in = host.swapped_in + host.linux_paged_in;
        stats.pages_out = host.swapped_out + host.linux_paged_out;
        let vcpu = |meter: &Meter| {
            let mut vcpu = VcpuStats::default();
            vcpu.exits = meter.exits.read();
            vcpu.instructions = Some(meter.retired.load(Ordering::Relaxed));
            vcpu.times = Some(meter.times.read(self.clock.now()));
            let major_faults = meter.major_faults.load(Ordering::Relaxed);
            vcpu.major_faults = self.backing.as_ref().map(|_| major_faults);
            vcpu
        };
        stats.vcpus = self.meters.iter().map(vcpu).collect();
        stats
    }

    fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::default();
        self.stats().fill(&mut metrics);
        self.host.stats().fill(&mut metrics, &[]);
        let (apf, dirty, faults) = (self.apf_stats(), self.mmu.dirty_stats(), self.fault_times());
        let mut all = FaultTimes::default();
        for (vcpu, ((apf, dirty), faults)) in apf.iter().zip(&dirty).zip(&faults).enumerate() {
            let labels = &[("vcpu", &*vcpu.to_string())];
            apf.fill(&mut metrics, labels);
            dirty.fill(&mut metrics, labels);
            faults.stalls.fill(&mut metrics, labels);
            all.add(faults);
        }
        all.fill(&mut metrics);
        metrics
    }

    fn shared_file(&self) -> Option<SharedFile<'_>> {
        let shared = self.shared_memory()?;
        Some(SharedFile {
            file: shared.file(),
            offset: shared.first() * PAGE_SIZE as u64,
        })
    }

    fn huge_page_policy(&self) -> Option<&dyn HugePagePolicy> {
        Some(self)
    }

    fn missing_memory(&self) -> Option<&dyn MissingMemory> {
        self.source.is_some().then_some(self)
    }

    fn balloon(&self) -> Option<&dyn Balloon> {
        Some(self)
    }

    fn page_out(&self) -> Option<&dyn PageOut> {
        let is_huge = self.shared_memory().is_some_and(SharedMemory::is_huge);
        (self.backing.is_some() && !is_huge).then_some(self)
    }

    fn apf_switch(&self) -> Option<&dyn ApfSwitch> {
        Some(self)
    }

    fn settings(&self) -> Settings {
        self.present_settings()
    }

    fn memory_settings(&self) -> &dyn MemorySettings {
        self
    }

    fn page_states(&self, gfns: GfnRange) -> PageStates {
        self.states_of(gfns)
    }
}

impl HugePagePolicy for Vm {
    fn disallow_huge(&self, gfns: GfnRange) -> Result<(), String> {
        self.mmu.disallow_huge(gfns).map_err(|e| e.to_string())
    }

    fn allow_huge(&self, gfns: GfnRange) {
        self.mmu.allow_huge(gfns);
    }
}

impl ApfSwitch for Vm {
    fn apf(&self) -> Apf {
        self.apf()
    }

    /// The guest sees no other difference. Has no effect if the VM did not offer async faults at
    /// its start.
    fn set_apf(&self, apf: Apf) {
        let off = apf == Apf::Off || self.config.apf == Apf::Off;
        self.apf_paused.store(off, Ordering::Relaxed);
    }
}

impl Builder for VmBuilder {
    type Vm = Vm;

    fn build(&self) -> Result<Arc<Vm>, SoftError> {
        self.vm_with_background().map(Arc::new)
    }

    fn full_command_line(&self) -> String {
        Self::full_command_line(self)
    }
}
