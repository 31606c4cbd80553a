//! The register pages of the distributor and the redistributors (IHI 0069, 12.9 and 12.11).
//!
//! ```text
//! DISTRIBUTOR     64 KiB           GICD_*
//! REDISTRIBUTORS  128 KiB a vCPU   64 KiB of GICR_* control, 64 KiB for its INTIDs 0 to 31
//!   two regions: 123 vCPUs fit between the distributor and the machine's other devices
//! ```
//! Accesses have 4 bytes, 1 byte for priorities, and 8 or 4 bytes for the 64-bit registers. Every
//! other access, and every register that is not here, reads as zero and ignores writes. The
//! specification demands this of reserved registers (IHI 0069, 12.1.3).

use super::bank::{Property, locate};
use super::fabric::{Concerns, Gic, GicState, ROUTE_MASK, SPI_BANKS, affinity};
use lacuna_addr::Gpa;

/// The distributor's page of 64 KiB, at the address of QEMU's `virt` machine.
pub const DISTRIBUTOR: Gpa = Gpa::truncate(0x0800_0000);
/// The first redistributor's pages. The next one's follow after [`REDISTRIBUTOR_STRIDE`].
pub const REDISTRIBUTORS: Gpa = Gpa::truncate(0x080a_0000);
/// The pages of redistributor [`FIRST_REGION_VCPUS`], which begins a second region.
pub const REDISTRIBUTORS_2: Gpa = Gpa::truncate(0x3e00_0000);
/// Bytes of a page of registers.
pub const REGISTER_PAGE: u64 = 0x1_0000;
/// Bytes between two redistributors.
pub const REDISTRIBUTOR_STRIDE: u64 = 2 * REGISTER_PAGE;
/// The redistributors of the first region: as many as fit below the machine's other devices.
pub const FIRST_REGION_VCPUS: usize =
    ((0x0900_0000 - REDISTRIBUTORS.get()) / REDISTRIBUTOR_STRIDE) as usize;
/// The most redistributors: the second region ends where memory begins.
pub const MAX_VCPUS: usize =
    FIRST_REGION_VCPUS + ((0x4000_0000 - REDISTRIBUTORS_2.get()) / REDISTRIBUTOR_STRIDE) as usize;

/// In both kinds of page: the architecture's version is 3.
const PIDR2: u32 = 0xffe8;
const PIDR2_VALUE: u32 = 0x38;
/// The product is `L`; the implementer has no JEP106 code.
const IIDR_VALUE: u32 = 0x4c00_0000;

mod gicd {
    pub(super) const CTLR: u32 = 0x0000;
    pub(super) const TYPER: u32 = 0x0004;
    pub(super) const IIDR: u32 = 0x0008;
    pub(super) const IROUTER: u32 = 0x6000;
    pub(super) const IROUTER_END: u32 = 0x8000;

    /// CTLR: affinity routing is always enabled, and there is one security state.
    pub(super) const CTLR_ARE: u32 = 1 << 4;
    pub(super) const CTLR_DS: u32 = 1 << 6;
}

mod gicr {
    pub(super) const IIDR: u32 = 0x0004;
    pub(super) const TYPER: u32 = 0x0008;
    pub(super) const TYPER_HIGH: u32 = 0x000c;
    pub(super) const WAKER: u32 = 0x0014;

    pub(super) const TYPER_LAST: u32 = 1 << 4;
    pub(super) const WAKER_PROCESSOR_SLEEP: u32 = 1 << 1;
    pub(super) const WAKER_CHILDREN_ASLEEP: u32 = 1 << 2;
}

/// A page of registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    Distributor,
    /// GICR control of a vCPU.
    Control(usize),
    /// GICR for INTIDs 0 to 31 of a vCPU.
    Private(usize),
}

/// One access: the aligned 32-bit register, and its accessed bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    page: Page,
    offset: u32,
    mask: u32,
    shift: u32,
}

impl Gic {
    /// Whether an access of a vCPU to `gpa` belongs to [`Gic::mmio_read`] or [`Gic::mmio_write`].
    pub fn claims(&self, gpa: Gpa) -> bool {
        self.page(gpa).is_some()
    }

