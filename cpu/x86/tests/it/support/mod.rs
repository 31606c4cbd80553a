//! A processor on flat memory, for the guests of this crate's tests and benches.
//!
//! ```text
//! physical and linear (identity, user pages, 4 KiB leaves or what a test asks for):
//!   0        page tables, grown as needed
//!   CODE     the program
//!   DATA     data, up to the memory's end
//! ```
#![allow(dead_code)] // Each test file uses a part.

pub mod kernel;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod signals;

use iced_x86::code_asm::CodeAssembler;
use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_cpu::{Bus, HostPage, Processor, Stop, Stores, Wake};
use lacuna_sync::{Qsbr, VirtualClock};
use lacuna_x86::{ApicBus, Cpu, Exit, Regs, System};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock};

pub const CODE: u64 = 0x40_0000;
pub const DATA: u64 = 0x80_0000;
pub const STACK: u64 = DATA + 0x8000;

/// Frames of a 2 MiB block.
const BLOCK: u64 = 512;

/// Whether this host's processor is Intel's. Where the processors of AMD and Intel differ, ours is
/// as AMD's.
pub fn is_intel() -> bool {
    static IS_INTEL: LazyLock<bool> = LazyLock::new(|| {
        let processors = std::fs::read_to_string("/proc/cpuinfo").expect("procfs");
        processors.contains("GenuineIntel")
    });
    *IS_INTEL
}

/// Flat guest memory, in huge pages if the host has them.
pub struct Flat {
    memory: NonNull<u8>,
    layout: Layout,
    pub tracked: Vec<bool>,
    /// Write-tracked pages of each block.
    watched_in: Vec<u16>,
    /// For each block: whether its pages are given out with [`Span::Block`] while no page of the
    /// block is write-tracked.
    pub whole: Vec<bool>,
    /// Calls of [`Bus::page`].
    pub lookups: u64,
    /// Frames that answer `Stop::Wait` once.
    pub absent: Vec<bool>,
    pub code_writes: Vec<Gfn>,
}

impl Flat {
    pub fn new(bytes: u64) -> Self {
        let frames = (bytes / 4096) as usize;
        let layout = Layout::from_size_align(bytes as usize, 2 << 20).expect("a sane size");
        // SAFETY: the size is not zero, and all of it is zeroed, after the advice: else the host
        // would have filled it with small pages before.
        let memory = unsafe {
            let memory = NonNull::new(std::alloc::alloc(layout)).expect("memory");
            let advice = rustix::mm::Advice::LinuxHugepage;
            let _ = rustix::mm::madvise(memory.as_ptr().cast(), bytes as usize, advice);
            memory.write_bytes(0, bytes as usize);
            memory
        };
        Self {
            memory,
            layout,
            tracked: vec![false; frames],
            watched_in: vec![0; frames.div_ceil(BLOCK as usize)],
            whole: vec![false; frames.div_ceil(BLOCK as usize)],
            lookups: 0,
            absent: vec![false; frames],
            code_writes: Vec::new(),
        }
    }

    fn frames(&self) -> u64 {
        self.layout.size() as u64 / 4096
    }

    fn frame(&mut self, gfn: u64) -> HostPage {
        assert!(gfn < self.frames(), "outside the memory");
        let block = (gfn / BLOCK) as usize;
        // SAFETY: inside the allocation, page-aligned, and it lives as long as the bus. A block
        // that ends inside the memory lies in it as one piece.
        unsafe {
            let base = self.memory.add(gfn as usize * 4096);
            let stores = Stores {
                allowed: true,
                tracked: self.tracked[gfn as usize],
            };
            let page = HostPage::new(base, stores);
            if self.whole[block] && self.watched_in[block] == 0 {
                assert!((gfn | (BLOCK - 1)) < self.frames(), "a whole block");
                page.of_block()
            } else {
                page
            }
        }
    }

    pub fn write(&mut self, gpa: u64, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            let at = gpa + i as u64;
            self.frame(at >> 12).store_u8(at as usize & 0xfff, *byte);
        }
    }

    pub fn write_u64(&mut self, gpa: u64, value: u64) {
        self.write(gpa, &value.to_le_bytes());
    }

    pub fn read(&mut self, gpa: u64, len: usize) -> Vec<u8> {
        (gpa..gpa + len as u64)
            .map(|at| self.frame(at >> 12).load_u8(at as usize & 0xfff))
            .collect()
    }

    pub fn read_u64(&mut self, gpa: u64) -> u64 {
        u64::from_le_bytes(self.read(gpa, 8).try_into().expect("eight bytes"))
    }
}

impl Drop for Flat {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.memory.as_ptr(), self.layout) }
    }
}

// SAFETY: the frames live as long as the bus and are never taken back.
unsafe impl Bus for Flat {
    fn page(&mut self, gfn: Gfn, _access: Access) -> Result<HostPage, Stop> {
        self.lookups += 1;
        let index = gfn.get() as usize;
        if gfn.get() >= self.frames() {
            return Err(Stop::Mmio(gfn.gpa()));
        }
        if std::mem::take(&mut self.absent[index]) {
            return Err(Stop::Wait);
        }
        Ok(self.frame(gfn.get()))
    }

