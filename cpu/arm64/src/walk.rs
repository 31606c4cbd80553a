//! Stage 1: the walk of the guest's tables (VMSAv8-64, Arm ARM D8), permissions, access flag and
//! dirty state.
//!
//! ```text
//! va  55      47..39  38..30  29..21  20..12  11..0        4 KiB granule, 25 to 48 bits
//!     TTBR0/1 L0 ---> L1 ---> L2 ---> L3 ---> page         a block at L1 has 1 GiB, at L2 2 MiB
//!              WalkCache: va[55:21] -> L3 table + what the levels above it take away
//! ```
//! The cache is the processor's cache of intermediate entries (D8.14): most walks read one
//! descriptor. It holds frame numbers and no pointers, so stage-2 changes need not flush it. It is
//! flushed with the TLB. A walk that would end in a fault drops its cache entry and reads the
//! tables themselves.
//!
//! The walk reads tables as stage-2 reads. It asks for a table page with [`Access::Write`] only to
//! set the access flag or the dirty state, as FEAT_HAFDBS does (D8.4.5). A table without memory, or
//! one that cannot be written then, raises an external abort on the walk.
//!
//! Choices that the architecture allows: TG0 and TG1 are ignored, because there is only one
//! granule; TnSZ outside 16 to 39 faults; an IPS above 48 bits counts as 48; a failing access sets
//! no access flag; the contiguous bit is ignored. Memory types have no effect on accesses.
//!
//! While HA and HD are set, a clean leaf with DBM is writable for every rule: for WXN, and for a
//! kernel's fetch from a program's writable page. QEMU 7.2 allows that fetch.

use crate::state::{Exception, Trap};
use crate::sysreg::{System, sctlr, tcr};
use lacuna_addr::{Access, GPA_BITS, Gfn, Gpa, Level};
use lacuna_cpu::{Bus, HostPage, Mapping, Privilege, Stop, WalkCache};
use std::sync::atomic::Ordering;

mod descriptor {
    pub(super) const VALID: u64 = 1 << 0;
    /// A table at levels 0 to 2, a page at level 3.
    pub(super) const TABLE: u64 = 1 << 1;
    pub(super) const AP_USER: u64 = 1 << 6;
    pub(super) const AP_READ_ONLY: u64 = 1 << 7;
    pub(super) const AF: u64 = 1 << 10;
    pub(super) const NG: u64 = 1 << 11;
    pub(super) const DBM: u64 = 1 << 51;
    pub(super) const PXN: u64 = 1 << 53;
    pub(super) const UXN: u64 = 1 << 54;
    pub(super) const PXN_TABLE: u64 = 1 << 59;
    pub(super) const UXN_TABLE: u64 = 1 << 60;
    pub(super) const NO_USER_TABLE: u64 = 1 << 61;
    pub(super) const READ_ONLY_TABLE: u64 = 1 << 62;
    /// A table's limits for everything below it.
    pub(super) const TABLE_LIMITS: u64 = PXN_TABLE | UXN_TABLE | NO_USER_TABLE | READ_ONLY_TABLE;
    /// The frame in a descriptor: bits 47 to 12.
    pub(super) const FRAME: u64 = 0x0000_ffff_ffff_f000;
}
use descriptor::*;

/// Fault status codes (D17.2.37); the level is added.
pub(crate) mod fault {
    pub(crate) const ADDRESS_SIZE: u32 = 0x00;
    pub(crate) const TRANSLATION: u32 = 0x04;
    pub(crate) const ACCESS_FLAG: u32 = 0x08;
    pub(crate) const PERMISSION: u32 = 0x0c;
    pub(crate) const EXTERNAL_ON_WALK: u32 = 0x14;
}

/// After this many changes of descriptors by other vCPUs, a walk gives up and returns to the run
/// loop.
const MAX_RACES: usize = 16;
/// The smallest and the largest TnSZ.
const TSZ_MIN: u64 = 16;
const TSZ_MAX: u64 = 39;

/// The purpose of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// An instruction's access to memory, or its fetch.
    Access,
    /// Cache maintenance by address, or an AT instruction: PAN does not count, and no page becomes
    /// dirty.
    Probe,
}

/// An access to translate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    pub(crate) va: u64,
    pub(crate) access: Access,
    pub(crate) user: Privilege,
    pub(crate) purpose: Purpose,
}

