//! From a description of a run to its end: the counterpart of `lacuna_soft::VmBuilder`.

use crate::pages::FirstTouch;
use crate::source::{SourceConfig, SourceStats};
use crate::{Delivery, KvmError, Vm, VmConfig};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_machine::{Apf, Console, Ending, GuestMemory, Image, PlatformDevices};
use lacuna_sync::{Clock, HostClock, LatencySetting, Nanos};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

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
    /// How its writes are recorded while a slot logs.
    pub delivery: Delivery,
    /// For the guest kernel; `smp=` and `ap=` are added, and what the host's KVM makes necessary.
    pub command_line: String,
}

/// A run in progress, or ended.
pub struct Observed<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// Its devices.
    pub devices: &'a PlatformDevices,
    /// The time since the run began.
    pub now: Nanos,
}

/// The result of a run.
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

/// How often the watcher of a run is called.
const WATCH: Duration = Duration::from_millis(100);
/// Exists if the host's KVM works without hardware support (PVM). That KVM runs guest kernels in
/// its instruction emulator, and guest programs cannot use the usual system calls.
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

    /// Runs `image` to its end. `watch` is called several times a second on the calling thread.
    ///
    /// # Errors
    /// The reason why the run cannot start. A run that has started has an [`Ending`].
    pub fn run(
        &self,
        image: &Image<'_>,
        console: impl Console + 'static,
        mut watch: impl FnMut(&Observed<'_>),
    ) -> Result<RunSummary, KvmError> {
        let vm = self.vm()?;
        let vcpus = vm.boot(image, &self.full_command_line())?;
        let devices = PlatformDevices::new(console);
        let clock = HostClock::default();
        let watcher = thread::current();
        thread::scope(|scope| {
            let runner = scope.spawn(|| {
                drop(lacuna_machine::run(vcpus, &devices, &*vm));
                watcher.unpark();
            });
            while !runner.is_finished() && devices.ending().is_none() {
                watch(&Observed {
                    vm: &vm,
                    devices: &devices,
                    now: clock.now(),
                });
                thread::park_timeout(WATCH);
            }
        });
        let end = clock.now();
        Ok(RunSummary {
            ending: devices.ending().unwrap_or(Ending::Stopped),
            stats: vm.source_stats(),
            status: status_page(&vm, &devices),
            end,
        })
    }

    /// Its VM, not booted, for a caller that runs the vCPUs in another way.
    ///
    /// # Errors
    /// As [`Vm::new`].
    pub fn vm(&self) -> Result<Arc<Vm>, KvmError> {
        Vm::new(VmConfig {
            memory: self.memory,
            vcpus: self.vcpus,
            apf: self.apf,
            delivery: self.delivery,
            source: SourceConfig {
                resident: self.resident,
                latency: self.latency.clone(),
                first_touch: self.first_touch,
            },
        })
    }
}

/// A copy of the status page, without a fault if possible.
fn status_page(vm: &Vm, devices: &PlatformDevices) -> Option<Vec<u8>> {
    let mut page = vec![0; PAGE_SIZE];
    vm.read(devices.status_page()?.gpa(), &mut page).ok()?;
    Some(page)
}
