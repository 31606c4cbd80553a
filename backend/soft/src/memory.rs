//! Guest memory for loaders, devices and viewers.

use crate::vm::Vm;
use lacuna_addr::{BackingAddr, Gfn, Gpa, PAGE_SIZE};
use lacuna_host::HostError;
use lacuna_machine::{GuestMemory, MemoryError};
use lacuna_mmu::{DirtyError, Rmap, Writing};
use lacuna_slots::Slot;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// The part of an access in one page.
struct Piece {
    slot: Arc<Slot<Rmap>>,
    at: Gpa,
    /// Its offset in the bytes of the access.
    done: usize,
    len: usize,
}

impl Piece {
    fn addr(&self) -> BackingAddr {
        BackingAddr::new(self.slot.backing_of(self.at.gfn()).get() + self.at.offset() as u64)
    }
}

impl Vm {
    /// Splits `len` bytes at `gpa`.
    fn pieces(&self, gpa: Gpa, len: usize) -> Result<Vec<Piece>, MemoryError> {
        let slots = self.mmu.slots();
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < len {
            let at = gpa
                .checked_add(done as u64)
                .ok_or(MemoryError::NoSlot(gpa))?;
            let part = (PAGE_SIZE - at.offset()).min(len - done);
            let slot = slots.find(at.gfn()).ok_or(MemoryError::NoSlot(at))?;
            pieces.push(Piece {
                slot: Arc::clone(slot),
                at,
                done,
                len: part,
            });
            done += part;
        }
        Ok(pieces)
    }

    /// Why the page of `piece` could not be accessed. If its slot has been removed meanwhile, the
    /// memory was removed too, and nothing is lost.
    fn no_page(&self, piece: &Piece, error: &HostError) -> MemoryError {
        let slots = self.mmu.slots();
        match slots.iter().any(|slot| slot.backing == piece.slot.backing) {
            true => MemoryError::Backing {
                gpa: piece.at,
                kind: error.failure_kind(),
                cause: error.to_string(),
            },
            false => MemoryError::NoSlot(piece.at),
        }
    }

    /// Writes `bytes` past all TLBs; `begin` and `done` ensure that each page is marked.
    pub(crate) fn write_past(
        &self,
        gpa: Gpa,
        bytes: &[u8],
        begin: impl Fn(&Arc<Slot<Rmap>>, Gfn) -> Result<Writing, DirtyError>,
        mut done: impl FnMut(Writing),
    ) -> Result<(), MemoryError> {
        for piece in self.pieces(gpa, bytes.len())? {
            let gfn = piece.at.gfn();
            let gpa = piece.at;
            let writing = begin(&piece.slot, gfn).map_err(|e| MemoryError::Refused {
                gpa,
                cause: e.to_string(),
            })?;
            let part = &bytes[piece.done..piece.done + piece.len];
            let copied = self.host.copy_in(piece.addr(), part);
            copied.map_err(|error| self.no_page(&piece, &error))?;
            done(writing);
            // A decoding vCPU sets the bit, then reads the bytes: either it sees the write, or this
            // code sees the bit.
            fence(Ordering::SeqCst);
            if self.code.is_write_tracked(gfn) {
                self.code.written_by_host(gfn, self.qsbr());
            }
        }
        Ok(())
    }
}

impl GuestMemory for Vm {
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        let begin = |slot: &_, gfn| self.mmu.host_write(slot, gfn);
        self.write_past(gpa, bytes, begin, Writing::done)
    }

    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        for piece in self.pieces(gpa, into.len())? {
            let part = &mut into[piece.done..piece.done + piece.len];
            let copied = self.host.copy_out(piece.addr(), part);
            copied.map_err(|error| self.no_page(&piece, &error))?;
        }
        Ok(())
    }

    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        let Ok(pieces) = self.pieces(gpa, into.len()) else {
            return false;
        };
        let mut peek = |piece: Piece| {
            let part = &mut into[piece.done..piece.done + piece.len];
            self.host.peek(piece.addr(), part).is_some()
        };
        pieces.into_iter().all(&mut peek)
    }
}
