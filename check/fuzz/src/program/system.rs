//! Acts on the machine: tables, MSRs, control registers, devices, events.

use super::{Author, Mode};
use crate::asm::{Asm, RAX, RCX, RDX, Rm, Size};
use crate::place::*;
use crate::runtime::{APF_ACK, APF_ENABLE, APF_VECTOR};
use crate::values::{self, MSRS, pick};

impl Author<'_> {
    /// Rewrites a stage-1 entry, and sometimes flushes the TLB.
    pub(super) fn page_table(&mut self, a: &mut Asm) -> String {
        let value = values::entry(self.rng, self.memory);
        let good = self.rng.u8(..12) == 0;
        let at = match good {
            // The data pages of the good tables' first 2 MiB.
            true => GOOD + 4 * 4096 + self.rng.u64(DATA >> 12..512) * 8,
            false => values::play_entry(self.rng),
        };
        a.mov_imm(RAX, value).store(Rm::Abs(at as i32), RAX);
        match self.rng.u8(..5) {
            0 => {
                let va = PLAY_VA + self.rng.u64(..2048) * 4096;
                a.mov_imm(RAX, va).raw(&[0x0f, 0x01, 0x38]); // invlpg [rax]
                "table entry, invlpg"
            }
            1 => {
                a.raw(&[0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8]); // mov rax, cr3; mov cr3, rax
                "table entry, cr3 again"
            }
            2 => {
                a.mov_imm(RAX, PLAY).raw(&[0x0f, 0x22, 0xd8]);
                "table entry, cr3 to it"
            }
            3 => {
                let va = PLAY_VA + self.rng.u64(..2048) * 4096;
                a.mov_imm(RAX, va).load(RDX, Rm::At(RAX, 0));
                a.store(Rm::At(RAX, 8), RDX);
                "table entry, access"
            }
            _ => "table entry",
        }
        .into()
    }

    pub(super) fn msr(&mut self, a: &mut Asm) -> String {
        let (index, name) = pick(self.rng, MSRS);
        if self.rng.u8(..24) == 0 {
            let index = values::number(self.rng) as u32;
            a.mov_imm32(RCX, index);
            a.raw(pick(self.rng, &[&[0x0f, 0x30], &[0x0f, 0x32]]));
            return "msr of any number".into();
        }
        if self.rng.bool() {
            a.mov_imm32(RCX, index).raw(&[0x0f, 0x32]);
            return format!("rdmsr {name}");
        }
        let value = values::for_msr(self.rng, index, self.memory);
        a.wrmsr(index, value);
        format!("wrmsr {name}")
    }

    /// Control and debug registers.
    pub(super) fn control(&mut self, a: &mut Asm) -> String {
        let number = pick(self.rng, &[0, 0, 2, 3, 3, 3, 4, 4, 8, 8, 1]);
        let modrm = 0xc0 | (number & 7) << 3;
        let rex: &[u8] = match number {
            8 => &[0x44],
            _ => &[],
        };
        if self.rng.u8(..3) == 0 {
            a.raw(rex).raw(&[0x0f, 0x20, modrm]);
            return format!("mov r, cr{number}");
        }
        if self.rng.u8(..6) == 0 {
            let debug = self.rng.u8(..8);
            let value = values::number(self.rng) & 0xffff_ffff;
            a.mov_imm(RAX, value).raw(&[0x0f, 0x23, 0xc0 | debug << 3]);
            return format!("mov dr{debug}, r");
        }
        match number {
            0 | 4 => {
                // One bit changes.
                let bits: &[u32] = match number {
                    0 => &[1, 2, 3, 5, 16, 16, 18, 29, 30, 31],
                    _ => &[2, 3, 4, 7, 7, 17, 17, 20, 20, 5, 9, 16, 18, 21],
                };
                let bit = 1u64 << pick(self.rng, bits);
                a.raw(&[0x0f, 0x20, modrm]).mov_imm(RDX, bit);
                a.raw(&[0x48, 0x31, 0xd0, 0x0f, 0x22, modrm]); // xor rax, rdx
            }
            3 => {
                let root = match self.rng.u8(..16) {
                    0 => values::number(self.rng),
                    1..8 => PLAY,
                    8..11 => PLAY | self.rng.u64(..4) | self.rng.u64(..2) << 63,
                    11 => GOOD | self.rng.u64(..4),
                    _ => GOOD,
                };
                a.mov_imm(RAX, root).raw(&[0x0f, 0x22, modrm]);
            }
            _ => {
                let value = match self.rng.bool() {
                    true => self.rng.u64(..17),
                    false => values::number(self.rng),
                };
                a.mov_imm(RAX, value).raw(rex).raw(&[0x0f, 0x22, modrm]);
            }
        }
        format!("mov cr{number}, r")
    }

    pub(super) fn port(&mut self, a: &mut Asm) -> String {
        let port = pick(
            self.rng,
            &[0x3f8, 0x3f9, 0x3fa, 0x3fd, 0x5c0, 0x80, 0xcf8, 0xffff],
        );
        a.mov_imm32(RDX, port);
        let (name, opcode) = pick(self.rng, &[("out", 0xee), ("in", 0xec)]);
        match self.rng.u8(..3) {
            0 => a.raw(&[opcode]),
            1 => a.raw(&[opcode | 1]),
            _ => a.raw(&[0x66, opcode | 1]),
        };
        name.into()
    }

    /// Accesses the local APIC by its registers in memory, or starts a short timer.
    pub(super) fn apic(&mut self, a: &mut Asm) -> String {
        match self.rng.u8(..4) {
            0 => {
                // TSC deadline: LVT, then the current time and some.
                a.wrmsr(0x832, 2 << 17 | u64::from(TIMER_VECTOR));
                a.mov_imm32(RCX, 0x6e0).raw(&[0x0f, 0x31]); // rdtsc
                a.raw(&[0x05]).raw(&self.rng.u32(..200_000).to_le_bytes());
                a.raw(&[0x83, 0xd2, 0, 0x0f, 0x30]); // adc edx, 0; wrmsr
                "deadline".into()
            }
            1 => {
                let lvt = self.rng.u64(..2) << 17 | u64::from(TIMER_VECTOR);
                let count = self.rng.u64(1..100_000);
                if self.rng.bool() {
                    a.wrmsr(0x832, lvt).wrmsr(0x838, count);
                    return "timer by msr".into();
                }
                a.mov_imm(RAX, APIC);
                for (register, value) in [(0x320, lvt), (0x380, count)] {
                    a.op(&[], Size::Long, &[0xc7], 0, Rm::At(RAX, register));
                    a.raw(&(value as u32).to_le_bytes());
                }
                "timer".into()
            }
            _ => {
                let register = pick(
                    self.rng,
                    &[
                        0x20, 0x30, 0x80, 0xa0, 0xb0, 0xd0, 0xe0, 0xf0, 0x100, 0x280, 0x300, 0x310,
                        0x320, 0x350, 0x370, 0x380, 0x390, 0x3e0, 0x3f0,
                    ],
                );
                a.mov_imm(RAX, APIC + register);
                if self.rng.bool() {
                    a.op(&[], Size::Long, &[0x8b], RDX, Rm::At(RAX, 0));
                    return "apic read".into();
                }
                let msr = 0x800 + (register >> 4) as u32;
                let value = values::for_msr(self.rng, msr, self.memory) as u32;
                a.mov_imm32(RDX, value);
                a.op(&[], Size::Long, &[0x89], RDX, Rm::At(RAX, 0));
                "apic write".into()
            }
        }
    }

    /// Sets the vector, then the area; disables; or acknowledges without an event.
    pub(super) fn async_faults(&mut self, a: &mut Asm) -> String {
        match self.rng.u8(..6) {
            0 => {
                a.wrmsr(APF_ENABLE, 0);
                "async faults off"
            }
            1 => {
                a.wrmsr(APF_ACK, 1);
                "async faults acknowledged"
            }
            _ => {
                a.wrmsr(APF_VECTOR, u64::from(READY_VECTOR));
                let value = values::for_msr(self.rng, APF_ENABLE, self.memory);
                a.wrmsr(APF_ENABLE, value);
                "async faults on"
            }
        }
        .into()
    }

    /// Small system instructions.
    pub(super) fn system(&mut self, a: &mut Asm, mode: Mode) -> String {
        const SMALL: [(&str, &[u8]); 22] = [
            ("cpuid", &[0x0f, 0xa2]),
            ("rdtsc", &[0x0f, 0x31]),
            ("rdtscp", &[0x0f, 0x01, 0xf9]),
            ("swapgs", &[0x0f, 0x01, 0xf8]),
            ("clts", &[0x0f, 0x06]),
            ("wbinvd", &[0x0f, 0x09]),
            ("cli", &[0xfa]),
            ("sti", &[0xfb]),
            ("sti hlt", &[0xfb, 0xf4]),
            ("pause", &[0xf3, 0x90]),
            ("smsw", &[0x0f, 0x01, 0xe0]),
            ("lmsw", &[0x0f, 0x01, 0xf0]),
            ("sldt", &[0x0f, 0x00, 0xc0]),
            ("str", &[0x0f, 0x00, 0xc8]),
            ("mov r, seg", &[0x8c, 0xd8]),
            ("mov gs, ax", &[0x8e, 0xe8]),
            ("mov ss, ax", &[0x8e, 0xd0]),
            ("lar", &[0x0f, 0x02, 0xc2]),
            ("verr", &[0x0f, 0x00, 0xe2]),
            ("lldt", &[0x0f, 0x00, 0xd0]),
            ("mfence", &[0x0f, 0xae, 0xf0]),
            ("clflush", &[0x0f, 0xae, 0x38]),
        ];
        let (name, bytes) = pick(self.rng, &SMALL);
        if bytes[0] == 0x8e || name == "lldt" {
            let selector = pick(self.rng, &[0, 0x10, 0x18, 0x23, 0x2b, 0x30, 0x38, 0xfff8]);
            a.mov_imm32(RAX, selector);
        }
        match self.rng.u8(..24) {
            0 => {
                // sgdt, sidt, and load them again
                let at = values::data(self.rng, self.memory);
                let kind = self.rng.u8(..2);
                a.op(&[], Size::Long, &[0x0f, 0x01], kind, Rm::Abs(at as i32));
                a.op(&[], Size::Long, &[0x0f, 0x01], kind | 2, Rm::Abs(at as i32));
                "sgdt lgdt".into()
            }
            1 if self.rng.u8(..8) == 0 => {
                let at = values::data(self.rng, self.memory);
                a.op(
                    &[],
                    Size::Long,
                    &[0x0f, 0x01],
                    2 | self.rng.u8(..2),
                    Rm::Abs(at as i32),
                );
                "lgdt of anything".into()
            }
            // Rare, because only the VMM can wake it.
            2 if mode == Mode::Kernel && self.rng.u8(..8) == 0 => {
                a.raw(&[0xfa, 0xf4]);
                "cli hlt".into()
            }
            _ => {
                a.raw(bytes);
                name.into()
            }
        }
    }

    /// Transfers to another privilege or handler. The rest of the sequence is rarely reached.
    pub(super) fn transfer(&mut self, a: &mut Asm) -> String {
        let at = values::address(self.rng, self.memory);
        match self.rng.u8(..12) {
            0 => a.raw(&[0x0f, 0x05]), // syscall
            1 => {
                let at = USER_SEQUENCES + self.rng.u64(..SEQUENCE_COUNT) * SEQUENCE_SIZE;
                a.mov_imm(RCX, at).raw(&[0x48, 0x0f, 0x07]) // sysretq
            }
            2 => a.raw(&[0xcd, self.rng.u8(..)]), // int n
            3 => a.raw(&[0xcc]),                  // int3
            4 => a.raw(&[0x0f, 0x0b]),            // ud2
            5 => a.raw(&[0x48, 0xcf]),            // iretq
            6 => a.raw(&[0x48, 0xcb]),            // retfq
            7 => {
                let kind = pick(self.rng, &[3, 5]);
                a.op(&[], Size::Quad, &[0xff], kind, self.operand()) // far call, far jmp
            }
            8 => {
                let kind = pick(self.rng, &[2, 4]);
                a.op(&[], Size::Long, &[0xff], kind, self.operand()) // call, jmp
            }
            9 => a.mov_imm(RAX, at).raw(&[0xff, 0xe0]), // jmp rax
            10 => a.raw(&[0xf1]),                       // int1
            _ => a.raw(&[0xc3]),                        // ret
        };
        "transfer".into()
    }

    /// Random bytes.
    pub(super) fn noise(&mut self, a: &mut Asm) -> String {
        const LIKELY: [u8; 20] = [
            0x0f, 0x48, 0x66, 0x67, 0xf0, 0xf2, 0xf3, 0x64, 0x65, 0x01, 0xae, 0xba, 0xc7, 0xff,
            0x38, 0x3a, 0xd9, 0xc5, 0x62, 0x4c,
        ];
        for _ in 0..self.rng.u8(1..12) {
            let byte = match self.rng.bool() {
                true => pick(self.rng, &LIKELY),
                false => self.rng.u8(..),
            };
            a.raw(&[byte]);
        }
        // The last instruction of the random bytes ends within these.
        a.raw(&[0x90; 12]);
        "noise".into()
    }
}
