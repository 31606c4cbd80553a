//! One VM of one slice: its vCPUs' threads, the threads that provide its pages, and what its guest
//! says at the end.

use super::PAGES;
use super::fixture::{Arm, Fixture, Work};
use super::kernel_queue::{Fill, KernelQueues};
use super::queue::{Listed, Queues, use_queue};
use crate::base::pin;
use crate::experiment::{LabError, LabResult};
use crate::interrupt;
use crate::session::{Guest, image};
use lacuna::device::{Next, dispatch};
use lacuna::memory::{MemoryError, MemoryKind, SlotFlags};
use lacuna::missing::FaultToken;
use lacuna::{
    Apf, Ending, Exit, Gpa, MissingMemory, PAGE_SIZE, PlatformDevices, Vcpu, VcpuError, Vm,
};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// The longest time for the boot of a guest, and for its touching.
const LIMIT: Duration = Duration::from_secs(120);
/// How often the lab checks for the end of a guest. The check is rare, because it takes time from
/// the vCPUs.
const LOOK: Duration = Duration::from_millis(2);
/// The beginning of the guest's last line.
const RESULT: &str = "RESULT threads=";

pub struct Machine<V> {
    vm: Arc<V>,
    queues: Box<dyn Queues>,
    devices: PlatformDevices,
    lines: Arc<Mutex<Vec<String>>>,
    arm: Arm,
    work: Work,
}

/// For Linux memory through queues, the kernel's queue; otherwise the lab's own lists.
fn queues<V: Vm<Error: Into<LabError>>>(
    fixture: &Fixture<V>,
    arm: Arm,
) -> LabResult<Box<dyn Queues>> {
    let Work {
        arch, vcpus, batch, ..
    } = fixture.work;
    let kernel = |parts: &[_], fill| KernelQueues::new(V::BACKEND, parts, fill);
    Ok(Box::new(match (fixture.kind, arm) {
        (MemoryKind::Hugetlbfs, Arm::Queue(_)) => kernel(&[], Fill::Huge)?,
        (MemoryKind::Linux, Arm::Queue(_)) => kernel(&[], Fill::Run(batch))?,
        (MemoryKind::Linux, Arm::QueueEach) => kernel(&fixture.shares()?, Fill::Run(batch))?,
        _ => {
            let lists = if arm == Arm::QueueEach { vcpus } else { 1 };
            return Ok(Box::new(Arc::new(Listed::new(lists, arch))));
        }
    }))
}

/// An accepted exit.
type Accepted = (Gpa, FaultToken);

impl<V: Vm<Error: Into<LabError>>> Machine<V> {
    pub fn new(fixture: &Fixture<V>, arm: Arm) -> LabResult<Self> {
        let queues = queues(fixture, arm)?;
        let apf = match arm {
            Arm::ExitsTold => Apf::On,
            _ => Apf::Off,
        };
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let kept = Arc::clone(&lines);
        let keep = move |line: &str| {
            let mut lines = kept.lock().expect("no panic under this lock");
            lines.push(line.to_owned());
        };
        Ok(Self {
            vm: (fixture.make)(apf, queues.source())?,
            queues,
            devices: PlatformDevices::of(fixture.work.arch, keep),
            lines,
            arm,
            work: fixture.work,
        })
    }