    /// A load of `size` bytes by any vCPU.
    pub fn mmio_read(&self, gpa: Gpa, size: u8) -> u64 {
        let Some((page, offset)) = self.page(gpa) else {
            return 0;
        };
        let word = |part: Part| u64::from(self.read_part(part));
        match (size, is_64_bit(page, offset)) {
            (8, true) if offset % 8 == 0 => {
                let [low, high] = halves(page, offset);
                word(low) | word(high) << 32
            }
            _ => part(page, offset, size).map_or(0, word),
        }
    }

    /// A store of `size` bytes by vCPU `by`.
    pub fn mmio_write(&self, by: usize, gpa: Gpa, size: u8, value: u64) {
        let Some((page, offset)) = self.page(gpa) else {
            return;
        };
        let write = |part, value| {
            self.change(Some(by), |shared| write_part(shared, part, value));
        };
        match (size, is_64_bit(page, offset)) {
            (8, true) if offset % 8 == 0 => {
                let [low, high] = halves(page, offset);
                self.change(Some(by), |shared| {
                    write_part(shared, low, value as u32);
                    write_part(shared, high, (value >> 32) as u32)
                });
            }
            _ => {
                if let Some(part) = part(page, offset, size) {
                    write(part, (value as u32) << part.shift);
                }
            }
        }
    }

    fn page(&self, gpa: Gpa) -> Option<(Page, u32)> {
        let gpa = gpa.get();
        let offset = (gpa % REGISTER_PAGE) as u32;
        if gpa & !(REGISTER_PAGE - 1) == DISTRIBUTOR.get() {
            return Some((Page::Distributor, offset));
        }
        let (start, first, end) = match gpa < REDISTRIBUTORS_2.get() {
            true => (REDISTRIBUTORS, 0, FIRST_REGION_VCPUS),
            false => (REDISTRIBUTORS_2, FIRST_REGION_VCPUS, MAX_VCPUS),
        };
        let from = gpa.checked_sub(start.get())?;
        let index = first + usize::try_from(from / REDISTRIBUTOR_STRIDE).ok()?;
        let page = match from % REDISTRIBUTOR_STRIDE < REGISTER_PAGE {
            true => Page::Control(index),
            false => Page::Private(index),
        };
        (index < end.min(self.vcpus())).then_some((page, offset))
    }

    fn read_part(&self, part: Part) -> u32 {
        let shared = self.lock();
        let value = match part.page {
            Page::Distributor => read_distributor(&shared, part.offset),
            Page::Control(index) => read_control(&shared, index, part.offset),
            Page::Private(index) => match locate(part.offset) {
                Some((0, property)) => shared.redistributors[index].private.read(property),
                _ => 0,
            },
        };
        (value & part.mask) >> part.shift
    }
}

/// The halves of a 64-bit register.
fn halves(page: Page, offset: u32) -> [Part; 2] {
    [offset, offset + 4].map(|offset| Part {
        page,
        offset,
        mask: u32::MAX,
        shift: 0,
    })
}

/// An access of 4 bytes, or of 1 byte to a priority.
fn part(page: Page, offset: u32, size: u8) -> Option<Part> {
    let shift = 8 * (offset % 4);
    let priority = matches!(locate(offset), Some((_, Property::Priority(_))));
    let mask = match size {
        4 if shift == 0 => u32::MAX,
        1 if priority && !matches!(page, Page::Control(_)) => 0xff << shift,
        _ => return None,
    };
    Some(Part {
        page,
        offset: offset & !3,
        mask,
        shift,
    })
}

fn is_64_bit(page: Page, offset: u32) -> bool {
    match page {
        Page::Distributor => (gicd::IROUTER..gicd::IROUTER_END).contains(&offset),
        Page::Control(_) => offset & !7 == gicr::TYPER,
        Page::Private(_) => false,
    }
}