/// A translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) mapping: Mapping,
    /// Loads are allowed too. If not, this is an execute-only page, or the kernel may only fetch
    /// from it (PAN). No TLB may hold such a page, because a TLB's entries are readable.
    pub(crate) readable: bool,
    /// The address has a tag in its highest byte: invalidations by address may miss a TLB entry.
    pub(crate) tagged: bool,
    /// AttrIndx: the index of the memory type in MAIR_EL1.
    pub(crate) attributes: u8,
    /// SH, two bits.
    pub(crate) shareability: u8,
}

/// Why an attempt to walk found no mapping.
#[derive(Debug)]
enum Miss {
    /// A fault, by its status code with the level.
    Fault(u32),
    /// Another processor changed a descriptor between the load here and its update.
    Raced,
    Stop(Stop),
}

impl From<Stop> for Miss {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

fn miss<T>(code: u32, level: u32) -> Result<T, Miss> {
    Err(Miss::Fault(code + level))
}

/// `va` without its tag: bits 63 to 56 become copies of bit 55 if TCR_EL1 ignores them (D8.9,
/// AddrTop).
#[inline]
pub(crate) const fn untagged(sys: &System, va: u64) -> u64 {
    let ignored = if va >> 55 & 1 == 0 {
        tcr::TBI0
    } else {
        tcr::TBI1
    };
    if sys.tcr & ignored == 0 {
        va
    } else {
        ((va << 8) as i64 >> 8) as u64
    }
}

/// Translates the address of `request`, sets the access flag of its leaf, and the leaf's dirty
/// state for a write.
///
/// # Errors
/// An abort with its fault status code, or the bus's stop for a table page. If other vCPUs keep
/// changing the tables, [`Stop::Again`].
#[inline]
pub(crate) fn walk<B: Bus>(
    sys: &System,
    cache: &mut WalkCache,
    bus: &mut B,
    request: Request,
) -> Result<Found, Trap> {
    let va = untagged(sys, request.va);
    let abort = |code| Err(abort(request, code).into());
    if sys.sctlr & sctlr::M == 0 {
        return flat(request, va).map_or_else(|| abort(fault::ADDRESS_SIZE), Ok);
    }
    let root = match Root::of(sys, va) {
        Ok(root) => root,
        Err(code) => return abort(code),
    };
    let mut walker = Walker {
        sys,
        cache,
        bus,
        va,
        root,
        request,
    };
    if let Some(table) = walker.cache.find(va) {
        match walker.last_level(table) {
            Ok(found) => return Ok(found),
            Err(Miss::Stop(stop)) => return Err(stop.into()),
            Err(Miss::Fault(_) | Miss::Raced) => {}
        }
    }
    walker.full_walk()
}

/// The exception of a failed access.
pub(crate) fn abort(request: Request, code: u32) -> Exception {
    match request.access {
        Access::Fetch => Exception::instruction_abort(request.va, code),
        _ => Exception::data_abort(request.va, code, request.access),
    }
}

/// Without stage 1, an address is a physical address.
fn flat(request: Request, va: u64) -> Option<Found> {
    Some(Found {
        mapping: Mapping {
            gfn: Gpa::new(va)?.gfn(),
            writable: true,
            user: false,
            exec: true,
            global: true,
            level: Level::L4K,
        },
        readable: true,
        tagged: va != request.va,
        attributes: 0,
        shareability: 2,
    })
}

/// The beginning of a walk.
#[derive(Clone, Copy)]
struct Root {
    /// The first table's address.
    table: u64,
    /// The lowest address bit that indexes it.
    shift: u32,
    /// Bits of a physical address.
    output: u32,
}

impl Root {
    /// The first table for the untagged `va`. `Err` is a status code.
    #[inline]
    fn of(sys: &System, va: u64) -> Result<Self, u32> {
        let upper = (va as i64) < 0;
        let (tsz, disabled, ttbr) = if upper {
            (sys.tcr >> 16 & 0x3f, tcr::EPD1, sys.ttbr1)
        } else {
            (sys.tcr & 0x3f, tcr::EPD0, sys.ttbr0)
        };
        if !(TSZ_MIN..=TSZ_MAX).contains(&tsz) || sys.tcr & disabled != 0 {
            return Err(fault::TRANSLATION);
        }
        let size = 64 - tsz as u32;
        if (va as i64) >> size != -i64::from(upper) {
            return Err(fault::TRANSLATION);
        }
        // Each level has 9 bits of the address; the first one has the rest.
        let shift = 12 + (size - 13) / 9 * 9;
        let below = 1_u64 << (size - shift + 3);
        let output = output_bits(sys.tcr);
        let table = ttbr & 0xffff_ffff_fffe & !(below - 1);
        if table >> output != 0 {
            return Err(fault::ADDRESS_SIZE);
        }
        Ok(Self {
            table,
            shift,
            output,
        })
    }
}

/// Bits of a physical address: TCR_EL1.IPS, at most the processor's.
fn output_bits(tcr: u64) -> u32 {
    match tcr >> 32 & 7 {
        0 => 32,
        1 => 36,
        2 => 40,
        3 => 42,
        4 => 44,
        _ => GPA_BITS,
    }
}

/// One walk's inputs.
struct Walker<'a, B> {
    sys: &'a System,
    cache: &'a mut WalkCache,
    bus: &'a mut B,
    /// Without a tag.
    va: u64,
    root: Root,
    request: Request,
}

