//! What the vCPUs' threads and the worker share, and the worker.

use crate::device::{Answer, VirtioDevice};
use crate::guest::{Fault, Guest, Host};
use crate::queue::QueueState;
use crate::registers::Registers;
use lacuna_machine::Line;
use lacuna_sync::{Condvar, Mutex, MutexGuard, lock, lock_order};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, Weak};
use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_NEEDS_RESET};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};

/// The registers, and what the worker does.
pub(crate) struct Control {
    pub registers: Registers,
    /// The queues that the worker looks at next, a bit each.
    notified: u32,
    /// Whether the worker handles a request. It has a copy of the queue then.
    busy: bool,
    /// Threads that wait for the end of the request in progress.
    waiting: u32,
    pub paused: bool,
    pub fault: Option<Fault>,
    is_over: bool,
}

pub(crate) struct Shared<D> {
    pub device: D,
    vm: Weak<dyn Host>,
    line: Line,
    control: Mutex<Control, lock_order::VirtioRegisters>,
    changed: Condvar,
}

impl<D: VirtioDevice> Shared<D> {
    pub fn new(vm: Weak<dyn Host>, line: Line, device: D) -> Self {
        let control = Control {
            registers: Registers::of(&device),
            notified: 0,
            busy: false,
            waiting: 0,
            paused: false,
            fault: None,
            is_over: false,
        };
        Self {
            device,
            vm,
            line,
            control: Mutex::new(control),
            changed: Condvar::new(),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, Control> {
        lock(&self.control)
    }

    /// The registers while the worker handles no request. A request in progress ends first.
    pub fn quiet(&self) -> MutexGuard<'_, Control> {
        let mut control = self.lock();
        control.waiting += 1;
        let quiet = self.changed.wait_while(control, |control| control.busy);
        let mut control = quiet.unwrap_or_else(PoisonError::into_inner);
        control.waiting -= 1;
        self.changed.notify_all();
        control
    }

    /// Keeps the VM. A thread that uses the line and may hold the last reference to the VM calls
    /// this before it locks, and drops the result after the lock: a VM's end takes locks, too.
    pub fn hold(&self) -> Option<Arc<dyn Host>> {
        self.vm.upgrade()
    }

    /// Wakes the worker for the queues in `queues`, a bit each.
    pub fn notify(&self, control: &mut Control, queues: u32) {
        if control.registers.has(VIRTIO_CONFIG_S_DRIVER_OK) {
            let count = control.registers.queues.len();
            control.notified |= queues & ((1 << count) - 1);
            self.changed.notify_all();
        }
    }

    /// Resets the device. No request is in progress.
    pub fn reset(&self, control: &mut Control) {
        control.registers = Registers::of(&self.device);
        control.notified = 0;
        control.fault = None;
        self.line.lower();
    }

    /// Sets bits of InterruptStatus.
    pub fn raise(&self, registers: &mut Registers, bits: u32) {
        if registers.interrupt == 0 {
            self.line.raise();
        }
        registers.interrupt |= bits;
    }

    /// The driver has handled these interrupts.
    pub fn acknowledge(&self, registers: &mut Registers, bits: u32) {
        registers.interrupt &= !bits;
        self.set_line(registers);
    }

    /// Gives the line the level that the registers say.
    pub fn set_line(&self, registers: &Registers) {
        match registers.interrupt {
            0 => self.line.lower(),
            _ => self.line.raise(),
        }
    }

    /// Replaces the configuration space but the driver's bytes, and notifies the driver.
    pub fn change_config(&self) {
        let _vm = self.hold();
        let mut control = self.lock();
        let registers = &mut control.registers;
        let driver = self.device.driver_config();
        let mut config = self.device.config();
        config[driver.clone()].copy_from_slice(&registers.config[driver]);
        registers.config = config;
        registers.config_generation = registers.config_generation.wrapping_add(1);
        if registers.has(VIRTIO_CONFIG_S_DRIVER_OK) {
            self.raise(registers, VIRTIO_MMIO_INT_CONFIG);
        }
    }

    /// Ends the worker after its request.
    pub fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// The worker thread.
    pub fn work(&self) {
        while let Some(mut job) = self.next() {
            // Dropped after the lock is released, see `hold`.
            let vm = self.hold();
            let step = || self.step(&mut job, vm.as_deref());
            let step = catch_unwind(AssertUnwindSafe(step)).unwrap_or(Err(Fault::Panicked));
            self.finish(job, step);
        }
    }

    /// Waits for a notified queue, and makes the worker busy with it. `None` ends the worker.
    fn next(&self) -> Option<Job> {
        let idle = |control: &mut Control| !control.is_over && !control.has_work();
        let awake = self.changed.wait_while(self.lock(), idle);
        let mut control = awake.unwrap_or_else(PoisonError::into_inner);
        if control.is_over {
            return None;
        }
        let index = control.notified.trailing_zeros() as usize;
        control.notified &= !(1 << index);
        control.busy = true;
        Some(Job {
            index,
            queue: control.registers.queues[index],
            features: control.registers.driver_features,
        })
    }

    fn finish(&self, job: Job, step: Result<Option<bool>, Fault>) {
        let mut control = self.lock();
        control.registers.queues[job.index] = job.queue;
        control.busy = false;
        match step {
            Ok(None) => {}
            Ok(Some(interrupt)) => {
                control.notified |= 1 << job.index;
                if interrupt {
                    self.raise(&mut control.registers, VIRTIO_MMIO_INT_VRING);
                }
            }
            Err(fault) => {
                control.registers.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
                control.fault = Some(fault);
                self.raise(&mut control.registers, VIRTIO_MMIO_INT_CONFIG);
            }
        }
        self.changed.notify_all();
    }

    /// Handles the next request of a queue. Returns `None` if there is none, and otherwise whether
    /// the driver wants an interrupt.
    fn step(&self, job: &mut Job, vm: Option<&dyn Host>) -> Result<Option<bool>, Fault> {
        let queue = &mut job.queue;
        let Some(vm) = vm.filter(|_| queue.ready) else {
            return Ok(None);
        };
        let guest = Guest::new(vm, job.features);
        let Some(chain) = queue.pop(&guest)? else {
            return Ok(None);
        };
        match self.device.handle(job.index, &chain, &guest)? {
            Answer::Used(written) => queue.push(&guest, chain.head, written).map(Some),
            Answer::Later => {
                queue.undo_pop();
                Ok(None)
            }
        }
    }
}

/// A queue that the worker looks at.
struct Job {
    index: usize,
    /// A copy. Only the worker changes the queue meanwhile.
    queue: QueueState,
    features: u64,
}

impl Control {
    fn has_work(&self) -> bool {
        self.notified != 0
            && !self.paused
            && self.waiting == 0
            && !self.registers.has(VIRTIO_CONFIG_S_NEEDS_RESET)
    }
}
