//! Describes and executes a run, for `lacuna run`, the lab and the tests.

use crate::error::SoftError;
use crate::seeded::{SimulatedVm, Simulator, SimulatorConfig, Trace};
use crate::stall::Stalls;
use crate::vm::{BootMemory, Vm, check_vcpus};
use lacuna_addr::PageCount;
use lacuna_apf::Stats as ApfStats;
use lacuna_host::{
    Host, HostConfig, HostError, HostStats, HugePages, Io, Latency, LatencySetting, LinuxBacking,
    MemoryKind, PageSource, Swap, SwapStore, linux_room,
};
use lacuna_machine::{
    Apf, Arch, Builder as _, Console, CpuModel, Delivery, Detection, Ending, Image, Layout,
    MachineError, MemorySlots as _, PlatformDevices, RunEnd, VmConfig,
};
use lacuna_sync::{Clock, HostClock, Nanos, VirtualClock};
use std::ops::ControlFlow;
use std::sync::Arc;

/// The description of a run.
#[derive(Clone, Debug)]
pub struct VmBuilder {
    /// The architecture of its processors, for [`Builder::build`](lacuna_machine::Builder::build).
    pub arch: Arch,
    /// The memory that the guest sees.
    pub memory: PageCount,
    /// The frames of the host that the guest gets. Beside them, each vCPU takes 2.5 MiB of this
    /// process, whatever the guest's size: 1 MiB for decoded instructions, the rest for its TLBs
    /// and other caches of translations.
    pub resident: PageCount,
    /// The number of its processors.
    pub vcpus: usize,
    /// The kind of memory for the guest's pages.
    pub memory_kind: MemoryKind,
    /// The VMM's own memory for the guest's pages, such as a file. `memory_kind` and `resident`
    /// have no effect on it.
    pub backing: Option<LinuxBacking>,
    /// How many of the guest's pages shall be in place, if they are Linux memory
    /// ([`Host::limit_linux`]); `None`: any number.
    pub linux_limit: Option<PageCount>,
    /// Whether the kernel backs all of `resident` when the VM is made ([`Host::prefault`]). If not,
    /// the VM is made at once, and the kernel backs memory at its first touch.
    pub prefault: bool,
    /// The regions for which the host uses 2 MiB pages.
    pub huge: HugePages,
    /// The place of swapped-out pages.
    pub swap: Swap,
    /// Provides the pages of the guest's memory when they are first needed, numbered from 0 in the
    /// order of the memory slots; `None`: they are zeros.
    pub source: Option<Arc<dyn PageSource>>,
    /// The delay added to every swap transfer. Reads may have a sequence of delays.
    pub latency: LatencySetting,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: Apf,
    /// Which processor the guest sees.
    pub cpu: CpuModel,
    /// How writes are detected while a slot logs. [`DetectionChoice`] changes it while the VM runs.
    ///
    /// [`DetectionChoice`]: lacuna_machine::DetectionChoice
    pub detection: Detection,
    /// Where dirty logging records writes.
    pub delivery: Delivery,
    /// The seed of a run on one thread in virtual time, which repeats bit for bit; `None` for
    /// threads and real time. It is for
    /// [`VmBuilder::run_seeded`]. A VM from `build` with a seed has stopped
    /// virtual time: a vCPU that waits for time to pass fails with
    /// [`VcpuError::TimeStandsStill`](lacuna_machine::VcpuError::TimeStandsStill).
    pub seed: Option<u64>,
    /// The command line of the guest kernel, to which the run adds `smp=`, and `ap=` for x86-64.
    pub command_line: String,
}

/// The result of a run.
#[non_exhaustive]
pub struct RunSummary {
    /// Why it ended.
    pub ending: Ending,
    /// The host's counters at the end, while the VM still exists.
    pub host: HostStats,
    /// Each vCPU's stalls.
    pub stalls: Vec<Stalls>,
    /// Each vCPU's asynchronous page faults.
    pub apf: Vec<ApfStats>,
    /// The number of instructions retired by each vCPU.
    pub retired: Vec<u64>,
    /// The guest's time at the end.
    pub end: Nanos,
    /// The guest's status page, if it announced one.
    pub status: Option<Vec<u8>>,
    /// The trace of a seeded run.
    pub trace: Option<Trace>,
}

