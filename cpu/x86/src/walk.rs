//! The stage-1 page walk: four-level long-mode paging (SDM vol 3 4.5), permissions, A and D bits.
//!
//! ```text
//! va  47..39  38..30  29..21  20..12  11..0
//!     PML4E -> PDPTE -> PDE -> PTE -> page        PDPTE.PS: a 1 GiB leaf, PDE.PS: a 2 MiB leaf
//!              WalkCache: va[55:21] -> PT page + rights of the three levels above it
//! ```
//! The cache is the processor's paging-structure cache (SDM vol 3 4.10.3): most walks read one
//! entry. It holds frame numbers and no pointers, so stage-2 changes need not flush it. It is
//! flushed when the TLB is flushed for the guest (CR0, CR3, CR4, EFER, INVLPG). As on hardware, a
//! walk that would end in a fault drops its cache entry and reads the tables themselves.
//!
//! The walk asks for table pages with [`Access::Write`], as hardware with EPT A/D bits does. A
//! table without memory reads as all ones, and faults because of its reserved bits. A table in a
//! read-only slot (firmware keeps its first page tables in ROM) is read, and its A and D bits stay
//! unchanged: the walk continues as if it had set them. KVM's walker does the same (Linux,
//! arch/x86/kvm/mmu/paging_tmpl.h, `update_accessed_dirty_bits`).

use crate::state::bits::{CR0_WP, CR4_PGE, CR4_SMEP, EFER_NXE};
use crate::state::{Exception, System, Trap, is_canonical};
use lacuna_addr::{Access, Gfn, Gpa, Level};
use lacuna_cpu::{Bus, HostPage, Mapping, Stop, WalkCache};
use std::sync::atomic::Ordering;

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;
/// The frame in an entry: bits 47 to 12.
const FRAME: u64 = 0x0000_ffff_ffff_f000;
/// Bits above the 48 physical address bits of CPUID 0x80000008.
const RESERVED_HIGH: u64 = 0x000f_0000_0000_0000;
/// The rights of an entry. NX is kept inverted, so that AND combines the rights of all levels.
const RIGHTS: u64 = WRITE | USER | NO_EXECUTE;

/// After this many changes of entries by other vCPUs, a walk gives up and returns to the run loop.
const MAX_RACES: usize = 16;

/// The privilege of a memory access: `Supervisor` at CPL 0 to 2 and for implicit accesses to
/// descriptor tables and the TSS, `User` at CPL 3.
pub(crate) use lacuna_cpu::Privilege as User;

/// The privilege of an explicit access at `cpl`.
#[inline(always)]
pub(crate) const fn at_cpl(cpl: u8) -> User {
    if cpl == 3 {
        User::User
    } else {
        User::Supervisor
    }
}

/// Why an attempt to walk found no mapping.
enum Miss {
    /// #PF, with P or RSVD bits of the error code.
    Fault(u32),
    /// Another processor changed an entry between the load here and the update of A or D.
    Raced,
    Stop(Stop),
}

impl From<Stop> for Miss {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

const FAULT_ABSENT: Miss = Miss::Fault(0);
const FAULT_PROTECTION: Miss = Miss::Fault(1);
const FAULT_RESERVED: Miss = Miss::Fault(1 | 8);

/// Translates `va` for `access` by `user`, setting A on every level used and D on the leaf of a
/// write.
///
/// # Errors
/// #PF with its error code, #GP(0) for a non-canonical address, or the bus's stop for a table page.
/// If other vCPUs keep changing the tables, [`Stop::Again`].
#[inline]
pub(crate) fn walk<B: Bus>(
    sys: &System,
    cache: &mut WalkCache,
    bus: &mut B,
    va: u64,
    access: Access,
    user: User,
) -> Result<Mapping, Trap> {
    // The cache's tags do not contain bits 63 to 56.
    if !is_canonical(va) {
        return Err(Exception::GP0.into());
    }
    let mut walker = Walker {
        sys,
        cache,
        bus,
        va,
        access,
        user,
    };
    if let Some(table) = walker.cache.find(va) {
        match walker.page_table(table) {
            Ok(mapping) => return Ok(mapping),
            Err(Miss::Stop(stop)) => return Err(stop.into()),
            Err(Miss::Fault(_) | Miss::Raced) => {}
        }
    }
    walker.full_walk()
}

/// One walk's inputs.
struct Walker<'a, B> {
    sys: &'a System,
    cache: &'a mut WalkCache,
    bus: &'a mut B,
    va: u64,
    access: Access,
    user: User,
}

