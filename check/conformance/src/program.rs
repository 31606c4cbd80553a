//! Guests of a few instructions, for events that no whole guest causes on purpose.
//!
//! A body writes such a program once, for every architecture, with an [`Assembler`]. `x86` encodes
//! it with iced-x86, `arm64` with `check/a64`.
//!
//! Programs start like every image. An x86-64 processor is in long mode at CPL 0 with the identity
//! map and interrupts off. An AArch64 processor is at EL1 with stage 1 off and interrupts masked,
//! so its accesses must be aligned.
//!
//! A program reports a value to its VMM, or asks for one, by an exit: through a port on x86-64, and
//! through an address without memory on AArch64. [`reported`] and [`is_question`] recognise both.

mod arm64;
mod x86;

use lacuna_addr::Gpa;
use lacuna_machine::{Arch, Exit, Image, Segment, VcpuState, Width};

pub use x86::{X2APIC_EOI, assemble as assemble_x86, msr, take_interrupts};

/// The offset of a program in its VM's memory.
const CODE: u64 = 0x20_0000;
/// The offset of the end of a stack that a program may use.
pub const STACK: u64 = 0x21_0000;
/// An address that has no memory in a small VM, and that every program reaches.
pub const DEVICE: u64 = 0xd000_0000;
/// Another such place, for later slots.
pub const LATER: u64 = 0x5000_0000;

/// The address of byte `offset` of a VM's first memory.
pub const fn ram(arch: Arch, offset: u64) -> u64 {
    match arch {
        Arch::Arm64 => (1 << 30) + offset,
        _ => offset,
    }
}

/// The same as a type.
pub const fn gpa(arch: Arch, offset: u64) -> Gpa {
    Gpa::truncate(ram(arch, offset))
}

/// The address of a program's first instruction.
pub const fn code(arch: Arch) -> Gpa {
    gpa(arch, CODE)
}

/// The value that enables asynchronous page faults with the 64-byte aligned area at `gpa`. On
/// x86-64 this is the value of an MSR: today's contract, at any privilege. On AArch64 it is the
/// argument of a call: the first contract of 2020.
pub const fn async_faults_at(arch: Arch, gpa: u64) -> u64 {
    match arch {
        Arch::Arm64 => 1 << 63 | gpa | 1,
        _ => gpa | 0xb,
    }
}

/// The port that a program writes to report a value.
pub const REPORT_PORT: u16 = 0x81;
/// The address for that.
const REPORT_AT: u64 = 0x0a00_0000;
/// The port that a program reads to ask for one.
pub const ASK_PORT: u16 = 0x80;
/// The address for that.
const ASK_AT: u64 = 0x0a00_0008;

/// The value that this exit reports.
pub fn reported(exit: &Exit) -> Option<u32> {
    match *exit {
        Exit::IoOut {
            port: REPORT_PORT,
            value,
            ..
        } => Some(value),
        Exit::MmioWrite { gpa, value, .. } if gpa.get() == REPORT_AT => Some(value as u32),
        _ => None,
    }
}

/// Whether this exit asks for a value: answer it with `Vcpu::complete_read`.
pub fn is_question(exit: &Exit) -> bool {
    match exit {
        Exit::IoIn { port, .. } => *port == ASK_PORT,
        Exit::MmioRead { gpa, .. } => gpa.get() == ASK_AT,
        _ => false,
    }
}

/// A general register of 64 bits. No instruction of an [`Assembler`] changes another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "they differ in nothing but their names")]
pub enum Reg {
    A,
    B,
    C,
    D,
    E,
    F,
    G,
    H,
}

/// When a branch is taken. Numbers are without sign.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// The registers are equal.
    Equal,
    /// They differ.
    NotEqual,
    /// The first is less.
    Less,
}

/// A place in a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Label(usize);

#[derive(Clone, Copy, Debug)]
enum Op {
    Set(Reg, u64),
    Load(Width, Reg, Reg, u32),
    Store(Width, Reg, u32, Reg),
    Increment(Reg, u32),
    Add(Reg, Reg),
    AddImmediate(Reg, u32),
    Not(Reg),
    ShiftRight(Reg, u8),
    Label(Label),
    Jump(Label),
    Branch(Condition, Reg, Reg, Label),
    Report(Reg),
    Ask(Reg),
    Print(Reg),
    Exit(Reg),
    EnableAsyncFaults(u64),
    AllowUnaligned,
    Halt,
    Crash,
}

/// The register `reg` in a saved state.
///
/// # Panics
/// The state is of an architecture without programs.
pub fn saved(state: &mut VcpuState, reg: Reg) -> &mut u64 {
    match state {
        VcpuState::X86(state) => &mut state.regs.gpr[x86::number(reg)],
        VcpuState::Arm64(state) => &mut state.regs.x[arm64::number(reg) as usize],
        other => panic!("{other:?}"),
    }
}

/// Collects the instructions of a program. Offsets are in bytes, and multiples of the width.
#[derive(Debug, Default)]
pub struct Assembler {
    ops: Vec<Op>,
    labels: usize,
}

impl Assembler {
    fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// `to = value`.
    pub fn set(&mut self, to: Reg, value: u64) {
        self.push(Op::Set(to, value));
    }

