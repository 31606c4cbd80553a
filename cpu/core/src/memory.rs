//! The loads and stores of an instruction, for any processor.
//!
//! ```text
//! load::<T> -- Tlb::load, one compare --> done
//!      miss -> load_slow: one aligned word of memory? one page or two?
//!              -> translate: the processor's own
//!                memory: the access, by byte atomics if misaligned
//!                no memory: the processor's own device_load and device_store
//! ```
//! A failed access returns [`Blocked`]. It has changed nothing, or the first page of a store over
//! two, which its repetition writes again.

use crate::{Bus, HostPage, Privilege, Tlb, Word};
use lacuna_addr::{Access, Gfn, Gpa, PAGE_SIZE};

/// The access was not made; the processor has recorded the reason. This type is empty, so that the
/// hot paths return in registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blocked;

/// The result of a function that accesses memory.
pub type Touch<T> = Result<T, Blocked>;

const LAST: u64 = PAGE_SIZE as u64 - 1;

/// Offset in its page.
pub const fn offset(va: u64) -> usize {
    (va & LAST) as usize
}

/// A page of virtual memory for one access.
#[derive(Clone, Copy)]
pub enum Target {
    /// Memory.
    Memory(Gfn, HostPage),
    /// No memory, at this address.
    Device(Gpa),
}

/// The memory accesses of a processor.
pub trait Memory {
    /// The TLB of the running privilege.
    fn tlb(&self) -> &Tlb;

    /// The running privilege.
    fn user(&self) -> Privilege;

    /// Whether [`Memory::translate`] takes this address.
    #[inline(always)]
    fn is_translatable(&self, _va: u64) -> bool {
        true
    }

    /// Checks the address of an access of `bytes` bytes.
    fn check_span(&mut self, va: u64, bytes: usize, access: Access) -> Touch<()>;

    /// Translates one address, and caches the translation.
    fn translate(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        access: Access,
        user: Privilege,
    ) -> Touch<Target>;

    /// Reads 1 to 8 bytes of a device.
    fn device_load(&mut self, gpa: Gpa, bytes: usize) -> Touch<u64>;

    /// Writes the low 1 to 8 bytes of `value` to a device.
    fn device_store(&mut self, gpa: Gpa, bytes: usize, value: u64) -> Touch<()>;

    /// The written pages with decoded instructions, if the instruction is executed alone.
    fn code_written(&mut self) -> Option<&mut Vec<Gfn>>;

    /// Blocks the instruction: it writes decoded instructions, so it must be executed alone.
    fn block_for_step(&mut self) -> Touch<()>;

    /// Loads a word.
    #[inline(always)]
    fn load<T: Word>(&mut self, bus: &mut impl Bus, va: u64) -> Touch<T> {
        match self.tlb().load(va) {
            Some(value) => Ok(value),
            None => self.load_slow(bus, va),
        }
    }

    /// Stores a word.
    #[inline(always)]
    fn store<T: Word>(&mut self, bus: &mut impl Bus, va: u64, value: T) -> Touch<()> {
        if self.tlb().store(va, value) {
            return Ok(());
        }
        self.store_slow(bus, va, value)
    }

    /// [`Memory::load`] after a miss in the TLB.
    #[cold]
    #[inline(never)]
    fn load_slow<T: Word>(&mut self, bus: &mut impl Bus, va: u64) -> Touch<T> {
        if let Some(page) = self.refill::<T>(bus, va, Access::Read)? {
            return Ok(page.load(offset(va)));
        }
        self.load_as(bus, va, T::BYTES, self.user()).map(T::narrow)
    }

    /// [`Memory::store`] after a miss in the TLB.
    #[cold]
    #[inline(never)]
    fn store_slow<T: Word>(&mut self, bus: &mut impl Bus, va: u64, value: T) -> Touch<()> {
        if let Some(page) = self.refill::<T>(bus, va, Access::Write)? {
            page.store(offset(va), value);
            return Ok(());
        }
        self.store_as(bus, va, T::BYTES, value.widen(), self.user())
    }

