//! One VM on `/dev/kvm`: descriptors, memory, page source.
//!
//! UNSAFETY: bytes of the guest are read and written at addresses in the mapping of their slot. The
//! fields are dropped in the order in which they stand, so that the mappings outlive the VM's
//! descriptors.

use crate::KvmError;
use crate::available::open;
use crate::dirty::{Dirty, Log};
use crate::kick::VcpuKicks;
use crate::memory::{self, Memory};
use crate::pages::Pages;
use crate::ring;
use crate::setup::Features;
use crate::slots::{Refusal, SlotTable};
use crate::source::{Source, SourceConfig, SourceStats};
use crate::tracker::Tracker;
use kvm_bindings::{KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, kvm_enable_cap};
use kvm_ioctls::{Kvm, VmFd};
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_machine::{Apf, GuestMemory, Kick, MemoryError, VmConfig};
use lacuna_slots::{Delivery, RingSize, SlotFlags, SlotId, SlotSpec};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// One virtual machine.
pub struct Vm {
    /// First, with its rings: a mapping of a vCPU's descriptor keeps the VM alive.
    pub(crate) dirty: Dirty,
    /// Before the memory: KVM's workers may wait for pages until the descriptor is closed.
    pub(crate) fd: VmFd,
    /// With the memory of slots that were added later.
    pub(crate) slots: SlotTable,
    pub(crate) source: Source,
    pub(crate) memory: Arc<Memory>,
    pub(crate) features: Features,
    pub(crate) config: VmConfig,
    pub(crate) kicks: Arc<VcpuKicks>,
    /// Of each vCPU: exits that its VMM handled.
    pub(crate) exits: Box<[AtomicU64]>,
    pub(crate) booted: AtomicBool,
}

/// The address at which hardware without unrestricted guests keeps three pages for itself: in the
/// hole below 4 GiB, where firmware would be.
const TSS_ADDRESS: usize = 0xfffb_d000;
/// The same limit as in `lacuna_soft`.
const VCPUS_MAX: usize = 64;

impl Vm {
    /// A VM without content, whose memory comes from `source`.
    ///
    /// # Errors
    /// What this machine or its KVM lacks.
    pub fn new(
        config: VmConfig,
        source: SourceConfig,
        tracker: Tracker,
    ) -> Result<Arc<Self>, KvmError> {
        let kvm = open()?;
        check(&kvm, &config, &source, tracker)?;
        let features = Features::of(&kvm, &config).map_err(KvmError::step("read its features"))?;
        if config.apf == Apf::On && !features.has_apf() {
            return Err(KvmError::NoApf);
        }
        let memory = Arc::new(Memory::new(config.memory)?);
        let kicks = Arc::new(VcpuKicks::new(config.vcpus));
        let dirty = Dirty::new(config.delivery, tracker)?;
        let source = Source::open(tracker)
            .and_then(|uffd| Source::start(uffd, Arc::clone(&memory), source, Arc::clone(&kicks)))
            .map_err(|(step, errno)| KvmError::Userfaultfd { step, errno })?;
        let fd = make(&kvm)?;
        if let Delivery::Ring { size, .. } = config.delivery {
            use_rings(&fd, size)?;
        }
        let slots = boot_slots(&fd, &memory)?;
        Ok(Arc::new(Self {
            dirty,
            fd,
            slots,
            source,
            memory,
            features,
            kicks,
            exits: (0..config.vcpus).map(|_| AtomicU64::new(0)).collect(),
            booted: AtomicBool::new(false),
            config,
        }))
    }

    /// The run is over: no vCPU enters the guest again, and pages come without latency.
    pub(crate) fn end_latency(&self) {
        self.kicks.stop();
        self.source.wake();
    }

    /// What a switch or a harvest of dirty logging needs.
    pub(crate) fn log(&self) -> Log<'_> {
        Log {
            dirty: &self.dirty,
            fd: &self.fd,
            slots: &self.slots,
            source: &self.source,
            kicks: &self.kicks,
        }
    }

    /// The counters of its page source.
    pub fn source_stats(&self) -> SourceStats {
        self.source.stats()
    }

    /// Why the guest cannot continue without a page, if that is so.
    pub(crate) fn source_failure(&self) -> Option<String> {
        self.source.failure()
    }
}

