//! From a description of a run to its end: what `lacuna run`, the lab and the tests have in common.

use crate::{SimulatedVm, Simulator, SimulatorConfig, SoftError, Stalls, Trace, Vm, VmConfig};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_apf::Stats as ApfStats;
use lacuna_host::{
    FileStore, Host, HostConfig, HostError, HostStats, HugePages, Io, Latency, LatencySetting,
    MemoryStore, SwapStore,
};
use lacuna_machine::{Apf, Console, Ending, GuestMemory, Image, Layout, PlatformDevices};
use lacuna_sync::{Clock, HostClock, Nanos, VirtualClock};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Where pages go that have no frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swap {
    /// An unlinked file in this folder.
    File(PathBuf),
    /// Compressed, inside the resident budget.
    Memory,
}

/// A run.
#[derive(Clone, Debug)]
pub struct VmBuilder {
    /// The memory that the guest believes it has.
    pub memory: PageCount,
    /// The frames it gets.
    pub resident: PageCount,
    /// Its processors.
    pub vcpus: usize,
    /// Where its pages are made 512 at a time.
    pub huge: HugePages,
    /// Where the rest goes.
    pub swap: Swap,
    /// Added to every swap transfer.
    pub latency: LatencySetting,
    /// Whether the guest is offered asynchronous page faults.
    pub apf: Apf,
    /// One thread, virtual time, bit-exact; `None` for threads and real time.
    pub seed: Option<u64>,
    /// For the guest kernel; `smp=` and `ap=` are added.
    pub command_line: String,
}

/// A run that is under way or over.
pub struct Observed<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// Its devices.
    pub devices: &'a PlatformDevices,
    /// The guest's time.
    pub now: Nanos,
}

/// How a run went.
pub struct RunSummary {
    /// Why it ended.
    pub ending: Ending,
    /// The host's counters at the end, the VM still there.
    pub host: HostStats,
    /// Each vCPU's stalls.
    pub stalls: Vec<Stalls>,
    /// Each vCPU's asynchronous page faults.
    pub apf: Vec<ApfStats>,
    /// Instructions that each vCPU retired.
    pub retired: Vec<u64>,
    /// The guest's time at the end.
    pub end: Nanos,
    /// The guest's status page, if it announced one.
    pub status: Option<Vec<u8>>,
    /// Of a seeded run.
    pub trace: Option<Trace>,
}

/// How often the watcher of a threaded run looks.
const WATCH: Duration = Duration::from_millis(100);
/// A swap transfer's virtual time without added latency: about the plain file's here.
const VIRTUAL_IO_NS: u64 = 50_000;

impl VmBuilder {
    /// The memory manager of this run, for several VMs to share if wanted.
    pub fn host(&self, clock: Arc<dyn Clock>) -> Result<Arc<Host>, HostError> {
        let io = match self.seed {
            None => Io::Ring { readers: 4 },
            Some(seed) => Io::Virtual {
                seed,
                latency_ns: VIRTUAL_IO_NS..2 * VIRTUAL_IO_NS,
            },
        };
        // Twice the memory: runs of free places for clusters stay easy to find.
        let capacity = PageCount::new(2 * self.memory.get());
        let swap = match &self.swap {
            Swap::File(dir) => self.delayed(FileStore::create(dir, capacity)?),
            Swap::Memory => self.delayed(MemoryStore::new()),
        };
        Host::new(HostConfig {
            budget: self.resident,
            huge: self.huge,
            swap,
            io,
            clock,
        })
    }

