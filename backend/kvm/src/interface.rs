//! [`Vm`] implements the traits of `lacuna_machine`'s backend interface.

mod settings;

use crate::error::KvmError;
use crate::mapping::Mapping;
use crate::slots::{KvmSlot, Refusal, SlotSpec, check_address, check_slot, spec_of};
use crate::vcpu::Vcpu;
use crate::vm::Vm;
use crate::{arch, boot, ioeventfd};
use lacuna_addr::{Gfn, GfnRange, PAGE_SIZE, PageCount, PageStates};
use lacuna_machine::settings::{MemorySettings, Settings};
use lacuna_machine::{
    ApfSwitch, Backend, Balloon, DetectedBy, DetectionChoice, DirtyRings, DirtyTracking,
    ExitCounters, GuestWrite, HugePagePolicy, Image, Input, InterruptController, InterruptError,
    InterruptLines, IoBus, IoEventFdError, LogReaders, MemorySlot, MemorySlotError, MemorySlots,
    MissingMemory, Msi, SharedFile, SharedState, StateError, TwoStepLog, VcpuStats, VmConfig,
    VmStats, check_reserved,
};
use lacuna_metrics::{Kind, Metrics, Value};
use lacuna_slots::{Delivery, DirtyError, Logging, SlotError, SlotFlags, SlotId};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("config", &lacuna_machine::Vm::config(self))
            .finish_non_exhaustive()
    }
}

impl lacuna_machine::Vm for Vm {
    type Vcpu = Vcpu;
    type Error = KvmError;

    const BACKEND: Backend = Backend::Kvm;

    fn config(&self) -> VmConfig {
        self.config
    }

    fn boot(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<Vcpu>, KvmError> {
        boot::with_image(self, image, command_line)
    }

    fn bare_vcpus(self: &Arc<Self>) -> Result<Vec<Vcpu>, KvmError> {
        boot::bare(self)
    }

    fn save_shared(&self) -> Result<SharedState, StateError> {
        self.eventfds.settle(&self.fd)?;
        arch::interrupts::save_shared(&self.fd)
    }

    fn restore_shared(&self, state: &SharedState) -> Result<(), StateError> {
        arch::interrupts::restore_shared(&self.fd, state)
    }

    fn stats(&self) -> VmStats {
        let host = self.memory.host.stats();
        let mut stats = VmStats::default();
        stats.resident = self.memory.resident();
        stats.first_touches = match self.memory.is_filled_by_linux() {
            // Of private memory none has left. Pages of a file may have.
            true => stats.resident.get(),
            false => host.faults_zero_fill,
        };
        stats.pages_in = host.swapped_in;
        stats.pages_out = host.swapped_out;
        let vcpu = |exits: &ExitCounters| {
            let mut vcpu = VcpuStats::default();
            vcpu.exits = exits.read();
            vcpu
        };
        stats.vcpus = self.exits.iter().map(vcpu).collect();
        stats
    }

    fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::default();
        self.stats().fill(&mut metrics);
        self.memory.host.stats().fill(&mut metrics, &[]);
        if self.own_apf.is_some() {
            let of = ("lacuna_apf_in_flight", "Faults in flight.", Kind::Gauge);
            for (vcpu, in_flight) in self.apf_in_flight.iter().enumerate() {
                let value = Value::Whole(in_flight.load(Ordering::Relaxed));
                metrics.add(of, &[("vcpu", &*vcpu.to_string())], value);
            }
        }
        metrics
    }

    fn shared_file(&self) -> Option<SharedFile<'_>> {
        let shared = self.memory.backing.shared()?;
        Some(SharedFile {
            file: shared.file(),
            offset: shared.first() * PAGE_SIZE as u64,
        })
    }

    /// `None`: the memory manager and Linux choose for all of the guest's memory.
    fn huge_page_policy(&self) -> Option<&dyn HugePagePolicy> {
        None
    }

    fn missing_memory(&self) -> Option<&dyn MissingMemory> {
        self.provider().map(|_| self as &dyn MissingMemory)
    }

    fn balloon(&self) -> Option<&dyn Balloon> {
        // A handler would fill a discarded page again, with its old content.
        self.memory.handler().is_none().then_some(self)
    }

    /// `None`: KVM delivers the events. It has no switch, and to write the guest's register would
    /// lose the tokens in flight.
    fn apf_switch(&self) -> Option<&dyn ApfSwitch> {
        self.own_apf.is_some().then_some(self)
    }

    fn settings(&self) -> Settings {
        self.present_settings()
    }

    fn memory_settings(&self) -> &dyn MemorySettings {
        self
    }

    fn page_states(&self, gfns: GfnRange) -> PageStates {
        self.states_of(gfns)
    }
}

