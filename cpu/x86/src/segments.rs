//! Segment registers and descriptor tables in 64-bit mode (SDM vol 3 3.4, 3.5, 5.2).
//!
//! In 64-bit mode, selectors and privileges are checked, code must be 64-bit (CS.L = 1, CS.D = 0),
//! and only FS and GS have a base.

use crate::linear::{Linear, Width};
use crate::state::{Exception, System, Table, Trap, is_canonical};
use crate::walk::User;

/// Index into [`System::selectors`], in the encoding of instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Segment {
    Es,
    Cs,
    Ss,
    Ds,
    Fs,
    Gs,
}

/// A code or data segment descriptor, or the low half of a system one (SDM vol 3 figure 3-8).
#[derive(Clone, Copy)]
pub(crate) struct Descriptor {
    raw: u64,
    /// The address of the read.
    address: u64,
}

const TSS_AVAILABLE: u64 = 9;
const TSS_BUSY: u64 = 11;
const CALL_GATE: u64 = 12;
const LDT: u64 = 2;

impl Descriptor {
    fn is_segment(self) -> bool {
        self.raw >> 44 & 1 != 0
    }

    fn kind(self) -> u64 {
        self.raw >> 40 & 0xf
    }

    pub(crate) fn is_code(self) -> bool {
        self.is_segment() && self.kind() & 8 != 0
    }

    /// Conforming code: runs at the caller's privilege.
    pub(crate) fn is_conforming(self) -> bool {
        self.is_code() && self.kind() & 4 != 0
    }

    pub(crate) fn is_writable_data(self) -> bool {
        self.is_segment() && self.kind() & 0b1010 == 0b0010
    }

    pub(crate) fn is_readable(self) -> bool {
        self.is_segment() && self.kind() & 0b1010 != 0b1000
    }

    pub(crate) fn dpl(self) -> u8 {
        (self.raw >> 45 & 3) as u8
    }

    pub(crate) fn is_present(self) -> bool {
        self.raw >> 47 & 1 != 0
    }

    /// 64-bit code: L set, D clear.
    pub(crate) fn is_long(self) -> bool {
        self.raw >> 53 & 3 == 1
    }

    fn base(self) -> u64 {
        (self.raw >> 16 & 0xff_ffff) | (self.raw >> 56 << 24)
    }

    /// LAR. Bits 19 to 16 are undefined in the manual; here they are the descriptor's, as on tested
    /// processors. In IA-32e mode an LDT's descriptor is not valid for LAR (SDM vol 2 table 3-53).
    pub(crate) fn access_rights(self) -> Option<u32> {
        let valid = self.is_segment() || self.is_tss() || self.kind() == CALL_GATE;
        valid.then_some((self.raw >> 32) as u32 & 0x00ff_ff00)
    }

    /// LSL.
    pub(crate) fn segment_limit(self) -> Option<u32> {
        let valid = self.is_segment() || self.is_tss() || self.kind() == LDT;
        valid.then_some(self.limit())
    }

    fn is_tss(self) -> bool {
        !self.is_segment() && matches!(self.kind(), TSS_AVAILABLE | TSS_BUSY)
    }

    fn limit(self) -> u32 {
        let limit = (self.raw & 0xffff | self.raw >> 32 & 0xf_0000) as u32;
        if self.raw >> 55 & 1 != 0 {
            limit << 12 | 0xfff
        } else {
            limit
        }
    }

    /// Sets the accessed bit in memory.
    pub(crate) fn touch(self, m: &mut impl Linear) -> Result<(), Trap> {
        if self.kind() & 1 != 0 {
            return Ok(());
        }
        let byte = self.raw >> 40 & 0xff | 1;
        m.write(
            self.address.wrapping_add(5),
            Width::W8,
            byte,
            User::Supervisor,
        )
    }

    /// The value for [`System::segment_dpl`].
    fn outer_dpl(self) -> u8 {
        if self.is_conforming() { 3 } else { self.dpl() }
    }
}

