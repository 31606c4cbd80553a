//! The guest of the async-fault queue: registers, events, and two words of its memory.

mod arm64;

use crate::entry::{Absent, Entry};
use crate::platform::Platform;
use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_apf::x86::{self, CpuState};
use lacuna_apf::{Guest, Prefault, SharedWords, Unwritable};
use lacuna_cpu::HostPage;
use lacuna_machine::{GuestMemory as _, MemoryError, VcpuError};
use lacuna_x86::Cpu;

impl<P: Platform> Guest for Entry<P> {
    fn is_interruptible(&self) -> bool {
        self.cpu.is_interruptible()
    }

    fn prefault(&mut self, gfn: Gfn, access: Access) -> Prefault {
        match self.provided_page(gfn, access, |_| ()) {
            Ok(()) => return Prefault::Mapped,
            // An unstarted ticket would keep its frame for ever.
            Err(Some(Absent::Pending(ticket))) => self.vm.host.start(&ticket),
            // `None`: the VMM has reported the page ready without providing it. The guest's access
            // exits again.
            Err(Some(Absent::NoMemory | Absent::Busy) | None) => {}
        }
        Prefault::NotMapped
    }

    fn resume(&mut self) {
        self.cpu.unhalt();
    }
}

impl<P: Platform> SharedWords for Entry<P> {
    fn read_u32(&mut self, at: Gpa) -> Option<u32> {
        let load = |page: HostPage| page.load_u32(at.offset());
        match self.with_page(at.gfn(), Access::Read, load) {
            Ok(value) => Some(value),
            Err(Absent::NoMemory) => None,
            Err(Absent::Pending(_) | Absent::Busy) => {
                let mut bytes = [0; 4];
                let read = self.vm.read(at, &mut bytes);
                self.note(read).ok()?;
                Some(u32::from_le_bytes(bytes))
            }
        }
    }

    fn write_u32(&mut self, at: Gpa, value: u32) -> Result<(), Unwritable> {
        let store = |page: HostPage| {
            // If the page has decoded instructions, the write below notifies every vCPU.
            (!page.is_write_tracked()).then(|| page.store_u32(at.offset(), value))
        };
        match self.with_page(at.gfn(), Access::Write, store) {
            Ok(Some(())) => Ok(()),
            Err(Absent::NoMemory) => Err(Unwritable),
            Ok(None) | Err(Absent::Pending(_) | Absent::Busy) => {
                // As in KVM, the vCPU waits for this page.
                let (mmu, vcpu_mmu) = (&self.vm.mmu, self.bus.vcpu_mmu());
                let written = self.vm.write_past(
                    at,
                    &value.to_le_bytes(),
                    |slot, gfn| Ok(mmu.vcpu_write(slot, gfn)),
                    |writing| writing.done_by(vcpu_mmu),
                );
                self.note(written)
            }
        }
    }
}

impl x86::Guest for Entry<Cpu> {
    fn state(&self) -> CpuState {
        CpuState {
            user: self.cpu.cpl() != 0,
            paging: self.cpu.paging(),
            lapic: self.cpu.apic_enabled(),
        }
    }

    fn inject_page_fault(&mut self, address: u64) {
        self.cpu.inject_page_fault(address);
    }

    fn interrupt(&mut self, vector: u8) {
        self.cpu.raise_interrupt(vector);
    }
}

impl<P: Platform> Entry<P> {
    /// Missing guest memory is the guest's fault. A failure to bring in a page ends the run.
    fn note(&mut self, result: Result<(), MemoryError>) -> Result<(), Unwritable> {
        if let Err(error) = &result
            && let MemoryError::Backing { gpa, cause, .. } | MemoryError::Refused { gpa, cause } =
                error
        {
            let (vcpu, kind) = (self.index, error.failure_kind());
            self.failed = Some(VcpuError::no_page(vcpu, *gpa, kind, cause.clone()));
        }
        result.map_err(|_| Unwritable)
    }
}
