//! Dirty tracking with KVM and Linux, under the names that the soft backend gives to the same
//! calls.
//!
//! ```text
//! VmConfig::delivery   the kernel's bitmap, a ring for each vCPU, or Linux's page table
//! set_logging          on; copy all memory
//! get_dirty, or collect_rings + reset_rings; copy what they name; again and again
//! set_logging          off
//! ```
//! When a call returns, it has done everything that the order *take, rearm, flush, copy* requires
//! before the copy. No vCPU's thread may make these calls. Writes by this process ([`Vm`] as
//! [`GuestMemory`](lacuna_machine::GuestMemory)) are unknown to KVM; they are recorded here and
//! reported with the guest's.
//!
//! UNSAFETY: descriptors are borrowed from `kvm-ioctls`, which has no safe way to do it. A slot's
//! flags are changed by the call that can also move the slot.

use crate::memory::Memory;
use crate::ring::Ring;
use crate::vm::region;
use crate::{KvmError, Vm};
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
    KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap,
};
use kvm_ioctls::VmFd;
use lacuna_addr::{GfnRange, Gpa, Hva, HvaRange, PAGE_SIZE};
use lacuna_slots::{ClearError, DirtyBitmap, RingSize, SlotId};
use lacuna_sys::{Errno, Pagemap, Written, clear_dirty_log, reset_dirty_rings};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard};

/// How writes are detected, and where they are recorded. It is chosen with the VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Delivery {
    /// KVM's bitmap for each slot, cleared and write-protected by explicit calls
    /// (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`).
    #[default]
    Bitmap,
    /// KVM's dirty rings, one for each vCPU.
    Ring(RingSize),
    /// Linux's page table: userfaultfd's asynchronous write protection, read by `PAGEMAP_SCAN`. All
    /// memory must be resident.
    Pagemap,
}

/// Whether a slot logs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logging {
    /// It does not log.
    Off,
    /// It logs, beginning with no dirty page.
    On,
}

