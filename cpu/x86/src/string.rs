//! String instructions: MOVS, STOS, LODS, SCAS, CMPS with their REP prefixes.
//!
//! Every iteration leaves the registers as the architecture specifies, so a fault keeps the
//! completed iterations. Forward copies and fills go page by page. One execution completes a
//! bounded piece of a long REP and then requests another ([`Why::Again`]), so that the run loop can
//! check for interrupts and requests in between. It charges the budget for the iterations.

use crate::arith::mask;
use crate::flags::DF;
use crate::general::{load, reg, segment_base, set_reg, store};
use crate::mem::{Memory, Target, Touch};
use crate::op::{Op, Operand};
use crate::processor::{Core, Why};
use lacuna_addr::{Access, PAGE_SIZE};
use lacuna_cpu::{Bus, HostPage};

/// Kinds, in `aux` bits 0-2.
pub(crate) const MOVS: u8 = 0;
pub(crate) const STOS: u8 = 1;
pub(crate) const LODS: u8 = 2;
pub(crate) const SCAS: u8 = 3;
pub(crate) const CMPS: u8 = 4;
/// Prefixes, in `aux` bits 3-4.
pub(crate) const REP: u8 = 1 << 3;
pub(crate) const REPNE: u8 = 2 << 3;
/// 32-bit addresses and count, in `aux` bit 5.
pub(crate) const ADDRESS_32: u8 = 1 << 5;

const RAX: u8 = 0;
const RCX: u8 = 1;
const RSI: u8 = 6;
const RDI: u8 = 7;

/// Iterations, or pages of a block move, in one execution.
const PIECE: u32 = 256;
/// Iterations that cost one instruction of the budget.
const ITERATIONS_PER_INSTRUCTION: u64 = 64;

/// Executes a string op: one iteration, or with REP a piece.
pub(crate) fn execute(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let s = Strings::new(op);
    if op.aux & (REP | REPNE) == 0 {
        return s.iterate(core, bus);
    }
    let mut spent = 0;
    let outcome = s.repeat(core, bus, &mut spent);
    // A piece costs at least one. Otherwise a long REP with one iteration at a time would be free.
    // A piece blocked before its first iteration costs nothing.
    let piece = u64::from(spent > 0 && outcome.is_err());
    core.budget -= (spent / ITERATIONS_PER_INSTRUCTION).max(piece) as i64;
    outcome
}

#[derive(Clone, Copy)]
struct Strings {
    kind: u8,
    prefix: u8,
    width: u8,
    /// log2 of the bytes of RSI, RDI and RCX.
    address: u8,
    segment: u8,
}

impl Strings {
    fn new(op: &Op) -> Self {
        Self {
            kind: op.aux & 7,
            prefix: op.aux & (REP | REPNE),
            width: op.width(),
            address: if op.aux & ADDRESS_32 != 0 { 2 } else { 3 },
            segment: op.src,
        }
    }

    fn repeat(&self, core: &mut Core, bus: &mut impl Bus, spent: &mut u64) -> Touch<()> {
        for _ in 0..PIECE {
            let count = reg(core, RCX, self.address);
            if count == 0 {
                return Ok(());
            }
            let moved = self.block_move(core, bus, count)?;
            if moved > 0 {
                *spent += moved;
                set_reg(core, RCX, self.address, count - moved);
                continue;
            }
            self.iterate(core, bus)?;
            *spent += 1;
            set_reg(core, RCX, self.address, count - 1);
            if count == 1 || self.is_over(core) {
                return Ok(());
            }
            if core.stepping {
                break;
            }
        }
        if reg(core, RCX, self.address) == 0 {
            return Ok(());
        }
        core.block(Why::Again)
    }

    /// Whether REPE or REPNE ends here.
    fn is_over(&self, core: &Core) -> bool {
        matches!(self.kind, SCAS | CMPS) && core.flags.zf() != (self.prefix == REP)
    }

    fn source(&self, core: &Core) -> u64 {
        reg(core, RSI, self.address).wrapping_add(segment_base(core, self.segment))
    }

    fn advance(&self, core: &mut Core, slot: u8, bytes: u64) {
        let at = core.r[slot as usize];
        let to = if core.rflags & DF == 0 {
            at.wrapping_add(bytes)
        } else {
            at.wrapping_sub(bytes)
        };
        set_reg(core, slot, self.address, to);
    }

