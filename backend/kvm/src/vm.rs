//! One VM on `/dev/kvm`: descriptors, slots, memory, and the readers of its faults.
//!
//! UNSAFETY: this file reads and writes the guest's bytes at addresses in the mapping of their
//! slot. KVM may access these mappings until the last descriptor of the VM is closed, so they must
//! outlive the descriptors. [`Vm`] declares its fields in that order, and Rust drops them in it.

use crate::arch::{self, Features};
use crate::available::{MemoryCapability, open};
use crate::dirty::{Dirty, Log};
use crate::error::KvmError;
use crate::eventfds::EventFds;
use crate::faults::Faults;
use crate::kick::VcpuKicks;
use crate::mapping;
use crate::memory::{BUDGET_MIN, Memory, MemoryConfig};
use crate::ring;
use crate::slots::{KvmSlot, Refusal, SlotSpec, SlotTable};
use crate::tracker::Tracker;
use kvm_bindings::{KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, kvm_enable_cap};
use kvm_ioctls::{Kvm, VmFd};
use lacuna_addr::{Gpa, Hva, HvaRange, PAGE_SIZE};
use lacuna_host::{Host, MemoryKind};
use lacuna_machine::{
    Apf, ExitCounters, GuestMemory, InterruptLines, Kick, LogReaders, MemoryError, VCPUS_MAX,
    VmConfig,
};
use lacuna_slots::{Delivery, DirtyError, RingSize, SlotFlags, SlotId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// One virtual machine.
pub struct Vm {
    /// Dropped first, because it maps the vCPUs' dirty rings: such a mapping keeps KVM's VM alive
    /// after all descriptors are closed.
    pub(crate) dirty: Dirty,
    /// Dropped before `slots`, `faults` and `memory`: until the descriptor is closed, KVM uses the
    /// memory. The close waits for KVM's async page fault workers, so [`Vm::drop`] ends their waits
    /// for pages.
    pub(crate) fd: VmFd,
    /// The memory slots. A slot added after boot has its own mapping here.
    pub(crate) slots: Arc<SlotTable>,
    pub(crate) faults: Faults,
    pub(crate) memory: Arc<Memory>,
    pub(crate) features: Features,
    pub(crate) config: VmConfig,
    pub(crate) kicks: Arc<VcpuKicks>,
    /// The exits that each vCPU has returned to its VMM.
    pub(crate) exits: Box<[ExitCounters]>,
    pub(crate) booted: AtomicBool,
    /// The features of KVM's leaf of CPUID, if the host side of the guest's async page faults is in
    /// this process. Otherwise it is KVM.
    pub(crate) own_apf: Option<u32>,
    /// Whether these faults are switched off: the guest gets no page-not-present.
    pub(crate) apf_paused: AtomicBool,
    /// Each vCPU's tokens in flight of these faults.
    pub(crate) apf_in_flight: Box<[AtomicU64]>,
    pub(crate) log_readers: LogReaders,
    pub(crate) interrupt_lines: InterruptLines,
    pub(crate) eventfds: EventFds,
}

impl Vm {
    /// Makes a VM whose memory is empty.
    ///
    /// # Errors
    /// The configuration is invalid, or this machine or its KVM lacks a requirement.
    pub(crate) fn new(config: VmConfig, memory: MemoryConfig) -> Result<Arc<Self>, KvmError> {
        let kvm = open()?;
        check(&kvm, &config, &memory)?;
        let features = Features::of(&kvm, &config).map_err(KvmError::step("read its features"))?;
        if config.apf == Apf::On && !features.has_apf() {
            return Err(KvmError::NoApf);
        }
        if let Some(feature) = features.missing() {
            return Err(KvmError::NoFeature(feature));
        }
        let own_apf = has_own_apf(&config, &memory).then(|| features.kvm_features());
        let begins_set = MemoryCapability::LogInitiallySet
            .is_offered(|extension| kvm.check_extension_raw(extension.into()));
        let dirty = Dirty::new(config.delivery, memory.tracker, begins_set)?;
        let memory = Arc::new(Memory::new(memory)?);
        let kicks = Arc::new(VcpuKicks::new(config.vcpus));
        let slots = Arc::new(SlotTable::new());
        let faults = Faults::start(Arc::clone(&memory), Arc::clone(&slots), Arc::clone(&kicks));
        let faults = faults.map_err(|(step, errno)| KvmError::Userfaultfd { step, errno })?;
        let fd = create(&kvm, config.vcpus)?;
        if let Delivery::Ring { size, .. } = config.delivery {
            use_rings(&fd, size)?;
        }
        if let (Some(_), Some(provider)) = (own_apf, &faults.state.provider) {
            arch::apf::take(&fd)?;
            provider.tell_guest();
        }
        add_boot_slots(&fd, &slots, &memory)?;
        Ok(Arc::new(Self {
            dirty,
            fd,
            slots,
            faults,
            memory,
            features,
            kicks,
            exits: (0..config.vcpus).map(|_| ExitCounters::default()).collect(),
            booted: AtomicBool::new(false),
            own_apf,
            apf_paused: AtomicBool::new(false),
            apf_in_flight: (0..config.vcpus).map(|_| AtomicU64::new(0)).collect(),
            log_readers: LogReaders::default(),
            interrupt_lines: InterruptLines::new(config.arch),
            eventfds: EventFds::default(),
            config,
        }))
    }

    /// Ends the run: no vCPU enters the guest again, and pages arrive without latency.
    pub fn end_latency(&self) {
        self.kicks.stop();
        self.memory.host.end_latency();
    }

    /// The parts of this VM that dirty logging uses.
    pub(crate) fn log(&self) -> Log<'_> {
        Log {
            dirty: &self.dirty,
            fd: &self.fd,
            slots: &self.slots,
            memory: &self.memory,
            kicks: &self.kicks,
        }
    }

    /// The manager of its memory, for its counters.
    pub fn host(&self) -> &Arc<Host> {
        &self.memory.host
    }

    /// Faults that its guest, KVM or the VMM has waited for so far. Several threads that wait for
    /// one page may count as one or as several.
    pub fn faults(&self) -> u64 {
        self.faults.count()
    }
}

