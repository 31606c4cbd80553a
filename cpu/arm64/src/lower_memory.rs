//! Translates one instruction to ops: loads and stores.

use crate::encoding::Class;
use crate::lower::{Lower, Lowered, Unallocated, destination};
use crate::op::{Code, Op, SP, TEMP, ZERO};

/// The operation of [`Code::Unprivileged`] and [`Code::Ordered`], in `aux`. The low bits are log2
/// of the size; then come these.
pub(crate) mod access {
    pub(crate) const SIZE: u8 = 3;
    pub(crate) const STORE: u8 = 1 << 2;
    /// A load extends the sign.
    pub(crate) const SIGNED: u8 = 1 << 3;
    /// A sign-extending load writes 32 bits, not 64.
    pub(crate) const TO_32: u8 = 1 << 4;
    /// Two registers.
    pub(crate) const PAIR: u8 = 1 << 5;
}

/// The address of a load or store.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Address {
    /// Base and displacement.
    Displaced,
    /// Base and shifted index.
    Indexed,
}

/// The code for the size and opc fields, with a displacement and with an index. `None` is a
/// prefetch.
#[rustfmt::skip]
fn single(size: u32, opc: u32, address: Address) -> Result<Option<Code>, Unallocated> {
    use Code::*;
    let [displaced, indexed] = match (size, opc) {
        (0, 0) => [Store8, Store8X], (0, 1) => [LoadU8, LoadU8X],
        (0, 2) => [LoadS8To64, LoadS8To64X], (0, 3) => [LoadS8To32, LoadS8To32X],
        (1, 0) => [Store16, Store16X], (1, 1) => [LoadU16, LoadU16X],
        (1, 2) => [LoadS16To64, LoadS16To64X], (1, 3) => [LoadS16To32, LoadS16To32X],
        (2, 0) => [Store32, Store32X], (2, 1) => [LoadU32, LoadU32X],
        (2, 2) => [LoadS32To64, LoadS32To64X],
        (3, 0) => [Store64, Store64X], (3, 1) => [LoadU64, LoadU64X],
        (3, 2) => return Ok(None),
        _ => return Err(Unallocated),
    };
    Ok(Some(if address == Address::Displaced { displaced } else { indexed }))
}

