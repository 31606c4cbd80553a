//! Events through the IDT (SDM vol 3 6.12 to 6.15, vol 2 "INT n"): exceptions, interrupts, INT n.
//!
//! ```text
//! the frame, from 16-byte      deliver(event)
//! aligned down:                 | prepare() and commit() ----------------> Entered
//!   SS                          | prepare() raises a second; by class of first and second:
//!   RSP                         |   benign + any, contributory + #PF ----> deliver the second
//!   RFLAGS                      |   contributory + contributory,
//!   CS                          |   #PF + (contributory or #PF) ---------> deliver #DF(0)
//!   RIP                         |   #DF + any ---------------------------> Shutdown
//!   error code, if any
//! ```
//! Every step that can fail comes before the first change. So a stop half-way leaves the
//! architectural state unchanged, and the same event can be delivered again.

use crate::linear::{Linear, Width};
use crate::segments::{self, Descriptor, Segment};
use crate::state::{Exception, Trap, is_canonical};
use crate::walk::User;

/// RFLAGS bits.
pub(crate) mod rflags {
    /// Bit 1, always set.
    pub(crate) const ONE: u64 = 1 << 1;
    /// Trap flag.
    pub(crate) const TF: u64 = 1 << 8;
    /// Interrupt enable.
    pub(crate) const IF: u64 = 1 << 9;
    /// I/O privilege level.
    pub(crate) const IOPL: u64 = 3 << 12;
    /// Nested task.
    pub(crate) const NT: u64 = 1 << 14;
    /// Resume.
    pub(crate) const RF: u64 = 1 << 16;
    /// Virtual-8086: always zero in long mode.
    pub(crate) const VM: u64 = 1 << 17;
    /// Virtual interrupt flag and virtual interrupt pending.
    pub(crate) const VIF_VIP: u64 = 3 << 19;
    /// The I/O privilege level of `flags`.
    pub(crate) const fn iopl(flags: u64) -> u8 {
        (flags >> 12 & 3) as u8
    }
}

/// The registers of control transfers, as in the executor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flow {
    /// The current instruction: the faulting one, or the next one for traps and interrupts.
    pub rip: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// All flags, arithmetic ones included.
    pub rflags: u64,
}

/// An event to deliver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// The processor's own fault or trap.
    Exception(Exception),
    /// INT n and INT3: the gate's DPL is checked.
    Software {
        /// n.
        vector: u8,
        /// The address behind INT, to return to. `Flow::rip` is INT itself, which may fault.
        next: u64,
    },
    /// An external interrupt, or INT1.
    Interrupt(u8),
}

/// The result of a delivery.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// The handler for this vector runs next. It is the handler of the event, or of a fault during
    /// its delivery.
    Entered(u8),
    /// A triple fault: the processor stops. Nothing has changed.
    Shutdown,
}

const DOUBLE_FAULT: u8 = 8;
const PAGE_FAULT: u8 = 14;

/// Delivers `event`, or the fault of its delivery, and ends the halt and interrupt shadow.
///
/// # Errors
/// A stop or exclusive trap of memory: nothing has changed; deliver the same event again later.
pub(crate) fn deliver(m: &mut impl Linear, flow: &mut Flow, event: Event) -> Result<Outcome, Trap> {
    let mut event = event;
    let mut cr2 = m.system().cr2;
    loop {
        if let Event::Exception(Exception {
            cr2: Some(address), ..
        }) = event
        {
            cr2 = address;
        }
        let second = match Entry::prepare(m, *flow, event) {
            Ok(entry) => {
                let sys = m.system_mut();
                sys.cr2 = cr2;
                sys.halted = false;
                sys.interrupt_shadow = false;
                *flow = entry.commit(m);
                return Ok(Outcome::Entered(vector(event)));
            }
            Err(Trap::Exception(second)) => second,
            Err(stop) => return Err(stop),
        };
        if let Some(address) = second.cr2 {
            cr2 = address;
        }
        event = match (Class::of(event), Class::of(Event::Exception(second))) {
            (Class::DoubleFault, _) => return Ok(Outcome::Shutdown),
            (Class::Contributory, Class::Contributory)
            | (Class::PageFault, Class::Contributory | Class::PageFault) => {
                Event::Exception(Exception::with_error(DOUBLE_FAULT, 0))
            }
            _ => Event::Exception(second),
        };
    }
}

