//! Guest memory for those who are not vCPUs: loaders, devices, viewers.

use crate::Vm;
use lacuna_addr::{Gpa, Hva, PAGE_SIZE};
use lacuna_machine::{GuestMemory, MemoryError};
use lacuna_mmu::DirtyError;
use std::sync::atomic::{Ordering, fence};

impl Vm {
    /// Splits `len` bytes at `gpa` into pieces that lie in one page each.
    fn pieces(&self, gpa: Gpa, len: usize) -> Result<Vec<(Hva, Gpa, usize, usize)>, MemoryError> {
        let slots = self.mmu.slots().snapshot();
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < len {
            let at = gpa
                .checked_add(done as u64)
                .ok_or(MemoryError::NoSlot(gpa))?;
            let part = (PAGE_SIZE - at.offset()).min(len - done);
            let slot = slots.find(at.gfn()).ok_or(MemoryError::NoSlot(at))?;
            let hva = Hva::new(slot.hva(at.gfn()).get() + at.offset() as u64);
            pieces.push((hva, at, done, part));
            done += part;
        }
        Ok(pieces)
    }
}

impl Vm {
    /// [`GuestMemory::write`] by someone who marks the page as written afterwards.
    pub(crate) fn write_unmarked(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        for (hva, at, done, part) in self.pieces(gpa, bytes.len())? {
            let copied = self.host.copy_in(hva, &bytes[done..done + part]);
            copied.map_err(|e| MemoryError::Backing {
                gpa: at,
                cause: e.to_string(),
            })?;
            // A vCPU that decodes meanwhile sets the bit, then reads the bytes: one of the two
            // sees the other.
            fence(Ordering::SeqCst);
            if self.code.is_watched(at.gfn()) {
                self.code.written_by_host(at.gfn(), self.quiescence());
            }
        }
        Ok(())
    }
}

impl GuestMemory for Vm {
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        for (_, at, done, part) in self.pieces(gpa, bytes.len())? {
            let refused = |error: DirtyError| MemoryError::Backing {
                gpa: at,
                cause: error.to_string(),
            };
            self.mmu.may_write(at.gfn()).map_err(refused)?;
            self.write_unmarked(at, &bytes[done..done + part])?;
            self.mmu.wrote(at.gfn());
        }
        Ok(())
    }

    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        for (hva, at, done, part) in self.pieces(gpa, into.len())? {
            let copied = self.host.copy_out(hva, &mut into[done..done + part]);
            copied.map_err(|e| MemoryError::Backing {
                gpa: at,
                cause: e.to_string(),
            })?;
        }
        Ok(())
    }

    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        let Ok(pieces) = self.pieces(gpa, into.len()) else {
            return false;
        };
        let mut peek = |(hva, _, done, part)| {
            let part: &mut [u8] = &mut into[done..done + part];
            self.host.peek(hva, part).is_some()
        };
        pieces.into_iter().all(&mut peek)
    }
}
