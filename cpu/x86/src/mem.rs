//! Linear memory: every load and store of an instruction.
//!
//! ```text
//! load::<T> -- Tlb::load, one compare --> done
//!      miss -> load_slow: canonical? one page or two?
//!              -> translate: Tlb::refill from a 2 MiB entry, else walk + Bus::page + Tlb::insert
//!                memory: the access, by byte atomics if misaligned
//!                no memory (Stop::Mmio): from the replies of earlier exits, else leave for one
//! ```
//! A failed access returns [`Blocked`] and has changed nothing; the reason is in [`Core::why`].

use crate::apic::io_apic_offset;
use crate::linear::{Linear, Width};
use crate::processor::{Core, Why};
use crate::state::{Exception, System, Trap, is_canonical};
use crate::walk::{User, walk};
use lacuna_addr::{Access, Gfn, Gpa, PAGE_SIZE};
use lacuna_cpu::{Bus, HostPage, Stop, Word, after, device_pieces, low_bytes};

/// The access was not made; [`Core::why`] has the reason. This type is empty, so that the hot paths
/// return in registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Blocked;

/// The result of a function that accesses memory.
pub(crate) type Touch<T> = Result<T, Blocked>;

const LAST: u64 = PAGE_SIZE as u64 - 1;

/// Offset in its page.
const fn offset(va: u64) -> usize {
    (va & LAST) as usize
}

/// A page of linear memory for one access.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Memory(Gfn, HostPage),
    Device(Gpa),
}

impl Core {
    /// Loads a word.
    #[inline(always)]
    pub(crate) fn load<T: Word>(&mut self, bus: &mut impl Bus, va: u64) -> Touch<T> {
        match self.translations.front.tlb.load(va) {
            Some(value) => Ok(value),
            None => self.load_slow(bus, va),
        }
    }

    /// Stores a word.
    #[inline(always)]
    pub(crate) fn store<T: Word>(&mut self, bus: &mut impl Bus, va: u64, value: T) -> Touch<()> {
        if self.translations.front.tlb.store(va, value) {
            return Ok(());
        }
        self.store_slow(bus, va, value)
    }

    /// Replaces a word by `new(old)`, unlocked; returns the old value.
    #[inline(always)]
    pub(crate) fn update<T: Word>(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        new: impl Fn(T) -> T,
    ) -> Touch<T> {
        match self.translations.front.tlb.update(va, &new) {
            Some(old) => Ok(old),
            None => self.update_slow(bus, va, new),
        }
    }

    #[cold]
    #[inline(never)]
    fn load_slow<T: Word>(&mut self, bus: &mut impl Bus, va: u64) -> Touch<T> {
        if let Some(page) = self.refill::<T>(bus, va, Access::Read)? {
            return Ok(page.load(offset(va)));
        }
        self.load_as(bus, va, T::BYTES, self.user).map(T::narrow)
    }

    #[cold]
    #[inline(never)]
    fn store_slow<T: Word>(&mut self, bus: &mut impl Bus, va: u64, value: T) -> Touch<()> {
        if let Some(page) = self.refill::<T>(bus, va, Access::Write)? {
            page.store(offset(va), value);
            return Ok(());
        }
        self.store_as(bus, va, T::BYTES, value.widen(), self.user)
    }

    #[cold]
    #[inline(never)]
    fn update_slow<T: Word>(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        new: impl Fn(T) -> T,
    ) -> Touch<T> {
        if let Some(page) = self.refill::<T>(bus, va, Access::Write)? {
            let old = page.load(offset(va));
            page.store(offset(va), new(old));
            return Ok(old);
        }
        self.translate_span(bus, va, T::BYTES, Access::Write, self.user)?;
        let old = T::narrow(self.load_as(bus, va, T::BYTES, self.user)?);
        self.store_as(bus, va, T::BYTES, new(old).widen(), self.user)?;
        Ok(old)
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
        if va & (T::BYTES as u64 - 1) != 0 || !is_canonical(va) {
            return Ok(None);
        }
        match self.translate(bus, va, access, self.user)? {
            Target::Memory(_, page) if !access.is_write() || !page.is_write_tracked() => {
                Ok(Some(page))
            }
            _ => Ok(None),
        }
    }

