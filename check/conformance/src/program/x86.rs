//! Programs in x86-64 machine code.

use super::{ASK_PORT, Assembler, CODE, Code, Condition, Interrupts, Op, REPORT_PORT, Reg, STACK};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use lacuna_machine::{Arch, Width, port};

/// The MSR that enables asynchronous page faults (Linux: MSR_KVM_ASYNC_PF_EN).
const ASYNC_FAULTS: u32 = 0x4b56_4d02;

/// The machine code of a program for this architecture only.
pub fn assemble(program: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Code {
    let mut assembler = CodeAssembler::new(64).expect("64 bits");
    program(&mut assembler).expect("instructions of this mode");
    Code {
        arch: Arch::X86_64,
        bytes: assembler.assemble(CODE).expect("labels within reach"),
    }
}

/// WRMSR of a 32-bit value.
///
/// # Errors
/// As the assembler's.
pub fn msr(a: &mut CodeAssembler, index: u32, value: u32) -> Result<(), IcedError> {
    a.mov(ecx, index)?;
    a.mov(eax, value)?;
    a.xor(edx, edx)?;
    a.wrmsr()
}

/// The x2APIC's MSR that ends an interrupt.
pub const X2APIC_EOI: u32 = 0x80b;
const X2APIC_ID: u32 = 0x802;
const X2APIC_SVR: u32 = 0x80f;
const APIC_BASE: u32 = 0x1b;
/// The addresses of a program's interrupt table, and of its pointer.
const IDT: u64 = 0x30_0000;
const IDTR: u64 = 0x30_2000;

/// A stack for each vCPU, interrupt gates for these vectors, and an enabled x2APIC. Interrupts stay
/// off.
///
/// # Errors
/// As the assembler's.
pub fn take_interrupts(
    a: &mut CodeAssembler,
    handlers: &[(u32, CodeLabel)],
) -> Result<(), IcedError> {
    for (vector, handler) in handlers {
        gate(a, *vector, *handler)?;
    }
    a.mov(rdi, IDTR)?;
    a.mov(word_ptr(rdi), 0xfff)?;
    a.mov(rax, IDT)?;
    a.mov(qword_ptr(rdi + 2), rax)?;
    a.lidt(ptr(rdi))?;
    a.mov(ecx, APIC_BASE)?;
    a.rdmsr()?;
    a.or(eax, 0xc00)?;
    a.wrmsr()?;
    msr(a, X2APIC_SVR, 0x1ff)?;
    a.mov(ecx, X2APIC_ID)?;
    a.rdmsr()?;
    a.shl(eax, 12)?;
    a.mov(rsp, STACK)?;
    a.sub(rsp, rax)
}

/// An interrupt gate for code below 4G.
fn gate(a: &mut CodeAssembler, vector: u32, handler: CodeLabel) -> Result<(), IcedError> {
    a.mov(rdi, IDT + u64::from(vector) * 16)?;
    a.lea(rax, ptr(handler))?;
    a.mov(word_ptr(rdi), ax)?;
    a.mov(word_ptr(rdi + 2), cs)?;
    a.mov(word_ptr(rdi + 4), 0x8e00)?;
    a.shr(rax, 16)?;
    a.mov(word_ptr(rdi + 6), ax)
}

/// One register by its four sizes. RAX, RCX and RDX hold values within one operation.
struct Names(AsmRegister64, AsmRegister32, AsmRegister16, AsmRegister8);

fn names(reg: Reg) -> Names {
    match reg {
        Reg::A => Names(rbx, ebx, bx, bl),
        Reg::B => Names(rbp, ebp, bp, bpl),
        Reg::C => Names(rsi, esi, si, sil),
        Reg::D => Names(rdi, edi, di, dil),
        Reg::E => Names(r8, r8d, r8w, r8b),
        Reg::F => Names(r9, r9d, r9w, r9b),
        Reg::G => Names(r14, r14d, r14w, r14b),
        Reg::H => Names(r15, r15d, r15w, r15b),
    }
}

/// The number of a register.
pub(super) fn number(reg: Reg) -> usize {
    [3, 5, 6, 7, 8, 9, 14, 15][reg as usize]
}

/// Writes `program` with `a`.
pub(super) fn emit(program: &Assembler, a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut labels: Vec<_> = (0..program.labels).map(|_| a.create_label()).collect();
    for op in &program.ops {
        one(*op, a, &mut labels)?;
    }
    // A label may be at the end.
    a.nop()
}

fn one(op: Op, a: &mut CodeAssembler, labels: &mut [CodeLabel]) -> Result<(), IcedError> {
    match op {
        Op::Set(to, value) => a.mov(names(to).0, value),
        Op::Load(width, to, base, offset) => {
            let (to, at) = (names(to), names(base).0 + offset);
            match width {
                Width::Byte => a.movzx(to.1, byte_ptr(at)),
                Width::Word => a.movzx(to.1, word_ptr(at)),
                Width::Long => a.mov(to.1, dword_ptr(at)),
                Width::Quad => a.mov(to.0, qword_ptr(at)),
            }
        }
        Op::Store(width, base, offset, from) => {
            let (from, at) = (names(from), names(base).0 + offset);
            match width {
                Width::Byte => a.mov(byte_ptr(at), from.3),
                Width::Word => a.mov(word_ptr(at), from.2),
                Width::Long => a.mov(dword_ptr(at), from.1),
                Width::Quad => a.mov(qword_ptr(at), from.0),
            }
        }
        Op::Increment(base, offset) => a.inc(dword_ptr(names(base).0 + offset)),
        Op::Add(to, from) => a.add(names(to).0, names(from).0),
        Op::AddImmediate(to, value) => a.add(names(to).0, value as i32),
        Op::Not(to) => a.not(names(to).0),
        Op::ShiftRight(to, bits) => a.shr(names(to).0, u32::from(bits)),
        Op::Label(label) => a.set_label(&mut labels[label.0]),
        Op::Jump(label) => a.jmp(labels[label.0]),
        Op::Branch(condition, x, y, label) => {
            a.cmp(names(x).0, names(y).0)?;
            match condition {
                Condition::Equal => a.je(labels[label.0]),
                Condition::NotEqual => a.jne(labels[label.0]),
                Condition::Less => a.jb(labels[label.0]),
            }
        }
        Op::Report(value) => {
            a.mov(eax, names(value).1)?;
            a.out(i32::from(REPORT_PORT), eax)
        }
        Op::Ask(to) => {
            a.in_(eax, i32::from(ASK_PORT))?;
            a.mov(names(to).1, eax)
        }
        Op::Print(byte) => {
            a.mov(eax, names(byte).1)?;
            a.mov(dx, i32::from(port::SERIAL))?;
            a.out(dx, al)
        }
        Op::Exit(code) => {
            a.mov(eax, names(code).1)?;
            a.mov(dx, i32::from(port::EXIT))?;
            a.out(dx, eax)
        }
        Op::EnableAsyncFaults(value) => {
            a.mov(ecx, ASYNC_FAULTS)?;
            a.mov(eax, value as u32)?;
            a.mov(edx, (value >> 32) as u32)?;
            a.wrmsr()
        }
        Op::AllowUnaligned => Ok(()),
        Op::Halt => a.hlt(),
        Op::Crash => a.ud2(),
    }
}

/// The tables of a program for CPL 3, and its stack downward from the last one. They are in the
/// page of its code, so the image has every page that the program needs.
const GDT: u64 = CODE + 0x800;
const GDT_POINTER: u64 = CODE + 0x880;
const TSS: u64 = CODE + 0x900;
const FRAME: u64 = CODE + 0xff0;
/// The selectors of that GDT.
const USER_DATA: u32 = 0x20 | 3;
const USER_CODE: u32 = 0x28 | 3;
const TASK: u32 = 0x30;
/// A TSS of 64-bit mode, and the I/O bitmap behind it: ports up to 0x87.
const TSS_BYTES: u64 = 0x68;
const BITMAP_BYTES: u64 = 0x80 / 8 + 2;

/// The machine code at [`CODE`] of a program that runs at CPL 3. It may use the memory from 2 to
/// 4 MiB, and ports up to 0x87. If several vCPUs run it, one begins after the other has reached
/// CPL 3.
///
/// # Panics
/// The program is too long.
pub(super) fn user(
    interrupts: Interrupts,
    program: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Vec<u8> {
    let mut code = assemble(|a| {
        let mut user = a.create_label();
        // The user bit of the boot tables on the way to the memory from 2 to 4 MiB.
        for entry in [0x4000, 0x5000, 0x6008] {
            a.mov(rax, entry as u64)?;
            a.or(qword_ptr(rax), 4)?;
        }
        a.mov(rax, cr3)?;
        a.mov(cr3, rax)?;
        a.mov(rax, GDT_POINTER)?;
        a.lgdt(ptr(rax))?;
        // Another vCPU may have made the task busy, and LTR refuses a busy one.
        a.mov(rax, GDT + u64::from(TASK) + 5)?;
        a.and(byte_ptr(rax), 0xfd)?;
        a.mov(eax, TASK)?;
        a.ltr(ax)?;
        a.mov(rsp, FRAME)?;
        a.push(USER_DATA as i32)?;
        a.push(0)?;
        a.push(match interrupts {
            Interrupts::Off => 2,
            Interrupts::On => 0x202,
        })?;
        a.push(USER_CODE as i32)?;
        a.lea(rax, ptr(user))?;
        a.push(rax)?;
        a.iretq()?;
        a.set_label(&mut user)?;
        program(a)
    })
    .bytes;
    assert!(code.len() <= (GDT - CODE) as usize, "too long");
    let limit = TSS_BYTES + BITMAP_BYTES - 1;
    let task = 0x89 << 40 | (TSS & 0xff_ffff) << 16 | (TSS >> 24) << 56 | limit;
    let gdt = [
        0,
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
        task,
        TSS >> 32,
    ];
    let mut put = |at: u64, bytes: &[u8]| {
        code.resize((at - CODE) as usize, 0);
        code.extend(bytes);
    };
    put(GDT, &gdt.map(u64::to_le_bytes).concat());
    put(GDT_POINTER, &(size_of_val(&gdt) as u16 - 1).to_le_bytes());
    put(GDT_POINTER + 2, &GDT.to_le_bytes());
    // The offset of the I/O bitmap. A clear bit permits a port.
    put(TSS + 0x66, &(TSS_BYTES as u16).to_le_bytes());
    put(FRAME, &[]);
    code
}