/// Whether `selector` is one of the four null selectors.
pub(crate) const fn is_null(selector: u16) -> bool {
    selector & !3 == 0
}

/// The error code that names `selector`.
pub(crate) const fn code(selector: u16) -> u32 {
    (selector & !3) as u32
}

/// Reads the 8-byte descriptor of a non-null selector.
///
/// # Errors
/// `outside` if the descriptor lies past the table's limit, and the errors of the read itself.
pub(crate) fn fetch(
    m: &mut impl Linear,
    selector: u16,
    outside: Exception,
) -> Result<Descriptor, Trap> {
    let address = locate(m.system(), selector).ok_or(outside)?;
    let raw = m.read(address, Width::W64, User::Supervisor)?;
    Ok(Descriptor { raw, address })
}

/// The descriptor of `selector`, if there is one and the current privilege may examine it (SDM vol
/// 2 "VERR").
///
/// # Errors
/// The errors of the descriptor's read.
pub(crate) fn visible(m: &mut impl Linear, selector: u16) -> Result<Option<Descriptor>, Trap> {
    let Some(address) = locate(m.system(), selector).filter(|_| !is_null(selector)) else {
        return Ok(None);
    };
    let raw = m.read(address, Width::W64, User::Supervisor)?;
    let descriptor = Descriptor { raw, address };
    let privilege = m.system().cpl.max((selector & 3) as u8);
    let visible = descriptor.is_conforming() || privilege <= descriptor.dpl();
    Ok(visible.then_some(descriptor))
}

/// The address of a selector's descriptor, if it lies in its table.
fn locate(sys: &System, selector: u16) -> Option<u64> {
    let table = if selector & 4 == 0 {
        sys.gdtr
    } else {
        sys.ldtr
    };
    let offset = u32::from(selector & !7);
    let absent = selector & 4 != 0 && is_null(sys.ldtr.selector);
    (!absent && offset + 7 <= table.limit).then(|| table.base.wrapping_add(offset.into()))
}

/// MOV to a segment register other than CS, and POP FS and GS. After a MOV to SS the caller sets
/// the interrupt shadow.
///
/// # Errors
/// #UD for CS; #GP, #NP or #SS with the selector as SDM vol 2 "MOV" lists them; traps of memory.
pub(crate) fn load(m: &mut impl Linear, segment: Segment, selector: u16) -> Result<(), Trap> {
    let (dpl, base) = match segment {
        Segment::Cs => return Err(Exception::UD.into()),
        Segment::Ss => {
            stack_segment(m, selector, m.system().cpl)?;
            (3, 0)
        }
        _ if is_null(selector) => (3, 0),
        _ => {
            let bad = Exception::gp(code(selector));
            let descriptor = fetch(m, selector, bad)?;
            let dpl = descriptor.outer_dpl();
            let cpl = m.system().cpl;
            if !descriptor.is_readable() || (selector & 3) as u8 > dpl || cpl > dpl {
                return Err(bad.into());
            }
            if !descriptor.is_present() {
                return Err(Exception::with_error(11, code(selector)).into());
            }
            descriptor.touch(m)?;
            (dpl, descriptor.base())
        }
    };
    let sys = m.system_mut();
    sys.selectors[segment as usize] = selector;
    sys.segment_dpl[segment as usize] = dpl;
    match segment {
        Segment::Fs => sys.fs_base = base,
        Segment::Gs => sys.gs_base = base,
        _ => {}
    }
    Ok(())
}