impl<B: Bus> Walker<'_, B> {
    #[cold]
    fn full_walk(&mut self) -> Result<Mapping, Trap> {
        self.cache.drop_one(self.va);
        for _ in 0..MAX_RACES {
            match self.upper_levels() {
                Ok(mapping) => return Ok(mapping),
                Err(Miss::Raced) => {}
                Err(Miss::Stop(stop)) => return Err(stop.into()),
                Err(Miss::Fault(error)) => {
                    let error = error | self.error_bits();
                    return Err(Exception::page_fault(error, self.va).into());
                }
            }
        }
        Err(Stop::Again.into())
    }

    fn upper_levels(&mut self) -> Result<Mapping, Miss> {
        let mut table = (self.sys.cr3 & FRAME) | RIGHTS;
        for shift in [39, 30, 21] {
            let (page, gfn, entry) = self.load(table, shift)?;
            let rights = entry & table;
            if entry_is_leaf(entry, shift) {
                return self.leaf(page, gfn, shift, entry, rights);
            }
            self.update(page, gfn, shift, entry, ACCESSED)?;
            table = entry & FRAME | rights & RIGHTS;
        }
        let mapping = self.page_table(table)?;
        self.cache.fill(self.va, table);
        Ok(mapping)
    }

    /// The last level; `table` has the PT page and the rights so far.
    #[inline(always)]
    fn page_table(&mut self, table: u64) -> Result<Mapping, Miss> {
        let (page, gfn, entry) = self.load(table, 12)?;
        self.leaf(page, gfn, 12, entry, entry & table)
    }

    /// The present, well-formed entry for this level of the table page in `table`, NX inverted.
    #[inline(always)]
    fn load(&mut self, table: u64, shift: u32) -> Result<(HostPage, Gfn, u64), Miss> {
        let gfn = Gpa::truncate(table & FRAME).gfn();
        let page = match self.bus.page(gfn, Access::Write) {
            Ok(page) => page,
            Err(Stop::Mmio(_)) => self.read_only_table(gfn)?,
            Err(stop) => return Err(stop.into()),
        };
        let entry = page.word(offset(self.va, shift)).load(Ordering::Acquire);
        if entry & PRESENT == 0 {
            return Err(FAULT_ABSENT);
        }
        if entry & self.reserved(entry, shift) != 0 {
            return Err(FAULT_RESERVED);
        }
        Ok((page, gfn, entry ^ NO_EXECUTE))
    }

    /// The read-only table page `gfn`.
    #[cold]
    fn read_only_table(&mut self, gfn: Gfn) -> Result<HostPage, Miss> {
        match self.bus.page(gfn, Access::Read) {
            Ok(page) => Ok(page),
            Err(Stop::Mmio(_)) => Err(FAULT_RESERVED),
            Err(stop) => Err(stop.into()),
        }
    }

    #[inline(always)]
    fn reserved(&self, entry: u64, shift: u32) -> u64 {
        let nx = if self.sys.efer & EFER_NXE == 0 {
            NO_EXECUTE
        } else {
            0
        };
        let level = match shift {
            39 => LARGE,
            // Bit 12 of a large leaf is its PAT bit.
            30 | 21 if entry & LARGE != 0 => ((1 << shift) - 1) & !0x1fff,
            _ => 0,
        };
        RESERVED_HIGH | nx | level
    }

    #[inline(always)]
    fn leaf(
        &mut self,
        page: HostPage,
        gfn: Gfn,
        shift: u32,
        entry: u64,
        rights: u64,
    ) -> Result<Mapping, Miss> {
        let user_page = rights & USER != 0;
        let (may_write, may_fetch) = match self.user {
            User::User => (rights & WRITE != 0, rights & NO_EXECUTE != 0),
            User::Supervisor => (
                rights & WRITE != 0 || self.sys.cr0 & CR0_WP == 0,
                rights & NO_EXECUTE != 0 && !(user_page && self.sys.cr4 & CR4_SMEP != 0),
            ),
        };
        let allowed = match self.access {
            Access::Read => true,
            Access::Write => may_write,
            Access::Fetch => may_fetch,
        };
        if !allowed || (self.user == User::User && !user_page) {
            return Err(FAULT_PROTECTION);
        }
        let set = if self.access.is_write() {
            ACCESSED | DIRTY
        } else {
            ACCESSED
        };
        self.update(page, gfn, shift, entry, set)?;
        let below = (1 << shift) - 1;
        let address = (entry & FRAME & !below) | (self.va & below);
        Ok(Mapping {
            gfn: Gpa::truncate(address).gfn(),
            writable: may_write && (entry | set) & DIRTY != 0,
            user: user_page,
            exec: may_fetch,
            global: entry & GLOBAL != 0 && self.sys.cr4 & CR4_PGE != 0,
            level: match shift {
                12 => Level::L4K,
                21 => Level::L2M,
                _ => Level::L1G,
            },
        })
    }

    /// Sets `bits` in the entry, loaded as `entry` (NX inverted), if the table is writable.
    #[inline(always)]
    fn update(
        &mut self,
        page: HostPage,
        gfn: Gfn,
        shift: u32,
        entry: u64,
        bits: u64,
    ) -> Result<(), Miss> {
        if entry & bits == bits || !page.is_writable() {
            return Ok(());
        }
        let old = entry ^ NO_EXECUTE;
        page.word(offset(self.va, shift))
            .compare_exchange(old, old | bits, Ordering::AcqRel, Ordering::Acquire)
            .map_err(|_| Miss::Raced)?;
        if page.is_write_tracked() {
            self.cache.note_written_code();
            self.bus.code_written(gfn);
        }
        Ok(())
    }

    /// The error-code bits of the access itself: W/R, U/S, I/D.
    fn error_bits(&self) -> u32 {
        let fetch_counts = self.sys.efer & EFER_NXE != 0 || self.sys.cr4 & CR4_SMEP != 0;
        let kind = match self.access {
            Access::Read => 0,
            Access::Write => 1 << 1,
            Access::Fetch => u32::from(fetch_counts) << 4,
        };
        kind | u32::from(self.user == User::User) << 2
    }
}

/// The entry's offset in its table page.
#[inline(always)]
const fn offset(va: u64, shift: u32) -> usize {
    ((va >> shift) & 511) as usize * 8
}

#[inline(always)]
const fn entry_is_leaf(entry: u64, shift: u32) -> bool {
    shift < 39 && entry & LARGE != 0
}

#[cfg(test)]
mod tests;