    /// Boots the guest and starts all threads. The thread of the first vCPU is pinned to the core
    /// `first_core`, if there is one, and the others to the cores after it.
    pub fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        command_line: &str,
        first_core: Option<usize>,
    ) -> LabResult {
        // Start the readers before the boot, which loads the guest into missing memory.
        self.start_readers(scope);
        let vcpus = self.vm.boot(&image(self.work.arch, "touch")?, command_line);
        let vcpus = vcpus.map_err(Into::into)?;
        let (accepted, tokens) = channel();
        match self.arm {
            Arm::Exits => self.exit_on_missing()?,
            Arm::ExitsTold => {
                self.exit_on_missing()?;
                scope.spawn(move || self.provide_accepted(&tokens));
            }
            Arm::Queue(_) | Arm::QueueEach => self.queues.open(),
            Arm::Source => {}
        }
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            let accepted = accepted.clone();
            scope.spawn(move || {
                if let Some(first) = first_core {
                    pin(first + index);
                }
                use_queue(index);
                self.drive(vcpu, &accepted);
            });
        }
        Ok(())
    }

    fn exit_on_missing(&self) -> LabResult {
        for slot in self.vm.memory_slots() {
            self.vm
                .set_slot_flags(slot.id, SlotFlags::EXIT_ON_MISSING)?;
        }
        Ok(())
    }

    fn start_readers<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let queues = (0..self.arm.readers()).flat_map(|_| 0..self.queues.count());
        for queue in queues {
            scope.spawn(move || {
                if let Err(error) = self.queues.read(queue, self.vm.missing_memory()) {
                    self.fail(0, &error.to_string());
                }
            });
        }
    }

    /// Answered faults of each descriptor of the kernel's queue.
    pub fn filled(&self) -> Option<Vec<u64>> {
        self.queues.filled()
    }

    fn memory(&self) -> &dyn MissingMemory {
        self.vm.missing_memory().expect("it has a source")
    }

    /// The work of one vCPU's thread.
    fn drive(&self, mut vcpu: V::Vcpu, accepted: &Sender<Accepted>) {
        let _end = self.end_when_dropped();
        loop {
            let exit = vcpu.run();
            if let Ok(Exit::MemoryFault { gpa, token, .. }) = exit {
                // This loop does not ask whether the run is over: all vCPUs share the lock of the
                // answer. The end kicks every vCPU, which is another exit.
                if let Err(error) = self.bring(&mut vcpu, gpa, token, accepted) {
                    self.fail(vcpu.index(), &error.to_string());
                }
            } else if dispatch(&mut vcpu, exit, &self.devices, &*self.vm) == Next::Stop {
                break;
            }
        }
    }

    fn bring(
        &self,
        vcpu: &mut V::Vcpu,
        gpa: Gpa,
        token: FaultToken,
        accepted: &Sender<Accepted>,
    ) -> Result<(), MemoryError> {
        if self.arm == Arm::ExitsTold && vcpu.accept(token).is_ok() {
            // The other thread ends only after all vCPUs.
            let _ = accepted.send((gpa, token));
            return Ok(());
        }
        let bytes = (self.work.batch * PAGE_SIZE) as u64;
        let first = Gpa::truncate(gpa.get() / bytes * bytes);
        let pages = PAGES[..self.work.batch].as_flattened();
        self.memory().provide(first, pages).map(|_| ())
    }

    /// The work of the thread that provides the pages of accepted tokens.
    fn provide_accepted(&self, accepted: &Receiver<Accepted>) {
        for (gpa, token) in accepted {
            if let Err(error) = self.memory().provide(gpa, &PAGES[0]) {
                self.fail(token.vcpu(), &error.to_string());
            }
            // The token is unknown if the VM has ended.
            let _ = self.memory().ready(token);
        }
    }

    fn fail(&self, vcpu: usize, cause: &str) {
        let cause = cause.to_owned();
        let error = VcpuError::Host { vcpu, cause };
        self.devices.end(Ending::Failed(error), &*self.vm);
    }

    /// The guest, once it waits at its gate.
    pub fn prepared(&self) -> LabResult<Guest<'_>> {
        let guest = Guest::wait_for(&*self.vm, &self.devices);
        let prepared = guest.and_then(|guest| guest.prepared().map(|()| guest));
        prepared.map_err(|error| match self.devices.ending() {
            None => error,
            Some(_) => self.ended(),
        })
    }

    /// Waits for the end of the guest.
    pub fn wait(&self) -> LabResult {
        let deadline = Instant::now() + LIMIT;
        while self.devices.ending().is_none() {
            interrupt::check()?;
            if Instant::now() > deadline {
                return Err(LabError::Guest(format!(
                    "the guest did not end within {LIMIT:?}"
                )));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// The number of touched pages, and the nanoseconds from the opening of the gate until the last
    /// touch, by the guest's clock.
    pub fn touched(&self) -> LabResult<(f64, f64)> {
        let lines = self.lines.lock().expect("no panic under this lock");
        let found = lines.iter().find(|line| line.starts_with(RESULT));
        let field = |line: &str, name: &str| {
            let word = line.split(' ').find_map(|word| word.strip_prefix(name));
            word.and_then(|value| value.parse::<f64>().ok())
        };
        let touched = found.and_then(|line| field(line, "pages=").zip(field(line, "ns=")));
        let is_done = self.devices.ending() == Some(Ending::Exited(0));
        drop(lines);
        let touched = touched.filter(|_| is_done).ok_or_else(|| self.ended())?;
        let came = self.filled().map(|filled| filled.iter().sum::<u64>());
        match came.map(|faults| (faults * self.work.batch as u64) as f64) {
            Some(came) if came < touched.0 => Err(LabError::Guest(format!(
                "at most {came} of {} pages came through the userfaultfd",
                touched.0
            ))),
            _ => Ok(touched),
        }
    }

    fn ended(&self) -> LabError {
        let lines = self.lines.lock().expect("no panic under this lock");
        let ending = self.devices.ending();
        LabError::Guest(format!(
            "the guest ended with {ending:?}; its last line: {:?}",
            lines.last().map_or("", |line| line)
        ))
    }

    /// Ends the guest and the readers when the value is dropped, also after an error or a panic.
    pub fn end_when_dropped(&self) -> End<'_, V> {
        End(self)
    }
}

/// See [`Machine::end_when_dropped`].
pub struct End<'a, V: Vm>(&'a Machine<V>);

impl<V: Vm> Drop for End<'_, V> {
    fn drop(&mut self) {
        let Self(machine) = self;
        machine.devices.end(Ending::Stopped, &*machine.vm);
        machine.queues.end();
    }
}
