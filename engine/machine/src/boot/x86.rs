//! The boot data of x86 guests: Lacuna's 64-bit entry, with PVH's start information.
//!
//! ```text
//! 0x0000  unused: a guest's own page tables may leave it unmapped, so that null pointers fault
//! 0x1000  GDT: null, unused, 64-bit code (0x10), data (0x18)
//! 0x2000  hvm_start_info, then the memory map    (Xen: public/arch-x86/hvm/start_info.h)
//! 0x3000  command line, at most 4 KiB with its final zero
//! 0x4000  PML4, 0x5000 PDPT, 0x6000..0xa000 four page directories: they map the first 4 GiB to
//!         themselves by 2 MiB pages
//! image   at the addresses of its segments, at or above 64 KiB
//! ```
//! Guest memory lies below 3 GiB. The rest continues at 4 GiB. The hole between 3 and 4 GiB has the
//! local APIC.

use super::{BootError, Layout, Placement};
use crate::{Arch, GuestMemory, Image};
use lacuna_addr::{Gpa, PAGE_SIZE};

const GDT: u64 = 0x1000;
const START_INFO: u64 = 0x2000;
const COMMAND_LINE: u64 = 0x3000;
const PML4: u64 = 0x4000;
/// The memory from address 0 on ends here, or earlier. The rest continues at [`HIGH_START`].
pub(super) const LOW_END: u64 = 3 << 30;
pub(super) const HIGH_START: u64 = 4 << 30;
const START_MAGIC: u32 = 0x336e_c578;
const GDT_ENTRIES: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// Where the loader puts its data.
const PLACEMENT: Placement = Placement {
    arch: Arch::X86_64,
    boot_end: 0x1_0000,
};

/// The state in which every vCPU starts: 64-bit long mode, CPL0, interrupts off, the first 4 GiB
/// identity-mapped, flat segments; RBX = RSI = [`Boot::start_info`]. There is no stack. All vCPUs
/// start at once; a guest tells them apart by their APIC ids, from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Boot {
    /// RIP.
    pub entry: Gpa,
    /// RBX and RSI: `struct hvm_start_info`.
    pub start_info: Gpa,
    /// CR3.
    pub page_table: Gpa,
    /// GDTR base.
    pub gdt: Gpa,
    /// GDTR limit in bytes, inclusive.
    pub gdt_limit: u16,
    /// CS selector.
    pub code_selector: u16,
    /// SS, DS, ES selector.
    pub data_selector: u16,
}

impl Boot {
    /// Checks `image` against `layout`, then writes it and the boot data. If a check fails, nothing
    /// is written.
    ///
    /// # Errors
    /// The image is for another architecture, or it, the command line or the boot data does not
    /// fit.
    pub fn load(
        image: &Image<'_>,
        layout: &Layout,
        command_line: &str,
        memory: &impl GuestMemory,
    ) -> Result<Self, BootError> {
        PLACEMENT.load(image, layout, command_line, memory)?;
        let at = Gpa::truncate;
        memory.write(at(COMMAND_LINE), command_line.as_bytes())?;
        memory.write(at(GDT), &bytes_of(&GDT_ENTRIES))?;
        memory.write(at(START_INFO), &start_info(layout))?;
        for (index, table) in identity_map().iter().enumerate() {
            memory.write(at(PML4 + (index * PAGE_SIZE) as u64), table)?;
        }
        Ok(Self {
            entry: image.entry,
            start_info: at(START_INFO),
            page_table: at(PML4),
            gdt: at(GDT),
            gdt_limit: (GDT_ENTRIES.len() * 8 - 1) as u16,
            code_selector: 0x10,
            data_selector: 0x18,
        })
    }
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// PML4, PDPT and four page directories: present, writable, 2 MiB leaves.
fn identity_map() -> Vec<Vec<u8>> {
    const TABLE: u64 = 0b11;
    const LEAF: u64 = 0b1000_0011;
    let page = PAGE_SIZE as u64;
    let pdpt = PML4 + page;
    let directories = pdpt + page;
    let mut tables = vec![bytes_of(&[pdpt | TABLE])];
    tables.push(bytes_of(
        &[0, 1, 2, 3].map(|i| (directories + i * page) | TABLE),
    ));
    for gib in 0..4u64 {
        let leaves: Vec<u64> = (0..512).map(|i| (gib << 30) | (i << 21) | LEAF).collect();
        tables.push(bytes_of(&leaves));
    }
    tables
}

/// `hvm_start_info` version 1, followed by its memory map.
fn start_info(layout: &Layout) -> Vec<u8> {
    const SIZE: u64 = 56;
    const RAM: u32 = 1;
    let mut out = Vec::new();
    out.extend(START_MAGIC.to_le_bytes());
    out.extend(1u32.to_le_bytes()); // version
    out.extend([0u8; 8]); // flags, number of modules
    out.extend(0u64.to_le_bytes()); // module list
    out.extend(COMMAND_LINE.to_le_bytes());
    out.extend(0u64.to_le_bytes()); // RSDP: none
    out.extend((START_INFO + SIZE).to_le_bytes());
    out.extend((layout.ranges.len() as u32).to_le_bytes());
    out.extend(0u32.to_le_bytes());
    debug_assert_eq!(out.len() as u64, SIZE);
    for r in &layout.ranges {
        out.extend(r.start().gpa().get().to_le_bytes());
        out.extend((r.pages() * PAGE_SIZE as u64).to_le_bytes());
        out.extend(RAM.to_le_bytes());
        out.extend(0u32.to_le_bytes());
    }
    out
}