/// Checks the new selector of SS at privilege `cpl`. Null is allowed in 64-bit mode below CPL 3.
///
/// # Errors
/// #GP or #SS with the selector, traps of memory.
pub(crate) fn stack_segment(m: &mut impl Linear, selector: u16, cpl: u8) -> Result<(), Trap> {
    let rpl = (selector & 3) as u8;
    let bad = Exception::gp(code(selector));
    if is_null(selector) {
        return if cpl != 3 && rpl == cpl {
            Ok(())
        } else {
            Err(bad.into())
        };
    }
    let descriptor = fetch(m, selector, bad)?;
    if rpl != cpl || descriptor.dpl() != cpl || !descriptor.is_writable_data() {
        return Err(bad.into());
    }
    if !descriptor.is_present() {
        return Err(Exception::with_error(12, code(selector)).into());
    }
    descriptor.touch(m)
}

/// On a return to an outer level, nulls the data segments that the new level may not use (SDM vol 3
/// 5.8.6).
pub(crate) fn drop_inner(sys: &mut System) {
    for segment in [Segment::Es, Segment::Ds, Segment::Fs, Segment::Gs] {
        let dpl = &mut sys.segment_dpl[segment as usize];
        if *dpl < sys.cpl {
            *dpl = 3;
            sys.selectors[segment as usize] = 0;
        }
    }
}

/// LGDT and LIDT: the register for the operand's `limit` and `base`.
///
/// # Errors
/// #GP(0) above CPL 0 or for a non-canonical base.
pub(crate) fn pseudo_descriptor(sys: &System, limit: u16, base: u64) -> Result<Table, Trap> {
    if sys.cpl != 0 || !is_canonical(base) {
        return Err(Exception::GP0.into());
    }
    Ok(Table {
        base,
        limit: limit.into(),
        selector: 0,
    })
}

/// LTR: loads the task register, and marks its descriptor as busy.
///
/// # Errors
/// #GP(0) above CPL 0 or for a null selector, #GP or #NP with the selector, traps of memory.
pub(crate) fn load_tr(m: &mut impl Linear, selector: u16) -> Result<(), Trap> {
    if m.system().cpl != 0 || is_null(selector) {
        return Err(Exception::GP0.into());
    }
    let (descriptor, base) = system_segment(m, selector, TSS_AVAILABLE)?;
    let busy = descriptor.raw >> 40 & 0xff | 2;
    m.write(
        descriptor.address.wrapping_add(5),
        Width::W8,
        busy,
        User::Supervisor,
    )?;
    m.system_mut().tr = Table {
        base,
        limit: descriptor.limit(),
        selector,
    };
    Ok(())
}

/// LLDT. A null selector leaves no LDT.
///
/// # Errors
/// As [`load_tr`].
pub(crate) fn load_ldtr(m: &mut impl Linear, selector: u16) -> Result<(), Trap> {
    if m.system().cpl != 0 {
        return Err(Exception::GP0.into());
    }
    let table = if is_null(selector) {
        Table {
            base: 0,
            limit: 0,
            selector,
        }
    } else {
        let (descriptor, base) = system_segment(m, selector, LDT)?;
        Table {
            base,
            limit: descriptor.limit(),
            selector,
        }
    };
    m.system_mut().ldtr = table;
    Ok(())
}

/// A 16-byte system descriptor of the GDT, and its 64-bit base.
fn system_segment(
    m: &mut impl Linear,
    selector: u16,
    kind: u64,
) -> Result<(Descriptor, u64), Trap> {
    let bad = Exception::gp(code(selector));
    if selector & 4 != 0 || u32::from(selector & !7) + 15 > m.system().gdtr.limit {
        return Err(bad.into());
    }
    let low = fetch(m, selector, bad)?;
    let high = m.read(low.address.wrapping_add(8), Width::W64, User::Supervisor)?;
    let base = low.base() | high << 32;
    // Bits 12 to 8 of the last doubleword, at a type's place, must be zero.
    if low.is_segment() || low.kind() != kind || high >> 40 & 0x1f != 0 || !is_canonical(base) {
        return Err(bad.into());
    }
    if !low.is_present() {
        return Err(Exception::with_error(11, code(selector)).into());
    }
    Ok((low, base))
}

#[cfg(test)]
mod tests;