/// SDM vol 3 table 6-4.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    Benign,
    Contributory,
    PageFault,
    DoubleFault,
}

impl Class {
    fn of(event: Event) -> Self {
        match event {
            Event::Exception(e) => match e.vector {
                0 | 10..=13 => Self::Contributory,
                PAGE_FAULT => Self::PageFault,
                DOUBLE_FAULT => Self::DoubleFault,
                _ => Self::Benign,
            },
            Event::Software { .. } | Event::Interrupt(_) => Self::Benign,
        }
    }
}

const fn vector(event: Event) -> u8 {
    match event {
        Event::Exception(e) => e.vector,
        Event::Software { vector, .. } | Event::Interrupt(vector) => vector,
    }
}

/// EXT, bit 0 of error codes: the event did not come from a software interrupt instruction.
const fn ext(event: Event) -> u32 {
    !matches!(event, Event::Software { .. }) as u32
}

/// Whether the event is a fault in the strict sense. A fault's frame has RF set, so that a
/// breakpoint on the instruction is not hit twice. #DB, #BP, #OF and the aborts #DF and #MC are not
/// faults (SDM vol 3 6.8.3).
const fn is_fault(event: Event) -> bool {
    match event {
        Event::Exception(e) => matches!(e.vector, 0 | 5..=7 | 10..=17 | 19..=21),
        Event::Software { .. } | Event::Interrupt(_) => false,
    }
}

/// A 64-bit interrupt or trap gate (SDM vol 3 figure 6-8).
struct Gate {
    low: u64,
    high: u64,
}

impl Gate {
    fn read(m: &mut impl Linear, event: Event) -> Result<Self, Trap> {
        let vector = u32::from(vector(event));
        let error = vector * 8 + 2 + ext(event);
        let idtr = m.system().idtr;
        if vector * 16 + 15 > idtr.limit {
            return Err(Exception::gp(error).into());
        }
        let address = idtr.base.wrapping_add(u64::from(vector) * 16);
        let low = m.read(address, Width::W64, User::Supervisor)?;
        let high = m.read(address.wrapping_add(8), Width::W64, User::Supervisor)?;
        let gate = Self { low, high };
        let dpl = (low >> 45 & 3) as u8;
        let is_gate = low >> 41 & 0xf == 7;
        let refused = matches!(event, Event::Software { .. }) && dpl < m.system().cpl;
        if !is_gate || refused {
            return Err(Exception::gp(error).into());
        }
        if low >> 47 & 1 == 0 {
            return Err(Exception::with_error(11, error).into());
        }
        Ok(gate)
    }

    fn selector(&self) -> u16 {
        (self.low >> 16) as u16
    }

    fn offset(&self) -> u64 {
        self.low & 0xffff | self.low >> 32 & 0xffff_0000 | self.high << 32
    }

    fn ist(&self) -> u64 {
        self.low >> 32 & 7
    }

    fn clears_if(&self) -> bool {
        self.low >> 40 & 1 == 0
    }
}

/// A delivery that can no longer fail.
struct Entry {
    flow: Flow,
    cs: u16,
    cpl: u8,
}