    /// `to = [base + offset]`, with zeros above `width`.
    pub fn load(&mut self, width: Width, to: Reg, base: Reg, offset: u32) {
        self.push(Op::Load(width, to, base, offset));
    }

    /// `[base + offset] = from`.
    pub fn store(&mut self, width: Width, base: Reg, offset: u32, from: Reg) {
        self.push(Op::Store(width, base, offset, from));
    }

    /// Adds 1 to the 32-bit word at `base + offset`: on x86-64 in one instruction.
    pub fn increment(&mut self, base: Reg, offset: u32) {
        self.push(Op::Increment(base, offset));
    }

    /// `to = to + from`.
    pub fn add(&mut self, to: Reg, from: Reg) {
        self.push(Op::Add(to, from));
    }

    /// `to = to + value`; `value` is less than 4096, or 4096.
    pub fn add_immediate(&mut self, to: Reg, value: u32) {
        self.push(Op::AddImmediate(to, value));
    }

    /// `to = !to`.
    pub fn not(&mut self, to: Reg) {
        self.push(Op::Not(to));
    }

    /// `to = to >> bits`.
    pub fn shift_right(&mut self, to: Reg, bits: u8) {
        self.push(Op::ShiftRight(to, bits));
    }

    /// A label without a place: [`Assembler::place`] gives it one.
    pub fn label(&mut self) -> Label {
        self.labels += 1;
        Label(self.labels - 1)
    }

    /// `label` is here.
    pub fn place(&mut self, label: Label) {
        self.push(Op::Label(label));
    }

    /// A label that is here.
    pub fn here(&mut self) -> Label {
        let label = self.label();
        self.place(label);
        label
    }

    /// Continues at `label`.
    pub fn jump(&mut self, label: Label) {
        self.push(Op::Jump(label));
    }

    /// Continues at `label` if `a` and `b` compare so.
    pub fn branch(&mut self, condition: Condition, a: Reg, b: Reg, label: Label) {
        self.push(Op::Branch(condition, a, b, label));
    }

    /// Reports the lower 32 bits of `value` to the VMM.
    pub fn report(&mut self, value: Reg) {
        self.push(Op::Report(value));
    }

    /// Asks the VMM for 32 bits.
    pub fn ask(&mut self, to: Reg) {
        self.push(Op::Ask(to));
    }

    /// Prints the lowest byte of `byte` on the serial line.
    pub fn print(&mut self, byte: Reg) {
        self.push(Op::Print(byte));
    }

    /// Ends the run; the lower 32 bits of `code` are the exit code.
    pub fn exit(&mut self, code: Reg) {
        self.push(Op::Exit(code));
        self.push(Op::Halt);
    }

    /// Gives `value` to the host as the first step of asynchronous page faults: see
    /// [`async_faults_at`].
    pub fn enable_async_faults(&mut self, value: u64) {
        self.push(Op::EnableAsyncFaults(value));
    }

    /// From here on, accesses need not be aligned. On AArch64 this needs stage 1 tables with an
    /// identity map. They are in the first page behind [`STACK`].
    pub fn allow_unaligned(&mut self) {
        self.push(Op::AllowUnaligned);
    }

    /// Waits for an interrupt.
    pub fn halt(&mut self) {
        self.push(Op::Halt);
    }

    /// Raises an exception. Its handler cannot be reached.
    pub fn crash(&mut self) {
        self.push(Op::Crash);
    }
}

/// A program in machine code.
#[derive(Clone, Debug)]
pub struct Code {
    arch: Arch,
    bytes: Vec<u8>,
}

/// Assembles the program that `write` writes.
pub fn assemble(arch: Arch, write: impl FnOnce(&mut Assembler)) -> Code {
    let mut program = Assembler::default();
    write(&mut program);
    let bytes = match arch {
        Arch::Arm64 => arm64::encode(&program),
        _ => x86::assemble(|a| x86::emit(&program, a)).bytes,
    };
    Code { arch, bytes }
}

/// Whether interrupts are on in a program. None ever arrives, because it has no timer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interrupts {
    /// They are off.
    Off,
    /// They are on. Then KVM lets its own worker bring pages in.
    On,
}

/// A program whose accesses a processor makes on every host. Some KVMs emulate CPL 0, so on x86-64
/// the program runs at CPL 3. On AArch64 it stays at EL1. It may use the bytes 2 to 4 MiB of its
/// VM's memory.
///
/// Two vCPUs may run it. The second begins after the first has left for the first time: on AArch64
/// the first switches it on, and on x86-64 a task register cannot be loaded by both at once.
///
/// # Panics
/// The program is too long.
pub fn assemble_user(
    arch: Arch,
    interrupts: Interrupts,
    write: impl FnOnce(&mut Assembler),
) -> Code {
    let mut program = Assembler::default();
    write(&mut program);
    let bytes = match arch {
        Arch::Arm64 => arm64::encode_user(interrupts, &program),
        _ => x86::user(interrupts, |a| x86::emit(&program, a)),
    };
    Code { arch, bytes }
}

/// The image of such code.
pub fn image(code: &Code) -> Image<'_> {
    let entry = gpa(code.arch, CODE);
    Image {
        arch: code.arch,
        segments: vec![Segment {
            gpa: entry,
            bytes: &code.bytes,
            size: code.bytes.len() as u64,
        }],
        entry,
    }
}
