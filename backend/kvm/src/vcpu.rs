//! One vCPU: `KVM_RUN` and its exits.
//!
//! UNSAFETY: the data of a port or MMIO access is in the vCPU's shared pages (`struct kvm_run`). An
//! [`Io`] keeps a pointer to it after the borrow from `VcpuFd::run` has ended. The pages are mapped
//! as long as the vCPU exists. KVM reads and writes them only inside `KVM_RUN`, and this file
//! enters `KVM_RUN` only after all accesses are answered.

use crate::arch::{self, Fresh};
use crate::vm::Vm;
use kvm_bindings::{
    KVM_EXIT_DIRTY_RING_FULL, KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use lacuna_addr::Gpa;
use lacuna_machine::{Exit, SaveRestore, StateError, VcpuError, VcpuState, Width};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One virtual processor of the KVM backend.
pub struct Vcpu {
    /// Dropped before `vm`, which may unmap the guest's memory: KVM uses that memory until the last
    /// descriptor of the VM and its vCPUs is closed.
    fd: VcpuFd,
    vm: Arc<Vm>,
    index: usize,
    io: Option<Io>,
    /// The values of registers when KVM made the vCPU.
    fresh: Fresh,
}

// SAFETY: 1. the pointer in `io` is the only field that is not `Send`. It points into the mapping
// that `fd` owns, and that mapping belongs to no thread.
unsafe impl Send for Vcpu {}

/// The accesses that one exit of KVM reports: several for a string instruction such as `REP OUTS`.
struct Io {
    direction: Direction,
    width: Width,
    /// The data of the next access.
    data: NonNull<u8>,
    /// Accesses left.
    left: usize,
}

#[derive(Clone, Copy)]
enum Direction {
    In(Place),
    Out(Place),
}

#[derive(Clone, Copy)]
enum Place {
    Port(u16),
    Memory(Gpa),
}

impl Vcpu {
    pub(crate) fn new(vm: Arc<Vm>, fd: VcpuFd, index: usize) -> Self {
        Self {
            fresh: vm.features.fresh(&fd),
            fd,
            vm,
            index,
            io: None,
        }
    }

    /// The next access of the last exit, if one is left. A write is removed from `io` here; a read
    /// stays until `complete_read` answers it.
    fn next_access(&mut self) -> Option<Exit> {
        let io = self.io.as_mut().filter(|io| io.left > 0)?;
        let width = io.width;
        Some(match io.direction {
            Direction::In(Place::Port(port)) => Exit::IoIn { port, width },
            Direction::In(Place::Memory(gpa)) => Exit::MmioRead { gpa, width },
            Direction::Out(place) => {
                let mut value = [0; 8];
                let size = width as usize;
                // SAFETY: 1. `left` accesses of `width` bytes lie at `data`, in the shared page.
                // 2. The vCPU is not in `KVM_RUN`, so the kernel does not write it.
                unsafe { io.data.copy_to(NonNull::from(&mut value).cast(), size) };
                io.advance();
                let value = u64::from_le_bytes(value);
                match place {
                    Place::Port(port) => Exit::IoOut {
                        port,
                        width,
                        value: value as u32,
                    },
                    Place::Memory(gpa) => Exit::MmioWrite { gpa, width, value },
                }
            }
        })
    }

    /// Enters the guest once. Returns `None` if KVM has reported accesses, which are in `io` then,
    /// or if the VMM has nothing to do.
    fn enter(&mut self) -> Result<Option<Exit>, VcpuError> {
        let vm = Arc::clone(&self.vm);
        let exit = NonNull::from(&mut self.fd.get_kvm_run().immediate_exit);
        // SAFETY: 1. the field is in the shared page, which is mapped as long as `self.fd` lives.
        let _entry = unsafe { vm.kicks.enter(self.index, exit) };
        if vm.kicks.is_stopping() {
            return Ok(Some(Exit::Interrupted));
        }
        self.io = None;
        let (direction, data): (_, NonNull<[u8]>) = match self.fd.run() {
            Ok(VcpuExit::IoOut(port, data)) => (Direction::Out(Place::Port(port)), data.into()),
            // The pointer comes from a `&mut`, because `complete_read` writes through it.
            Ok(VcpuExit::IoIn(port, data)) => (Direction::In(Place::Port(port)), data.into()),
            Ok(VcpuExit::MmioRead(at, data)) => (Direction::In(memory(at)), data.into()),
            Ok(VcpuExit::MmioWrite(at, data)) => (Direction::Out(memory(at)), data.into()),
            Ok(VcpuExit::Intr) => return Ok(self.requested()),
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                return Ok(Some(Exit::DirtyRingFull));
            }
            Ok(VcpuExit::Shutdown) => {
                let text = format!("vCPU {}: {}", self.index, self.describe("triple fault"));
                return Ok(Some(Exit::Shutdown(text)));
            }
            Ok(VcpuExit::InternalError) => {
                let what = format!("KVM cannot go on: {}", self.internal_error());
                return Err(self.failed(&what));
            }
            Ok(other) => {
                let what = format!("KVM stopped it: {other:?}");
                return Err(self.failed(&what));
            }
            Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => {
                return Ok(self.requested());
            }
            Err(e) => return Err(self.failed(&format!("KVM_RUN: {e}"))),
        };
        self.io = Some(self.accesses(direction, data.cast(), data.len()));
        Ok(None)
    }

    /// After an entry that a signal or `immediate_exit` has ended: [`Exit::Interrupted`] if the VMM
    /// has requested this vCPU, otherwise `None`.
    fn requested(&self) -> Option<Exit> {
        let taken = self.vm.kicks.take_request(self.index);
        taken.then_some(Exit::Interrupted)
    }

    fn accesses(&mut self, direction: Direction, data: NonNull<u8>, bytes: usize) -> Io {
        let size = match direction {
            Direction::In(Place::Port(_)) | Direction::Out(Place::Port(_)) => {
                // SAFETY: 1. the exit was KVM_EXIT_IO, so KVM has filled the union's `io`.
                usize::from(unsafe { self.fd.get_kvm_run().__bindgen_anon_1.io.size })
            }
            Direction::In(Place::Memory(_)) | Direction::Out(Place::Memory(_)) => bytes,
        };
        Io {
            direction,
            width: width(size),
            data,
            left: bytes.checked_div(size).unwrap_or(0),
        }
    }

    fn internal_error(&mut self) -> String {
        // SAFETY: 1. the exit was KVM_EXIT_INTERNAL_ERROR, so KVM has filled the union's
        // `internal`.
        let code = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror };
        match code {
            KVM_INTERNAL_ERROR_EMULATION => "an instruction that it cannot emulate".into(),
            KVM_INTERNAL_ERROR_DELIVERY_EV => "an event that it cannot deliver".into(),
            other => format!("internal error {other}"),
        }
    }

    fn failed(&self, what: &str) -> VcpuError {
        VcpuError::Host {
            vcpu: self.index,
            cause: self.describe(what),
        }
    }

    fn describe(&self, what: &str) -> String {
        match arch::program_counter(&self.fd) {
            Ok(place) => format!("{what} at {place}"),
            Err(e) => format!("{what}; its registers: {e}"),
        }
    }
}

