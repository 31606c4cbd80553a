//! Guests of a few instructions, for what no whole guest does on purpose.
//!
//! They start as every image does: long mode, CPL 0, interrupts off, the identity map.

use iced_x86::IcedError;
use iced_x86::code_asm::CodeAssembler;
use lacuna_addr::Gpa;
use lacuna_machine::{Arch, Image, Segment};

/// Where a program lies, and its first instruction.
pub const CODE: u64 = 0x20_0000;
/// One past its stack.
pub const STACK: u64 = 0x21_0000;
/// Where there is no memory in a small VM, and the identity map still reaches.
pub const DEVICE: u64 = 0xd000_0000;

/// The machine code of `program` at [`CODE`].
pub fn assemble(program: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let mut assembler = CodeAssembler::new(64).expect("64 bits");
    program(&mut assembler).expect("instructions of this mode");
    assembler.assemble(CODE).expect("labels within reach")
}

/// Where a program for CPL 3 has its tables and, downward from the last, its stack: in the page of
/// its code, so the program needs no page that the image does not have.
const GDT: u64 = CODE + 0x800;
const GDT_POINTER: u64 = CODE + 0x880;
const TSS: u64 = CODE + 0x900;
const FRAME: u64 = CODE + 0xff0;
/// The selectors of that GDT.
const USER_DATA: u32 = 0x20 | 3;
const USER_CODE: u32 = 0x28 | 3;
const TASK: u32 = 0x30;
/// A TSS of 64-bit mode, and the I/O bitmap behind it: ports up to 0x80.
const TSS_BYTES: u64 = 0x68;
const BITMAP_BYTES: u64 = 0x80 / 8 + 2;

/// Whether a program may be interrupted. None is: it has no timer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interrupts {
    /// They are off.
    Off,
    /// They are on. Then KVM lets a worker of its own bring pages in.
    On,
}

/// The machine code at [`CODE`] of a program that runs at CPL 3. It may use the memory from 2 to
/// 4 MiB, and ports up to 0x80. Where KVM emulates CPL 0, only at CPL 3 the program's accesses are
/// a processor's. If several vCPUs run it, one begins after the other has reached CPL 3.
///
/// # Panics
/// The program is too long.
pub fn assemble_user(
    interrupts: Interrupts,
    program: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Vec<u8> {
    use iced_x86::code_asm::*;
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
    });
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
    // The offset of the I/O bitmap. A bit that is clear permits a port.
    put(TSS + 0x66, &(TSS_BYTES as u16).to_le_bytes());
    put(FRAME, &[]);
    code
}

/// The image of such code.
pub fn image(code: &[u8]) -> Image<'_> {
    let entry = Gpa::truncate(CODE);
    Image {
        arch: Arch::X86_64,
        segments: vec![Segment {
            gpa: entry,
            bytes: code,
            size: code.len() as u64,
        }],
        entry,
    }
}