/// Refuses what the caller can change, before anything is made.
fn check(
    kvm: &Kvm,
    config: &VmConfig,
    source: &SourceConfig,
    tracker: Tracker,
) -> Result<(), KvmError> {
    let most = kvm.get_max_vcpus().min(VCPUS_MAX);
    if !(1..=most).contains(&config.vcpus) {
        return Err(KvmError::Vcpus {
            asked: config.vcpus,
            most,
        });
    }
    let resident = source.resident.get().min(config.memory.get());
    if resident < Pages::BUDGET_MIN as u64 {
        return Err(KvmError::Resident {
            pages: resident,
            least: Pages::BUDGET_MIN as u64,
        });
    }
    if tracker == Tracker::Pagemap && resident < config.memory.get() {
        return Err(KvmError::Away);
    }
    Ok(())
}

/// The VM's descriptor, with interrupt controllers.
fn make(kvm: &Kvm) -> Result<VmFd, KvmError> {
    let fd = kvm.create_vm().map_err(KvmError::step("make a VM"))?;
    fd.set_tss_address(TSS_ADDRESS)
        .map_err(KvmError::step("place the TSS"))?;
    fd.create_irq_chip()
        .map_err(KvmError::step("make interrupt controllers"))?;
    Ok(fd)
}

/// The slots of the boot layout, over the guest's mapping.
fn boot_slots(fd: &VmFd, memory: &Memory) -> Result<SlotTable, KvmError> {
    let slots = SlotTable::new();
    for (id, (gpa, hva, bytes)) in (0..).map(SlotId).zip(memory.slots()) {
        let spec = SlotSpec {
            id,
            guest: gpa.get(),
            host: hva,
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
    Ok(slots)
}

/// Gives a ring to every vCPU that is made from now on. On a host whose stores are seen in order,
/// as on x86, the older of the two capabilities is equivalent.
fn use_rings(fd: &VmFd, size: RingSize) -> Result<(), KvmError> {
    let caps = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING];
    let most = |cap: u32| usize::try_from(fd.check_extension_raw(cap.into())).unwrap_or(0);
    let cap = caps.into_iter().find(|cap| most(*cap) > 0);
    let cap = cap.ok_or(KvmError::NoRing)?;
    let (bytes, most) = (ring::bytes(size), most(cap));
    if bytes > most {
        return Err(KvmError::Ring { bytes, most });
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
    /// KVM waits for its workers, and they wait for pages.
    fn drop(&mut self) {
        self.end_latency();
    }
}

/// A piece of an access that lies in one slot: its place among the bytes, its length, its address.
struct Piece {
    done: usize,
    len: usize,
    at: Gpa,
    hva: u64,
    slot: Arc<crate::slots::KvmSlot>,
}

impl Vm {
    fn pieces(&self, gpa: Gpa, len: usize) -> Result<Vec<Piece>, MemoryError> {
        let slots = self.slots.snapshot();
        let (mut pieces, mut done) = (Vec::new(), 0);
        while done < len {
            let at = gpa.checked_add(done as u64);
            let at = at.ok_or(MemoryError::NoSlot(gpa))?;
            let slot = slots.find(at.gfn()).ok_or(MemoryError::NoSlot(at))?;
            let offset = at.get() - slot.gfns.start().gpa().get();
            let left = slot.hvas.pages() * PAGE_SIZE as u64 - offset;
            let part = left.min((len - done) as u64) as usize;
            pieces.push(Piece {
                done,
                len: part,
                at,
                hva: slot.hvas.start().get() + offset,
                slot: Arc::clone(slot),
            });
            done += part;
        }
        Ok(pieces)
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
            unsafe { memory::copy_in(piece.hva, &bytes[piece.done..piece.done + piece.len]) };
            let first = piece.slot.page(piece.at.gfn());
            let last = (piece.at.offset() + piece.len - 1) / PAGE_SIZE;
            for page in first..=first + last {
                let _ = piece.slot.attach.host_writes.mark(page);
            }
        }
        Ok(())
    }

    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        for piece in self.pieces(gpa, into.len())? {
            let part = &mut into[piece.done..piece.done + piece.len];
            // SAFETY: 1. the piece lies in its slot's mapping, which the slot keeps.
            unsafe { memory::copy_out(piece.hva, part) };
        }
        Ok(())
    }

    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        let Ok(pieces) = self.pieces(gpa, into.len()) else {
            return false;
        };
        pieces
            .iter()
            .all(|piece| memory::is_mapped(piece.hva, piece.len))
            && self.read(gpa, into).is_ok()
    }
}
