//! A guest of a dozen instructions without a kernel. It writes one byte to each of some pages, in a
//! pseudo-random order, and exits through a port. Then the host harvests.
//!
//! The order is a linear congruential generator's, of full period: every page comes once, and
//! successive pages are rarely neighbours. The guest has page tables of its own, in which every
//! entry has A and D, and loads them before the first write.

use super::churn::{Counted, DIRTIED, HARVESTS, counted};
use crate::experiment::LabError;
use crate::fixture::{boot_code, time_to_port};
use crate::players::reap;
use lacuna::dirty::DetectionChoice as _;
use lacuna::dirty::{Delivery, Detection, Logging};
use lacuna::memory::SlotId;
use lacuna::soft::{Vcpu, Vm, VmBuilder};
use lacuna::{DirtyTracking as _, Exit, MemorySlots as _, PAGE_SIZE, Vcpu as _};
use lacuna_addr::Level;
use std::sync::Arc;

const CODE: u64 = 0x10_0000;
/// The guest's page tables: one of each upper level, the directories, then one for each 2 MiB.
const TABLES: u64 = 0x20_0000;
/// The memory after the tables.
pub const AREA: u64 = 0x40_0000;
const BLOCK: u64 = 0x20_0000;

/// What follows the port write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The same pages once more, after a load of CR3: every write walks.
    LoadCr3,
    /// The same pages once more.
    Again,
    /// The next pages of the order.
    Continue,
}

/// The guest's writes.
#[derive(Clone, Copy)]
pub struct Writes {
    /// The address of the first page.
    pub first: u64,
    /// All pages of the order: a power of two.
    pub pages: u64,
    /// From a page's write to the next page's.
    pub stride: u64,
    /// Writes up to an exit.
    pub count: u64,
    /// The guest's own pages.
    pub leaves: Level,
    /// What follows then.
    pub then: Then,
}

impl Writes {
    /// The end of the memory that they need.
    pub const fn end(&self) -> u64 {
        (self.first + self.pages * self.stride).next_multiple_of(BLOCK)
    }
}

/// How writes are detected in a slot that logs; `None`: it does not log.
pub type Watch = Option<Detection>;

/// One vCPU, and the slot that logs: the VM's last.
pub struct Rig {
    pub vm: Arc<Vm>,
    vcpu: Vcpu,
    pub slot: SlotId,
    words: Vec<u64>,
    pub watch: Watch,
    /// The counts of its harvests.
    harvested: Counted,
}

impl Rig {
    pub fn new(builder: &VmBuilder, writes: Writes, delivery: Delivery) -> Result<Self, LabError> {
        let (code, tables) = (program(writes), tables(writes.end(), writes.leaves));
        let pieces = [(CODE, &*code), (TABLES, &*tables)];
        let (vm, mut vcpus) = boot_code(builder, delivery, &pieces)?;
        let slots = vm.memory_slots();
        let slot = slots.last().expect("a VM has memory");
        Ok(Self {
            slot: slot.id,
            words: vec![0; slot.gfns.pages().div_ceil(64) as usize],
            vm,
            vcpu: vcpus.remove(0),
            watch: None,
            harvested: Counted::default(),
        })
    }

    /// Lets the guest write until its next exit; returns nanoseconds of CPU time.
    pub fn sweep(&mut self) -> Result<u64, LabError> {
        time_to_port(&mut self.vcpu)
    }

    /// Lets the guest write until its next exit. Returns whether that is because its ring is full.
    pub fn fills_ring(&mut self) -> Result<bool, LabError> {
        match self.vcpu.run() {
            Ok(Exit::IoOut { .. }) => Ok(false),
            Ok(Exit::DirtyRingFull) => Ok(true),
            other => Err(LabError::Guest(format!("the guest left with {other:?}"))),
        }
    }

    /// Returns how many pages were written since the last harvest.
    pub fn harvest(&mut self) -> Result<u64, LabError> {
        let pages = if self.vm.delivery() == Delivery::Bitmap {
            self.vm.get_dirty(self.slot, &mut self.words)?;
            self.words.iter().map(|w| u64::from(w.count_ones())).sum()
        } else {
            reap(&self.vm)
        };
        self.harvested[DIRTIED] += pages;
        self.harvested[HARVESTS] += 1;
        Ok(pages)
    }

    /// From now on the slot logs as `watch` says. The arm before may have left write-protected
    /// pages: the caller lets the guest write to all pages.
    pub fn watch(&mut self, watch: Watch) -> Result<(), LabError> {
        self.vm.set_logging(self.slot, Logging::Off)?;
        self.vm
            .set_detection(watch.unwrap_or(Detection::WriteProtect));
        if watch.is_some() {
            self.vm.set_logging(self.slot, Logging::LAZY)?;
        }
        self.watch = watch;
        Ok(())
    }

    pub fn counted(&self) -> Counted {
        let stats = counted(&self.vm.dirty_stats());
        std::array::from_fn(|i| stats[i] + self.harvested[i])
    }
}

/// Page tables that map everything below `end` to itself, by `leaves`.
fn tables(end: u64, leaves: Level) -> Vec<u8> {
    const USED: u64 = 0x67; // present, writable, user, accessed, dirty
    const LARGE: u64 = 0x80;
    const PAGE: u64 = PAGE_SIZE as u64;
    let blocks = end.div_ceil(BLOCK);
    let directories = blocks.div_ceil(512);
    let table = |index: u64| (TABLES + index * PAGE) | USED;
    let mut words = vec![table(1)];
    let mut level = |index: u64, entries: Vec<u64>| {
        words.resize((index * 512) as usize, 0);
        words.extend(entries);
    };
    level(1, (0..directories).map(|at| table(2 + at)).collect());
    let first = 2 + directories;
    if leaves == Level::L4K {
        level(2, (0..blocks).map(|at| table(first + at)).collect());
        level(
            first,
            (0..blocks * 512).map(|page| (page * PAGE) | USED).collect(),
        );
    } else {
        level(
            2,
            (0..blocks).map(|at| (at * BLOCK) | USED | LARGE).collect(),
        );
    }
    assert!(TABLES + words.len() as u64 * 8 <= AREA, "tables have room");
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// The machine code.
fn program(writes: Writes) -> Vec<u8> {
    assert!(writes.pages.is_power_of_two(), "the generator's period");
    let target = match writes.then {
        Then::LoadCr3 => 0xce,
        Then::Again => 0xd6,
        Then::Continue => 0xd8,
    };
    let long = |value: u64| u32::try_from(value).expect("a small number").to_le_bytes();
    [
        &[0x48, 0xbe][..],
        &writes.first.to_le_bytes(), // mov rsi, first
        &[0xb8],
        &long(TABLES),       // load: mov eax, tables
        &[0x0f, 0x22, 0xd8], // mov cr3, rax
        &[0x31, 0xc0],       // again: xor eax, eax
        &[0xbb],
        &long(writes.count), // continue: mov ebx, count
        &[0x69, 0xc0],
        &long(1_664_525), // touch: imul eax, eax, 1664525
        &[0x05],
        &long(1_013_904_223), // add eax, 1013904223
        &[0x25],
        &long(writes.pages - 1), // and eax, pages - 1
        &[0x48, 0x69, 0xf8],
        &long(writes.stride),   // imul rdi, rax, stride
        &[0xc6, 0x04, 0x3e, 1], // mov byte [rsi + rdi], 1
        &[0xff, 0xcb],          // dec ebx
        &[0x75, 0xe1],          // jnz touch
        &[0xe6, 0xf4],          // out 0xf4, al
        &[0xeb, target],        // jmp load, again or continue
    ]
    .concat()
}
