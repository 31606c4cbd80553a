//! The memory map of the guest.
//!
//! ```text
//! 0x0000   boot data, as every image has it (lacuna_machine::Boot)
//! 0x10000  runtime: entry, stubs, the handler     0x14000 GDT, 0x15000 IDT, 0x16000 TSS
//! 0x18000  the good page tables, which the handler loads
//! 0x20000  a page a vCPU: its next sequence, its word for async page faults, its interrupt stack
//! 0x30000  counters: exceptions by vector, then acts by label
//! 0x34000  the sequences' entry states                         0x40000 the sequences
//! 0x60000  page tables that the guest changes at random
//! 0x80000  data, to the end of memory
//! ```
//! Below 8 GiB, guest-virtual addresses equal guest-physical ones, except for the alias of the
//! sequences at 1 GiB. CPL 3 executes the sequences by that alias.

/// First instruction of every vCPU.
pub const RUNTIME: u64 = 0x1_0000;
/// Global descriptor table.
pub const GDT: u64 = 0x1_4000;
/// Descriptors of the GDT and the IDT, for LGDT and LIDT.
pub const POINTERS: u64 = 0x1_4800;
/// Interrupt descriptor table.
pub const IDT: u64 = 0x1_5000;
/// A task state segment a vCPU, [`TSS_SIZE`] apart.
pub const TSS: u64 = 0x1_6000;
/// Distance of two task state segments.
pub const TSS_SIZE: u64 = 0x80;
/// Root of the good page tables.
pub const GOOD: u64 = 0x1_8000;
/// The per-vCPU pages.
pub const PER_CPU: u64 = 0x2_0000;
/// Offset in a per-vCPU page: index of the sequence that the vCPU executes.
pub const NEXT: i32 = 0;
/// Offset in a per-vCPU page: whether the guest never acknowledges async page faults.
pub const HOSTILE: i32 = 8;
/// Offset in a per-vCPU page: the area that async page faults use.
pub const AREA: i32 = 0x40;
/// Exceptions and interrupts by vector.
pub const VECTORS: u64 = 0x3_0000;
/// Sequences begun.
pub const BEGUN: u64 = 0x3_0800;
/// Completed acts, by label.
pub const ACTS: u64 = 0x3_1000;
/// The most labels.
pub const LABELS: usize = 512;
/// Entry states of the sequences.
pub const STATES: u64 = 0x3_4000;
/// Distance of two entry states.
pub const STATE_SIZE: u64 = 64;
/// The sequences.
pub const SEQUENCES: u64 = 0x4_0000;
/// Number of sequences; a power of two.
pub const SEQUENCE_COUNT: u64 = 128;
/// Bytes of each.
pub const SEQUENCE_SIZE: u64 = 512;
/// Address of the sequences for CPL 3.
pub const USER_SEQUENCES: u64 = 1 << 30;
/// Page tables that the guest changes at random: PML4, PDPT, PD and PTs, linked at first.
pub const PLAY: u64 = 0x6_0000;
/// The number of these tables.
pub const PLAY_TABLES: u64 = 8;
/// The addresses that they translate, in addition to all others.
pub const PLAY_VA: u64 = 1 << 39;
/// First byte of data.
pub const DATA: u64 = 0x8_0000;
/// An address without memory.
pub const HOLE: u64 = 0x2000_0000;
/// The local APIC's registers.
pub const APIC: u64 = 0xfee0_0000;
/// Last page of the lower half of linear addresses.
pub const LOW_EDGE: u64 = 0x7fff_ffff_f000;
/// First page of the upper half.
pub const HIGH_EDGE: u64 = 0xffff_8000_0000_0000;
/// The first address for slots besides the guest's main memory; there may be one every
/// [`EXTRA_STEP`].
pub const EXTRA: u64 = 16 << 20;
/// Distance of two such slots.
pub const EXTRA_STEP: u64 = 8 << 20;
/// The most slots besides the main memory.
pub const EXTRAS: u64 = 4;
/// Vector of page-ready interrupts.
pub const READY_VECTOR: u8 = 0xec;
/// Vector of the local APIC's timer, most of the time.
pub const TIMER_VECTOR: u8 = 0xe0;
/// INT n by which a sequence ends.
pub const END_VECTOR: u32 = 0x20;
/// INT n by which SYSCALL reaches the handler.
pub const SYSCALL_VECTOR: u32 = 0x21;
/// Code and data segments: CPL 0, then CPL 3 (SYSRET's order).
pub const KERNEL_CS: u16 = 0x10;
/// Its SS.
pub const KERNEL_SS: u16 = 0x18;
/// CPL 3's SS.
pub const USER_SS: u16 = 0x20 | 3;
/// CPL 3's CS.
pub const USER_CS: u16 = 0x28 | 3;
/// Selector of the first vCPU's task state segment.
pub const TSS_SELECTOR: u16 = 0x30;
