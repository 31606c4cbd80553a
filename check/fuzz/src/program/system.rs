//! Acts on the machine: tables, MSRs, control registers, devices, events.

use super::{Author, Mode};
use crate::encode::{Rm, Size, Written, op, wrmsr};
use crate::place::*;
use crate::runtime::{APF_ACK, APF_ENABLE, APF_VECTOR};
use crate::values::{self, MSRS, pick};
use iced_x86::code_asm::*;

impl Author<'_> {
    /// Rewrites a stage-1 entry, and sometimes flushes the TLB.
    pub(super) fn page_table(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let value = values::entry(self.rng, self.memory);
        let good = self.rng.u8(..12) == 0;
        let at = match good {
            // The data pages of the good tables' first 2 MiB.
            true => GOOD + 4 * 4096 + self.rng.u64(DATA >> 12..512) * 8,
            false => values::play_entry(self.rng),
        };
        a.mov(rax, value)?;
        a.mov(qword_ptr(at), rax)?;
        let label = match self.rng.u8(..5) {
            0 => {
                let va = PLAY_VA + self.rng.u64(..2048) * 4096;
                a.mov(rax, va)?;
                a.invlpg(ptr(rax))?;
                "table entry, invlpg"
            }
            1 => {
                a.mov(rax, cr3)?;
                a.mov(cr3, rax)?;
                "table entry, cr3 again"
            }
            2 => {
                a.mov(rax, PLAY)?;
                a.mov(cr3, rax)?;
                "table entry, cr3 to it"
            }
            3 => {
                let va = PLAY_VA + self.rng.u64(..2048) * 4096;
                a.mov(rax, va)?;
                a.mov(rdx, qword_ptr(rax))?;
                a.mov(qword_ptr(rax + 8), rdx)?;
                "table entry, access"
            }
            _ => "table entry",
        };
        Ok(label.into())
    }

    pub(super) fn msr(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let (index, name) = pick(self.rng, MSRS);
        if self.rng.u8(..24) == 0 {
            let index = values::number(self.rng) as u32;
            a.mov(ecx, index)?;
            a.db(&[0x0f, pick(self.rng, &[0x30, 0x32])])?;
            return Ok("msr of any number".into());
        }
        if self.rng.bool() {
            a.mov(ecx, index)?;
            a.rdmsr()?;
            return Ok(format!("rdmsr {name}"));
        }
        let value = values::for_msr(self.rng, index, self.memory);
        wrmsr(a, index, value)?;
        Ok(format!("wrmsr {name}"))
    }

    /// Control and debug registers.
    pub(super) fn control(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let number = pick(self.rng, &[0, 0, 2, 3, 3, 3, 4, 4, 8, 8, 1]);
        let register = [cr0, cr1, cr2, cr3, cr4, cr5, cr6, cr7, cr8][number];
        if self.rng.u8(..3) == 0 {
            a.mov(rax, register)?;
            return Ok(format!("mov r, cr{number}"));
        }
        if self.rng.u8(..6) == 0 {
            let debug = self.rng.u8(..8);
            let value = values::number(self.rng) & 0xffff_ffff;
            a.mov(rax, value)?;
            a.db(&[0x0f, 0x23, 0xc0 | debug << 3])?;
            return Ok(format!("mov dr{debug}, r"));
        }
        match number {
            0 | 4 => {
                // One bit changes.
                let bits: &[u32] = match number {
                    0 => &[1, 2, 3, 5, 16, 16, 18, 29, 30, 31],
                    _ => &[2, 3, 4, 7, 7, 17, 17, 20, 20, 5, 9, 16, 18, 21],
                };
                let bit = 1u64 << pick(self.rng, bits);
                a.mov(rax, register)?;
                a.mov(rdx, bit)?;
                a.xor(rax, rdx)?;
            }
            3 => {
                let root = match self.rng.u8(..16) {
                    0 => values::number(self.rng),
                    1..8 => PLAY,
                    8..11 => PLAY | self.rng.u64(..4) | self.rng.u64(..2) << 63,
                    11 => GOOD | self.rng.u64(..4),
                    _ => GOOD,
                };
                a.mov(rax, root)?;
            }
            _ => {
                let value = match self.rng.bool() {
                    true => self.rng.u64(..17),
                    false => values::number(self.rng),
                };
                a.mov(rax, value)?;
            }
        }
        a.mov(register, rax)?;
        Ok(format!("mov cr{number}, r"))
    }

    pub(super) fn port(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let port = pick(
            self.rng,
            &[0x3f8, 0x3f9, 0x3fa, 0x3fd, 0x5c0, 0x80, 0xcf8, 0xffff],
        );
        a.mov(edx, port)?;
        let (name, opcode) = pick(self.rng, &[("out", 0xee), ("in", 0xec)]);
        match self.rng.u8(..3) {
            0 => a.db(&[opcode]),
            1 => a.db(&[opcode | 1]),
            _ => a.db(&[0x66, opcode | 1]),
        }?;
        Ok(name.into())
    }

    /// Accesses the local APIC by its registers in memory, or starts a short timer.
    pub(super) fn apic(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let label = match self.rng.u8(..4) {
            0 => {
                // TSC deadline: LVT, then the current time and some.
                wrmsr(a, 0x832, 2 << 17 | u64::from(TIMER_VECTOR))?;
                a.mov(ecx, 0x6e0)?;
                a.rdtsc()?;
                a.add(eax, self.rng.i32(..200_000))?;
                a.adc(edx, 0)?;
                a.wrmsr()?;
                "deadline"
            }
            1 => {
                let lvt = self.rng.u64(..2) << 17 | u64::from(TIMER_VECTOR);
                let count = self.rng.u64(1..100_000);
                if self.rng.bool() {
                    wrmsr(a, 0x832, lvt)?;
                    wrmsr(a, 0x838, count)?;
                    return Ok("timer by msr".into());
                }
                a.mov(rax, APIC)?;
                for (register, value) in [(0x320, lvt), (0x380, count)] {
                    a.mov(dword_ptr(rax + register), value as u32)?;
                }
                "timer"
            }
            _ => {
                let register = pick(
                    self.rng,
                    &[
                        0x20, 0x30, 0x80, 0xa0, 0xb0, 0xd0, 0xe0, 0xf0, 0x100, 0x280, 0x300, 0x310,
                        0x320, 0x350, 0x370, 0x380, 0x390, 0x3e0, 0x3f0,
                    ],
                );
                a.mov(rax, APIC + register)?;
                if self.rng.bool() {
                    a.mov(edx, dword_ptr(rax))?;
                    return Ok("apic read".into());
                }
                let msr = 0x800 + (register >> 4) as u32;
                let value = values::for_msr(self.rng, msr, self.memory) as u32;
                a.mov(edx, value)?;
                a.mov(dword_ptr(rax), edx)?;
                "apic write"
            }
        };
        Ok(label.into())
    }

    /// Sets the vector, then the area; disables; or acknowledges without an event.
    pub(super) fn async_faults(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let label = match self.rng.u8(..6) {
            0 => {
                wrmsr(a, APF_ENABLE, 0)?;
                "async faults off"
            }
            1 => {
                wrmsr(a, APF_ACK, 1)?;
                "async faults acknowledged"
            }
            _ => {
                wrmsr(a, APF_VECTOR, u64::from(READY_VECTOR))?;
                let value = values::for_msr(self.rng, APF_ENABLE, self.memory);
                wrmsr(a, APF_ENABLE, value)?;
                "async faults on"
            }
        };
        Ok(label.into())
    }

    /// Small system instructions.
    pub(super) fn system(&mut self, a: &mut CodeAssembler, mode: Mode) -> Written<String> {
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
            a.mov(eax, selector)?;
        }
        let label = match self.rng.u8(..24) {
            0 => {
                // sgdt, sidt, and load them again
                let at = values::data(self.rng, self.memory);
                let kind = self.rng.u8(..2);
                for kind in [kind, kind | 2] {
                    op(a, &[], Size::Long, &[0x0f, 0x01], kind, Rm::Abs(at as i32))?;
                }
                "sgdt lgdt"
            }
            1 if self.rng.u8(..8) == 0 => {
                let at = values::data(self.rng, self.memory);
                let kind = 2 | self.rng.u8(..2);
                op(a, &[], Size::Long, &[0x0f, 0x01], kind, Rm::Abs(at as i32))?;
                "lgdt of anything"
            }
            // Rare, because only the VMM can wake it.
            2 if mode == Mode::Kernel && self.rng.u8(..8) == 0 => {
                a.db(&[0xfa, 0xf4])?;
                "cli hlt"
            }
            _ => {
                a.db(bytes)?;
                name
            }
        };
        Ok(label.into())
    }

    /// Transfers to another privilege or handler. The rest of the sequence is rarely reached.
    pub(super) fn transfer(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let at = values::address(self.rng, self.memory);
        match self.rng.u8(..12) {
            0 => a.syscall(),
            1 => {
                let at = USER_SEQUENCES + self.rng.u64(..SEQUENCE_COUNT) * SEQUENCE_SIZE;
                a.mov(rcx, at)?;
                a.sysretq()
            }
            2 => a.int(u32::from(self.rng.u8(..))),
            3 => a.int3(),
            4 => a.ud2(),
            5 => a.iretq(),
            6 => a.db(&[0x48, 0xcb]), // retfq
            7 => {
                let kind = pick(self.rng, &[3, 5]);
                op(a, &[], Size::Quad, &[0xff], kind, self.operand()) // far call, far jmp
            }
            8 => {
                let kind = pick(self.rng, &[2, 4]);
                op(a, &[], Size::Long, &[0xff], kind, self.operand()) // call, jmp
            }
            9 => {
                a.mov(rax, at)?;
                a.jmp(rax)
            }
            10 => a.int1(),
            _ => a.ret(),
        }?;
        Ok("transfer".into())
    }

    /// Random bytes.
    pub(super) fn noise(&mut self, a: &mut CodeAssembler) -> Written<String> {
        const LIKELY: [u8; 20] = [
            0x0f, 0x48, 0x66, 0x67, 0xf0, 0xf2, 0xf3, 0x64, 0x65, 0x01, 0xae, 0xba, 0xc7, 0xff,
            0x38, 0x3a, 0xd9, 0xc5, 0x62, 0x4c,
        ];
        for _ in 0..self.rng.u8(1..12) {
            let byte = match self.rng.bool() {
                true => pick(self.rng, &LIKELY),
                false => self.rng.u8(..),
            };
            a.db(&[byte])?;
        }
        // The last instruction of the random bytes ends within these.
        a.db(&[0x90; 12])?;
        Ok("noise".into())
    }
}
