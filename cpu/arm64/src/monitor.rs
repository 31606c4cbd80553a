//! The exclusive monitor (Arm ARM B2.10): LDXR marks an address, and STXR stores only if nothing
//! has been stored there since.
//!
//! A compare-and-swap of the value that LDXR has loaded is not enough. Another vCPU may store a
//! second value and then the first one again, and STXR must fail. Plain stores are by far the most
//! frequent accesses, so no plain store looks at a monitor. Two facts make this possible.
//!
//! **A quiet pair needs no more than compare-and-swap.** A pair is quiet if this vCPU executes only
//! register operations and branches between LDXR and STXR, and does not leave its run loop. Suppose
//! that the compare-and-swap of STXR succeeds at time *t*. Then memory has at *t* the value that
//! LDXR has returned. So the execution is the same as one in which LDXR loads just before *t*: no
//! access of this vCPU lies between, so neither this vCPU nor another one can tell the difference.
//! In that execution neither a vCPU nor the host stores between the two.
//!
//! **Another pair runs alone.** If there is a load, a store, a barrier, a system instruction or an
//! exit between the two, time *t* matters. Such a store-exclusive fails, and the vCPU remembers its
//! load-exclusive. At the repetition, the vCPU executes from there to the store-exclusive while
//! every other vCPU is stopped (`Exit::Exclusive`). So no vCPU stores in between. The architecture
//! promises no progress to such loops (B2.10.5), but programs have them: a list whose head is
//! replaced by LDXR and STXR loads the second element in between. A store of the *host* in between
//! is noticed only by its value: devices do not share a word with a guest's exclusive accesses.
//!
//! A count shows which instructions are in between. The decoder notes in LDXR how many quiet
//! instructions follow in its basic block, and in STXR how many precede. If the two numbers cover
//! the instructions retired in between, the pair is quiet. An exception counts too, so a pair with
//! a handler in between is not quiet. An exception and its return also clear the monitor.
//!
//! A store by this vCPU itself does not clear the monitor: the architecture leaves that open.
//! STXR fails if its address or size differs from LDXR's.

use crate::atomics::{exchange_if, joined, words};
use crate::lower_memory::access;
use crate::mem::{Touch, offset};
use crate::op::{Code, Op};
use crate::processor::{Core, Why};
use crate::state::Trap;
use lacuna_cpu::{Bus, HostPage, Word};

/// The mark of the last load-exclusive.
#[derive(Default)]
pub(crate) struct Monitor {
    mark: Option<Mark>,
    /// The place of the load-exclusive's op, if its store-exclusive has failed because the pair was
    /// not quiet. The pair runs alone at its repetition.
    loud: Option<u16>,
}

/// A marked address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mark {
    va: u64,
    /// `aux` of the ops: the size, and whether it is a pair.
    size: u8,
    value: [u64; 2],
    /// The number of instructions retired before LDXR.
    at: u64,
    /// The number of quiet instructions behind it.
    quiet: u64,
    /// The place of its op.
    site: u16,
    scope: Scope,
}

/// The vCPU's whereabouts since the load-exclusive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scope {
    /// In its run loop.
    Running,
    /// It has left its run loop.
    Left,
    /// In its run loop, while every other vCPU is stopped.
    Alone,
}

impl Monitor {
    /// Whether the mark's load-exclusive runs while every other vCPU is stopped.
    pub(crate) fn is_alone(&self) -> bool {
        self.mark.is_some_and(|mark| mark.scope == Scope::Alone)
    }

    /// The vCPU leaves its run loop.
    #[inline]
    pub(crate) fn leave(&mut self) {
        if let Some(mark) = &mut self.mark {
            mark.scope = Scope::Left;
        }
    }

    /// Nothing is marked: the next store-exclusive fails.
    pub(crate) fn clear(&mut self) {
        self.mark = None;
    }
}

/// Whether an op accesses registers only, and cannot be blocked.
const fn is_quiet(code: Code) -> bool {
    let branch = Code::Jump as u8 <= code as u8 && (code as u8) < Code::System as u8;
    (code as u8) < Code::LoadU8 as u8 || branch || matches!(code, Code::Carry | Code::Unary)
}