    fn track_code(&mut self, gfn: Gfn) -> Result<(), Stop> {
        let tracked = &mut self.tracked[gfn.get() as usize];
        self.watched_in[(gfn.get() / BLOCK) as usize] +=
            u16::from(!std::mem::replace(tracked, true));
        Ok(())
    }

    fn code_written(&mut self, gfn: Gfn) {
        self.code_writes.push(gfn);
    }
}

pub struct NoWake;

impl Wake for NoWake {
    fn wake(&self, _index: usize) {}
}

/// A processor and its memory.
pub struct Machine {
    pub cpu: Cpu,
    pub memory: Flat,
    pub slots: Qsbr,
    pub clock: Arc<VirtualClock>,
}

impl Machine {
    /// `bytes` of memory, mapped one to one with all rights; a device page behind it.
    pub fn new(bytes: u64) -> Self {
        let clock = Arc::new(VirtualClock::default());
        let apics = Arc::new(ApicBus::new(1, Arc::new(NoWake)));
        let mut memory = Flat::new(bytes);
        identity(&mut memory, bytes + 4096, Leaf::Page);
        let mut cpu = Cpu::new(0, apics, clock.clone());
        let mut system = System::long_mode(0x1000);
        system.cr0 |= 1 << 16;
        cpu.set_system(system);
        let mut regs = Regs {
            rip: CODE,
            rflags: 2,
            ..Regs::default()
        };
        regs.gpr[4] = STACK;
        cpu.set_regs(&regs);
        Self {
            cpu,
            memory,
            slots: Qsbr::new(1),
            clock,
        }
    }

    /// Maps the memory to itself again, with leaves of this size, and gives it out by blocks.
    pub fn by_blocks(&mut self, leaf: Leaf) {
        let bytes = self.memory.frames() * 4096;
        identity(&mut self.memory, bytes, leaf);
        self.memory.whole.fill(true);
        self.cpu.flush_tlb();
    }

    /// A machine with a program at [`CODE`].
    pub fn with(bytes: u64, program: impl FnOnce(&mut CodeAssembler)) -> Self {
        let mut machine = Self::new(bytes);
        let code = assemble(CODE, program);
        machine.memory.write(CODE, &code);
        machine
    }

    pub fn run(&mut self, fuel: u64) -> Exit {
        self.cpu.run(&mut self.memory, self.slots.vcpu(0), fuel)
    }

    pub fn run_exclusive(&mut self) -> Exit {
        self.cpu.run_exclusive(&mut self.memory, self.slots.vcpu(0))
    }

    /// Continues after each wait, until another exit.
    pub fn run_through(&mut self, fuel: u64) -> Exit {
        loop {
            match self.run(fuel) {
                Exit::Stop(Stop::Wait) => {}
                exit => return exit,
            }
        }
    }

    pub fn reg(&self, n: usize) -> u64 {
        self.cpu.regs().gpr[n]
    }

    pub fn set_regs(&mut self, change: impl FnOnce(&mut Regs)) {
        let mut regs = self.cpu.regs();
        change(&mut regs);
        self.cpu.set_regs(&regs);
    }

    pub fn device(&self) -> Gpa {
        Gpa::truncate(self.memory.frames() * 4096)
    }
}

/// Machine code at `at`.
pub fn assemble(at: u64, program: impl FnOnce(&mut CodeAssembler)) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).expect("64 is a bitness");
    program(&mut a);
    a.assemble(at).expect("a program of this test")
}

/// Sizes of a leaf in the guest's tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leaf {
    Page,
    Block,
    Gib,
}

/// Bits of an entry: present, writable, user.
pub const RIGHTS: u64 = 7;
/// PS: a leaf above the last level.
pub const LARGE: u64 = 1 << 7;

/// Four-level tables at 0x1000 that map `0..bytes` to itself, leaves larger than a page rounded up.
fn identity(memory: &mut Flat, bytes: u64, leaf: Leaf) {
    let mut next = 0x3000;
    memory.write_u64(0x1000, 0x2000 | RIGHTS);
    for gib in 0..bytes.div_ceil(1 << 30) {
        if leaf == Leaf::Gib {
            memory.write_u64(0x2000 + gib * 8, gib << 30 | LARGE | RIGHTS);
            continue;
        }
        let directory = next;
        next += 0x1000;
        memory.write_u64(0x2000 + gib * 8, directory | RIGHTS);
        let end = (bytes - (gib << 30)).min(1 << 30);
        for mib2 in 0..end.div_ceil(1 << 21) {
            let at = (gib << 30) + (mib2 << 21);
            if leaf == Leaf::Block {
                memory.write_u64(directory + mib2 * 8, at | LARGE | RIGHTS);
                continue;
            }
            memory.write_u64(directory + mib2 * 8, next | RIGHTS);
            for page in (at..bytes.min(at + (1 << 21))).step_by(4096) {
                memory.write_u64(next + (page >> 12) % 512 * 8, page | RIGHTS);
            }
            next += 0x1000;
        }
    }
    assert!(next <= CODE, "too many page tables");
}