    /// One iteration, without the count.
    fn iterate(&self, core: &mut Core, bus: &mut impl Bus) -> Touch<()> {
        let (width, size) = (self.width, 1 << self.width);
        let (source, destination) = (self.source(core), reg(core, RDI, self.address));
        match self.kind {
            MOVS => {
                let value = load(core, bus, source, width)?;
                store(core, bus, destination, width, value)?;
            }
            STOS => store(core, bus, destination, width, reg(core, RAX, width))?,
            LODS => {
                let value = load(core, bus, source, width)?;
                set_reg(core, RAX, width, value);
            }
            SCAS => {
                let (a, b) = (reg(core, RAX, width), load(core, bus, destination, width)?);
                core.flags
                    .set_sub_wide(width, a.wrapping_sub(b) & mask(width), b);
            }
            _ => {
                let a = load(core, bus, source, width)?;
                let b = load(core, bus, destination, width)?;
                core.flags
                    .set_sub_wide(width, a.wrapping_sub(b) & mask(width), b);
            }
        }
        if matches!(self.kind, MOVS | LODS | CMPS) {
            self.advance(core, RSI, size);
        }
        if self.kind != LODS {
            self.advance(core, RDI, size);
        }
        Ok(())
    }

    /// Completes as many iterations of a forward MOVS or STOS as fit into their first pages; 0 if
    /// they must go one by one. The caller updates RCX.
    fn block_move(&self, core: &mut Core, bus: &mut impl Bus, count: u64) -> Touch<u64> {
        if !matches!(self.kind, MOVS | STOS) || core.rflags & DF != 0 || core.stepping {
            return Ok(0);
        }
        let destination = reg(core, RDI, self.address);
        let source = self.source(core);
        let mut room = self.room(destination);
        if self.kind == MOVS {
            room = room.min(self.room(source));
        }
        let moved = count.min(room);
        if moved < 2 {
            return Ok(0);
        }
        let len = (moved << self.width) as usize;
        let from = match self.kind {
            MOVS => match page(core, bus, source, Access::Read)? {
                Some(from) => Some(from),
                None => return Ok(0),
            },
            _ => None,
        };
        let Some(to) = page(core, bus, destination, Access::Write)? else {
            return Ok(0);
        };
        let (to_offset, from_offset) = (offset(destination), offset(source));
        match from {
            Some(from) if from.base() == to.base() && overruns(to_offset, from_offset, len) => {
                return Ok(0);
            }
            Some(from) => to.copy_from(to_offset, from, from_offset, len),
            None => to.fill(
                to_offset,
                len,
                repeated(reg(core, RAX, self.width), self.width),
            ),
        }
        self.advance(core, RDI, len as u64);
        if self.kind == MOVS {
            self.advance(core, RSI, len as u64);
        }
        Ok(moved)
    }

    /// Whole elements from `va` to its page's end.
    fn room(&self, va: u64) -> u64 {
        (PAGE_SIZE - offset(va)) as u64 >> self.width
    }
}

const fn offset(va: u64) -> usize {
    va as usize & (PAGE_SIZE - 1)
}

/// Whether a forward copy would read its own written bytes.
const fn overruns(to: usize, from: usize, len: usize) -> bool {
    to > from && to - from < len
}

/// The value repeated over 8 bytes.
fn repeated(value: u64, width: u8) -> u64 {
    match width {
        0 => value * 0x0101_0101_0101_0101,
        1 => value * 0x0001_0001_0001_0001,
        2 => value | value << 32,
        _ => value,
    }
}

/// The page for a block move; `None` if it does not allow plain accesses.
fn page(core: &mut Core, bus: &mut impl Bus, va: u64, access: Access) -> Touch<Option<HostPage>> {
    let known = if access.is_write() {
        core.translations.front.tlb.writable_page(va)
    } else {
        core.translations.front.tlb.readable_page(va)
    };
    if known.is_some() || !crate::state::is_canonical(va) {
        return Ok(known);
    }
    match core.translate(bus, va, access, core.user)? {
        Target::Memory(_, page) if access.is_write() && page.is_write_tracked() => Ok(None),
        Target::Memory(_, page) => Ok(Some(page)),
        Target::Device(_) => Ok(None),
    }
}