    fn delayed<S: SwapStore + 'static>(&self, store: S) -> Box<dyn SwapStore> {
        Box::new(Latency::new(store, self.latency.clone()))
    }

    /// The guest kernel's whole command line.
    pub fn full_command_line(&self) -> String {
        format!("smp={} ap=direct {}", self.vcpus, self.command_line)
            .trim_end()
            .to_owned()
    }

    /// Runs `image` to its end. `watch` is called several times a second on the calling thread.
    ///
    /// # Errors
    /// What keeps the run from starting. A run that started has an [`Ending`].
    pub fn run(
        &self,
        image: &Image<'_>,
        console: impl Console + 'static,
        watch: impl FnMut(&Observed<'_>),
    ) -> Result<RunSummary, SoftError> {
        self.check()?;
        match self.seed {
            None => self.run_threads(image, console, watch),
            Some(seed) => self.run_seeded(seed, image, console, watch),
        }
    }

    /// Refuses sizes that no host can run, before memory and files are taken for them. The budget
    /// is compared with what all vCPUs need: each asks for its own part only when it is made.
    fn check(&self) -> Result<(), SoftError> {
        Layout::new(self.memory)?;
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
            memory: self.memory,
            vcpus: self.vcpus,
            apf: self.apf,
        }
    }

    fn run_threads(
        &self,
        image: &Image<'_>,
        console: impl Console + 'static,
        mut watch: impl FnMut(&Observed<'_>),
    ) -> Result<RunSummary, SoftError> {
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = self.host(Arc::clone(&clock))?;
        let vm = Vm::new(Arc::clone(&host), Arc::clone(&clock), self.config())?;
        let vcpus = vm.boot(image, &self.full_command_line())?;
        let devices = PlatformDevices::new(console);
        let background = host.spawn_background()?;
        let watcher = thread::current();
        thread::scope(|scope| {
            let named = thread::Builder::new().name("lacuna-run".into());
            let spawned = named.spawn_scoped(scope, || {
                drop(lacuna_machine::run(vcpus, &devices, &*vm));
                watcher.unpark();
            });
            let runner = spawned.map_err(|error| HostError::Thread(error.to_string()))?;
            while !runner.is_finished() && devices.ending().is_none() {
                watch(&Observed {
                    vm: &vm,
                    devices: &devices,
                    now: clock.now(),
                });
                thread::park_timeout(WATCH);
            }
            Ok::<(), HostError>(())
        })?;
        drop(background);
        let end = clock.now();
        // The status page may be in swap.
        host.end_latency();
        Ok(RunSummary::of(&vm, &devices, end, None))
    }

    fn run_seeded(
        &self,
        seed: u64,
        image: &Image<'_>,
        console: impl Console + 'static,
        mut watch: impl FnMut(&Observed<'_>),
    ) -> Result<RunSummary, SoftError> {
        let clock = Arc::new(VirtualClock::default());
        let host = self.host(Arc::clone(&clock) as Arc<dyn Clock>)?;
        let vm = Vm::new(
            Arc::clone(&host),
            Arc::clone(&clock) as Arc<dyn Clock>,
            self.config(),
        )?;
        let vcpus = vm.boot(image, &self.full_command_line())?;
        let devices = Arc::new(PlatformDevices::new(console));
        let mut simulator = Simulator::new(SimulatorConfig {
            seed,
            clock: Arc::clone(&clock),
            host,
        });
        simulator.add(SimulatedVm {
            vm: Arc::clone(&vm),
            vcpus,
            devices: Arc::clone(&devices),
        });
        let trace = simulator.run(|| {
            watch(&Observed {
                vm: &vm,
                devices: &devices,
                now: clock.now(),
            })
        });
        Ok(RunSummary::of(&vm, &devices, clock.now(), Some(trace)))
    }
}

impl RunSummary {
    fn of(vm: &Vm, devices: &PlatformDevices, end: Nanos, trace: Option<Trace>) -> Self {
        Self {
            ending: devices.ending().unwrap_or(Ending::Stopped),
            host: vm.host().stats(),
            stalls: vm.stalls(),
            apf: vm.apf_stats(),
            retired: vm.retired(),
            status: status_page(vm, devices),
            end,
            trace,
        }
    }
}

/// A copy of the status page, from swap if need be.
fn status_page(vm: &Vm, devices: &PlatformDevices) -> Option<Vec<u8>> {
    let mut page = vec![0; PAGE_SIZE];
    vm.read(devices.status_page()?.gpa(), &mut page).ok()?;
    Some(page)
}