    /// Replaces a word by `new(old)` with a LOCK prefix; returns the old value. `new` may be called
    /// more than once.
    pub(crate) fn update_locked<T: Word>(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        new: impl Fn(T) -> T,
    ) -> Touch<T> {
        if let Some(old) = self.translations.front.tlb.update_locked(va, &new) {
            return Ok(old);
        }
        if va & (T::BYTES as u64 - 1) != 0 {
            self.translate_span(bus, va, T::BYTES, Access::Write, self.user)?;
            if !self.sys.exclusive {
                return self.block(Why::Trap(Trap::Exclusive));
            }
            return self.update_slow(bus, va, new);
        }
        if !is_canonical(va) {
            return self.block(Why::NonCanonical);
        }
        match self.translate(bus, va, Access::Write, self.user)? {
            Target::Memory(gfn, page) => {
                self.note_code_write(gfn, page)?;
                Ok(page.update_locked(offset(va), new))
            }
            Target::Device(_) => self.update_slow(bus, va, new),
        }
    }

    /// Loads `bytes` (1 to 8) at any address with the rights of `user`.
    pub(crate) fn load_as(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        bytes: usize,
        user: User,
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
    pub(crate) fn store_as(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        bytes: usize,
        value: u64,
        user: User,
    ) -> Touch<()> {
        let (first, second) = self.translate_span(bus, va, bytes, Access::Write, user)?;
        for target in [Some(first), second].into_iter().flatten() {
            if let Target::Memory(gfn, page) = target {
                self.note_code_write(gfn, page)?;
            }
        }
        let low = bytes.min(PAGE_SIZE - offset(va));
        self.store_at(first, offset(va), low, value)?;
        match second {
            Some(second) => self.store_at(second, 0, bytes - low, value >> (8 * low)),
            None => Ok(()),
        }
    }

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
            Target::Device(gpa) if self.apic.mmio_frame() == Some(gpa.gfn()) => {
                let now = self.clock.now();
                Ok(self.apic.mmio_read(gpa.offset() & !3, now).into())
            }
            Target::Device(gpa) if let Some(offset) = io_apic_offset(gpa) => {
                Ok(self.apic.bus().io_apic_read(offset).into())
            }
            Target::Device(gpa) => self.device_load(gpa, bytes),
        }
    }

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
            Target::Device(gpa) if self.apic.mmio_frame() == Some(gpa.gfn()) => {
                let now = self.clock.now();
                self.apic.mmio_write(gpa.offset(), value as u32, now);
            }
            Target::Device(gpa) if let Some(offset) = io_apic_offset(gpa) => {
                self.apic.bus().io_apic_write(offset, value as u32);
            }
            Target::Device(gpa) => return self.device_store(gpa, bytes, value),
        }
        Ok(())
    }

    /// Reads 1 to 8 bytes of a device.
    #[cold]
    fn device_load(&mut self, gpa: Gpa, bytes: usize) -> Touch<u64> {
        let mut value = 0;
        for (done, size) in device_pieces(gpa, bytes) {
            match self.replay.take() {
                Some(answer) => value |= low_bytes(answer, size) << (8 * done),
                None => return self.block(Why::DeviceRead(after(gpa, done), size as u8)),
            }
        }
        Ok(value)
    }

    /// Writes the low 1 to 8 bytes of `value` to a device.
    #[cold]
    fn device_store(&mut self, gpa: Gpa, bytes: usize, value: u64) -> Touch<()> {
        for (done, size) in device_pieces(gpa, bytes) {
            if self.replay.take().is_none() {
                let value = low_bytes(value >> (8 * done), size);
                return self.block(Why::DeviceWrite(after(gpa, done), size as u8, value));
            }
        }
        Ok(())
    }

    /// Records that a store is about to change decoded instructions. It must not do so inside a
    /// basic block, so the run loop executes the instruction alone ([`Core::stepping`]) and drops
    /// the decoded code afterwards.
    pub(crate) fn note_code_write(&mut self, gfn: Gfn, page: HostPage) -> Touch<()> {
        if !page.is_write_tracked() {
            return Ok(());
        }
        if !self.stepping {
            return self.block(Why::Step);
        }
        if !self.code_written.contains(&gfn) {
            self.code_written.push(gfn);
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
        user: User,
    ) -> Touch<(Target, Option<Target>)> {
        let last = va.wrapping_add(bytes as u64 - 1);
        if !is_canonical(va) || !is_canonical(last) {
            return self.block(Why::NonCanonical);
        }
        let first = self.translate(bus, va, access, user)?;
        let second = match (va ^ last) & !LAST {
            0 => None,
            _ => Some(self.translate(bus, last & !LAST, access, user)?),
        };
        Ok((first, second))
    }

    /// Translates one canonical address, and caches the translation.
    pub(crate) fn translate(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        access: Access,
        user: User,
    ) -> Touch<Target> {
        let learned = self.translations.of(user, self.user);
        if let Some((gfn, page)) = learned.tlb.refill(va, access) {
            return Ok(Target::Memory(gfn, page));
        }
        let walks = &mut self.translations.walk;
        let mapping = match walk(&self.sys, walks, bus, va, access, user) {
            Ok(mapping) => mapping,
            Err(trap) => {
                if matches!(trap, Trap::Exception(_)) {
                    self.translations.faulted(va);
                }
                return self.block(Why::Trap(trap));
            }
        };
        let page = match bus.page(mapping.gfn, access) {
            Ok(page) => page,
            Err(Stop::Mmio(_)) => {
                let gpa = Gpa::truncate(mapping.gfn.gpa().get() | va & LAST);
                return Ok(Target::Device(gpa));
            }
            Err(stop) => return self.block(Why::Trap(Trap::Stop(stop))),
        };
        let learned = self.translations.of(user, self.user);
        learned.insert(va, &mapping, page);
        Ok(Target::Memory(mapping.gfn, page))
    }

    /// The page to fetch instructions at `va` from. It is never a device's.
    pub(crate) fn fetch_page(&mut self, bus: &mut impl Bus, va: u64) -> Touch<(Gfn, HostPage)> {
        if let Some(found) = self.translations.front.tlb.executable_page(va) {
            return Ok(found);
        }
        if !is_canonical(va) {
            return self.block(Why::Trap(Exception::GP0.into()));
        }
        match self.translate(bus, va, Access::Fetch, self.user)? {
            Target::Memory(gfn, page) => Ok((gfn, page)),
            Target::Device(gpa) => self.block(Why::Trap(Trap::Stop(Stop::Mmio(gpa)))),
        }
    }

    /// Records the reason, and returns the caller's result.
    #[cold]
    pub(crate) fn block<T>(&mut self, why: Why) -> Touch<T> {
        self.why = why;
        Err(Blocked)
    }

    /// Raises `exception` at the current instruction.
    #[cold]
    pub(crate) fn raise<T>(&mut self, exception: Exception) -> Touch<T> {
        self.block(Why::Trap(Trap::Exception(exception)))
    }
}

/// Linear memory for event delivery and the system instructions. They may write decoded pages; the
/// run loop drops the decoded code afterwards.
pub(crate) struct View<'a, B> {
    pub(crate) core: &'a mut Core,
    pub(crate) bus: &'a mut B,
}

impl<'a, B: Bus> View<'a, B> {
    pub(crate) fn new(core: &'a mut Core, bus: &'a mut B) -> Self {
        core.stepping = true;
        Self { core, bus }
    }
}

impl<B: Bus> Linear for View<'_, B> {
    fn system(&self) -> &System {
        &self.core.sys
    }

    fn system_mut(&mut self) -> &mut System {
        &mut self.core.sys
    }

    fn read(&mut self, va: u64, width: Width, user: User) -> Result<u64, Trap> {
        let read = self
            .core
            .load_as(self.bus, va, width.bytes() as usize, user);
        read.map_err(|_| self.core.why.as_trap())
    }

    fn write(&mut self, va: u64, width: Width, value: u64, user: User) -> Result<(), Trap> {
        let write = self
            .core
            .store_as(self.bus, va, width.bytes() as usize, value, user);
        write.map_err(|_| self.core.why.as_trap())
    }
}
