//! Returns from handlers and between privilege levels: IRET, far RET and JMP, SYSCALL, SYSRET, and
//! the I/O permission check.
//!
//! Targets are 64-bit code. A return to a compatibility-mode segment is #GP with its selector, as
//! on a processor without that mode. As in `deliver.rs`, nothing changes before the last check has
//! passed.

use crate::control::privileged;
use crate::deliver::{Flow, rflags};
use crate::linear::{Linear, Width};
use crate::segments::{self, Segment};
use crate::state::bits::EFER_SCE;
use crate::state::{Exception, System, Trap, is_canonical};
use crate::walk::User;

/// The flags that IRET and SYSRET take from their operand at any level: CF PF AF ZF SF TF DF OF NT
/// AC ID. RF is dropped: it suppresses a breakpoint for one instruction, and breakpoints are never
/// hit here.
const USER_FLAGS: u64 = 0x0024_4dd5;

/// Pops values at the current privilege without moving RSP.
struct Pops<'a, M> {
    m: &'a mut M,
    rsp: u64,
    width: Width,
    user: User,
}

impl<'a, M: Linear> Pops<'a, M> {
    fn new(m: &'a mut M, rsp: u64, width: Width) -> Self {
        let user = crate::walk::at_cpl(m.system().cpl);
        Self {
            m,
            rsp,
            width,
            user,
        }
    }

    fn pop(&mut self) -> Result<u64, Trap> {
        let last = self.rsp.wrapping_add(self.width.bytes() - 1);
        if !is_canonical(self.rsp) || !is_canonical(last) {
            return Err(Exception::SS0.into());
        }
        let value = self.m.read(self.rsp, self.width, self.user)?;
        self.rsp = self.rsp.wrapping_add(self.width.bytes());
        Ok(value)
    }
}

/// IRET with an operand of `width` (64-bit mode always pops SS and RSP).
///
/// # Errors
/// #GP(0) for NT, a null CS or a non-canonical RIP; #GP, #NP or #SS with the bad selector; #SS(0)
/// for a non-canonical stack; traps of memory.
pub(crate) fn iret(m: &mut impl Linear, flow: &mut Flow, width: Width) -> Result<(), Trap> {
    if flow.rflags & rflags::NT != 0 {
        return Err(Exception::GP0.into());
    }
    let mut pops = Pops::new(m, flow.rsp, width);
    let rip = pops.pop()?;
    let cs = pops.pop()? as u16;
    let flags = pops.pop()?;
    let rsp = pops.pop()?;
    let ss = pops.pop()? as u16;

    let cpl = return_code(m, cs)?;
    if !is_canonical(rip) {
        return Err(Exception::GP0.into());
    }
    segments::stack_segment(m, ss, cpl)?;
    let rflags = returned_flags(m.system().cpl, flow.rflags, flags, width);
    enter(m.system_mut(), cs, cpl, Some(ss));
    *flow = Flow { rip, rsp, rflags };
    Ok(())
}

/// The flags after IRET at `cpl`.
fn returned_flags(cpl: u8, old: u64, popped: u64, width: Width) -> u64 {
    let mut mask = USER_FLAGS;
    if cpl <= rflags::iopl(old) {
        mask |= rflags::IF;
    }
    if cpl == 0 {
        mask |= rflags::IOPL | rflags::VIF_VIP;
    }
    let mask = width.truncate(mask);
    old & !(mask | rflags::RF) | popped & mask | rflags::ONE
}

/// Far RET with an operand of `width`. Drops `extra` bytes of arguments.
///
/// # Errors
/// As [`iret`], without NT.
pub(crate) fn ret_far(
    m: &mut impl Linear,
    flow: &mut Flow,
    width: Width,
    extra: u16,
) -> Result<(), Trap> {
    let mut pops = Pops::new(m, flow.rsp, width);
    let rip = pops.pop()?;
    let cs = pops.pop()? as u16;
    let outer = (cs & 3) as u8 > pops.m.system().cpl;
    pops.rsp = pops.rsp.wrapping_add(extra.into());
    let mut rsp = pops.rsp;
    let mut ss = None;
    if outer {
        rsp = pops.pop()?.wrapping_add(extra.into());
        ss = Some(pops.pop()? as u16);
    }

    let cpl = return_code(m, cs)?;
    if !is_canonical(rip) {
        return Err(Exception::GP0.into());
    }
    if let Some(ss) = ss {
        segments::stack_segment(m, ss, cpl)?;
    }
    enter(m.system_mut(), cs, cpl, ss);
    *flow = Flow { rip, rsp, ..*flow };
    Ok(())
}

/// Far JMP through memory to a code segment at the same level. Call gates and task gates are #GP.
///
/// # Errors
/// #GP(0) for a null selector or a non-canonical target, #GP or #NP with the selector, traps of
/// memory.
pub(crate) fn jump_far(
    m: &mut impl Linear,
    flow: &mut Flow,
    selector: u16,
    rip: u64,
) -> Result<(), Trap> {
    if segments::is_null(selector) {
        return Err(Exception::GP0.into());
    }
    let bad = Exception::gp(segments::code(selector));
    let code = segments::fetch(m, selector, bad)?;
    let cpl = m.system().cpl;
    let reachable = if code.is_conforming() {
        code.dpl() <= cpl
    } else {
        code.dpl() == cpl && (selector & 3) as u8 <= cpl
    };
    if !code.is_code() || !reachable || !code.is_long() {
        return Err(bad.into());
    }
    if !code.is_present() {
        return Err(Exception::with_error(11, segments::code(selector)).into());
    }
    if !is_canonical(rip) {
        return Err(Exception::GP0.into());
    }
    code.touch(m)?;
    m.system_mut().selectors[Segment::Cs as usize] = selector & !3 | u16::from(cpl);
    flow.rip = rip;
    Ok(())
}