impl InterruptController for Vm {
    fn interrupt_lines(&self) -> &InterruptLines {
        &self.interrupt_lines
    }

    fn set_line(&self, number: u32, level: bool) {
        arch::interrupts::set_line(&self.fd, number, level);
    }

    fn send_msi(&self, msi: Msi) -> Result<(), InterruptError> {
        arch::interrupts::send_msi(&self.fd, msi)
    }

    fn connect(&self, input: Input) -> Result<Arc<OwnedFd>, InterruptError> {
        self.eventfds.connect(&self.fd, input)
    }

    fn disconnect(&self, eventfd: &Arc<OwnedFd>) {
        self.eventfds.disconnect(&self.fd, eventfd);
    }
}

impl IoBus for Vm {
    fn assign(&self, write: GuestWrite, eventfd: &Arc<OwnedFd>) -> Result<(), IoEventFdError> {
        ioeventfd::assign(&self.fd, write, eventfd)
    }

    fn deassign(&self, write: GuestWrite, eventfd: &Arc<OwnedFd>) {
        ioeventfd::deassign(&self.fd, write, eventfd);
    }
}

impl DirtyTracking for Vm {
    fn delivery(&self) -> Delivery {
        self.dirty.delivery()
    }

    fn set_logging(&self, id: SlotId, logging: Logging) -> Result<(), DirtyError> {
        self.log().set_logging(id, logging)
    }

    fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        self.log().get_dirty(id, out)
    }

    fn put_back_dirty(&self, id: SlotId, dirty: &[u64]) -> Result<(), DirtyError> {
        self.log().put_back_dirty(id, dirty)
    }

    fn is_logging(&self, id: SlotId) -> bool {
        self.log().is_logging(id)
    }

    fn log_readers(&self) -> &LogReaders {
        &self.log_readers
    }

    fn dirty_rings(&self) -> Option<&dyn DirtyRings> {
        matches!(self.dirty.delivery(), Delivery::Ring { .. }).then_some(self)
    }

    fn two_step_log(&self) -> Option<&dyn TwoStepLog> {
        self.log().has_two_steps().is_ok().then_some(self)
    }

    fn detected_by(&self) -> DetectedBy {
        self.dirty.detected_by()
    }

    /// `None`: the host's kernel chooses how it detects writes.
    fn detection(&self) -> Option<&dyn DetectionChoice> {
        None
    }
}

impl DirtyRings for Vm {
    /// No vCPU executes guest code meanwhile.
    fn reap_rings(&self, each: &mut dyn FnMut(SlotId, usize)) -> Result<usize, DirtyError> {
        Ok(self.log().reap(each))
    }

    fn reset_rings(&self) -> Result<usize, DirtyError> {
        self.log().reset()
    }
}

impl TwoStepLog for Vm {
    fn peek_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        self.log().peek_dirty(id, out)
    }

    /// KVM does not report which pages were dirty, so `mask` is unchanged.
    fn clear_dirty(
        &self,
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &mut [u64],
    ) -> Result<(), DirtyError> {
        self.log().clear_dirty(id, first_page, pages, mask)
    }
}

fn refused(id: SlotId) -> impl Fn(Refusal) -> MemorySlotError {
    move |refusal| match refusal {
        Refusal::Slot(error) => error.into(),
        Refusal::Kvm(errno) => MemorySlotError::Host {
            id,
            cause: format!("KVM refused the change of this slot: {errno}"),
        },
    }
}

/// The flags that a slot may have here.
const SUPPORTED: SlotFlags = SlotFlags::READONLY.union(SlotFlags::EXIT_ON_MISSING);

