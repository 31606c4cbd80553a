//! The guest of the async-fault queue: registers, events, and two words of its memory.

use crate::entry::{Absent, Entry};
use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_apf::x86::{self, CpuState, Unwritable};
use lacuna_apf::{Guest, Prefault};
use lacuna_cpu::{HostPage, Processor};
use lacuna_machine::{GuestMemory as _, MemoryError, VcpuError};
use lacuna_x86::Cpu;

impl<P: Processor> Guest for Entry<P> {
    fn is_interruptible(&self) -> bool {
        self.cpu.is_interruptible()
    }

    fn prefault(&mut self, gfn: Gfn, access: Access) -> Prefault {
        match self.with_page(gfn, access, |_| ()) {
            Ok(()) => return Prefault::Mapped,
            // A ticket that no thread starts would keep its frame for ever.
            Err(Absent::Pending(ticket)) => self.vm.host.start(&ticket),
            Err(Absent::NoMemory | Absent::Busy) => {}
        }
        Prefault::NotMapped
    }

    fn resume(&mut self) {
        self.cpu.unhalt();
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
            // Decoded instructions are in this page: the write below tells every vCPU.
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

    fn inject_page_fault(&mut self, address: u64) {
        self.cpu.inject_page_fault(address);
    }

    fn interrupt(&mut self, vector: u8) {
        self.cpu.raise_interrupt(vector);
    }
}

impl<P: Processor> Entry<P> {
    /// Missing guest memory is the guest's fault; a page that cannot be brought in ends the run.
    fn note(&mut self, result: Result<(), MemoryError>) -> Result<(), Unwritable> {
        if let Err(MemoryError::Backing { gpa, cause } | MemoryError::Refused { gpa, cause }) =
            &result
        {
            self.failed = Some(VcpuError::PageLost {
                vcpu: self.index,
                gpa: *gpa,
                cause: cause.clone(),
            });
        }
        result.map_err(|_| Unwritable)
    }
}