/// Checks the popped CS of a return, and gives the new CPL: its RPL.
fn return_code(m: &mut impl Linear, cs: u16) -> Result<u8, Trap> {
    if segments::is_null(cs) {
        return Err(Exception::GP0.into());
    }
    let bad = Exception::gp(segments::code(cs));
    let code = segments::fetch(m, cs, bad)?;
    let rpl = (cs & 3) as u8;
    let privilege_fits = if code.is_conforming() {
        code.dpl() <= rpl
    } else {
        code.dpl() == rpl
    };
    if !code.is_code() || rpl < m.system().cpl || !privilege_fits || !code.is_long() {
        return Err(bad.into());
    }
    if !code.is_present() {
        return Err(Exception::with_error(11, segments::code(cs)).into());
    }
    code.touch(m)?;
    Ok(rpl)
}

/// Loads CS, and SS if it was popped.
fn enter(sys: &mut System, cs: u16, cpl: u8, ss: Option<u16>) {
    let outer = cpl > sys.cpl;
    sys.selectors[Segment::Cs as usize] = cs;
    sys.cpl = cpl;
    if let Some(ss) = ss {
        sys.selectors[Segment::Ss as usize] = ss;
    }
    if outer {
        segments::drop_inner(sys);
    }
}

/// SYSCALL's saved values in general registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Saved {
    /// RIP of the next instruction.
    pub rcx: u64,
    /// The caller's flags.
    pub r11: u64,
}

/// SYSCALL. `flow.rip` is the address behind the instruction.
///
/// # Errors
/// #UD without EFER.SCE.
pub(crate) fn syscall(sys: &mut System, flow: &mut Flow) -> Result<Saved, Trap> {
    if sys.efer & EFER_SCE == 0 {
        return Err(Exception::UD.into());
    }
    let saved = Saved {
        rcx: flow.rip,
        r11: flow.rflags & !rflags::RF,
    };
    flow.rip = sys.lstar;
    flow.rflags = saved.r11 & !sys.fmask | rflags::ONE;
    let cs = (sys.star >> 32) as u16 & !3;
    set_flat(sys, cs, cs.wrapping_add(8), 0);
    Ok(saved)
}

/// SYSRET with a 64-bit operand, from the RCX and R11 in `saved`. The executor raises #UD for the
/// 32-bit form, because its target, compatibility mode, does not exist here.
///
/// # Errors
/// #UD without EFER.SCE; #GP(0) above CPL 0 and for a non-canonical RCX, both at the caller's
/// level.
pub(crate) fn sysret(sys: &mut System, flow: &mut Flow, saved: Saved) -> Result<(), Trap> {
    if sys.efer & EFER_SCE == 0 {
        return Err(Exception::UD.into());
    }
    privileged(sys)?;
    if !is_canonical(saved.rcx) {
        return Err(Exception::GP0.into());
    }
    flow.rip = saved.rcx;
    let kept = USER_FLAGS | rflags::IF | rflags::IOPL | rflags::VIF_VIP;
    flow.rflags = saved.r11 & kept | rflags::ONE;
    let base = (sys.star >> 48) as u16;
    set_flat(sys, base.wrapping_add(16) | 3, base.wrapping_add(8) | 3, 3);
    Ok(())
}

/// SYSCALL and SYSRET load fixed segments and read no descriptors.
fn set_flat(sys: &mut System, cs: u16, ss: u16, cpl: u8) {
    sys.selectors[Segment::Cs as usize] = cs;
    sys.selectors[Segment::Ss as usize] = ss;
    sys.cpl = cpl;
}

/// Whether IN and OUT may use `width` ports from `port` (SDM vol 1 19.5): by IOPL, else by the
/// bitmap of the TSS.
///
/// # Errors
/// #GP(0) if not, and traps of memory.
pub(crate) fn check_io(
    m: &mut impl Linear,
    flags: u64,
    port: u16,
    width: Width,
) -> Result<(), Trap> {
    let sys = m.system();
    if sys.cpl <= rflags::iopl(flags) {
        return Ok(());
    }
    let tr = sys.tr;
    let refused = Err(Exception::GP0.into());
    if tr.limit < 0x67 {
        return refused;
    }
    let bitmap = m.read(tr.base.wrapping_add(0x66), Width::W16, User::Supervisor)?;
    let offset = bitmap + u64::from(port / 8);
    // The processor always reads two bytes of the bitmap, because ports may straddle them.
    if offset + 1 > u64::from(tr.limit) {
        return refused;
    }
    let bits = m.read(tr.base.wrapping_add(offset), Width::W16, User::Supervisor)?;
    let ports = (1 << width.bytes()) - 1;
    if bits >> (port % 8) & ports != 0 {
        refused
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
