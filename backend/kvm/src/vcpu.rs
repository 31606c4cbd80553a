//! One vCPU: `KVM_RUN` and its exits.
//!
//! UNSAFETY: the data of a port or MMIO access is in the vCPU's shared pages (`struct kvm_run`). An
//! [`Io`] keeps a pointer to it after the borrow from `VcpuFd::run` has ended. The pages are mapped
//! as long as the vCPU exists. KVM reads and writes them only inside `KVM_RUN`, and this file
//! enters `KVM_RUN` only after all accesses are answered.

use crate::apf::{self, ExitedVcpu, VcpuApf};
use crate::arch::{self, Fresh};
use crate::kick::MissingPage;
use crate::stopped;
use crate::vm::Vm;
use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use lacuna_addr::{Gpa, aligned_piece};
use lacuna_machine::{
    Exit, FaultToken, GuestMemory as _, MissingMemory, SaveRestore, StateError, TokenError,
    VcpuError, VcpuState, Width,
};
use lacuna_slots::SlotFlags;
use std::ptr::NonNull;
use std::sync::Arc;
use tracing::trace;

/// One virtual processor of the KVM backend.
pub struct Vcpu {
    /// Dropped before `vm`, which may unmap the guest's memory: KVM uses that memory until the last
    /// descriptor of the VM and its vCPUs is closed.
    fd: VcpuFd,
    pub(crate) vm: Arc<Vm>,
    pub(crate) index: usize,
    io: Option<Io>,
    pub(crate) msr: Option<Register>,
    /// Its guest's async page faults, if their host side is in this process.
    apf: Option<VcpuApf>,
    /// The missing page of its last exit on missing memory.
    pub(crate) faulted: Option<Faulted>,
    /// The number of resets of the rings (`Dirty::resets`) before the entry that found its ring
    /// full.
    ring_full: Option<u64>,
    /// The values of registers when KVM made the vCPU.
    fresh: Fresh,
}

/// The missing page for which a vCPU has exited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Faulted {
    pub(crate) missing: MissingPage,
    /// Whether its token was refused: then the next run waits for the page instead of exiting
    /// again.
    pub(crate) waits: bool,
}

// SAFETY: 1. the pointer in `io` is the only field that is not `Send`. It points into the mapping
// that `fd` owns, and that mapping belongs to no thread.
unsafe impl Send for Vcpu {}

/// An access to a register of this process. It is answered before the next entry, which completes
/// its instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Register {
    Read(u32),
    Write(u32, u64),
    Answered,
}

/// The accesses that one exit of KVM reports: several for a string instruction such as `REP OUTS`,
/// and for an instruction that accesses, for example, 3 bytes of a device before the end of a page.
struct Io {
    direction: Direction,
    /// The data of the next access.
    data: NonNull<u8>,
    /// Bytes left.
    left: usize,
}

#[derive(Clone, Copy)]
enum Direction {
    In(AccessAddress, Answer),
    Out(AccessAddress),
}

#[derive(Clone, Copy)]
enum AccessAddress {
    /// A port, and the size of an access there.
    Port(u16, Width),
    /// The address of the next access.
    Memory(Gpa),
}

/// Whether the VMM knows of the next access, a read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The VMM has got the exit, and may answer.
    Asked,
    /// The VMM has not got the exit.
    NotAsked,
}

impl Vcpu {
    pub(crate) fn new(vm: Arc<Vm>, fd: VcpuFd, index: usize) -> Self {
        let apf = |features| VcpuApf::new(index, features, &vm.kicks);
        Self {
            apf: vm.own_apf.map(apf),
            fresh: vm.features.fresh(&fd),
            fd,
            vm,
            index,
            io: None,
            msr: None,
            faulted: None,
            ring_full: None,
        }
    }

    /// The next access of the last exit, if one is left. This removes a write from `io`; a read
    /// stays until `complete_read` answers it.
    fn next_access(&mut self) -> Option<Exit> {
        let io = self.io.as_mut().filter(|io| io.left > 0)?;
        let width = io.width();
        Some(match io.direction {
            Direction::In(place, _) => {
                io.direction = Direction::In(place, Answer::Asked);
                match place {
                    AccessAddress::Port(port, _) => Exit::IoIn { port, width },
                    AccessAddress::Memory(gpa) => Exit::MmioRead { gpa, width },
                }
            }
            Direction::Out(place) => {
                let mut value = [0; 8];
                let size = width as usize;
                // SAFETY: 1. `left` bytes, at least `width`, lie at `data`, in the shared page.
                // 2. The vCPU is not in `KVM_RUN`, so the kernel does not write it.
                unsafe { io.data.copy_to(NonNull::from(&mut value).cast(), size) };
                io.advance();
                let value = u64::from_le_bytes(value);
                match place {
                    AccessAddress::Port(port, _) => Exit::IoOut {
                        port,
                        width,
                        value: value as u32,
                    },
                    AccessAddress::Memory(gpa) => Exit::MmioWrite { gpa, width, value },
                }
            }
        })
    }