impl<B: Bus> Walker<'_, B> {
    #[cold]
    fn full_walk(&mut self) -> Result<Found, Trap> {
        self.cache.drop_one(self.va);
        for _ in 0..MAX_RACES {
            match self.upper_levels() {
                Ok(found) => return Ok(found),
                Err(Miss::Raced) => {}
                Err(Miss::Stop(stop)) => return Err(stop.into()),
                Err(Miss::Fault(code)) => return Err(abort(self.request, code).into()),
            }
        }
        Err(Stop::Again.into())
    }

    fn upper_levels(&mut self) -> Result<Found, Miss> {
        let mut table = self.root.table;
        let mut shift = self.root.shift;
        while shift > 12 {
            let (place, entry) = self.load(table, shift)?;
            if entry & TABLE == 0 {
                // There are no blocks of 512 GiB.
                return match shift {
                    39 => miss(fault::TRANSLATION, 0),
                    _ => self.leaf(place, entry, table),
                };
            }
            self.check_output(entry, shift)?;
            table = entry & FRAME | (entry | table) & TABLE_LIMITS;
            shift -= 9;
        }
        let found = self.last_level(table)?;
        self.cache.fill(self.va, table);
        Ok(found)
    }

    /// Level 3; `table` is its table, and the limits of the levels above.
    #[inline(always)]
    fn last_level(&mut self, table: u64) -> Result<Found, Miss> {
        let (place, entry) = self.load(table, 12)?;
        if entry & TABLE == 0 {
            return miss(fault::TRANSLATION, 3);
        }
        self.leaf(place, entry, table)
    }

    /// The valid descriptor for this level in `table`, and its place.
    #[inline(always)]
    fn load(&mut self, table: u64, shift: u32) -> Result<(DescriptorPlace, u64), Miss> {
        // The first table may be smaller than a page, and begin inside one.
        let index = match shift == self.root.shift {
            true => self.va << self.unused_bits() >> self.unused_bits() >> shift,
            false => self.va >> shift & 511,
        };
        let at = Gpa::truncate((table & 0xffff_ffff_fff8) + index * 8);
        let gfn = at.gfn();
        let page = match self.bus.page(gfn, Access::Read) {
            Ok(page) => page,
            Err(Stop::Mmio(_)) => return miss(fault::EXTERNAL_ON_WALK, level(shift)),
            Err(stop) => return Err(stop.into()),
        };
        let offset = at.offset();
        let entry = page.word(offset).load(Ordering::Acquire);
        if entry & VALID == 0 {
            return miss(fault::TRANSLATION, level(shift));
        }
        let place = DescriptorPlace {
            page,
            gfn,
            offset,
            shift,
        };
        Ok((place, entry))
    }

    /// Address bits above the translated ones.
    fn unused_bits(&self) -> u32 {
        let tsz = if (self.va as i64) < 0 {
            self.sys.tcr >> 16
        } else {
            self.sys.tcr
        };
        (tsz & 0x3f) as u32
    }

    #[inline(always)]
    fn check_output(&self, entry: u64, shift: u32) -> Result<(), Miss> {
        if (entry & FRAME) >> self.root.output != 0 {
            return miss(fault::ADDRESS_SIZE, level(shift));
        }
        Ok(())
    }

    /// The leaf `entry`, below the limits in `table`.
    #[inline(always)]
    fn leaf(&mut self, place: DescriptorPlace, entry: u64, table: u64) -> Result<Found, Miss> {
        let shift = place.shift;
        self.check_output(entry, shift)?;
        let updates = self.sys.tcr & tcr::HA != 0;
        if entry & AF == 0 && !updates {
            return miss(fault::ACCESS_FLAG, level(shift));
        }
        // A read-only leaf with DBM is writable: a write makes it dirty.
        let dirty_by_write = updates
            && self.sys.tcr & tcr::HD != 0
            && entry & (DBM | AP_READ_ONLY) == DBM | AP_READ_ONLY;
        let rights = self.rights(entry, table, dirty_by_write);
        let allowed = match self.request.access {
            Access::Read => rights.read,
            Access::Write => rights.write,
            Access::Fetch => rights.fetch,
        };
        if !allowed {
            return miss(fault::PERMISSION, level(shift));
        }
        let mut new = entry | AF;
        if dirty_by_write
            && self.request.access.is_write()
            && self.request.purpose == Purpose::Access
        {
            new &= !AP_READ_ONLY;
        }
        if new != entry {
            self.update(place, entry, new)?;
        }
        let below = (1 << shift) - 1;
        let address = (entry & FRAME & !below) | (self.va & below);
        Ok(Found {
            mapping: Mapping {
                gfn: Gpa::truncate(address).gfn(),
                writable: rights.write && new & AP_READ_ONLY == 0,
                user: rights.user,
                exec: rights.fetch,
                global: entry & NG == 0,
                level: match shift {
                    12 => Level::L4K,
                    21 => Level::L2M,
                    _ => Level::L1G,
                },
            },
            readable: rights.read,
            tagged: self.va != self.request.va,
            attributes: (entry >> 2 & 7) as u8,
            shareability: (entry >> 8 & 3) as u8,
        })
    }

    /// The rights of the request's privilege at a leaf (D8.4.1 to D8.4.3).
    #[inline(always)]
    fn rights(&self, entry: u64, table: u64, dirty_by_write: bool) -> Rights {
        let user = entry & AP_USER != 0 && table & NO_USER_TABLE == 0;
        let writable =
            (entry & AP_READ_ONLY == 0 || dirty_by_write) && table & READ_ONLY_TABLE == 0;
        let wxn = self.sys.sctlr & sctlr::WXN != 0;
        match self.request.user {
            Privilege::User => Rights {
                user,
                read: user,
                write: user && writable,
                fetch: entry & UXN == 0 && table & UXN_TABLE == 0 && !(user && writable && wxn),
            },
            Privilege::Supervisor => {
                let denied = user && self.sys.pan && self.request.purpose == Purpose::Access;
                Rights {
                    user,
                    read: !denied,
                    write: writable && !denied,
                    // The kernel never executes code that programs may write.
                    fetch: entry & PXN == 0
                        && table & PXN_TABLE == 0
                        && !(writable && (wxn || user)),
                }
            }
        }
    }

    /// Replaces the descriptor `old` by `new`.
    #[cold]
    fn update(&mut self, place: DescriptorPlace, old: u64, new: u64) -> Result<(), Miss> {
        let mut page = place.page;
        if !page.is_writable() {
            page = match self.bus.page(place.gfn, Access::Write) {
                Ok(page) => page,
                Err(Stop::Mmio(_)) => {
                    return miss(fault::EXTERNAL_ON_WALK, level(place.shift));
                }
                Err(stop) => return Err(stop.into()),
            };
        }
        page.word(place.offset)
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            .map_err(|_| Miss::Raced)?;
        if page.is_write_tracked() {
            self.cache.note_written_code();
            self.bus.code_written(place.gfn);
        }
        Ok(())
    }
}

/// A descriptor's place.
#[derive(Clone, Copy)]
struct DescriptorPlace {
    page: HostPage,
    gfn: Gfn,
    offset: usize,
    shift: u32,
}

/// The rights of a leaf.
struct Rights {
    /// Programs may access it.
    user: bool,
    read: bool,
    write: bool,
    fetch: bool,
}

/// The level of a descriptor that translates the bits from `shift` on.
const fn level(shift: u32) -> u32 {
    3 - (shift - 12) / 9
}

#[cfg(test)]
mod tests;