/// Why a call of dirty tracking is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirtyError {
    /// There is no such slot.
    #[error("{0} does not exist")]
    NoSlot(SlotId),
    /// Logging was not turned on for this slot.
    #[error("{0} does not log its writes: turn logging on first")]
    NotLogging(SlotId),
    /// The VM records writes in another way.
    #[error("this VM delivers by rings: collect from the rings")]
    NoBitmap,
    /// The VM's record cannot be read without clearing it.
    #[error("only KVM's bitmap can be read and cleared in two steps: use `get_dirty`")]
    OneStep,
    /// KVM has overwritten entries of a ring before they were reaped.
    #[error(
        "the dirty ring of vCPU {vcpu} ran over, and with it went the names of written pages: \
         copy all memory, and start again with a larger ring, or collect more often"
    )]
    Overflow {
        /// The vCPU of the ring.
        vcpu: usize,
    },
    /// The range breaks KVM's rules for what may be cleared.
    #[error(transparent)]
    Clear(#[from] ClearError),
    /// The buffer does not fit the slot.
    #[error("{id} has {needed} words of dirty bits, not {given}")]
    Words {
        /// The slot.
        id: SlotId,
        /// Words of its bitmap.
        needed: usize,
        /// Words of the buffer.
        given: usize,
    },
    /// The kernel refused.
    #[error("dirty logging: cannot {step}: {errno}")]
    Kernel {
        /// The refused step.
        step: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
}

/// For `map_err`: the kernel refused to `step`.
fn refused<E: Into<Errno>>(step: &'static str) -> impl Fn(E) -> DirtyError {
    move |e| DirtyError::Kernel {
        step,
        errno: e.into(),
    }
}

fn errno(error: kvm_ioctls::Error) -> Errno {
    Errno::from_raw_os_error(error.errno())
}

/// The dirty tracking of a VM.
pub(crate) struct Dirty {
    delivery: Delivery,
    /// For each slot, the pages that this process has written.
    host: Box<[DirtyBitmap]>,
    state: Mutex<State>,
}

/// Serialises switches and harvests.
struct State {
    /// For each slot.
    logging: Vec<Logging>,
    /// For each vCPU.
    rings: Vec<Ring>,
    pagemap: Option<Pagemap>,
}

impl Dirty {
    pub fn new(delivery: Delivery, memory: &Memory) -> Result<Self, KvmError> {
        let pagemap = match delivery {
            Delivery::Pagemap => Some(Pagemap::open().map_err(refused("open the page map"))?),
            Delivery::Bitmap | Delivery::Ring(_) => None,
        };
        let bitmap = |(_, _, bytes): (Gpa, Hva, u64)| DirtyBitmap::new(bytes as usize / PAGE_SIZE);
        let host: Box<[_]> = memory.slots().map(bitmap).collect();
        let state = State {
            logging: vec![Logging::Off; host.len()],
            rings: Vec::new(),
            pagemap,
        };
        Ok(Self {
            delivery,
            host,
            state: Mutex::new(state),
        })
    }

    /// Adds a vCPU's ring, before it runs.
    pub fn add_ring(&self, ring: Ring) {
        self.state().rings.push(ring);
    }

    pub fn delivery(&self) -> Delivery {
        self.delivery
    }

    /// This process has written there. The page is marked whether the slot logs or not. So a write
    /// during the start of logging needs no special case: a page that is marked later is copied
    /// later.
    pub fn wrote(&self, memory: &Memory, gpa: Gpa, bytes: usize) {
        for ((start, _, size), bitmap) in memory.slots().zip(&self.host) {
            let offset = gpa.get().checked_sub(start.get());
            let Some(offset) = offset.filter(|offset| *offset < size && bytes > 0) else {
                continue;
            };
            let (first, last) = (offset as usize, offset as usize + bytes - 1);
            for page in first / PAGE_SIZE..=last / PAGE_SIZE {
                let _ = bitmap.mark(page);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }
}

impl State {
    fn written(
        &self,
        place: Place,
        then: Written,
        each: impl FnMut(HvaRange),
    ) -> Result<(), DirtyError> {
        let pagemap = self.pagemap.as_ref().expect("opened with the VM");
        let scan = pagemap.written(place.hvas, then, each);
        scan.map_err(refused("scan the page map"))
    }

    /// Sets the bits of the pages written since they were last protected. `out` has those that have
    /// been protected so far, also if the call fails halfway.
    fn take_bits(&self, place: Place, out: &mut [u64]) -> Result<(), DirtyError> {
        self.written(place, Written::Protect, |run| {
            let first = (run.start().get() - place.hvas.start().get()) as usize / PAGE_SIZE;
            for page in first..first + run.pages() as usize {
                out[page / 64] |= 1 << (page % 64);
            }
        })
    }
}

/// A slot, and the place of its pages.
#[derive(Clone, Copy)]
struct Place {
    id: SlotId,
    start: Gpa,
    hvas: HvaRange,
}

impl Place {
    fn index(&self) -> usize {
        usize::from(self.id.0)
    }

    fn pages(&self) -> usize {
        self.hvas.pages() as usize
    }

    fn words(&self) -> usize {
        self.pages().div_ceil(64)
    }
}

impl Vm {
    /// How writes are detected and recorded.
    pub fn delivery(&self) -> Delivery {
        self.dirty.delivery()
    }

    /// The slots and the guest's pages in them, ascending by guest address.
    pub fn slots(&self) -> Vec<(SlotId, GfnRange)> {
        let ranges = self.memory.layout.ranges().iter();
        (0..).map(SlotId).zip(ranges.copied()).collect()
    }

    /// Turns the log of a slot on or off.
    ///
    /// # Errors
    /// There is no such slot, or the kernel lacks what the VM's [`Delivery`] needs.
    pub fn set_logging(&self, id: SlotId, logging: Logging) -> Result<(), DirtyError> {
        let mut state = self.dirty.state();
        let place = self.place(id)?;
        if state.logging[place.index()] == logging {
            return Ok(());
        }
        match (self.delivery(), logging) {
            (Delivery::Pagemap, Logging::On) => {
                state.written(place, Written::Protect, |_| ())?;
            }
            (Delivery::Pagemap, Logging::Off) => {
                let result = self.source.unprotect(place.hvas);
                result.map_err(refused("take off the write protection"))?;
            }
            (Delivery::Bitmap, Logging::On) => {
                clear_by_hand(&self.fd)?;
                self.set_flags(place, KVM_MEM_LOG_DIRTY_PAGES)?;
            }
            (Delivery::Ring(_), Logging::On) => self.set_flags(place, KVM_MEM_LOG_DIRTY_PAGES)?,
            (Delivery::Bitmap | Delivery::Ring(_), Logging::Off) => self.set_flags(place, 0)?,
        }
        if logging == Logging::On {
            self.dirty.host[place.index()].take(0, &mut vec![0; place.words()]);
        }
        state.logging[place.index()] = logging;
        Ok(())
    }

    /// Moves a slot's dirty bits into `out`, which has one word for 64 pages, and rearms those
    /// pages. Copy them afterwards.
    ///
    /// # Errors
    /// [`DirtyError`]; no dirty bit is lost then.
    pub fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        let state = self.dirty.state();
        let place = self.logging(&state, id, out.len())?;
        let host = &self.dirty.host[place.index()];
        host.take(0, out);
        let guest = match self.delivery() {
            Delivery::Bitmap => self.take_log(place, out),
            Delivery::Pagemap => state.take_bits(place, out),
            Delivery::Ring(_) => Err(DirtyError::NoBitmap),
        };
        guest.inspect_err(|_| host.put_back(0, out))
    }

    /// Copies a slot's dirty bits into `out` and does not change them: the first of two steps.
    ///
    /// # Errors
    /// [`DirtyError`].
    pub fn peek_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        let state = self.dirty.state();
        let place = self.logging(&state, id, out.len())?;
        self.has_two_steps()?;
        self.dirty.host[place.index()].copy(0, out);
        join(out, &self.read_log(place)?);
        Ok(())
    }

    /// Of `pages` pages from `first_page` on, clears the dirty bits that `mask` names, and rearms
    /// those pages: the second step. Copy them afterwards.
    ///
    /// # Errors
    /// [`DirtyError`]; the range must begin and end at a word, or with the slot.
    pub fn clear_dirty(
        &self,
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &[u64],
    ) -> Result<(), DirtyError> {
        let state = self.dirty.state();
        let place = self.place(id)?;
        let place = self.logging(&state, id, place.words())?;
        self.has_two_steps()?;
        self.dirty.host[place.index()].clear(first_page, pages, &mut mask.to_vec())?;
        self.clear_log(place, first_page, pages, mask)
    }

    /// Passes to `each` the pages in all vCPUs' rings, and those of logging slots that this process
    /// has written; returns their number. A page may be repeated. All vCPUs are made to leave the
    /// guest once before, because a processor may have a log of its own. Copy the pages after
    /// [`Vm::reset_rings`], never before.
    ///
    /// # Errors
    /// [`DirtyError::Overflow`], and then always. KVM can overflow a ring only while it emulates
    /// the guest's string instructions: see the host's log.
    pub fn collect_rings(&self, mut each: impl FnMut(SlotId, usize)) -> Result<usize, DirtyError> {
        let mut state = self.dirty.state();
        self.kicks.flush();
        let mut all = 0;
        for (vcpu, ring) in state.rings.iter_mut().enumerate() {
            let harvest = ring.harvest(&mut each);
            all += harvest.map_err(|_| DirtyError::Overflow { vcpu })?;
        }
        for ((id, _), host) in self.slots().into_iter().zip(&self.dirty.host) {
            if state.logging[usize::from(id.0)] == Logging::Off {
                continue;
            }
            let mut words = vec![0; host.words()];
            host.take(0, &mut words);
            for page in pages(&words) {
                each(id, page);
                all += 1;
            }
        }
        Ok(all)
    }

    /// Frees the entries that were reaped and rearms their pages; returns the number of entries.
    /// vCPUs that have left with [`Exit::DirtyRingFull`](lacuna_machine::Exit::DirtyRingFull) may
    /// be entered again.
    ///
    /// # Errors
    /// The VM has no rings.
    pub fn reset_rings(&self) -> Result<usize, DirtyError> {
        let mut state = self.dirty.state();
        let mut all = 0;
        loop {
            // SAFETY: 1. it is the VM's descriptor.
            let reset = unsafe { reset_dirty_rings(self.raw()) };
            match reset.map_err(refused("reset the rings"))? {
                0 => break,
                // A signal may have ended the call early.
                some => all += some,
            }
        }
        state.rings.iter_mut().for_each(Ring::was_reset);
        Ok(all)
    }

    fn place(&self, id: SlotId) -> Result<Place, DirtyError> {
        let found = self.memory.slots().nth(usize::from(id.0));
        let (start, hva, bytes) = found.ok_or(DirtyError::NoSlot(id))?;
        let hvas = HvaRange::new(hva, bytes / PAGE_SIZE as u64);
        let hvas = hvas.expect("a slot is a range");
        Ok(Place { id, start, hvas })
    }

    fn logging(&self, state: &State, id: SlotId, given: usize) -> Result<Place, DirtyError> {
        let place = self.place(id)?;
        if state.logging[place.index()] == Logging::Off {
            return Err(DirtyError::NotLogging(id));
        }
        match place.words() {
            needed if needed == given => Ok(place),
            needed => Err(DirtyError::Words { id, needed, given }),
        }
    }

    fn has_two_steps(&self) -> Result<(), DirtyError> {
        match self.delivery() {
            Delivery::Bitmap => Ok(()),
            Delivery::Ring(_) => Err(DirtyError::NoBitmap),
            Delivery::Pagemap => Err(DirtyError::OneStep),
        }
    }

    fn set_flags(&self, place: Place, flags: u32) -> Result<(), DirtyError> {
        let region = region(place.id, place.start, place.hvas, flags);
        // SAFETY: 1. the existing slot, with other flags.
        let set = unsafe { self.fd.set_user_memory_region(region) };
        set.map_err(|e| refused("switch a slot's logging")(errno(e)))
    }

    fn take_log(&self, place: Place, out: &mut [u64]) -> Result<(), DirtyError> {
        let words = self.read_log(place)?;
        join(out, &words);
        if words.iter().all(|word| *word == 0) {
            return Ok(());
        }
        self.clear_log(place, 0, place.pages(), &words)
    }

    fn read_log(&self, place: Place) -> Result<Vec<u64>, DirtyError> {
        let slot = u32::from(place.id.0);
        let words = self.fd.get_dirty_log(slot, place.pages() * PAGE_SIZE);
        words.map_err(|e| refused("read the log")(errno(e)))
    }

    fn clear_log(
        &self,
        place: Place,
        first: usize,
        pages: usize,
        mask: &[u64],
    ) -> Result<(), DirtyError> {
        let slot = u32::from(place.id.0);
        // SAFETY: 1. it is the VM's descriptor.
        let cleared =
            unsafe { clear_dirty_log(self.raw(), slot, first as u64, pages as u32, mask) };
        cleared.map_err(refused("clear the log"))
    }

    fn raw(&self) -> BorrowedFd<'_> {
        // SAFETY: 1. the descriptor is open as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.fd.as_raw_fd()) }
    }
}

/// From now on only `KVM_CLEAR_DIRTY_LOG` clears KVM's log and write-protects its pages.
fn clear_by_hand(vm: &VmFd) -> Result<(), DirtyError> {
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        ..Default::default()
    };
    cap.args[0] = u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE);
    let enabled = vm.enable_cap(&cap);
    enabled.map_err(|e| refused("clear the log by hand (Linux 5.1)")(errno(e)))
}

fn join(out: &mut [u64], words: &[u64]) {
    for (out, word) in out.iter_mut().zip(words) {
        *out |= word;
    }
}

/// The pages whose bits are set.
fn pages(words: &[u64]) -> impl Iterator<Item = usize> {
    let is_set = |page: &usize| words[page / 64] >> (page % 64) & 1 == 1;
    (0..words.len() * 64).filter(is_set)
}