    /// Enters the guest once. Returns `None` if KVM has reported accesses, now in `io`, or if the
    /// VMM has nothing to do.
    fn enter(&mut self) -> Result<Option<Exit>, VcpuError> {
        let vm = Arc::clone(&self.vm);
        let exit = NonNull::from(&mut self.fd.get_kvm_run().immediate_exit);
        // SAFETY: 1. the field is in the shared page, which is mapped as long as `self.fd` lives.
        let _entry = unsafe { vm.kicks.enter(self.index, exit) };
        if vm.kicks.is_stopping() {
            return Ok(Some(Exit::Interrupted));
        }
        let resets = vm.dirty.resets();
        if self.ring_full.is_some_and(|at| at == resets) {
            // KVM would refuse as well, but may push an entry for a page that it writes itself.
            // Enough of these entries overflow the ring.
            return Ok(Some(Exit::DirtyRingFull));
        }
        (self.io, self.msr, self.ring_full) = (None, None, None);
        let (direction, data): (Direction, NonNull<[u8]>) = match self.fd.run() {
            Ok(VcpuExit::IoOut(port, data)) => {
                let data = data.into();
                (Direction::Out(self.port(port)), data)
            }
            // The pointer comes from a `&mut`, because `complete_read` writes through it.
            Ok(VcpuExit::IoIn(port, data)) => {
                let data = data.into();
                (Direction::In(self.port(port), Answer::NotAsked), data)
            }
            Ok(VcpuExit::MmioRead(at, data)) => {
                (Direction::In(memory(at), Answer::NotAsked), data.into())
            }
            Ok(VcpuExit::MmioWrite(at, data)) => (Direction::Out(memory(at)), data.into()),
            Ok(VcpuExit::X86Rdmsr(access)) => {
                self.msr = Some(Register::Read(access.index));
                return Ok(None);
            }
            Ok(VcpuExit::X86Wrmsr(access)) => {
                self.msr = Some(Register::Write(access.index, access.data));
                return Ok(None);
            }
            Ok(VcpuExit::Intr) => return Ok(self.requested()),
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                trace!(target: "lacuna::mmu", "dirty ring is full");
                self.ring_full = Some(resets);
                return Ok(Some(Exit::DirtyRingFull));
            }
            Ok(VcpuExit::Shutdown) => {
                let text = format!("vCPU {}: {}", self.index, self.describe("triple fault"));
                return Ok(Some(Exit::Shutdown(text)));
            }
            Ok(VcpuExit::InternalError) => return Err(self.internal_error()),
            Ok(VcpuExit::MemoryFault { gpa, .. }) => {
                return Err(self.has_no_page(Gpa::truncate(gpa)));
            }
            Ok(other) => {
                let what = format!("KVM stopped it: {other:?}");
                return Err(self.failed(&what));
            }
            Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => {
                return Ok(self.requested());
            }
            Err(e) if e.errno() == libc::EFAULT => {
                return Err(self.failed(&stopped::no_page(None)));
            }
            Err(e) => return Err(self.failed(&format!("KVM_RUN: {e}"))),
        };
        self.io = Some(Io {
            direction,
            data: data.cast(),
            left: data.len(),
        });
        Ok(None)
    }

    /// The end of a run in which KVM found no page at `gpa`.
    fn has_no_page(&self, gpa: Gpa) -> VcpuError {
        // If Linux has lost the page, this read records it.
        let _ = self.vm.read(gpa, &mut [0]);
        self.failed(&stopped::no_page(Some(gpa)))
    }

    /// Reads a byte where a device access lies in guest memory. If Linux cannot bring a page of a
    /// file, or has taken a page away, KVM's emulator takes it for a device; the read records the
    /// loss, and the run ends with it.
    fn touch_memory(&self) {
        let direction = self.io.as_ref().map(|io| &io.direction);
        let (Some(Direction::In(at, _)) | Some(Direction::Out(at))) = direction else {
            return;
        };
        let AccessAddress::Memory(gpa) = at else {
            return;
        };
        // Outside of all slots it is a device's. A write to a read-only slot needs no page.
        let is_write = matches!(direction, Some(Direction::Out(_)));
        let slot = self.vm.slot_at(*gpa);
        if slot.is_ok_and(|slot| !(is_write && slot.flags.contains(SlotFlags::READONLY))) {
            let _ = self.vm.read(*gpa, &mut [0]);
        }
    }

    /// Handles an entry ended by a signal or `immediate_exit`: [`Exit::Interrupted`] if the VMM has
    /// requested this vCPU, otherwise `None`.
    fn requested(&self) -> Option<Exit> {
        let taken = self.vm.kicks.take_request(self.index);
        taken.then_some(Exit::Interrupted)
    }

    /// KVM has found the ring full. Returns whether the vCPU may enter again at once: after an
    /// overflow, a full ring may have no page.
    fn empty_full_ring(&self) -> Result<bool, VcpuError> {
        let Some(resets) = self.ring_full else {
            return Ok(false);
        };
        let emptied = self.vm.log().empty_full_ring(self.index, resets);
        emptied.map_err(|error| self.failed(&error.to_string()))
    }

    /// Calls the host side of the guest's async page faults, if it is in this process.
    pub(crate) fn with_apf<T>(
        &mut self,
        call: impl FnOnce(&mut VcpuApf, &ExitedVcpu<'_>) -> T,
    ) -> Option<T> {
        let exited = ExitedVcpu {
            fd: &self.fd,
            vm: &self.vm,
            index: self.index,
            midway: self.io.is_some() || self.msr.is_some(),
        };
        self.apf.as_mut().map(|apf| call(apf, &exited))
    }

    /// Answers the guest's access to a register of async page faults, and notifies the guest of
    /// arrived pages.
    fn tell_guest(&mut self) -> Result<(), VcpuError> {
        let answer = match self.msr {
            Some(Register::Read(index)) => self.with_apf(|apf, at| apf.read_msr(index, at)),
            Some(Register::Write(index, value)) => {
                self.with_apf(|apf, at| apf.write_msr(index, value, at).map(|()| value))
            }
            Some(Register::Answered) | None => None,
        };
        if let Some(answer) = answer {
            let run = &mut self.fd.get_kvm_run().__bindgen_anon_1;
            run.msr.error = u8::from(answer.is_none());
            run.msr.data = answer.unwrap_or(0);
            self.msr = Some(Register::Answered);
        }
        if self.apf.as_ref().is_some_and(VcpuApf::has_arrivals) {
            self.with_apf(VcpuApf::poll);
        }
        match self.apf.as_ref().and_then(VcpuApf::failure) {
            None => Ok(()),
            Some(why) => Err(self.failed(&why)),
        }
    }

    /// The place of an exit for `port`.
    fn port(&mut self, port: u16) -> AccessAddress {
        // SAFETY: 1. the exit was KVM_EXIT_IO, so KVM has filled the union's `io`.
        let size = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.io.size };
        AccessAddress::Port(port, width(usize::from(size)))
    }

    fn internal_error(&mut self) -> VcpuError {
        // SAFETY: 1. the exit was KVM_EXIT_INTERNAL_ERROR, so KVM has filled the union's
        // `internal`.
        let code = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror };
        self.failed(&stopped::internal_error(code))
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
    /// The size of the next access, at most `left`.
    fn width(&self) -> Width {
        let (Direction::In(place, _) | Direction::Out(place)) = self.direction;
        match place {
            AccessAddress::Port(_, width) => width,
            AccessAddress::Memory(_) if self.left.is_power_of_two() => width(self.left),
            AccessAddress::Memory(gpa) => width(aligned_piece(gpa.offset(), self.left)),
        }
    }

    fn advance(&mut self) {
        let bytes = self.width() as usize;
        let next = |place| match place {
            AccessAddress::Memory(gpa) => memory(gpa.get() + bytes as u64),
            port @ AccessAddress::Port(..) => port,
        };
        self.direction = match self.direction {
            Direction::In(place, _) => Direction::In(next(place), Answer::NotAsked),
            Direction::Out(place) => Direction::Out(next(place)),
        };
        self.left -= bytes;
        if self.left > 0 {
            // SAFETY: 1. bytes remain, and they follow this access's bytes.
            self.data = unsafe { self.data.add(bytes) };
        }
    }
}