/// Writes into each exclusive access of a basic block its place, and the number of quiet
/// instructions behind or before it: the low and the high half of `imm`.
pub(crate) fn mark_quiet(ops: &mut [Op]) {
    let (mut place, mut quiet) = (0, 0);
    for at in 0..ops.len() {
        let op = ops[at];
        match op.code {
            Code::StoreExclusive => ops[at].imm = quiet << 16 | place,
            Code::LoadExclusive => {
                let following = ops[at + 1..].iter().take_while(|op| is_quiet(op.code));
                let following: i32 = following.map(|op| i32::from(op.len)).sum();
                ops[at].imm = following << 16 | place;
            }
            _ => {}
        }
        quiet = if is_quiet(op.code) {
            quiet + i32::from(op.len)
        } else {
            0
        };
        place += i32::from(op.len);
    }
}

/// The number of instructions retired before this op, and its quiet neighbours.
fn position(core: &Core, op: &Op) -> (u64, u64) {
    let place = op.imm as u32 & 0xffff;
    let at = core.retired_before().wrapping_add(place.into());
    (at, u64::from(op.imm as u32 >> 16))
}

/// The number of bytes of an exclusive access.
const fn bytes(size: u8) -> usize {
    let one = 1 << (size & access::SIZE);
    if size & access::PAIR == 0 {
        one
    } else {
        2 * one
    }
}

/// LDXR, LDAXR, LDXP and LDAXP. `site` is the place of the op.
pub(crate) fn load(core: &mut Core, bus: &mut impl Bus, op: &Op, site: u16) -> Touch<()> {
    let va = core.r[op.base as usize];
    if core.monitor.loud == Some(site) && !core.exclusive {
        return core.block(Why::Trap(Trap::Exclusive));
    }
    let page = core.aligned_page(bus, va, bytes(op.aux))?;
    let value = read(page, offset(va), op.aux);
    let (at, quiet) = position(core, op);
    core.monitor.mark = Some(Mark {
        va,
        size: op.aux,
        value,
        at,
        quiet,
        site,
        scope: if core.exclusive {
            Scope::Alone
        } else {
            Scope::Running
        },
    });
    core.r[op.dst as usize] = value[0];
    if op.aux & access::PAIR != 0 {
        core.r[op.index as usize] = value[1];
    }
    Ok(())
}

fn read(page: HostPage, offset: usize, size: u8) -> [u64; 2] {
    match (size & access::SIZE, size & access::PAIR != 0) {
        (0, _) => [page.load::<u8>(offset).into(), 0],
        (1, _) => [page.load::<u16>(offset).into(), 0],
        (2, false) => [page.load::<u32>(offset).into(), 0],
        (2, true) => words(page.load(offset)),
        (_, false) => [page.load(offset), 0],
        // The two words may be of different times. The compare-and-swap finds out.
        (_, true) => [page.load(offset), page.load(offset + 8)],
    }
}

/// STXR, STLXR, STXP and STLXP.
pub(crate) fn store(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let va = core.r[op.base as usize];
    let stored = match core.monitor.mark {
        Some(mark) if (mark.va, mark.size) == (va, op.aux) => {
            let (at, quiet) = position(core, op);
            let between = at.wrapping_sub(mark.at).wrapping_sub(1);
            let stored = match mark.scope {
                Scope::Alone => Some(store_if(core, bus, op, mark)?),
                Scope::Running if between <= mark.quiet + quiet => {
                    Some(store_if(core, bus, op, mark)?)
                }
                _ => None,
            };
            core.monitor.loud = stored.is_none().then_some(mark.site);
            stored.unwrap_or(false)
        }
        _ => false,
    };
    core.monitor.clear();
    core.r[op.dst as usize] = u64::from(!stored);
    Ok(())
}

/// Stores the registers if memory has the value of `mark`.
fn store_if(core: &mut Core, bus: &mut impl Bus, op: &Op, mark: Mark) -> Touch<bool> {
    let (at, old) = (offset(mark.va), mark.value);
    let new = [op.src, op.index].map(|slot| core.r[slot as usize]);
    let page = core.store_page(bus, mark.va)?;
    let same = |found: u64| found == old[0];
    Ok(match (op.aux & access::SIZE, op.aux & access::PAIR != 0) {
        (0, _) => same(exchange_if(page, at, u8::narrow(old[0]), u8::narrow(new[0])).widen()),
        (1, _) => same(exchange_if(page, at, u16::narrow(old[0]), u16::narrow(new[0])).widen()),
        (2, false) => same(exchange_if(page, at, u32::narrow(old[0]), u32::narrow(new[0])).widen()),
        (2, true) => exchange_if(page, at, joined(old), joined(new)) == joined(old),
        (_, false) => same(exchange_if(page, at, old[0], new[0])),
        (_, true) => core.exchange_pair(page, mark.va, old, new)? == old,
    })
}