/// Refuses an invalid configuration, before the VM is made.
fn check(kvm: &Kvm, config: &VmConfig, memory: &MemoryConfig) -> Result<(), KvmError> {
    let max = kvm.get_max_vcpus().min(VCPUS_MAX);
    if !(1..=max).contains(&config.vcpus) {
        return Err(KvmError::Vcpus {
            asked: config.vcpus,
            max,
        });
    }
    let resident = match memory.is_whole() {
        true => memory.size.get(),
        false => memory.resident.get(),
    };
    if resident < BUDGET_MIN {
        return Err(KvmError::Resident {
            pages: resident,
            min: BUDGET_MIN,
        });
    }
    // Linux may swap pages of a memory file, and forgets then that they were written.
    let is_shared = match &memory.backing {
        Some(backing) => backing.shared().is_some_and(|shared| !shared.is_huge()),
        None => memory.kind == MemoryKind::Shared,
    };
    let leaves = !memory.is_whole() || is_shared;
    if memory.tracker == Tracker::Pagemap && memory.has_handler() {
        let what = "the page map of memory that a handler fills";
        return Err(DirtyError::Unsupported(what).into());
    }
    if memory.tracker == Tracker::Pagemap && leaves {
        return Err(KvmError::PartlyResident);
    }
    Ok(())
}

/// Whether the host side of the guest's async page faults is in this process: a VMM that provides
/// pages can then notify the guest.
///
/// It writes to two words of the guest's memory. KVM records such writes in a vCPU's dirty ring,
/// and this process cannot.
fn has_own_apf(config: &VmConfig, memory: &MemoryConfig) -> bool {
    let provides = memory.source.is_some() && !memory.has_handler();
    config.apf == Apf::On && provides && config.delivery.has_bitmaps()
}