impl MemorySlots for Vm {
    fn memory_slots(&self) -> Vec<MemorySlot> {
        let slots = self.slots.snapshot();
        let slot = |slot: &Arc<KvmSlot>| MemorySlot {
            id: slot.id,
            gfns: slot.gfns,
            flags: slot.flags,
        };
        slots.iter().map(slot).collect()
    }

    /// The memory is the slot's own. Linux supplies its pages, and the budget of resident pages
    /// does not count them.
    fn add_memory(
        &self,
        id: SlotId,
        gfns: GfnRange,
        flags: SlotFlags,
    ) -> Result<(), MemorySlotError> {
        flags.check(id, SUPPORTED)?;
        check_reserved(self.config.arch, id, gfns)?;
        if flags.contains(SlotFlags::EXIT_ON_MISSING) {
            return Err(SlotError::NoSource { id }.into());
        }
        let pages = PageCount::new(gfns.pages());
        check_slot(&self.fd, id, gfns, self.features.address_bits())?;
        let _logs = self.dirty.state();
        let own = Mapping::new(pages);
        let own = own.map_err(|errno| MemorySlotError::Host {
            id,
            cause: format!("cannot map its memory: {errno}"),
        })?;
        let spec = SlotSpec {
            id,
            guest: gfns.start().gpa().get(),
            backing: own.range().start(),
            bytes: gfns.pages() * PAGE_SIZE as u64,
            flags,
        };
        let added = self.slots.add(&self.fd, spec, Some(own));
        added.map_err(refused(id))
    }

    fn remove_slot(&self, id: SlotId) -> Result<(), MemorySlotError> {
        let _logs = self.dirty.state();
        let removed = self.slots.remove(&self.fd, id);
        self.faults.slots_changed();
        removed.map_err(refused(id))
    }

    fn move_slot(&self, id: SlotId, start: Gfn) -> Result<(), MemorySlotError> {
        let _logs = self.dirty.state();
        let slot = self.slots.get(id)?;
        if let Some(gfns) = GfnRange::new(start, slot.gfns.pages()) {
            check_reserved(self.config.arch, id, gfns)?;
            check_address(id, gfns, self.features.address_bits())?;
        }
        let spec = SlotSpec {
            guest: start.gpa().get(),
            ..spec_of(&slot)
        };
        self.slots.relocate(&self.fd, spec).map_err(refused(id))
    }

    fn set_slot_flags(&self, id: SlotId, flags: SlotFlags) -> Result<(), MemorySlotError> {
        flags.check(id, SUPPORTED)?;
        let _logs = self.dirty.state();
        let slot = self.slots.get(id)?;
        let has_source = slot.attach.is_of_boot() && self.provider().is_some();
        if flags.contains(SlotFlags::EXIT_ON_MISSING) && !has_source {
            return Err(SlotError::NoSource { id }.into());
        }
        if slot.flags == flags {
            return Ok(());
        }
        let by_kvm = (slot.flags ^ flags).contains(SlotFlags::READONLY);
        let changed = match by_kvm {
            true => self.change_by_kvm(&slot, flags),
            false => Ok(self.slots.set_own_flags(id, flags)?),
        };
        self.faults.slots_changed();
        changed
    }
}

impl Vm {
    /// Replaces flags that KVM knows. KVM cannot change them, so this deletes the slot and adds it
    /// again. A vCPU in between would find no memory there. KVM deletes the slot's log, so this
    /// saves the log's pages first.
    fn change_by_kvm(&self, slot: &KvmSlot, flags: SlotFlags) -> Result<(), MemorySlotError> {
        let _paused = self.kicks.pause();
        let preserved = self.log().preserve(slot);
        preserved.map_err(|error| MemorySlotError::Host {
            id: slot.id,
            cause: error.to_string(),
        })?;
        let changed = self.slots.set_flags(&self.fd, slot.id, flags);
        changed.map_err(refused(slot.id))?;
        if slot.attach.is_logging() {
            // If this fails, the next harvest has more pages than were written.
            let _ = self.log().clear_set_log(slot);
        }
        Ok(())
    }
}
