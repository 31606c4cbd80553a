//! Translates one rare instruction to ops. An instruction without a line here raises #UD, and CPUID
//! does not announce it.

use crate::bits::OFFSET_ADDED;
use crate::lower::{Flow, Lower, slot};
use crate::op::{Code, IMMEDIATE, LOCKED, MEMORY, Op, System, TARGET};
use crate::string;
use iced_x86::{CpuidFeature, Mnemonic, OpKind, Register};

impl Lower<'_> {
    pub(crate) fn rare(&mut self) -> Flow {
        use Mnemonic as M;
        match self.i.mnemonic() {
            M::Nop | M::Reservednop | M::Pause | M::Clflush | M::Clflushopt => self.nop(),
            M::Mfence | M::Lfence | M::Sfence => self.emit(Op::new(Code::Fence)),
            M::Not => self.e(Code::Not),
            M::Mul => self.e(Code::Mul),
            M::Imul => self.e(Code::Imul),
            M::Div => self.e(Code::Div),
            M::Idiv => self.e(Code::Idiv),
            M::Rol => self.rotate(0),
            M::Ror => self.rotate(1),
            M::Rcl => self.rotate(2),
            M::Rcr => self.rotate(3),
            M::Shld => self.double_shift(0),
            M::Shrd => self.double_shift(1),
            M::Xchg => self.exchange(),
            M::Xadd => self.e_g(Code::Xadd, 0),
            M::Cmpxchg => self.e_g(Code::Cmpxchg, 0),
            M::Cmpxchg8b => self.wide_e(Code::Cmpxchg8b),
            M::Bt => self.bit_test(0),
            M::Bts => self.bit_test(1),
            M::Btr => self.bit_test(2),
            M::Btc => self.bit_test(3),
            M::Bsf => self.g_e(Code::BitScan, 0),
            M::Bsr => self.g_e(Code::BitScan, 1),
            M::Tzcnt => self.g_e(Code::BitScan, 2),
            M::Lzcnt => self.g_e(Code::BitScan, 3),
            M::Popcnt => self.g_e(Code::BitScan, 4),
            M::Bswap => self.e(Code::Bswap),
            M::Cbw => self.plain(Code::Widen, 1, 0),
            M::Cwde => self.plain(Code::Widen, 2, 0),
            M::Cdqe => self.plain(Code::Widen, 3, 0),
            M::Cwd => self.plain(Code::SignFill, 1, 0),
            M::Cdq => self.plain(Code::SignFill, 2, 0),
            M::Cqo => self.plain(Code::SignFill, 3, 0),
            M::Lahf => self.plain(Code::Lahf, 0, 0),
            M::Sahf => self.plain(Code::Sahf, 0, 0),
            M::Clc => self.plain(Code::Carry, 0, 0),
            M::Stc => self.plain(Code::Carry, 0, 1),
            M::Cmc => self.plain(Code::Carry, 0, 2),
            M::Cld => self.plain(Code::Direction, 0, 0),
            M::Std => self.plain(Code::Direction, 0, 1),
            M::Pushfq => self.plain(Code::Pushf, 3, 0),
            M::Pushf => self.plain(Code::Pushf, 1, 0),
            M::Leave => self.leave(),
            M::Enter => self.enter(),
            M::Xlatb => self.xlat(),
            M::Loopne => self.count_loop(0),
            M::Loope => self.count_loop(1),
            M::Loop => self.count_loop(2),
            M::Jrcxz | M::Jecxz => self.count_loop(3),
            _ => self.strings(),
        }
    }

    fn strings(&mut self) -> Flow {
        use Mnemonic as M;
        let (kind, width) = match self.i.mnemonic() {
            M::Movsb => (string::MOVS, 0),
            M::Movsw => (string::MOVS, 1),
            M::Movsd => (string::MOVS, 2),
            M::Movsq => (string::MOVS, 3),
            M::Stosb => (string::STOS, 0),
            M::Stosw => (string::STOS, 1),
            M::Stosd => (string::STOS, 2),
            M::Stosq => (string::STOS, 3),
            M::Lodsb => (string::LODS, 0),
            M::Lodsw => (string::LODS, 1),
            M::Lodsd => (string::LODS, 2),
            M::Lodsq => (string::LODS, 3),
            M::Scasb => (string::SCAS, 0),
            M::Scasw => (string::SCAS, 1),
            M::Scasd => (string::SCAS, 2),
            M::Scasq => (string::SCAS, 3),
            M::Cmpsb => (string::CMPS, 0),
            M::Cmpsw => (string::CMPS, 1),
            M::Cmpsd => (string::CMPS, 2),
            M::Cmpsq => (string::CMPS, 3),
            _ => return self.system(),
        };
        // MOVSD and CMPSD are also SSE2 mnemonics; those name registers or plain memory.
        let implicit = |n| {
            use OpKind as K;
            !matches!(self.i.op_kind(n), K::Memory) && !self.i.op_register(n).is_xmm()
        };
        if !implicit(0) || !implicit(1) {
            return self.undefined();
        }
        use OpKind as K;
        let narrow = (0..2).any(|n| matches!(self.i.op_kind(n), K::MemorySegESI | K::MemoryESEDI));
        let segment = match self.i.segment_prefix() {
            Register::FS => 1,
            Register::GS => 2,
            _ => 0,
        };
        let prefix = if self.i.has_repne_prefix() {
            string::REPNE
        } else if self.i.has_rep_prefix() {
            string::REP
        } else {
            0
        };
        let address = if narrow { string::ADDRESS_32 } else { 0 };
        let aux = kind | prefix | address;
        self.emit(Op {
            form: width << 2,
            aux,
            src: segment,
            ..Op::new(Code::String)
        })
    }

    fn system(&mut self) -> Flow {
        use Mnemonic as M;
        match self.i.mnemonic() {
            M::Cli => self.end(System::Cli),
            M::Sti => self.end(System::Sti),
            M::Popfq => self.end_width(System::Popf, 3),
            M::Popf => self.end_width(System::Popf, 1),
            M::Iretq => self.end_width(System::Iret, 3),
            M::Iretd => self.end_width(System::Iret, 2),
            M::Iret => self.end_width(System::Iret, 1),
            M::Retf => self.ret_far(),
            M::Syscall => self.end(System::Syscall),
            M::Sysretq => self.end(System::Sysret),
            M::Int => {
                let imm = i32::from(self.i.immediate8());
                self.end_op(
                    System::Int,
                    Op {
                        imm,
                        ..Op::new(Code::System)
                    },
                )
            }
            M::Int3 => self.end(System::Int3),
            M::Int1 => self.end(System::Int1),
            M::Hlt => self.end(System::Hlt),
            M::Cpuid => self.end(System::Cpuid),
            // There is no counter, so CR4.PCE does not matter.
            M::Rdpmc => self.refused(),
            M::Rdmsr => self.end(System::Rdmsr),
            M::Wrmsr => self.end(System::Wrmsr),
            M::Rdtsc => self.end(System::Rdtsc),
            M::Rdtscp => self.end(System::Rdtscp),
            M::In => self.port(System::In, 0, 1),
            M::Out => self.port(System::Out, 1, 0),
            M::Swapgs => self.end(System::Swapgs),
            M::Clts => self.end(System::Clts),
            // WBNOINVD is not announced: without it, WBINVD ignores the F3 prefix.
            M::Invd | M::Wbinvd | M::Wbnoinvd => self.end(System::Wbinvd),
            M::Wait => self.end(System::Wait),
            M::Invlpg => self.end_e(System::Invlpg, 0),
            M::Lgdt => self.end_e(System::Lgdt, 3),
            M::Lidt => self.end_e(System::Lidt, 3),
            M::Sgdt => self.end_e(System::Sgdt, 3),
            M::Sidt => self.end_e(System::Sidt, 3),
            M::Lldt => self.end_e(System::Lldt, 1),
            M::Ltr => self.end_e(System::Ltr, 1),
            M::Lmsw => self.end_e(System::Lmsw, 1),
            M::Sldt => self.store_word(System::Sldt),
            M::Str => self.store_word(System::Str),
            M::Smsw => self.store_word(System::Smsw),
            M::Verr => self.end_e(System::Verr, 1),
            M::Verw => self.end_e(System::Verw, 1),
            M::Lar => self.end_g_e(System::Lar, 0),
            M::Lsl => self.end_g_e(System::Lsl, 0),
            M::Lss => self.end_g_e(System::LoadFar, segment(Register::SS)),
            M::Lfs => self.end_g_e(System::LoadFar, segment(Register::FS)),
            M::Lgs => self.end_g_e(System::LoadFar, segment(Register::GS)),
            _ if self.is_float() => self.emit_last(Op::new(Code::Float)),
            _ => self.undefined(),
        }
    }

    /// #UD, which ends the basic block: the bytes behind it may be no code.
    pub(crate) fn undefined(&mut self) -> Flow {
        self.emit_last(Op::new(Code::Undefined))
    }

    /// #GP(0) whenever it is executed.
    pub(crate) fn refused(&mut self) -> Flow {
        self.emit_last(Op {
            aux: 1,
            ..Op::new(Code::Undefined)
        })
    }

    fn emit_last(&mut self, op: Op) -> Flow {
        self.emit(op);
        Flow::End
    }

    fn is_float(&self) -> bool {
        use CpuidFeature as F;
        let float = |f: &CpuidFeature| matches!(f, F::FPU | F::FPU287 | F::FPU387);
        self.i.cpuid_features().iter().any(float)
    }

    fn nop(&mut self) -> Flow {
        self.emit(Op::new(Code::Nop))
    }

    fn plain(&mut self, code: Code, width: u8, aux: u8) -> Flow {
        self.emit(Op {
            form: width << 2,
            aux,
            ..Op::new(code)
        })
    }

    /// An op with the single operand E.
    fn e(&mut self, code: Code) -> Flow {
        let width = self.width(0);
        let op = self.form(code, width, 0, None);
        self.emit(op)
    }

    /// An op with the single operand E, 8 bytes of memory.
    fn wide_e(&mut self, code: Code) -> Flow {
        if !self.is_memory(0) {
            return self.undefined();
        }
        let op = self.form(code, 3, 0, None);
        self.emit(op)
    }

    /// An op with destination E, and G or an immediate as the source.
    fn e_g(&mut self, code: Code, aux: u8) -> Flow {
        let width = self.width(0);
        let op = self.form(code, width, 0, Some(1));
        self.emit(Op { aux, ..op })
    }

    /// An op with destination G and source E.
    fn g_e(&mut self, code: Code, aux: u8) -> Flow {
        let width = self.width(0);
        let op = self.form(code, width, 1, Some(0));
        self.emit(Op { aux, ..op })
    }

    /// A register may select a bit in another word than the one at the operand's address. If
    /// earlier ops compute the address, they add the distance to that word before they wrap the
    /// sum.
    fn bit_test(&mut self, kind: u8) -> Flow {
        let width = self.width(0);
        let mut op = self.form(Code::BitTest, width, 0, Some(1));
        op.aux = kind;
        if op.has(MEMORY)
            && !op.has(IMMEDIATE)
            && let Some(rest) = self.split_address()
        {
            self.emit(Op {
                form: width << 2,
                dst: TARGET,
                src: op.src,
                ..Op::new(Code::BitOffset)
            });
            self.emit(Op {
                index: TARGET,
                ..rest
            });
            op.aux |= OFFSET_ADDED;
        }
        self.emit(op)
    }

    fn rotate(&mut self, kind: u8) -> Flow {
        let width = self.width(0);
        let count = (!self.is_register(1)).then_some(1);
        let op = self.form(Code::Shift, width, 0, count);
        self.emit(Op { aux: kind, ..op })
    }

    fn double_shift(&mut self, kind: u8) -> Flow {
        let width = self.width(0);
        let mut op = self.form(Code::DoubleShift, width, 0, Some(1));
        if !self.is_register(2) {
            op.form |= IMMEDIATE;
            op.imm = self.i.immediate(2) as i32;
        }
        self.emit(Op { aux: kind, ..op })
    }

    /// XCHG: either operand may be the memory one; then it is locked without a LOCK prefix.
    fn exchange(&mut self) -> Flow {
        let width = self.width(0);
        let (e, g) = if self.is_memory(1) { (1, 0) } else { (0, 1) };
        let mut op = self.form(Code::Xchg, width, e, Some(g));
        if op.has(MEMORY) {
            op.form |= LOCKED;
        }
        self.emit(op)
    }

    fn leave(&mut self) -> Flow {
        let width = if self.i.stack_pointer_increment() == 2 {
            1
        } else {
            3
        };
        let narrow = self.i.code() == iced_x86::Code::Leavew;
        self.plain(Code::Leave, if narrow { 1 } else { width }, 0)
    }

    fn enter(&mut self) -> Flow {
        let width = if self.i.code() == iced_x86::Code::Enterw_imm16_imm8 {
            1
        } else {
            3
        };
        let (size, level) = (self.i.immediate16(), self.i.immediate8_2nd() & 31);
        let op = Op {
            form: width << 2,
            aux: level,
            ..Op::new(Code::Enter)
        };
        self.emit(Op {
            imm: size.into(),
            ..op
        })
    }

    /// AL = [RBX + AL].
    fn xlat(&mut self) -> Flow {
        self.emit(Op {
            dst: TARGET,
            src: 0,
            ..Op::new(Code::MovZx8)
        });
        let mut op = Op::new(Code::MovG);
        self.memory(&mut op);
        // iced gives AL as the index register, which no address can have.
        match self.ops.last_mut() {
            Some(address) if op.base != 3 && address.code == Code::Address => {
                address.index = TARGET;
            }
            _ => op.index = TARGET,
        }
        self.emit(op)
    }

    pub(crate) fn end_op(&mut self, system: System, op: Op) -> Flow {
        self.emit(Op {
            code: Code::System,
            aux: system as u8,
            ..op
        });
        Flow::End
    }

    fn end(&mut self, system: System) -> Flow {
        self.end_op(system, Op::new(Code::System))
    }

    fn end_width(&mut self, system: System, width: u8) -> Flow {
        self.end_op(
            system,
            Op {
                form: width << 2,
                ..Op::new(Code::System)
            },
        )
    }

    fn end_e(&mut self, system: System, width: u8) -> Flow {
        let op = self.form(Code::System, width, 0, None);
        self.end_op(system, op)
    }

    /// A system op with destination G and source E.
    fn end_g_e(&mut self, system: System, imm: i32) -> Flow {
        let width = self.width(0);
        let op = self.form(Code::System, width, 1, Some(0));
        self.end_op(system, Op { imm, ..op })
    }

    /// SLDT, STR, SMSW: a register of any width, or a word of memory.
    fn store_word(&mut self, system: System) -> Flow {
        let width = if self.is_memory(0) { 1 } else { self.width(0) };
        self.end_e(system, width)
    }

    /// IN and OUT: the port in `imm` or DX.
    fn port(&mut self, system: System, data: u32, port: u32) -> Flow {
        let mut op = Op {
            form: self.width(data) << 2,
            ..Op::new(Code::System)
        };
        if !self.is_register(port) {
            op.form |= IMMEDIATE;
            op.imm = i32::from(self.i.immediate8());
        }
        self.end_op(system, op)
    }

    pub(crate) fn pop_segment(&mut self, width: u8) -> Flow {
        let imm = segment(self.i.op0_register());
        self.end_op(
            System::PopSegment,
            Op {
                form: width << 2,
                imm,
                ..Op::new(Code::System)
            },
        )
    }

    /// MOV with a segment, control or debug register.
    pub(crate) fn mov_special(&mut self) -> Flow {
        let (to, from) = (self.i.op0_register(), self.i.op1_register());
        if to.is_segment_register() {
            let op = self.form(Code::System, 1, 1, None);
            return self.end_op(
                System::LoadSegment,
                Op {
                    imm: segment(to),
                    ..op
                },
            );
        }
        if from.is_segment_register() {
            let width = if self.is_memory(0) { 1 } else { self.width(0) };
            let op = self.form(Code::System, width, 0, None);
            return self.end_op(
                System::StoreSegment,
                Op {
                    imm: segment(from),
                    ..op
                },
            );
        }
        let (system, special, general) = match (to, from) {
            (to, from) if to.is_cr() => (System::MovToCr, to, from),
            (to, from) if from.is_cr() => (System::MovFromCr, from, to),
            (to, from) if to.is_dr() => (System::MovToDr, to, from),
            (to, from) if from.is_dr() => (System::MovFromDr, from, to),
            _ => return self.undefined(),
        };
        if self.i.has_lock_prefix() {
            return self.undefined();
        }
        let imm = special.number() as i32;
        self.end_op(
            system,
            Op {
                dst: slot(general),
                imm,
                ..Op::new(Code::System)
            },
        )
    }
}

/// ES CS SS DS FS GS, as `System::selectors` counts them.
fn segment(r: Register) -> i32 {
    match r {
        Register::ES => 0,
        Register::CS => 1,
        Register::SS => 2,
        Register::DS => 3,
        Register::FS => 4,
        _ => 5,
    }
}