impl lacuna_machine::Vcpu for Vcpu {
    fn index(&self) -> usize {
        self.index
    }

    fn run(&mut self) -> Result<Exit, VcpuError> {
        self.vm.memory.host.unblock_sigbus();
        self.end_exit();
        let exit = loop {
            self.check_source()?;
            if let Some(exit) = self.wait_for_area() {
                break exit;
            }
            self.tell_guest()?;
            if let Some(exit) = self.next_access() {
                break exit;
            }
            // The next entry completes an answered instruction, and ends at once if a missing page
            // is noted.
            if self.msr.is_none()
                && let Some(exit) = self.missing_exit()
            {
                break exit;
            }
            let full_before = self.ring_full;
            let entered = self.enter();
            self.touch_memory();
            // The guest may have read zeros in place of a page that Linux has taken away.
            if self.vm.faults.state.has_losses() {
                self.check_source()?;
            }
            match entered? {
                None => {}
                Some(Exit::DirtyRingFull)
                    if self.ring_full != full_before && self.empty_full_ring()? => {}
                Some(exit) => break exit,
            }
        };
        self.vm.exits[self.index].count(&exit);
        Ok(exit)
    }

    fn complete_read(&mut self, value: u64) {
        let asked = |io: &&mut Io| matches!(io.direction, Direction::In(_, Answer::Asked));
        let Some(io) = self.io.as_mut().filter(asked) else {
            return;
        };
        let (bytes, size) = (value.to_le_bytes(), io.width() as usize);
        // SAFETY: 1. the VMM has the exit of a read that is not answered, so `left` bytes, at least
        // `width`, lie at `data`, in the shared page. 2. The vCPU is not in `KVM_RUN`, so the
        // kernel does not read it.
        unsafe { io.data.copy_from(NonNull::from(&bytes).cast(), size) };
        io.advance();
    }

