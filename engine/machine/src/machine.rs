//! A machine: a VM, its devices, and a thread for each of its vCPUs.

use crate::pause::Pause;
use crate::run::{is_on_a_vcpu_of, refuse_on_a_vcpu, run_one};
use crate::{
    DeviceError, Ending, ErrorKind, Paused, PlatformDevices, RunEnd, VcpuError, Vm, VmStats,
};
use lacuna_sync::{Clock as _, HostClock, Nanos};
use std::io::{self, PipeReader, PipeWriter};
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A VM and its devices, with a thread for each vCPU. The threads wait for their vCPUs.
///
/// The host may refuse a thread. Therefore a machine has its threads before its guest: the
/// destination of a migration makes the machine before the source hands over the guest, and nothing
/// can fail afterwards. If this value is dropped, its threads end.
///
/// ```text
/// Builder::build ─► Machine::new ─► Vm::boot, or a restore ─► Machine::start ─► Running
/// ```
pub struct Machine<V: Vm> {
    // Dropped before `running`, which waits for the threads.
    gates: Vec<Sender<V::Vcpu>>,
    running: Running<V>,
}

/// A running guest.
///
/// An event loop polls its descriptor ([`AsFd`]), which is readable once the guest has ended.
///
/// Any thread may use it. If it is dropped, the guest ends, and the drop waits for the vCPUs'
/// threads; a drop on one of these threads, by a [`Device`](crate::Device), does not wait.
pub struct Running<V: Vm> {
    vm: Arc<V>,
    devices: Arc<PlatformDevices>,
    pause: Arc<Pause<V::Vcpu>>,
    threads: Vec<JoinHandle<Option<V::Vcpu>>>,
    clock: HostClock,
    /// The threads have the other end, and write nothing.
    end: PipeReader,
}

/// The call of [`Machine::with_threads`].
type Prepare = Arc<dyn Fn(usize) -> io::Result<()> + Send + Sync>;

/// Why there is no machine.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The devices do not fit the VM.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The host refuses a thread for a vCPU.
    #[error(transparent)]
    Thread(VcpuError),
    /// The host refuses the descriptors of a pipe.
    #[error("cannot make a pipe for the guest's end: {0}; raise the limit on files (ulimit -n)")]
    Pipe(String),
}

impl MachineError {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Device(error) => error.kind(),
            Self::Thread(error) => error.kind(),
            Self::Pipe(_) => ErrorKind::Host,
        }
    }
}

impl<V: Vm> Machine<V> {
    /// Starts a thread for each vCPU that `vm` is configured to have.
    ///
    /// # Errors
    /// The devices are for another architecture, a device lies over the guest's memory
    /// ([`PlatformDevices::check_memory`]), or the host refuses a thread or a pipe.
    pub fn new(vm: Arc<V>, devices: impl Into<Arc<PlatformDevices>>) -> Result<Self, MachineError> {
        Self::make(vm, devices.into(), None)
    }

    /// As [`Machine::new`]. The thread of each vCPU first calls `prepare` with the vCPU's number:
    /// to choose its processors, its priority or its control group.
    ///
    /// # Errors
    /// As [`Machine::new`], and the error of `prepare`.
    pub fn with_threads(
        vm: Arc<V>,
        devices: impl Into<Arc<PlatformDevices>>,
        prepare: impl Fn(usize) -> io::Result<()> + Send + Sync + 'static,
    ) -> Result<Self, MachineError> {
        Self::make(vm, devices.into(), Some(Arc::new(prepare)))
    }

    fn make(
        vm: Arc<V>,
        devices: Arc<PlatformDevices>,
        prepare: Option<Prepare>,
    ) -> Result<Self, MachineError> {
        let config = vm.config();
        devices.check_arch(config.arch)?;
        devices.check_memory(&vm.memory_slots())?;
        let (end, writer) = io::pipe().map_err(|error| MachineError::Pipe(error.to_string()))?;
        let writer = Arc::new(writer);
        let mut machine = Self {
            gates: Vec::new(),
            running: Running {
                vm,
                devices,
                pause: Arc::default(),
                threads: Vec::new(),
                clock: HostClock::default(),
                end,
            },
        };
        for index in 0..config.vcpus {
            let started = machine.start_thread(index, Arc::clone(&writer), prepare.clone());
            started.map_err(MachineError::Thread)?;
        }
        Ok(machine)
    }

    /// The pipe ends when the last thread drops `writer`, also by a panic.
    fn start_thread(
        &mut self,
        index: usize,
        writer: Arc<PipeWriter>,
        prepare: Option<Prepare>,
    ) -> Result<(), VcpuError> {
        let Running {
            vm, devices, pause, ..
        } = &self.running;
        let (vm, devices, pause) = (Arc::clone(vm), Arc::clone(devices), Arc::clone(pause));
        let (gate, vcpu) = channel();
        let (prepared, result) = channel();
        let prepares = prepare.is_some();
        let named = thread::Builder::new().name(format!("vcpu{index}"));
        let spawned = named.spawn(move || {
            let _writer = writer;
            if let Some(prepare) = prepare {
                // The machine waits for this result.
                let _ = prepared.send(prepare(index));
            }
            // An error means that the machine was dropped.
            let vcpu = vcpu.recv().ok()?;
            run_one(vcpu, &devices, &*vm, &pause)
        });
        let thread = spawned.map_err(|error| no_thread(index, &error))?;
        self.gates.push(gate);
        self.running.threads.push(thread);
        if !prepares {
            return Ok(());
        }
        let result = result.recv();
        let result = result.unwrap_or_else(|_| Err(io::Error::other("the call panicked")));
        result.map_err(|error| VcpuError::Host {
            vcpu: index,
            cause: format!("cannot prepare its thread: {error}"),
        })
    }