/// The bank, interrupt and half (0 or 1) of an `IROUTER<n>` register's word.
fn router(offset: u32) -> Option<(usize, usize, u32)> {
    if !(gicd::IROUTER..gicd::IROUTER_END).contains(&offset) {
        return None;
    }
    let intid = (offset - gicd::IROUTER) / 8;
    let bank = (intid / 32).checked_sub(1)? as usize;
    (bank < SPI_BANKS).then_some((bank, (intid % 32) as usize, offset / 4 % 2))
}

/// The distributor's bank of SPIs and the property behind `offset`. Bank 0 is in the
/// redistributors.
fn spi_bank(offset: u32) -> Option<(usize, Property)> {
    let (bank, property) = locate(offset)?;
    let bank = bank.checked_sub(1)? as usize;
    (bank < SPI_BANKS).then_some((bank, property))
}

fn read_distributor(shared: &GicState, offset: u32) -> u32 {
    let distributor = &shared.distributor;
    match offset {
        gicd::CTLR => {
            let [zero, one] = distributor.enabled.map(u32::from);
            zero | one << 1 | gicd::CTLR_ARE | gicd::CTLR_DS
        }
        // 10 bits of INTID; no LPIs, no message-based SPIs, no 1-of-N, no range selector.
        gicd::TYPER => SPI_BANKS as u32 | 9 << 19 | 1 << 25,
        gicd::IIDR => IIDR_VALUE,
        PIDR2 => PIDR2_VALUE,
        _ => {
            if let Some((bank, property)) = spi_bank(offset) {
                return distributor.spis[bank].read(property);
            }
            router(offset).map_or(0, |(bank, bit, half)| {
                (distributor.routes[bank][bit] >> (32 * half)) as u32
            })
        }
    }
}

fn read_control(shared: &GicState, index: usize, offset: u32) -> u32 {
    let ends = [FIRST_REGION_VCPUS, MAX_VCPUS, shared.redistributors.len()];
    let last = ends.contains(&(index + 1));
    match offset {
        gicr::IIDR => IIDR_VALUE,
        gicr::TYPER => {
            let last = if last { gicr::TYPER_LAST } else { 0 };
            (index as u32 & 0xffff) << 8 | last
        }
        gicr::TYPER_HIGH => affinity(index),
        gicr::WAKER if shared.redistributors[index].asleep => {
            gicr::WAKER_PROCESSOR_SLEEP | gicr::WAKER_CHILDREN_ASLEEP
        }
        PIDR2 => PIDR2_VALUE,
        _ => 0,
    }
}

fn write_part(shared: &mut GicState, part: Part, value: u32) -> Concerns {
    match part.page {
        Page::Distributor => write_distributor(shared, part, value),
        Page::Control(index) if part.offset == gicr::WAKER => {
            shared.redistributors[index].asleep = value & gicr::WAKER_PROCESSOR_SLEEP != 0;
            Concerns::One(index)
        }
        Page::Control(_) => Concerns::None,
        Page::Private(index) => match locate(part.offset) {
            Some((0, property)) => {
                // No private interrupt can change its trigger: PPIs are level-sensitive here.
                let private = &mut shared.redistributors[index].private;
                private.write(property, value, part.mask, u32::MAX);
                Concerns::One(index)
            }
            _ => Concerns::None,
        },
    }
}

fn write_distributor(shared: &mut GicState, part: Part, value: u32) -> Concerns {
    let distributor = &mut shared.distributor;
    if part.offset == gicd::CTLR {
        distributor.enabled = [value & 1 != 0, value & 2 != 0];
        return Concerns::All;
    }
    if let Some((bank, property)) = spi_bank(part.offset) {
        distributor.spis[bank].write(property, value, part.mask, 0);
        return Concerns::All;
    }
    let Some((bank, bit, half)) = router(part.offset) else {
        return Concerns::None;
    };
    let route = &mut distributor.routes[bank][bit];
    let kept = *route & !(u64::from(u32::MAX) << (32 * half));
    *route = (kept | u64::from(value) << (32 * half)) & ROUTE_MASK;
    Concerns::All
}