    fn missing_memory(&self) -> Option<&dyn MissingMemory> {
        lacuna_machine::Vm::missing_memory(&*self.vm)
    }

    fn accept(&mut self, token: FaultToken) -> Result<(), TokenError> {
        self.accept_fault(token)
    }
}

impl SaveRestore for Vcpu {
    /// Refuses while accesses of an instruction are left: KVM completes the instruction when the
    /// vCPU enters the guest again.
    fn save(&mut self) -> Result<VcpuState, StateError> {
        self.check_between_instructions()?;
        let state = arch::save(&self.fd, &self.vm.features, &self.fresh)?;
        Ok(match self.with_apf(VcpuApf::save) {
            None => state,
            Some(own) => apf::join(state, own),
        })
    }

    /// Refuses while accesses of an instruction are left: KVM would complete the instruction over
    /// the restored state.
    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError> {
        self.check_between_instructions()?;
        let Some((rest, own)) = self.apf.as_ref().and_then(|_| apf::split(state)) else {
            return self.restore_by_kvm(state);
        };
        let checked = self.with_apf(|apf, vcpu| apf.check(&own, vcpu));
        checked.unwrap_or(Ok(()))?;
        self.restore_by_kvm(&rest)?;
        let restored = self.with_apf(|apf, vcpu| apf.restore(&own, vcpu));
        restored.unwrap_or(Ok(()))
    }
}

impl Vcpu {
    fn check_between_instructions(&self) -> Result<(), StateError> {
        let vcpu = self.index;
        match self.io.is_some() || self.msr.is_some() {
            true => Err(StateError::MidInstruction { vcpu }),
            false => Ok(()),
        }
    }

    fn restore_by_kvm(&mut self, state: &VcpuState) -> Result<(), StateError> {
        let (fd, features, fresh) = (&self.fd, &self.vm.features, &self.fresh);
        let before = arch::save(fd, features, fresh);
        let accepted = arch::accept(fd, self.index, features, fresh, state)?;
        let restored = arch::restore(fd, fresh, accepted).or_else(|refused| {
            // KVM may refuse after a part is set. Then the vCPU gets its own state back.
            let own = before.and_then(|own| {
                let accepted = arch::accept(fd, self.index, features, fresh, &own)?;
                arch::restore(fd, fresh, accepted)
            });
            own.map_err(|error| StateError::Host {
                step: "give the vCPU its own state back",
                cause: format!("{error}, after another state was refused: {refused}"),
            })?;
            Err(refused)
        });
        restored.inspect(|()| self.forget_exits())
    }
}

fn memory(address: u64) -> AccessAddress {
    AccessAddress::Memory(Gpa::truncate(address))
}

fn width(size: usize) -> Width {
    match size {
        1 => Width::Byte,
        2 => Width::Word,
        4 => Width::Long,
        _ => Width::Quad,
    }
}