/// Makes KVM's VM, with interrupt controllers.
///
/// Linux registers an MMU notifier for the VM, and gives up with `EINTR` if a signal is pending for
/// the calling thread. The signal's handler has run when the call returns, so this function repeats
/// the request.
fn create(kvm: &Kvm, vcpus: usize) -> Result<VmFd, KvmError> {
    let fd = loop {
        match kvm.create_vm() {
            Err(interrupted) if interrupted.errno() == libc::EINTR => {}
            made => break made.map_err(KvmError::step("make a VM"))?,
        }
    };
    arch::make_controllers(&fd, vcpus)?;
    Ok(fd)
}

/// Adds the slots of the boot layout. They lie in the guest's memory.
fn add_boot_slots(fd: &VmFd, slots: &SlotTable, memory: &Memory) -> Result<(), KvmError> {
    for (id, (gpa, hva, bytes)) in (0..).map(SlotId).zip(memory.slots()) {
        let spec = SlotSpec {
            id,
            guest: gpa.get(),
            backing: hva,
            bytes,
            flags: SlotFlags::empty(),
        };
        slots.add(fd, spec, None).map_err(|refusal| match refusal {
            Refusal::Slot(error) => KvmError::Slot(error),
            Refusal::Kvm(errno) => KvmError::Kvm {
                step: "add a memory slot",
                errno,
            },
        })?;
    }
    Ok(())
}

/// Enables dirty rings: every vCPU created after this call has one.
///
/// Older kernels have only `KVM_CAP_DIRTY_LOG_RING`. On x86 the two capabilities are equivalent,
/// because other processors see a processor's stores in order.
fn use_rings(fd: &VmFd, size: RingSize) -> Result<(), KvmError> {
    let caps = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING];
    let max = |cap: u32| usize::try_from(fd.check_extension_raw(cap.into())).unwrap_or(0);
    let cap = caps.into_iter().find(|cap| max(*cap) > 0);
    let cap = cap.ok_or(KvmError::NoRing)?;
    let (bytes, max) = (ring::bytes(size), max(cap));
    if bytes > max {
        return Err(KvmError::Ring { bytes, max });
    }
    let mut enable = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    enable.args[0] = bytes as u64;
    fd.enable_cap(&enable)
        .map_err(KvmError::step("use dirty rings"))
}

impl Kick for Vm {
    fn kick(&self, index: usize) {
        self.kicks.request(index);
    }

    fn kick_all(&self) {
        self.kicks.request_all();
    }
}

impl Drop for Vm {
    /// Ends the waits of KVM's workers for pages, because the close of the VM's descriptor waits
    /// for the workers.
    fn drop(&mut self) {
        self.kicks.stop();
        self.faults.close();
    }
}

/// The part of an access that lies in one slot: its offset in the buffer, its length, its guest
/// address and its host address.
struct Piece {
    done: usize,
    len: usize,
    at: Gpa,
    hva: Hva,
    slot: Arc<KvmSlot>,
}

impl Vm {
    /// The parts of an access, which the calling thread is about to make.
    fn pieces(&self, gpa: Gpa, len: usize) -> Result<Vec<Piece>, MemoryError> {
        self.memory.host.unblock_sigbus();
        let slots = self.slots.snapshot();
        let (mut pieces, mut done) = (Vec::new(), 0);
        while done < len {
            let at = gpa.checked_add(done as u64);
            let at = at.ok_or(MemoryError::NoSlot(gpa))?;
            let slot = slots.find(at.gfn()).ok_or(MemoryError::NoSlot(at))?;
            let offset = at.get() - slot.gfns.start().gpa().get();
            let left = slot.backing.pages() * PAGE_SIZE as u64 - offset;
            let part = left.min((len - done) as u64) as usize;
            pieces.push(Piece {
                done,
                len: part,
                at,
                hva: Hva::new(slot.backing.start().get() + offset),
                slot: Arc::clone(slot),
            });
            done += part;
        }
        Ok(pieces)
    }
}

