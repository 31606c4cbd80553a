//! The guest as its asynchronous page faults see it: registers, events, two words of memory.

use crate::entry::Entry;
use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_apf::{CpuState, Guest, Prefault, Unwritable};
use lacuna_machine::GuestMemory as _;

impl Guest for Entry {
    fn state(&self) -> CpuState {
        CpuState {
            user: self.cpu.cpl() != 0,
            paging: self.cpu.paging(),
            open: self.cpu.interruptible(),
            lapic: self.cpu.apic_enabled(),
        }
    }

    fn read_u32(&mut self, at: Gpa) -> Option<u32> {
        let load = |page: lacuna_cpu::HostPage| page.load_u32(at.offset());
        self.with_page(at.gfn(), Access::Read, load).or_else(|| {
            let mut bytes = [0; 4];
            self.vm.read(at, &mut bytes).ok()?;
            Some(u32::from_le_bytes(bytes))
        })
    }

    fn write_u32(&mut self, at: Gpa, value: u32) -> Result<(), Unwritable> {
        let store = |page: lacuna_cpu::HostPage| {
            // Decoded instructions lie there: the way that tells every vCPU, below.
            (!page.is_watched()).then(|| page.store_u32(at.offset(), value))
        };
        if let Some(Some(())) = self.with_page(at.gfn(), Access::Write, store) {
            return Ok(());
        }
        // The page is elsewhere: as in KVM, the vCPU waits for this one.
        let written = self.vm.write(at, &value.to_le_bytes());
        written.map_err(|_| Unwritable)
    }

    fn inject_page_fault(&mut self, address: u64) {
        self.cpu.inject_page_fault(address);
    }

    fn interrupt(&mut self, vector: u8) {
        self.cpu.raise_interrupt(vector);
    }

    fn prefault(&mut self, gfn: Gfn, access: Access) -> Prefault {
        match self.with_page(gfn, access, |_| ()) {
            Some(()) => Prefault::Mapped,
            None => Prefault::NotMapped,
        }
    }

    fn resume(&mut self) {
        self.cpu.unhalt();
    }
}