/// The virtual time of a swap transfer without added latency: about as long as with a plain file.
const VIRTUAL_IO_NS: u64 = 50_000;

impl VmBuilder {
    /// A guest of one vCPU with `memory` pages, at most `resident` of them in frames of the host.
    /// The other pages are compressed in memory. Asynchronous page faults are offered; there are no
    /// huge pages. Every field may be changed before the VM is built.
    pub fn new(memory: PageCount, resident: PageCount) -> Self {
        Self {
            arch: Arch::default(),
            memory,
            resident,
            vcpus: 1,
            memory_kind: MemoryKind::default(),
            backing: None,
            linux_limit: None,
            prefault: false,
            huge: HugePages::Never,
            swap: Swap::Memory,
            source: None,
            latency: LatencySetting::default(),
            apf: Apf::On,
            cpu: CpuModel::default(),
            detection: Detection::default(),
            delivery: Delivery::default(),
            seed: None,
            command_line: String::new(),
        }
    }

    /// The memory manager of this run, which several VMs can share.
    pub fn host(&self, clock: Arc<dyn Clock>) -> Result<Arc<Host>, HostError> {
        let io = match self.seed {
            None => Io::Ring { readers: 4 },
            Some(seed) => Io::Virtual {
                seed,
                latency_ns: VIRTUAL_IO_NS..2 * VIRTUAL_IO_NS,
            },
        };
        // Twice the memory, so that runs of free places for clusters are easy to find.
        let capacity = PageCount::new(self.memory.get().saturating_mul(2));
        let swap = self.delayed(self.swap.open(capacity)?);
        let config = HostConfig {
            budget: self.resident,
            huge: self.huge,
            swap,
            io,
            clock,
        };
        let host = Host::with_linux_memory(config, self.linux_memory())?;
        self.linux_limit
            .iter()
            .for_each(|pages| host.limit_linux(*pages));
        if self.prefault {
            host.prefault(&mut || ControlFlow::Continue(()))?;
        }
        Ok(host)
    }

    /// The Linux memory for which the host reserves addresses.
    fn linux_memory(&self) -> PageCount {
        let is_linux = self.backing.is_some() || self.memory_kind != MemoryKind::Budget;
        match Layout::of(self.arch, self.memory) {
            Ok(layout) if is_linux => {
                let page = match &self.backing {
                    Some(backing) => backing.page_size(),
                    None => self.memory_kind.page_size(),
                };
                let slots = layout.ranges().iter();
                linux_room(page, slots.map(|slot| PageCount::new(slot.pages())))
            }
            // An impossible layout is refused when the VM is made.
            _ => PageCount::new(0),
        }
    }