/// A copy of fewer pages does not check which of them were touched.
const MANY: usize = 4;

impl Vm {
    /// Reads `piece`. Untouched pages stay untouched.
    fn copy_out(&self, piece: &Piece, into: &mut [u8]) {
        let is_aligned = piece.hva.get().is_multiple_of(PAGE_SIZE as u64);
        let range = HvaRange::new(piece.hva, (into.len() / PAGE_SIZE) as u64);
        let touched = range.filter(|range| is_aligned && range.pages() >= MANY as u64);
        let touched = touched.and_then(|range| self.memory.touched(range));
        let mut done = 0;
        for run in touched
            .unwrap_or_default()
            .chunk_by(|one, next| one == next)
        {
            let part = &mut into[done..done + run.len() * PAGE_SIZE];
            let hva = Hva::new(piece.hva.get() + done as u64);
            match run[0] {
                // SAFETY: 1. the piece lies in its slot's mapping, which the slot keeps.
                true => unsafe { mapping::copy_out(hva, part) },
                false => part.fill(0),
            }
            done += run.len() * PAGE_SIZE;
        }
        let hva = Hva::new(piece.hva.get() + done as u64);
        // SAFETY: as above.
        unsafe { mapping::copy_out(hva, &mut into[done..]) };
    }
}

impl GuestMemory for Vm {
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        let pieces = self.pieces(gpa, bytes.len())?;
        let refused =
            |piece: &&Piece| piece.slot.attach.is_logging() && !self.dirty.delivery().has_bitmaps();
        if let Some(piece) = pieces.iter().find(refused) {
            return Err(MemoryError::Refused {
                gpa: piece.at,
                cause: lacuna_slots::DirtyError::NoBitmap.to_string(),
            });
        }
        for piece in &pieces {
            // SAFETY: 1. the piece lies in its slot's mapping, which the slot keeps.
            unsafe { mapping::copy_in(piece.hva, &bytes[piece.done..piece.done + piece.len]) };
            let first = piece.slot.page(piece.at.gfn());
            let last = (piece.at.offset() + piece.len - 1) / PAGE_SIZE;
            for page in first..=first + last {
                let _ = piece.slot.attach.host_writes.mark(page);
            }
        }
        self.check_source(gpa)
    }

    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        for piece in self.pieces(gpa, into.len())? {
            self.copy_out(&piece, &mut into[piece.done..piece.done + piece.len]);
        }
        // A failed source wakes threads that wait for pages, and they find zeros.
        self.check_source(gpa)
    }

    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        let Ok(pieces) = self.pieces(gpa, into.len()) else {
            return false;
        };
        pieces
            .iter()
            .all(|piece| mapping::is_mapped(piece.hva, piece.len))
            && self.read(gpa, into).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kick::{install_handler, signal};
    use crate::mapping::Mapping;
    use lacuna_addr::PageCount;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    /// The thread that makes VMs gets signals, as from a profiler. In a process with many mappings,
    /// Linux checks for signals often while it makes a VM.
    #[lacuna_skip::test]
    fn a_vm_is_made_while_signals_come() {
        let kvm = match open() {
            Ok(kvm) => kvm,
            Err(why) => lacuna_skip::skip_test(format!("no VM: {why}")),
        };
        let one = || Mapping::new(PageCount::new(1)).expect("one page");
        let _mappings: Vec<_> = (0..2000).map(|_| one()).collect();
        install_handler();
        let made = AtomicUsize::new(0);
        // SAFETY: 1. the call has no preconditions.
        let maker = unsafe { libc::pthread_self() };
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..1000 {
                    // SAFETY: 1. the thread waits for this one at the end of the scope.
                    unsafe { libc::pthread_kill(maker, signal()) };
                    thread::sleep(Duration::from_micros(100));
                    if made.load(Ordering::Relaxed) == 10 {
                        break;
                    }
                }
            });
            for _ in 0..10 {
                create(&kvm, 1).expect("a signal is no reason to fail");
                made.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
}
