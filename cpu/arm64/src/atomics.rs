//! Barriers, accesses with acquire and release, and the atomic instructions of LSE.
//!
//! Which host accesses give the order that the architecture promises (Arm ARM B2.3):
//!
//! | guest | host |
//! |---|---|
//! | load, store | acquire load, release store: on x86 plain moves |
//! | LDAR, LDAPR | acquire load |
//! | STLR | release store, then a full fence: an LDAR does not overtake an earlier STLR |
//! | LSE, STXR, with every suffix | sequentially consistent read-modify-write |
//! | DMB LD, DSB LD | acquire fence |
//! | DMB ST | release fence |
//! | other DMB, DSB | full fence |
//!
//! The fence is behind STLR and not in front of LDAR, because programs load more often than they
//! store.
//!
//! The accesses of these instructions must be aligned: there is no FEAT_LSE2.

use crate::lower_branch::fence;
use crate::lower_memory::access;
use crate::mem::{Memory, Target, Touch, offset};
use crate::op::{Op, SINK, ZERO};
use crate::processor::{Core, Why};
use crate::state::{Exception, Trap, status};
use lacuna_addr::Access;
use lacuna_cpu::{Bus, HostPage, Word};
use std::sync::atomic::{self, Ordering};

/// DMB.
#[inline(always)]
pub(crate) fn fence(op: &Op) {
    atomic::fence(match op.aux {
        fence::LOADS => Ordering::Acquire,
        fence::STORES => Ordering::Release,
        _ => Ordering::SeqCst,
    });
}

impl Core {
    /// The page for an atomic access of `bytes` at `va`, which reads and writes. If a load would
    /// abort too, the abort is reported as a load's: ISS.WnR is clear (Arm ARM D17.2.37).
    pub(crate) fn atomic_page(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        bytes: usize,
    ) -> Touch<HostPage> {
        if !va.is_multiple_of(bytes as u64) {
            return self.misaligned(va, Access::Read);
        }
        match self.translations.front.tlb.writable_page(va) {
            Some(page) => Ok(page),
            None => self.atomic_page_slow(bus, va),
        }
    }

    #[cold]
    #[inline(never)]
    fn atomic_page_slow(&mut self, bus: &mut impl Bus, va: u64) -> Touch<HostPage> {
        let page = self.store_page(bus, va);
        if page.is_err() && matches!(self.why, Why::Trap(Trap::Exception(_))) {
            let why = self.why;
            self.translate(bus, va, Access::Read, self.user)?;
            self.why = why;
        }
        page
    }

    /// The page for a store at the aligned `va`, which must not be a device's.
    pub(crate) fn store_page(&mut self, bus: &mut impl Bus, va: u64) -> Touch<HostPage> {
        if let Some(page) = self.translations.front.tlb.writable_page(va) {
            return Ok(page);
        }
        match self.translate(bus, va, Access::Write, self.user)? {
            Target::Memory(gfn, page) => {
                self.note_code_write(gfn, page)?;
                Ok(page)
            }
            Target::Device(_) => self.unsupported(va, Access::Write),
        }
    }

    /// The page for a load of `bytes` at `va`, which must be aligned, and must not be a device's.
    pub(crate) fn aligned_page(
        &mut self,
        bus: &mut impl Bus,
        va: u64,
        bytes: usize,
    ) -> Touch<HostPage> {
        if !va.is_multiple_of(bytes as u64) {
            return self.misaligned(va, Access::Read);
        }
        if let Some(page) = self.translations.front.tlb.readable_page(va) {
            return Ok(page);
        }
        match self.translate(bus, va, Access::Read, self.user)? {
            Target::Memory(_, page) => Ok(page),
            Target::Device(_) => self.unsupported(va, Access::Read),
        }
    }

    #[cold]
    fn unsupported<T>(&mut self, va: u64, access: Access) -> Touch<T> {
        let status = status::UNSUPPORTED_EXCLUSIVE;
        self.raise(Exception::data_abort(va, status, access))
    }

    /// Replaces the aligned pair of 64-bit words at `va` by `new`, if it is `old`, as one atomic
    /// access. Returns the old pair.
    pub(crate) fn exchange_pair(
        &mut self,
        page: HostPage,
        va: u64,
        old: [u64; 2],
        new: [u64; 2],
    ) -> Touch<[u64; 2]> {
        if let Some(found) = page.compare_exchange_pair(offset(va), old, new) {
            return Ok(found);
        }
        if !self.exclusive {
            return self.block(Why::Trap(Trap::Exclusive));
        }
        let at = [offset(va), offset(va) + 8];
        let found = at.map(|at| page.load::<u64>(at));
        if found == old {
            page.store(at[0], new[0]);
            page.store(at[1], new[1]);
        }
        Ok(found)
    }
}

