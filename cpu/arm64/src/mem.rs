//! Virtual memory: this processor's part of [`Memory`].
//!
//! ```text
//! translate     Tlb::refill from a 2 MiB entry, else walk + Bus::page + Tlb::insert
//! device_load   no memory (Stop::Mmio): from the replies of earlier exits, else leave for one
//! ```
//! A failed access returns [`Blocked`]; the reason is in [`Core::why`].

use crate::processor::{Core, Why};
use crate::state::{Exception, Trap, status};
use crate::sysreg::sctlr;
use crate::walk::{Purpose, Request, walk};
use lacuna_addr::{Access, Gfn, Gpa};
pub(crate) use lacuna_cpu::{Blocked, Memory, Target, Touch, offset};
use lacuna_cpu::{Bus, HostPage, Privilege, Stop, Tlb, Word, after, device_pieces, low_bytes};

impl Core {
    /// Loads two adjacent words.
    #[inline(always)]
    pub(crate) fn load_pair<T: Word>(&mut self, bus: &mut impl Bus, va: u64) -> Touch<[T; 2]> {
        let tlb = &self.translations.front.tlb;
        let next = va.wrapping_add(T::BYTES as u64);
        match (tlb.load(va), tlb.load(next)) {
            (Some(first), Some(second)) => Ok([first, second]),
            _ => self.load_pair_slow(bus, va),
        }
    }

    /// Stores two adjacent words. Both pages of a crossing pair are translated before either is
    /// written.
    #[inline(always)]
    pub(crate) fn store_pair<T: Word>(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        values: [T; 2],
    ) -> Touch<()> {
        if self.translations.front.tlb.store_pair(va, values) {
            return Ok(());
        }
        self.store_pair_slow(bus, va, values)
    }

    #[cold]
    #[inline(never)]
    fn load_pair_slow<T: Word>(&mut self, bus: &mut impl Bus, va: u64) -> Touch<[T; 2]> {
        let next = va.wrapping_add(T::BYTES as u64);
        Ok([self.load(bus, va)?, self.load(bus, next)?])
    }

    #[cold]
    #[inline(never)]
    fn store_pair_slow<T: Word>(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        [first, second]: [T; 2],
    ) -> Touch<()> {
        let next = va.wrapping_add(T::BYTES as u64);
        for at in [va, next] {
            self.prepare_store(bus, at, T::BYTES, self.user)?;
        }
        self.store(bus, va, first)?;
        self.store(bus, next, second)
    }

    /// An alignment fault at `va`.
    #[cold]
    pub(crate) fn misaligned<T>(&mut self, va: u64, access: Access) -> Touch<T> {
        self.raise(Exception::data_abort(va, status::ALIGNMENT, access))
    }

    /// The page to fetch instructions at `va` from. A device's page gives an external abort.
    pub(crate) fn fetch_page(&mut self, bus: &mut impl Bus, va: u64) -> Touch<(Gfn, HostPage)> {
        if let Some(found) = self.translations.front.tlb.executable_page(va) {
            return Ok(found);
        }
        match self.translate(bus, va, Access::Fetch, self.user)? {
            Target::Memory(gfn, page) => Ok((gfn, page)),
            Target::Device(_) => self.raise(Exception::instruction_abort(va, status::EXTERNAL)),
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
    fn user(&self) -> Privilege {
        self.user
    }

    fn check_span(&mut self, va: u64, bytes: usize, access: Access) -> Touch<()> {
        if self.sys.sctlr & sctlr::A != 0 && !va.is_multiple_of(bytes as u64) {
            return self.misaligned(va, access);
        }
        Ok(())
    }

    fn translate(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        access: Access,
        user: Privilege,
    ) -> Touch<Target> {
        let learned = self.translations.of(user, self.user);
        // The callers have already looked into the running privilege's TLB.
        if user != self.user
            && let Some((gfn, page)) = learned.tlb.cached_page(va, access)
        {
            return Ok(Target::Memory(gfn, page));
        }
        if let Some((gfn, page)) = learned.tlb.refill(va, access) {
            return Ok(Target::Memory(gfn, page));
        }
        let walks = &mut self.translations.walk;
        let request = Request {
            va,
            access,
            user,
            purpose: Purpose::Access,
        };
        let found = match walk(&self.sys, walks, bus, request) {
            Ok(found) => found,
            Err(trap) => {
                return match trap {
                    Trap::Stop(stop) => self.block(Why::StoppedWalk(stop, access)),
                    Trap::Exception(_) => {
                        self.translations.faulted(va);
                        self.block(Why::Trap(trap))
                    }
                    Trap::Exclusive => self.block(Why::Trap(trap)),
                };
            }
        };
        let mapping = found.mapping;
        let page = match bus.page(mapping.gfn, access) {
            Ok(page) => page,
            Err(Stop::Mmio(_)) => {
                let gpa = Gpa::truncate(mapping.gfn.gpa().get() | offset(va) as u64);
                return Ok(Target::Device(gpa));
            }
            Err(stop) => return self.block(Why::Trap(Trap::Stop(stop))),
        };
        if found.readable {
            self.tagged |= found.tagged;
            if mapping.user && user == Privilege::Supervisor {
                self.user_pages.note(va);
            }
            let learned = self.translations.of(user, self.user);
            learned.insert(va, &mapping, page);
        }
        Ok(Target::Memory(mapping.gfn, page))
    }

    /// A read of the interrupt controller's registers changes nothing, so the instruction may be
    /// executed again.
    #[cold]
    fn device_load(&mut self, gpa: Gpa, bytes: usize) -> Touch<u64> {
        let mut value = 0;
        for (done, size) in device_pieces(gpa, bytes) {
            let gic = &self.fabric.gic;
            if gic.claims(gpa) {
                value |= gic.mmio_read(after(gpa, done), size as u8) << (8 * done);
                continue;
            }
            match self.replay.take() {
                Some(answer) => value |= low_bytes(answer, size) << (8 * done),
                None => return self.block(Why::DeviceRead(after(gpa, done), size as u8)),
            }
        }
        Ok(value)
    }

    /// A write to the interrupt controller has the same effect when the instruction is executed
    /// again.
    #[cold]
    fn device_store(&mut self, gpa: Gpa, bytes: usize, value: u64) -> Touch<()> {
        for (done, size) in device_pieces(gpa, bytes) {
            let value = low_bytes(value >> (8 * done), size);
            let gic = &self.fabric.gic;
            if gic.claims(gpa) {
                gic.mmio_write(self.interface.index(), after(gpa, done), size as u8, value);
            } else if self.replay.take().is_none() {
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

/// Memory for the system instructions. They may write decoded pages; the run loop drops the decoded
/// code afterwards.
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