impl Io {
    fn advance(&mut self) {
        self.left -= 1;
        if self.left > 0 {
            // SAFETY: 1. an access is left, and its data follows that of this one.
            self.data = unsafe { self.data.add(self.width as usize) };
        }
    }
}

impl lacuna_machine::Vcpu for Vcpu {
    fn index(&self) -> usize {
        self.index
    }

    fn run(&mut self) -> Result<Exit, VcpuError> {
        let exit = loop {
            if let Some(cause) = self.vm.source_failure() {
                let vcpu = self.index;
                return Err(VcpuError::Host { vcpu, cause });
            }
            if let Some(exit) = self.next_access() {
                break exit;
            }
            if let Some(exit) = self.enter()? {
                break exit;
            }
        };
        self.vm.exits[self.index].fetch_add(1, Ordering::Relaxed);
        Ok(exit)
    }

    fn complete_read(&mut self, value: u64) {
        let Some(io) = self.io.as_mut().filter(|io| io.left > 0) else {
            return;
        };
        let bytes = value.to_le_bytes();
        // SAFETY: 1. `left` accesses of `width` bytes lie at `data`, in the shared page. 2. The
        // vCPU is not in `KVM_RUN`, so the kernel does not read it.
        unsafe {
            io.data
                .copy_from(NonNull::from(&bytes).cast(), io.width as usize)
        };
        io.advance();
    }
}

impl SaveRestore for Vcpu {
    /// Refuses while accesses of an instruction are left: KVM completes the instruction when the
    /// vCPU enters the guest again.
    fn save(&mut self) -> Result<VcpuState, StateError> {
        if self.io.is_some() {
            let vcpu = self.index;
            return Err(StateError::MidInstruction { vcpu });
        }
        arch::save(&self.fd, &self.vm.features, &self.fresh)
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError> {
        let features = &self.vm.features;
        let accepted = arch::accept(&self.fd, self.index, features, &self.fresh, state)?;
        // The accesses that are left belong to the old state.
        self.io = None;
        arch::restore(&self.fd, &self.fresh, accepted)
    }
}

fn memory(address: u64) -> Place {
    Place::Memory(Gpa::truncate(address))
}

fn width(size: usize) -> Width {
    match size {
        1 => Width::Byte,
        2 => Width::Word,
        4 => Width::Long,
        _ => Width::Quad,
    }
}