/// LDAR, LDAPR and STLR. On a device they are plain accesses.
pub(crate) fn ordered(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    match op.aux & access::SIZE {
        0 => ordered_as::<u8>(core, bus, op),
        1 => ordered_as::<u16>(core, bus, op),
        2 => ordered_as::<u32>(core, bus, op),
        _ => ordered_as::<u64>(core, bus, op),
    }
}

fn ordered_as<T: Word>(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (va, store) = (core.r[op.base as usize], op.aux & access::STORE != 0);
    if !va.is_multiple_of(T::BYTES as u64) {
        let access = if store { Access::Write } else { Access::Read };
        return core.misaligned(va, access);
    }
    if store {
        core.store(bus, va, T::narrow(core.r[op.src as usize]))?;
        atomic::fence(Ordering::SeqCst);
    } else {
        core.r[op.dst as usize] = core.load::<T>(bus, va)?.widen();
    }
    Ok(())
}

/// LDADD and its like, and SWP.
pub(crate) fn atomic(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    match op.aux & access::SIZE {
        0 => atomic_as::<u8>(core, bus, op),
        1 => atomic_as::<u16>(core, bus, op),
        2 => atomic_as::<u32>(core, bus, op),
        _ => atomic_as::<u64>(core, bus, op),
    }
}

fn atomic_as<T: Word>(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let va = core.r[op.base as usize];
    let operand = T::narrow(core.r[op.src as usize]).widen();
    let page = core.atomic_page(bus, va, T::BYTES)?;
    let old = page.update_locked(offset(va), |old: T| {
        T::narrow(combine(op.form, T::BYTES, old.widen(), operand))
    });
    core.r[op.dst as usize] = old.widen();
    Ok(())
}

/// The value that the atomic operation with the fields o3 and opc stores: `a` is in memory. Both
/// operands are zero-extended from `bytes`.
fn combine(kind: u8, bytes: usize, a: u64, b: u64) -> u64 {
    let up = 64 - 8 * bytes as u32;
    let signed = |x: u64| (x << up) as i64;
    match kind {
        0 => a.wrapping_add(b),
        1 => a & !b,
        2 => a ^ b,
        3 => a | b,
        4 if signed(a) >= signed(b) => a,
        5 if signed(a) <= signed(b) => a,
        6 => a.max(b),
        7 => a.min(b),
        _ => b,
    }
}

/// CAS: `src` and `dst` are Rs, `imm` is Rt.
pub(crate) fn compare_and_swap(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    match op.aux & access::SIZE {
        0 => compare_and_swap_as::<u8>(core, bus, op),
        1 => compare_and_swap_as::<u16>(core, bus, op),
        2 => compare_and_swap_as::<u32>(core, bus, op),
        _ => compare_and_swap_as::<u64>(core, bus, op),
    }
}

fn compare_and_swap_as<T: Word>(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let va = core.r[op.base as usize];
    let wanted = T::narrow(core.r[op.src as usize]);
    let new = T::narrow(core.r[op.imm as u8 as usize]);
    let page = core.atomic_page(bus, va, T::BYTES)?;
    core.r[op.dst as usize] = exchange_if(page, offset(va), wanted, new).widen();
    Ok(())
}

/// Replaces the word at `offset` by `new`, if it is `old`, as one atomic access. Returns the old
/// word.
pub(crate) fn exchange_if<T: Word>(page: HostPage, offset: usize, old: T, new: T) -> T {
    page.update_locked(offset, |found| if found == old { new } else { found })
}

/// CASP: `src` and `dst` are Rs, `index` is Rs + 1; `imm` has Rt and Rt + 1 in its bytes.
pub(crate) fn compare_and_swap_pair(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let va = core.r[op.base as usize];
    let pair = |core: &Core, slots: [u8; 2]| slots.map(|slot| core.r[slot as usize]);
    let wanted = pair(core, [op.src, op.index]);
    let new = pair(core, [op.imm as u8, (op.imm >> 8) as u8]);
    let found = if op.aux & access::SIZE == 3 {
        let page = core.atomic_page(bus, va, 16)?;
        core.exchange_pair(page, va, wanted, new)?
    } else {
        let page = core.atomic_page(bus, va, 8)?;
        words(exchange_if(page, offset(va), joined(wanted), joined(new)))
    };
    core.r[op.dst as usize] = found[0];
    let second = if op.index == ZERO { SINK } else { op.index };
    core.r[second as usize] = found[1];
    Ok(())
}

/// Two 32-bit words in memory order.
pub(crate) const fn joined([low, high]: [u64; 2]) -> u64 {
    low & 0xffff_ffff | high << 32
}

/// The two words of [`joined`].
pub(crate) const fn words(both: u64) -> [u64; 2] {
    [both & 0xffff_ffff, both >> 32]
}