    /// Its VM.
    pub fn vm(&self) -> &Arc<V> {
        &self.running.vm
    }

    /// Its devices.
    pub fn devices(&self) -> &Arc<PlatformDevices> {
        &self.running.devices
    }

    /// Runs the vCPUs of its VM, which have booted or were restored. If the devices have an ending
    /// already, as after an earlier run, the guest executes nothing.
    ///
    /// # Panics
    /// These are not all of its vCPUs.
    pub fn start(self, vcpus: Vec<V::Vcpu>) -> Running<V> {
        assert_eq!(vcpus.len(), self.gates.len(), "all vCPUs of the VM");
        let Self { gates, mut running } = self;
        running.devices.resume();
        running.pause.enter(vcpus.len());
        running.clock = HostClock::default();
        for (gate, vcpu) in gates.iter().zip(vcpus) {
            // The thread has not ended: it waits for this vCPU.
            let _ = gate.send(vcpu);
        }
        running
    }
}

impl<V: Vm> Running<V> {
    /// Its VM.
    pub fn vm(&self) -> &Arc<V> {
        &self.vm
    }

    /// Its devices. They have the reason why the guest has ended ([`PlatformDevices::ending`]).
    pub fn devices(&self) -> &Arc<PlatformDevices> {
        &self.devices
    }

    /// The counters of its VM.
    pub fn stats(&self) -> VmStats {
        self.vm.stats()
    }

    /// The time since its start.
    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// Waits until every vCPU has left the guest and no other thread has them, and returns them.
    /// `None`: the guest has ended.
    ///
    /// A vCPU that waits for a page or a device leaves too. If the vCPU is in the middle of an
    /// instruction, its save is refused with
    /// [`StateError::MidInstruction`](crate::StateError::MidInstruction): end the pause, and begin
    /// another one. The devices are not paused: see [`PlatformDevices::pause`].
    ///
    /// # Panics
    /// On the thread of one of its vCPUs, which this would wait for. A device that calls this ends
    /// the run with its name ([`DeviceError::Panicked`](crate::DeviceError::Panicked)).
    pub fn pause(&self) -> Option<Paused<'_, V::Vcpu>> {
        refuse_on_a_vcpu("a pause", &self.pause);
        self.pause.begin(&*self.vm)
    }

    /// Ends the guest, unless it has ended. Does not wait for its end.
    pub fn stop(&self) {
        self.devices.end(Ending::Stopped, &*self.vm);
    }

    /// Waits for `time` at most, and returns whether the guest has ended. A pause delays the end of
    /// its vCPUs' threads, for 60 s at most: the pausing thread looks for
    /// [`PlatformDevices::ending`], and drops its [`Paused`] then.
    pub fn wait_timeout(&self, time: Duration) -> bool {
        self.pause.wait_end(time)
    }

    /// Waits until the guest has ended.
    ///
    /// # Panics
    /// With the panic of a vCPU's thread; on such a thread.
    pub fn wait(mut self) -> RunEnd<V> {
        let vcpus = self.join();
        let end = self.now();
        // Dropping a vCPU may update counters of its VM.
        drop(vcpus);
        RunEnd::new(Arc::clone(&self.vm), Arc::clone(&self.devices), end)
    }

    /// As [`Running::wait`], and returns the vCPUs, which can be started again in another machine.
    /// If a thread has kept a vCPU paused too long after the end, the vCPU is not returned: see
    /// [`Paused`].
    ///
    /// # Panics
    /// With the panic of a vCPU's thread; on such a thread.
    pub fn into_vcpus(mut self) -> Vec<V::Vcpu> {
        self.join()
    }

    fn join(&mut self) -> Vec<V::Vcpu> {
        refuse_on_a_vcpu("a wait for the end", &self.pause);
        let threads = mem::take(&mut self.threads);
        let join = |thread: JoinHandle<_>| {
            let joined = thread.join();
            joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let vcpus = threads.into_iter().filter_map(join).collect();
        self.devices.flush();
        vcpus
    }
}

impl<V: Vm> AsFd for Running<V> {
    /// At its end of file once every vCPU's thread has ended. Nothing is ever written to it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

impl<V: Vm> Drop for Running<V> {
    fn drop(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        // Without vCPUs, the devices can be used for another machine.
        if self.pause.has_begun() {
            self.stop();
        }
        if is_on_a_vcpu_of(&self.pause) {
            return;
        }
        for thread in mem::take(&mut self.threads) {
            // A panic was printed, and has ended the run.
            let _ = thread.join();
        }
        self.devices.flush();
    }
}

fn no_thread(vcpu: usize, error: &io::Error) -> VcpuError {
    VcpuError::Host {
        vcpu,
        cause: format!(
            "cannot start its thread: {error}; give the guest fewer vCPUs, or raise the limit on \
             processes (ulimit -u)"
        ),
    }
}
