//! Linear memory: this processor's part of [`Memory`].
//!
//! ```text
//! translate     Tlb::refill from a 2 MiB entry, else walk + Bus::page + Tlb::insert
//! device_load   no memory (Stop::Mmio): from the replies of earlier exits, else leave for one
//! ```
//! A failed access returns [`Blocked`]; the reason is in [`Core::why`].

use crate::apic::io_apic_offset;
use crate::linear::{Linear, Width};
use crate::processor::{Core, Why};
use crate::state::{Exception, System, Trap, is_canonical};
use crate::walk::{User, walk};
use lacuna_addr::{Access, Gfn, Gpa};
pub(crate) use lacuna_cpu::{Blocked, Memory, Target, Touch, offset};
use lacuna_cpu::{Bus, HostPage, Stop, Tlb, Word, after, device_pieces, low_bytes};

impl Core {
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

impl Memory for Core {
    #[inline(always)]
    fn tlb(&self) -> &Tlb {
        &self.translations.front.tlb
    }

    #[inline(always)]
    fn user(&self) -> User {
        self.user
    }

    #[inline(always)]
    fn is_translatable(&self, va: u64) -> bool {
        is_canonical(va)
    }

    fn check_span(&mut self, va: u64, bytes: usize, _: Access) -> Touch<()> {
        if !is_canonical(va) || !is_canonical(va.wrapping_add(bytes as u64 - 1)) {
            return self.block(Why::NonCanonical);
        }
        Ok(())
    }

    fn translate(
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
                let gpa = Gpa::truncate(mapping.gfn.gpa().get() | offset(va) as u64);
                return Ok(Target::Device(gpa));
            }
            Err(stop) => return self.block(Why::Trap(Trap::Stop(stop))),
        };
        let learned = self.translations.of(user, self.user);
        learned.insert(va, &mapping, page);
        Ok(Target::Memory(mapping.gfn, page))
    }

    #[cold]
    fn device_load(&mut self, gpa: Gpa, bytes: usize) -> Touch<u64> {
        if self.apic.mmio_frame() == Some(gpa.gfn()) {
            let now = self.clock.now();
            return Ok(self.apic.mmio_read(gpa.offset() & !3, now).into());
        }
        if let Some(offset) = io_apic_offset(gpa) {
            return Ok(self.apic.bus().io_apic_read(offset).into());
        }
        let mut value = 0;
        for (done, size) in device_pieces(gpa, bytes) {
            match self.replay.take() {
                Some(answer) => value |= low_bytes(answer, size) << (8 * done),
                None => return self.block(Why::DeviceRead(after(gpa, done), size as u8)),
            }
        }
        Ok(value)
    }

    #[cold]
    fn device_store(&mut self, gpa: Gpa, bytes: usize, value: u64) -> Touch<()> {
        if self.apic.mmio_frame() == Some(gpa.gfn()) {
            let now = self.clock.now();
            self.apic.mmio_write(gpa.offset(), value as u32, now);
            return Ok(());
        }
        if let Some(offset) = io_apic_offset(gpa) {
            self.apic.bus().io_apic_write(offset, value as u32);
            return Ok(());
        }
        for (done, size) in device_pieces(gpa, bytes) {
            if self.replay.take().is_none() {
                let value = low_bytes(value >> (8 * done), size);
                return self.block(Why::DeviceWrite(after(gpa, done), size as u8, value));
            }
        }
        Ok(())
    }

    fn code_written(&mut self) -> Option<&mut Vec<Gfn>> {
        self.stepping.then_some(&mut self.code_written)
    }

    fn block_for_step(&mut self) -> Touch<()> {
        self.block(Why::Step)
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
