//! Linear memory for the tests of segments, delivery and returns: bytes without page tables, and
//! the descriptor tables of a small kernel.

use super::{Linear, Width};
use crate::state::{Exception, System, Table, Trap, is_canonical};
use crate::walk::User;
use lacuna_cpu::Stop;
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const GDT: u64 = 0xffff_8000_0000_1000;
pub(crate) const IDT: u64 = 0xffff_8000_0000_2000;
pub(crate) const TSS: u64 = 0xffff_8000_0000_4000;
pub(crate) const LDT: u64 = 0xffff_8000_0000_5000;
/// RSP0 and IST1 in the TSS. IST2 is not canonical, and IST3's page is absent.
pub(crate) const RSP0: u64 = 0xffff_8000_0000_7008;
pub(crate) const IST1: u64 = 0xffff_8000_0000_9004;
pub(crate) const IST2: u64 = 0x8000_0000_0000;
pub(crate) const IST3: u64 = 0xffff_8000_00bb_b000;
/// Handlers lie at `HANDLER + vector`.
pub(crate) const HANDLER: u64 = 0xffff_8000_0010_0000;

/// Selectors of the mock's GDT.
pub(crate) const KERNEL_CS: u16 = 0x08;
pub(crate) const KERNEL_DS: u16 = 0x10;
pub(crate) const USER_DS: u16 = 0x20 | 3;
pub(crate) const USER_CS: u16 = 0x28 | 3;
pub(crate) const TSS_SEL: u16 = 0x30;
pub(crate) const CONFORMING_CS: u16 = 0x40;
/// 32-bit user code.
pub(crate) const COMPAT_CS: u16 = 0x48 | 3;
/// Kernel code, not present.
pub(crate) const ABSENT_CS: u16 = 0x50;
/// Read-only user data.
pub(crate) const READ_ONLY_DS: u16 = 0x58 | 3;
pub(crate) const ABSENT_DS: u16 = 0x60 | 3;
/// A user data segment with base 0x1234_5678 and a clear accessed bit.
pub(crate) const BASED_DS: u16 = 0x68 | 3;
pub(crate) const LDT_SEL: u16 = 0x70;
pub(crate) const GDT_LIMIT: u32 = 0x7f;

/// Bytes, and the faults of accesses to them.
pub(crate) struct Mock {
    pub(crate) sys: System,
    bytes: BTreeMap<u64, u8>,
    /// Absent pages: #PF.
    pub(crate) absent: BTreeSet<u64>,
    /// Pages that CPL 3 may not touch.
    pub(crate) supervisor: BTreeSet<u64>,
    /// Accesses stop after this many.
    pub(crate) stop_after: Option<usize>,
}

impl Mock {
    /// CPL 0, with all tables in place: gate `v` is a present DPL 0 interrupt gate to `HANDLER +
    /// v`.
    pub(crate) fn new() -> Self {
        let mut m = Self {
            sys: System::long_mode(0),
            bytes: BTreeMap::new(),
            absent: [IST3 >> 12, (IST3 - 1) >> 12].into(),
            supervisor: BTreeSet::new(),
            stop_after: None,
        };
        let descriptors = [
            (KERNEL_CS, 0x0020_9b00_0000_0000),
            (KERNEL_DS, 0x0000_9300_0000_0000),
            (USER_DS, 0x0000_f300_0000_0000),
            (USER_CS, 0x0020_fb00_0000_0000),
            (CONFORMING_CS, 0x0020_9f00_0000_0000),
            (COMPAT_CS, 0x00cf_fb00_0000_ffff),
            (ABSENT_CS, 0x0020_1b00_0000_0000),
            (READ_ONLY_DS, 0x0000_f100_0000_0000),
            (ABSENT_DS, 0x0000_7300_0000_0000),
            (BASED_DS, 0x1200_f234_5678_0000),
        ];
        for (selector, raw) in descriptors {
            m.put(GDT + u64::from(selector & !7), raw);
        }
        m.put_system_descriptor(TSS_SEL, 0x8900, TSS, 0x67);
        m.put_system_descriptor(LDT_SEL, 0x8200, LDT, 0xf);
        m.sys.gdtr = Table {
            base: GDT,
            limit: GDT_LIMIT,
            selector: 0,
        };
        m.sys.idtr = Table {
            base: IDT,
            limit: 0xfff,
            selector: 0,
        };
        m.sys.tr = Table {
            base: TSS,
            limit: 0x67,
            selector: TSS_SEL,
        };
        m.sys.selectors = [0, KERNEL_CS, KERNEL_DS, 0, 0, 0];
        m.put(TSS + 4, RSP0);
        for (ist, stack) in [(1, IST1), (2, IST2), (3, IST3)] {
            m.put(TSS + 0x1c + 8 * ist, stack);
        }
        for vector in 0..=255 {
            m.gate(vector, KERNEL_CS, 0x8e00);
        }
        m
    }