    /// The fast path for a TLB miss: one aligned word of plain memory. `None` for everything else.
    /// The path is short, so that the host's out-of-order execution reaches the next access.
    #[inline(always)]
    fn refill<T: Word>(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        access: Access,
    ) -> Touch<Option<HostPage>> {
        if va & (T::BYTES as u64 - 1) != 0 || !self.is_translatable(va) {
            return Ok(None);
        }
        match self.translate(bus, va, access, self.user())? {
            Target::Memory(_, page) if !access.is_write() || !page.is_write_tracked() => {
                Ok(Some(page))
            }
            _ => Ok(None),
        }
    }

    /// Loads `bytes` (1 to 8) at any address with the rights of `user`.
    fn load_as(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        bytes: usize,
        user: Privilege,
    ) -> Touch<u64> {
        let (first, second) = self.translate_span(bus, va, bytes, Access::Read, user)?;
        let low = bytes.min(PAGE_SIZE - offset(va));
        let mut value = self.load_at(first, offset(va), low)?;
        if let Some(second) = second {
            value |= self.load_at(second, 0, bytes - low)? << (8 * low);
        }
        Ok(value)
    }

    /// Stores the low `bytes` (1 to 8) of `value` at any address with the rights of `user`. Both
    /// pages of a crossing store are translated before either is written.
    fn store_as(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        bytes: usize,
        value: u64,
        user: Privilege,
    ) -> Touch<()> {
        let (first, second) = self.prepare_store(bus, va, bytes, user)?;
        let low = bytes.min(PAGE_SIZE - offset(va));
        self.store_at(first, offset(va), low, value)?;
        match second {
            Some(second) => self.store_at(second, 0, bytes - low, value >> (8 * low)),
            None => Ok(()),
        }
    }

    /// The page or two pages of a store, which may write decoded instructions.
    fn prepare_store(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        bytes: usize,
        user: Privilege,
    ) -> Touch<(Target, Option<Target>)> {
        let (first, second) = self.translate_span(bus, va, bytes, Access::Write, user)?;
        for target in [Some(first), second].into_iter().flatten() {
            if let Target::Memory(gfn, page) = target {
                self.note_code_write(gfn, page)?;
            }
        }
        Ok((first, second))
    }

    /// Loads from one page.
    fn load_at(&mut self, target: Target, offset: usize, bytes: usize) -> Touch<u64> {
        match target {
            Target::Memory(_, page) if offset.is_multiple_of(bytes) => Ok(match bytes {
                1 => page.load_u8(offset).into(),
                2 => page.load_u16(offset).into(),
                4 => page.load_u32(offset).into(),
                8 => page.load_u64(offset),
                _ => page.load_bytes(offset, bytes),
            }),
            Target::Memory(_, page) => Ok(page.load_bytes(offset, bytes)),
            Target::Device(gpa) => self.device_load(gpa, bytes),
        }
    }

    /// Stores to one page.
    fn store_at(&mut self, target: Target, offset: usize, bytes: usize, value: u64) -> Touch<()> {
        match target {
            Target::Memory(_, page) if offset.is_multiple_of(bytes) => match bytes {
                1 => page.store_u8(offset, value as u8),
                2 => page.store_u16(offset, value as u16),
                4 => page.store_u32(offset, value as u32),
                8 => page.store_u64(offset, value),
                _ => page.store_bytes(offset, bytes, value),
            },
            Target::Memory(_, page) => page.store_bytes(offset, bytes, value),
            Target::Device(gpa) => return self.device_store(gpa, bytes, value),
        }
        Ok(())
    }

    /// Records that a store is about to change decoded instructions. It must not do so inside a
    /// basic block, so the run loop executes the instruction alone and drops the decoded code
    /// afterwards.
    fn note_code_write(&mut self, gfn: Gfn, page: HostPage) -> Touch<()> {
        if !page.is_write_tracked() {
            return Ok(());
        }
        let Some(written) = self.code_written() else {
            return self.block_for_step();
        };
        if !written.contains(&gfn) {
            written.push(gfn);
        }
        Ok(())
    }

    /// The page or two pages of an access.
    fn translate_span(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        bytes: usize,
        access: Access,
        user: Privilege,
    ) -> Touch<(Target, Option<Target>)> {
        self.check_span(va, bytes, access)?;
        let last = va.wrapping_add(bytes as u64 - 1);
        let first = self.translate(bus, va, access, user)?;
        let second = match (va ^ last) & !LAST {
            0 => None,
            _ => Some(self.translate(bus, last & !LAST, access, user)?),
        };
        Ok((first, second))
    }
}