impl Entry {
    /// Makes all checks, and pushes the frame.
    fn prepare(m: &mut impl Linear, from: Flow, event: Event) -> Result<Self, Trap> {
        let ext = ext(event);
        let gate = Gate::read(m, event)?;
        let selector = gate.selector();
        let code = handler_code(m, selector, ext)?;
        let old_cpl = m.system().cpl;
        let cpl = if code.is_conforming() {
            old_cpl
        } else {
            code.dpl()
        };
        let stack = stack_for(m, from.rsp, gate.ist(), cpl, ext)?;
        if !is_canonical(gate.offset()) {
            return Err(Exception::gp(ext).into());
        }
        code.touch(m)?;
        let rsp = push_frame(m, from, event, stack, cpl)?;
        let mut cleared = rflags::TF | rflags::NT | rflags::RF | rflags::VM;
        if gate.clears_if() {
            cleared |= rflags::IF;
        }
        let flow = Flow {
            rip: gate.offset(),
            rsp,
            rflags: from.rflags & !cleared | rflags::ONE,
        };
        Ok(Self {
            flow,
            cs: selector & !3 | u16::from(cpl),
            cpl,
        })
    }

    fn commit(self, m: &mut impl Linear) -> Flow {
        let sys = m.system_mut();
        sys.selectors[Segment::Cs as usize] = self.cs;
        if self.cpl != sys.cpl {
            sys.selectors[Segment::Ss as usize] = self.cpl.into();
            sys.cpl = self.cpl;
        }
        self.flow
    }
}

/// The code segment of a gate.
fn handler_code(m: &mut impl Linear, selector: u16, ext: u32) -> Result<Descriptor, Trap> {
    if segments::is_null(selector) {
        return Err(Exception::gp(ext).into());
    }
    let bad = Exception::gp(segments::code(selector) | ext);
    let code = segments::fetch(m, selector, bad)?;
    if !code.is_code() || code.dpl() > m.system().cpl {
        return Err(bad.into());
    }
    if !code.is_present() {
        return Err(Exception::with_error(11, segments::code(selector) | ext).into());
    }
    if !code.is_long() {
        return Err(bad.into());
    }
    Ok(code)
}

/// The aligned stack pointer: from the TSS for an IST or a new privilege level, else the current
/// one.
fn stack_for(m: &mut impl Linear, rsp: u64, ist: u64, cpl: u8, ext: u32) -> Result<u64, Trap> {
    let sys = m.system();
    let offset = match ist {
        0 if cpl == sys.cpl => return checked_stack(rsp, ext),
        0 => 4 + 8 * u64::from(cpl),
        _ => 0x1c + 8 * ist,
    };
    let tr = sys.tr;
    if offset + 7 > u64::from(tr.limit) {
        return Err(Exception::with_error(10, segments::code(tr.selector) | ext).into());
    }
    let rsp = m.read(tr.base.wrapping_add(offset), Width::W64, User::Supervisor)?;
    checked_stack(rsp, ext)
}

fn checked_stack(rsp: u64, ext: u32) -> Result<u64, Trap> {
    if is_canonical(rsp) {
        Ok(rsp & !15)
    } else {
        Err(Exception::with_error(12, ext).into())
    }
}

/// Pushes the frame at `stack`, and returns RSP.
fn push_frame(
    m: &mut impl Linear,
    from: Flow,
    event: Event,
    stack: u64,
    cpl: u8,
) -> Result<u64, Trap> {
    let user = crate::walk::at_cpl(cpl);
    let selectors = m.system().selectors;
    let rf = if is_fault(event) { rflags::RF } else { 0 };
    let (rip, error) = match event {
        Event::Exception(e) => (from.rip, e.error),
        Event::Software { next, .. } => (next, None),
        Event::Interrupt(_) => (from.rip, None),
    };
    let frame = [
        Some(selectors[Segment::Ss as usize].into()),
        Some(from.rsp),
        Some(from.rflags | rf),
        Some(selectors[Segment::Cs as usize].into()),
        Some(rip),
        error.map(u64::from),
    ];
    let mut rsp = stack;
    for value in frame.into_iter().flatten() {
        rsp = rsp.wrapping_sub(8);
        // A push across the canonical hole is the stack's fault, not a general one.
        if !is_canonical(rsp) {
            return Err(Exception::with_error(12, ext(event)).into());
        }
        m.write(rsp, Width::W64, value, user)?;
    }
    Ok(rsp)
}

#[cfg(test)]
mod tests;