    /// The same kernel, interrupted in user mode.
    pub(crate) fn user() -> Self {
        let mut m = Self::new();
        m.sys.cpl = 3;
        m.sys.selectors = [USER_DS, USER_CS, USER_DS, USER_DS, 0, 0];
        m
    }

    /// Sets a gate. `attributes` is bits 15 to 0 of its second doubleword (P, DPL, type, IST), as
    /// in the manual's figure.
    pub(crate) fn gate(&mut self, vector: u8, selector: u16, attributes: u64) {
        self.gate_to(vector, selector, attributes, HANDLER + u64::from(vector));
    }

    pub(crate) fn gate_to(&mut self, vector: u8, selector: u16, attributes: u64, target: u64) {
        let low = target & 0xffff
            | u64::from(selector) << 16
            | attributes << 32
            | (target >> 16 & 0xffff) << 48;
        self.put(IDT + u64::from(vector) * 16, low);
        self.put(IDT + u64::from(vector) * 16 + 8, target >> 32);
    }

    fn put_system_descriptor(&mut self, selector: u16, kind: u64, base: u64, limit: u64) {
        let at = GDT + u64::from(selector);
        let low = limit | (base & 0xff_ffff) << 16 | kind << 32 | (base >> 24 & 0xff) << 56;
        self.put(at, low);
        self.put(at + 8, base >> 32);
    }

    pub(crate) fn put(&mut self, va: u64, value: u64) {
        for (i, byte) in value.to_le_bytes().into_iter().enumerate() {
            self.bytes.insert(va.wrapping_add(i as u64), byte);
        }
    }

    pub(crate) fn get(&self, va: u64) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| {
            self.byte(va.wrapping_add(i as u64))
        }))
    }

    fn byte(&self, va: u64) -> u8 {
        self.bytes.get(&va).copied().unwrap_or(0)
    }

    /// All of the system registers, to compare.
    pub(crate) fn registers(&self) -> String {
        format!("{:x?}", self.sys)
    }

    fn check(&mut self, va: u64, width: Width, user: User, write: u32) -> Result<(), Trap> {
        if let Some(left) = &mut self.stop_after {
            if *left == 0 {
                return Err(Stop::Wait.into());
            }
            *left -= 1;
        }
        for va in [va, va.wrapping_add(width.bytes() - 1)] {
            if !is_canonical(va) {
                return Err(Exception::GP0.into());
            }
            let as_user = u32::from(user == User::User) << 2;
            if self.absent.contains(&(va >> 12)) {
                return Err(Exception::page_fault(write | as_user, va).into());
            }
            if as_user != 0 && self.supervisor.contains(&(va >> 12)) {
                return Err(Exception::page_fault(1 | write | as_user, va).into());
            }
        }
        Ok(())
    }
}

impl Linear for Mock {
    fn system(&self) -> &System {
        &self.sys
    }

    fn system_mut(&mut self) -> &mut System {
        &mut self.sys
    }

    fn read(&mut self, va: u64, width: Width, user: User) -> Result<u64, Trap> {
        self.check(va, width, user, 0)?;
        Ok(width.truncate(self.get(va)))
    }

    fn write(&mut self, va: u64, width: Width, value: u64, user: User) -> Result<(), Trap> {
        self.check(va, width, user, 2)?;
        for i in 0..width.bytes() {
            self.bytes
                .insert(va.wrapping_add(i), (value >> (8 * i)) as u8);
        }
        Ok(())
    }
}