    fn delayed<S: SwapStore + 'static>(&self, store: S) -> Box<dyn SwapStore> {
        Box::new(Latency::new(store, self.latency.clone()))
    }

    /// The guest kernel's whole command line.
    pub fn full_command_line(&self) -> String {
        let all_start = match self.arch {
            Arch::Arm64 => "",
            _ => " ap=direct",
        };
        let line = format!("smp={}{all_start} {}", self.vcpus, self.command_line);
        line.trim_end().to_owned()
    }

    /// Runs `image` to its end, in real time or, with a seed, in virtual time.
    ///
    /// # Errors
    /// The reason why the run cannot start. A started run has an [`Ending`].
    pub fn run_to_summary(
        &self,
        image: &Image<'_>,
        console: impl Console + 'static,
    ) -> Result<RunSummary, SoftError> {
        let devices = Arc::new(PlatformDevices::of(image.arch, console));
        if self.seed.is_some() {
            let (end, trace) = self.run_seeded(image, devices, &mut |_, _| ())?;
            return Ok(RunSummary::of(end, Some(trace)));
        }
        Ok(RunSummary::of(self.start(image, devices)?.wait(), None))
    }

    /// Runs `image` to its end on the calling thread, in virtual time: each run with one seed is
    /// the same. `watch` is called between steps of the guest, with its VM and its time. It may end
    /// the guest: `devices.end(Ending::Stopped, vm)`.
    ///
    /// # Errors
    /// The reason why the run cannot start. A started run has an [`Ending`].
    ///
    /// # Panics
    /// The builder has no seed.
    pub fn run_seeded(
        &self,
        image: &Image<'_>,
        devices: Arc<PlatformDevices>,
        watch: &mut dyn FnMut(&Vm, Nanos),
    ) -> Result<(RunEnd<Vm>, Trace), SoftError> {
        let seed = self.seed.expect("a seeded VM");
        let clock = Arc::<VirtualClock>::default();
        let vm = Arc::new(self.vm(Arc::clone(&clock) as Arc<dyn Clock>)?);
        let checked = devices.check_arch(self.arch);
        let checked = checked.and_then(|()| devices.check_memory(&vm.memory_slots()));
        checked.map_err(MachineError::from)?;
        let vcpus = vm.boot_any(image, &self.full_command_line())?;
        let mut simulator = Simulator::new(SimulatorConfig {
            seed,
            clock: Arc::clone(&clock),
            host: Arc::clone(vm.host()),
        });
        simulator.add(SimulatedVm {
            vm: Arc::clone(&vm),
            vcpus,
            devices: Arc::clone(&devices),
        });
        let trace = simulator.run(|| watch(&vm, clock.now()));
        let end = clock.now();
        Ok((RunEnd::new(vm, devices, end), trace))
    }

    /// Makes the VM for the VMM's own run loop. Unless it has a seed, its host works in the
    /// background until the VM is dropped.
    pub(crate) fn vm_with_background(&self) -> Result<Vm, SoftError> {
        if self.seed.is_some() {
            let mut vm = self.vm(Arc::<VirtualClock>::default())?;
            vm.stands_still = true;
            return Ok(vm);
        }
        let mut vm = self.vm(Arc::<HostClock>::default())?;
        vm.background = Some(vm.host.spawn_background()?);
        Ok(vm)
    }

    /// Makes the VM, with a memory manager of its own.
    fn vm(&self, clock: Arc<dyn Clock>) -> Result<Vm, SoftError> {
        self.check()?;
        let host = self.host(Arc::clone(&clock))?;
        let memory = BootMemory {
            kind: self.memory_kind,
            source: self.source.clone(),
            backing: self.backing.clone(),
        };
        let vm = Vm::make(host, clock, self.config(), memory)?;
        vm.set_detection(self.detection);
        Ok(vm)
    }

    /// Refuses impossible sizes, before memory and files are allocated for them. The budget must
    /// suffice for all vCPUs, and the host would find a shortage too late: each vCPU reserves its
    /// part only when it is made.
    fn check(&self) -> Result<(), SoftError> {
        check_vcpus(self.vcpus)?;
        Layout::of(self.arch, self.memory)?;
        let minimum = Host::minimum_budget(self.vcpus);
        if self.resident < minimum {
            return Err(SoftError::Host(HostError::BudgetTooSmall {
                budget: self.resident,
                vcpus: self.vcpus,
                minimum,
            }));
        }
        Ok(())
    }

    fn config(&self) -> VmConfig {
        VmConfig {
            arch: self.arch,
            memory: self.memory,
            vcpus: self.vcpus,
            apf: self.apf,
            cpu: self.cpu,
            delivery: self.delivery,
        }
    }
}

impl RunSummary {
    fn of(end: RunEnd<Vm>, trace: Option<Trace>) -> Self {
        let vm = &end.vm;
        // The status page may be in swap.
        vm.host().end_latency();
        let status = end.status();
        Self {
            host: vm.host().stats(),
            stalls: vm.stalls(),
            apf: vm.apf_stats(),
            retired: vm.retired(),
            status,
            end: end.end,
            ending: end.ending,
            trace,
        }
    }
}