impl Lower<'_> {
    fn size(&self) -> u32 {
        self.field(30, 2)
    }

    /// A load or store of one register; `None` for a prefetch. `dst` and `src` are both the
    /// register; each op uses one of them.
    fn access(&self, address: Address) -> Result<Option<Op>, Unallocated> {
        let code = single(self.size(), self.field(22, 2), address)?;
        Ok(code.map(|code| Op {
            dst: self.destination(),
            src: self.source(0),
            base: self.or_sp(5),
            ..Op::new(code)
        }))
    }

    fn prefetch(&mut self) -> Lowered {
        self.emit(Op::new(Code::Nop))
    }

    pub(crate) fn unsigned_offset(&mut self) -> Lowered {
        let disp = (self.field(10, 12) << self.size()) as i32;
        match self.access(Address::Displaced)? {
            Some(op) => self.emit_access(Op { disp, ..op }),
            None => self.prefetch(),
        }
    }

    pub(crate) fn unscaled(&mut self) -> Lowered {
        let disp = self.signed(12, 9);
        match self.access(Address::Displaced)? {
            Some(op) => self.emit_access(Op { disp, ..op }),
            None => self.prefetch(),
        }
    }

    pub(crate) fn post_index(&mut self) -> Lowered {
        let by = self.signed(12, 9);
        let op = self.access(Address::Displaced)?.ok_or(Unallocated)?;
        self.write_back(op, by)
    }

    pub(crate) fn pre_index(&mut self) -> Lowered {
        let by = self.signed(12, 9);
        let op = self.access(Address::Displaced)?.ok_or(Unallocated)?;
        self.write_back(Op { disp: by, ..op }, by)
    }

    /// Emits an access.
    fn emit_access(&mut self, op: Op) -> Lowered {
        self.check_base(op.base);
        self.emit(op)
    }

    /// Emits the access, which can be blocked, and an op that adds `by` to the base, which cannot.
    fn write_back(&mut self, op: Op, by: i32) -> Lowered {
        self.alone_if_misaligning(op.base, by);
        self.emit_access(op)?;
        self.emit(Op {
            dst: op.base,
            src: op.base,
            imm: by,
            ..Op::new(Code::AddRi64)
        })
    }

    pub(crate) fn register_offset(&mut self) -> Lowered {
        let (option, scaled) = (self.field(13, 3), self.bit(12));
        let Some(op) = self.access(Address::Indexed)? else {
            return self.prefetch();
        };
        let index = self.extended(self.source(16), option, 0)?;
        let form = if scaled { self.size() as u8 } else { 0 };
        self.emit_access(Op { index, form, ..op })
    }

    pub(crate) fn literal(&mut self) -> Lowered {
        let code = match self.size() {
            0 => Code::LoadU32,
            1 => Code::LoadU64,
            2 => Code::LoadS32To64,
            _ => return self.prefetch(),
        };
        let offset = i64::from(self.signed(5, 19) << 2);
        let at = self.pc.wrapping_add(offset as u64);
        self.constant(TEMP, at)?;
        self.emit(Op {
            dst: self.destination(),
            base: TEMP,
            ..Op::new(code)
        })
    }

    pub(crate) fn pair(&mut self) -> Lowered {
        let (load, index) = (self.bit(22), self.field(23, 2));
        let (code, shift) = match (self.size(), load) {
            (0, true) => (Code::LoadPair32, 2),
            (0, false) => (Code::StorePair32, 2),
            // LDPSW has no form without allocation.
            (1, true) if index != 0 => (Code::LoadPairS32, 2),
            (2, true) => (Code::LoadPair64, 3),
            (2, false) => (Code::StorePair64, 3),
            _ => return Err(Unallocated),
        };
        let by = self.signed(15, 7) << shift;
        // `dst` and `index` are loaded, `src` and `index` are stored.
        let second = self.field(10, 5) as u8;
        let op = Op {
            dst: self.destination(),
            src: self.source(0),
            base: self.or_sp(5),
            index: if load {
                destination(second)
            } else {
                self.source(10)
            },
            ..Op::new(code)
        };
        let (pre, post) = (Op { disp: by, ..op }, op);
        match index {
            0 | 2 => self.emit_access(pre),
            1 => self.write_back_pair(post, by),
            _ => self.write_back_pair(pre, by),
        }
    }

    /// As [`Lower::write_back`]. For 64-bit registers one op does both, because every function
    /// begins and ends with such an access.
    fn write_back_pair(&mut self, op: Op, by: i32) -> Lowered {
        let code = match op.code {
            Code::LoadPair64 => Code::LoadPairBack64,
            Code::StorePair64 => Code::StorePairBack64,
            _ => return self.write_back(op, by),
        };
        self.alone_if_misaligning(op.base, by);
        self.emit_access(Op {
            code,
            imm: by,
            ..op
        })
    }

    /// An instruction that misaligns SP is executed alone, and so are the instructions behind it.
    fn alone_if_misaligning(&mut self, base: u8, by: i32) {
        if base == SP && by & 15 != 0 {
            self.ops.push(Op::new(Code::Alone));
        }
    }

    /// LDTR and STTR.
    pub(crate) fn unprivileged(&mut self) -> Lowered {
        let (size, opc) = (self.size(), self.field(22, 2));
        single(size, opc, Address::Displaced)?.ok_or(Unallocated)?;
        let kind = [0, 0, access::SIGNED, access::SIGNED | access::TO_32][opc as usize];
        let store = if opc == 0 { access::STORE } else { 0 };
        self.emit_access(Op {
            dst: self.destination(),
            src: self.source(0),
            base: self.or_sp(5),
            aux: size as u8 | kind | store,
            disp: self.signed(12, 9),
            ..Op::new(Code::Unprivileged)
        })
    }

    /// An op for the registers of exclusive and atomic accesses: `src` is Rs, `dst` and `imm` are
    /// Rt, `index` is Rt2, `aux` is log2 of the size.
    fn synchronizing(&self, code: Code) -> Op {
        Op {
            dst: self.destination(),
            src: self.source(16),
            base: self.or_sp(5),
            aux: self.size() as u8,
            imm: self.source(0).into(),
            ..Op::new(code)
        }
    }

    /// LDXR, LDAXR, STXR and STLXR. A store's status goes to `dst`; it stores `imm`.
    pub(crate) fn exclusive(&mut self) -> Lowered {
        let op = Op {
            imm: 0,
            ..self.synchronizing(Code::LoadExclusive)
        };
        if self.bit(22) {
            return self.emit_access(op);
        }
        self.emit_access(Op {
            code: Code::StoreExclusive,
            dst: destination(self.field(16, 5) as u8),
            src: self.source(0),
            ..op
        })
    }

    /// The same for two registers.
    pub(crate) fn exclusive_pair(&mut self) -> Lowered {
        let flow = self.exclusive()?;
        let (second, load) = (self.field(10, 5) as u8, self.bit(22));
        let index = if load {
            destination(second)
        } else {
            self.source(10)
        };
        if let Some(op) = self.ops.last_mut() {
            *op = Op {
                index,
                aux: op.aux | access::PAIR,
                ..*op
            };
        }
        Ok(flow)
    }

    /// LDAR, LDAPR and STLR.
    pub(crate) fn ordered(&mut self, class: Class) -> Lowered {
        let load = class == Class::LoadRcpc || self.bit(22);
        let store = if load { 0 } else { access::STORE };
        let op = self.synchronizing(Code::Ordered);
        self.emit_access(Op {
            src: self.source(0),
            aux: op.aux | store,
            imm: 0,
            ..op
        })
    }

    /// CAS: compares with Rs, stores Rt, and puts the old value into Rs.
    pub(crate) fn compare_and_swap(&mut self) -> Lowered {
        let op = self.synchronizing(Code::Cas);
        self.emit_access(Op {
            dst: destination(self.field(16, 5) as u8),
            ..op
        })
    }

    /// CASP: the same with two pairs of registers; each begins with an even one.
    pub(crate) fn compare_and_swap_pair(&mut self) -> Lowered {
        let (compared, stored) = (self.field(16, 5), self.field(0, 5));
        if (compared | stored) & 1 != 0 {
            return Err(Unallocated);
        }
        let second = |register: u32| match register {
            30 => ZERO,
            _ => register as u8 + 1,
        };
        let op = self.synchronizing(Code::CasPair);
        self.emit_access(Op {
            dst: compared as u8,
            src: compared as u8,
            index: second(compared),
            imm: (stored | u32::from(second(stored)) << 8) as i32,
            aux: op.aux + 2,
            ..op
        })
    }

    /// LDADD and its like, and SWP, which is the ninth. `form` is the operation, `src` the operand,
    /// `dst` the old value.
    pub(crate) fn atomic(&mut self) -> Lowered {
        let op = self.synchronizing(Code::Atomic);
        self.emit_access(Op {
            form: self.field(12, 4) as u8,
            imm: 0,
            ..op
        })
    }
}
