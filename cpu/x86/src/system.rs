//! Instructions that end a basic block; the run loop executes them. They change more than general
//! registers, flags and plain memory. Their rules are in control.rs, segments.rs, returns.rs and
//! msr.rs.

use crate::arith::mask;
use crate::control::{self, Flush};
use crate::cpuid;
use crate::deliver::Event;
use crate::dispatch::{RSP, address};
use crate::exit::{Exit, Own};
use crate::flags::{AC, ARITHMETIC, DF, ID, IF, IOPL, NT, RF, TF, ZF};
use crate::general::{reg, set_reg};
use crate::linear::{Linear, Width};
use crate::mem::View;
use crate::msr;
use crate::op::{IMMEDIATE, MEMORY, Op, Operand, System as Sys};
use crate::processor::Core;
use crate::returns::{self, Saved};
use crate::segments::{self, Segment};
use crate::stack;
use crate::state::{Exception, System, Table, Trap, is_canonical};
use crate::walk::User;
use lacuna_cpu::Bus;

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RBX: usize = 3;
const R11: usize = 11;

/// The run loop's action after a system op has completed, or must wait.
pub(crate) enum Done {
    /// Continue behind it.
    Next,
    /// Continue behind it. The trap flag raises no #DB before the next instruction has completed.
    Untrapped,
    /// RIP is set.
    Jumped,
    /// RIP is set. The new trap flag, not the old one, decides whether #DB follows.
    SystemCall,
    /// Continue behind it, after a flush.
    Flush(Flush),
    /// Continue behind it, after an exit to the machine.
    Exit(Exit),
    /// Not complete: execute it again when the machine has answered.
    Wait(Exit),
    /// Deliver this with RIP behind it.
    Event(Event),
}

type Outcome = Result<Done, Trap>;

const _: () = assert!(Sys::Crossing as u8 == KINDS.len() as u8 - 1);

/// [`Sys`] by the number in an op.
#[rustfmt::skip]
const KINDS: [Sys; 47] = [
    Sys::Cli, Sys::Sti, Sys::Popf, Sys::Iret, Sys::RetFar, Sys::Syscall, Sys::Sysret, Sys::Int,
    Sys::Int3, Sys::Int1, Sys::Hlt, Sys::Cpuid, Sys::Rdmsr, Sys::Wrmsr, Sys::Rdtsc, Sys::Rdtscp,
    Sys::In, Sys::Out, Sys::Swapgs, Sys::MovFromCr, Sys::MovToCr, Sys::MovFromDr, Sys::MovToDr,
    Sys::Clts, Sys::Lmsw, Sys::Smsw, Sys::Invlpg, Sys::Lgdt, Sys::Lidt, Sys::Sgdt, Sys::Sidt,
    Sys::Lldt, Sys::Ltr, Sys::Sldt, Sys::Str, Sys::Wbinvd, Sys::Wait, Sys::Verr, Sys::Verw,
    Sys::Lar, Sys::Lsl, Sys::LoadSegment, Sys::StoreSegment, Sys::PopSegment, Sys::LoadFar,
    Sys::JumpFar, Sys::Crossing,
];

/// Executes `op`; the instruction behind it is at `next`. An error leaves the state unchanged.
pub(crate) fn execute<B: Bus>(m: &mut View<'_, B>, op: &Op, next: u64) -> Outcome {
    let kind = KINDS[op.aux as usize % KINDS.len()];
    match kind {
        Sys::Cli | Sys::Sti => interrupt_flag(m, kind),
        Sys::Popf => pop_flags(m, op),
        Sys::Iret | Sys::RetFar | Sys::JumpFar => far_transfer(m, op, kind),
        Sys::Syscall | Sys::Sysret => system_call(m, kind, next),
        Sys::Int => Ok(Done::Event(Event::Software {
            vector: op.imm as u8,
            next,
        })),
        Sys::Int3 => Ok(Done::Event(Event::Software { vector: 3, next })),
        Sys::Int1 => Ok(Done::Event(Event::Interrupt(1))),
        Sys::Hlt => {
            control::privileged(&m.core.sys)?;
            m.core.sys.halted = true;
            Ok(Done::Next)
        }
        Sys::Cpuid => {
            let (leaf, subleaf) = (m.core.r[RAX] as u32, m.core.r[RCX] as u32);
            let leaf = cpuid::cpuid(&m.core.sys, &m.core.apic, &m.core.announced, leaf, subleaf);
            m.core.r[RAX] = leaf.eax.into();
            m.core.r[RBX] = leaf.ebx.into();
            m.core.r[RCX] = leaf.ecx.into();
            m.core.r[RDX] = leaf.edx.into();
            Ok(Done::Next)
        }
        Sys::Rdmsr | Sys::Wrmsr => model_specific(m, kind),
        Sys::Rdtsc | Sys::Rdtscp => {
            let tsc = control::rdtsc(&m.core.sys, m.core.clock.now())?;
            set_pair(m, tsc);
            if kind == Sys::Rdtscp {
                m.core.r[RCX] = m.core.sys.tsc_aux & mask(2);
            }
            Ok(Done::Next)
        }
        Sys::In | Sys::Out => port(m, op, kind),
        Sys::Swapgs => control::swapgs(&mut m.core.sys).map(|()| Done::Next),
        Sys::Clts => control::clts(&mut m.core.sys).map(|()| Done::Next),
        Sys::Wbinvd => control::privileged(&m.core.sys).map(|()| Done::Next),
        Sys::Invlpg => {
            control::privileged(&m.core.sys)?;
            Ok(Done::Flush(Flush::Address(address(m.core, op))))
        }
        Sys::MovFromCr | Sys::MovToCr | Sys::MovFromDr | Sys::MovToDr => {
            control_register(m, op, kind)
        }
        Sys::Smsw | Sys::Sldt | Sys::Str | Sys::StoreSegment => store_selector(m, op, kind),
        Sys::Lmsw | Sys::Lldt | Sys::Ltr | Sys::LoadSegment => load_selector(m, op, kind),
        Sys::PopSegment => pop_segment(m, op),
        Sys::LoadFar => load_far(m, op),
        Sys::Verr | Sys::Verw | Sys::Lar | Sys::Lsl => examine(m, op, kind),
        Sys::Wait => control::wait(&m.core.sys).map(|()| Done::Next),
        Sys::Lgdt | Sys::Lidt => load_table(m, op, kind),
        Sys::Sgdt | Sys::Sidt => store_table(m, op, kind),
        Sys::Crossing => Err(Exception::UD.into()),
    }
}

fn width(op: &Op) -> Width {
    match op.width() {
        0 => Width::W8,
        1 => Width::W16,
        2 => Width::W32,
        _ => Width::W64,
    }
}

/// EDX:EAX.
fn pair<B>(m: &View<'_, B>) -> u64 {
    m.core.r[RDX] << 32 | m.core.r[RAX] & mask(2)
}

fn set_pair<B>(m: &mut View<'_, B>, value: u64) {
    m.core.r[RAX] = value & mask(2);
    m.core.r[RDX] = value >> 32;
}

/// The privilege of an explicit access.
fn user<B>(m: &View<'_, B>) -> User {
    m.core.user
}

/// Reads `width` bytes of the memory operand, from byte `at` on.
fn read_operand<B: Bus>(m: &mut View<'_, B>, op: &Op, at: u64, width: Width) -> Result<u64, Trap> {
    let (va, by) = (operand(m.core, op, at, width)?, user(m));
    m.read(va, width, by)
}

/// Writes `width` bytes of the memory operand, from byte `at` on.
fn write_operand<B: Bus>(
    m: &mut View<'_, B>,
    op: &Op,
    at: u64,
    width: Width,
    value: u64,
) -> Result<(), Trap> {
    let (va, by) = (operand(m.core, op, at, width)?, user(m));
    m.write(va, width, value, by)
}

/// The address of byte `at` of the memory operand.
fn operand(core: &Core, op: &Op, at: u64, width: Width) -> Result<u64, Trap> {
    let va = address(core, op).wrapping_add(at);
    if is_canonical(va) && is_canonical(va.wrapping_add(width.bytes() - 1)) {
        Ok(va)
    } else if stack::is_stack_access(core, op) {
        Err(Exception::SS0.into())
    } else {
        Err(Exception::GP0.into())
    }
}

/// Reads the top of the stack.
fn read_stack<B: Bus>(m: &mut View<'_, B>, width: Width) -> Result<u64, Trap> {
    let (rsp, by) = (m.core.r[RSP], user(m));
    if !is_canonical(rsp) || !is_canonical(rsp.wrapping_add(width.bytes() - 1)) {
        return Err(Exception::SS0.into());
    }
    m.read(rsp, width, by)
}

/// CLI and STI: by IOPL. STI shadows the next instruction if interrupts were off.
fn interrupt_flag<B: Bus>(m: &mut View<'_, B>, kind: Sys) -> Outcome {
    if u64::from(m.core.sys.cpl) > (m.core.rflags & IOPL) >> 12 {
        return Err(Exception::GP0.into());
    }
    if kind == Sys::Cli {
        m.core.rflags &= !IF;
    } else {
        m.core.sys.interrupt_shadow = m.core.rflags & IF == 0;
        m.core.rflags |= IF;
    }
    Ok(Done::Next)
}

fn pop_flags<B: Bus>(m: &mut View<'_, B>, op: &Op) -> Outcome {
    let rsp = m.core.r[RSP];
    let image = read_stack(m, width(op))?;
    let old = m.core.rflags();
    m.core.r[RSP] = rsp.wrapping_add(1 << op.width());
    let new = popped_flags(m.core.sys.cpl, old, image, width(op));
    m.core.set_rflags(new & !RF);
    Ok(Done::Next)
}

/// The flags after POPF at `cpl`: forbidden flags stay.
fn popped_flags(cpl: u8, old: u64, image: u64, width: Width) -> u64 {
    let mut writable = ARITHMETIC | TF | DF | NT | AC | ID;
    if u64::from(cpl) <= (old & IOPL) >> 12 {
        writable |= IF;
    }
    if cpl == 0 {
        writable |= IOPL;
    }
    let writable = width.truncate(writable);
    old & !writable | image & writable
}

fn far_transfer<B: Bus>(m: &mut View<'_, B>, op: &Op, kind: Sys) -> Outcome {
    let mut flow = m.core.flow(m.core.rip);
    match kind {
        Sys::Iret => {
            returns::iret(m, &mut flow, width(op))?;
            m.core.sys.nmi_blocked = false;
        }
        Sys::RetFar => returns::ret_far(m, &mut flow, width(op), op.imm as u16)?,
        _ => {
            let rip = read_operand(m, op, 0, width(op))?;
            let selector = read_operand(m, op, 1 << op.width(), Width::W16)?;
            returns::jump_far(m, &mut flow, selector as u16, rip)?;
        }
    }
    m.core.follow(flow);
    Ok(Done::Jumped)
}

fn system_call<B: Bus>(m: &mut View<'_, B>, kind: Sys, next: u64) -> Outcome {
    let mut flow = m.core.flow(next);
    if kind == Sys::Syscall {
        let saved = returns::syscall(&mut m.core.sys, &mut flow)?;
        m.core.r[RCX] = saved.rcx;
        m.core.r[R11] = saved.r11;
    } else {
        let saved = Saved {
            rcx: m.core.r[RCX],
            r11: m.core.r[R11],
        };
        returns::sysret(&mut m.core.sys, &mut flow, saved)?;
    }
    m.core.follow(flow);
    Ok(Done::SystemCall)
}

fn model_specific<B: Bus>(m: &mut View<'_, B>, kind: Sys) -> Outcome {
    let (now, index) = (m.core.clock.now(), m.core.r[RCX] as u32);
    if msr::KVM.contains(&index) {
        return model_specific_outside(m, kind, index);
    }
    if kind == Sys::Rdmsr {
        let value = msr::rdmsr(&m.core.sys, &mut m.core.apic, now, index)?;
        set_pair(m, value);
        return Ok(Done::Next);
    }
    let value = pair(m);
    msr::wrmsr(&mut m.core.sys, &mut m.core.apic, now, index, value).map(Done::Flush)
}

/// RDMSR and WRMSR of an MSR that the machine answers.
fn model_specific_outside<B: Bus>(m: &mut View<'_, B>, kind: Sys, index: u32) -> Outcome {
    control::privileged(&m.core.sys)?;
    match (m.core.replay.take(), kind) {
        (Some(value), Sys::Rdmsr) => set_pair(m, value),
        (Some(_), _) => {}
        (None, Sys::Rdmsr) => return Ok(Done::Wait(Exit::Own(Own::MsrRead { index }))),
        (None, _) => {
            let value = pair(m);
            return Ok(Done::Wait(Exit::Own(Own::MsrWrite { index, value })));
        }
    }
    Ok(Done::Next)
}

fn port<B: Bus>(m: &mut View<'_, B>, op: &Op, kind: Sys) -> Outcome {
    let port = if op.has(IMMEDIATE) {
        op.imm as u16
    } else {
        m.core.r[RDX] as u16
    };
    let flags = m.core.rflags;
    returns::check_io(m, flags, port, width(op))?;
    let size = 1 << op.width();
    if kind == Sys::Out {
        let value = reg(m.core, RAX as u8, op.width()) as u32;
        return Ok(Done::Exit(Exit::Own(Own::IoOut { port, size, value })));
    }
    match m.core.replay.take() {
        Some(value) => set_reg(m.core, RAX as u8, op.width(), value),
        None => return Ok(Done::Wait(Exit::Own(Own::IoIn { port, size }))),
    }
    Ok(Done::Next)
}

fn control_register<B: Bus>(m: &mut View<'_, B>, op: &Op, kind: Sys) -> Outcome {
    let (general, number) = (op.dst as usize, op.imm as u32);
    let value = m.core.r[general];
    match kind {
        Sys::MovFromCr => {
            m.core.r[general] = control::read_cr(&m.core.sys, &m.core.apic, number)?;
        }
        Sys::MovFromDr => m.core.r[general] = control::read_dr(&m.core.sys, number)?,
        Sys::MovToDr => control::write_dr(&mut m.core.sys, number, value)?,
        _ => {
            let flush = control::write_cr(&mut m.core.sys, &mut m.core.apic, number, value)?;
            return Ok(Done::Flush(flush));
        }
    }
    Ok(Done::Next)
}

/// SMSW, SLDT, STR and MOV from a segment register.
fn store_selector<B: Bus>(m: &mut View<'_, B>, op: &Op, kind: Sys) -> Outcome {
    let sys = &m.core.sys;
    let value = match kind {
        Sys::Smsw => sys.cr0,
        Sys::Sldt => sys.ldtr.selector.into(),
        Sys::Str => sys.tr.selector.into(),
        _ => sys.selectors[op.imm as usize % 6].into(),
    };
    if op.has(MEMORY) {
        write_operand(m, op, 0, Width::W16, value & mask(1))?;
    } else {
        set_reg(m.core, op.dst, op.width(), value);
    }
    Ok(Done::Next)
}

/// LMSW, LLDT, LTR and MOV to a segment register.
fn load_selector<B: Bus>(m: &mut View<'_, B>, op: &Op, kind: Sys) -> Outcome {
    if kind != Sys::LoadSegment {
        control::privileged(&m.core.sys)?;
    }
    let selector = operand_selector(m, op)?;
    match kind {
        Sys::Lmsw => control::lmsw(&mut m.core.sys, selector)?,
        Sys::Lldt => segments::load_ldtr(m, selector)?,
        Sys::Ltr => segments::load_tr(m, selector)?,
        _ => {
            let segment = segment(op);
            segments::load(m, segment, selector)?;
            if segment == Segment::Ss {
                m.core.sys.interrupt_shadow = true;
                return Ok(Done::Untrapped);
            }
        }
    }
    Ok(Done::Next)
}

fn operand_selector<B: Bus>(m: &mut View<'_, B>, op: &Op) -> Result<u16, Trap> {
    let selector = if op.has(MEMORY) {
        read_operand(m, op, 0, Width::W16)?
    } else {
        m.core.r[op.dst as usize]
    };
    Ok(selector as u16)
}

fn pop_segment<B: Bus>(m: &mut View<'_, B>, op: &Op) -> Outcome {
    let rsp = m.core.r[RSP];
    let selector = read_stack(m, Width::W16)? as u16;
    segments::load(m, segment(op), selector)?;
    m.core.r[RSP] = rsp.wrapping_add(1 << op.width());
    Ok(Done::Next)
}

/// LSS, LFS, LGS: the offset lies below the selector.
fn load_far<B: Bus>(m: &mut View<'_, B>, op: &Op) -> Outcome {
    let offset = read_operand(m, op, 0, width(op))?;
    let selector = read_operand(m, op, 1 << op.width(), Width::W16)? as u16;
    segments::load(m, segment(op), selector)?;
    set_reg(m.core, op.src, op.width(), offset);
    Ok(Done::Next)
}

/// VERR, VERW, LAR, LSL: ZF says whether the selector passes.
fn examine<B: Bus>(m: &mut View<'_, B>, op: &Op, kind: Sys) -> Outcome {
    let selector = operand_selector(m, op)?;
    let found = segments::visible(m, selector)?.and_then(|descriptor| match kind {
        Sys::Verr => descriptor.is_readable().then_some(None),
        Sys::Verw => descriptor.is_writable_data().then_some(None),
        Sys::Lar => descriptor.access_rights().map(Some),
        _ => descriptor.segment_limit().map(Some),
    });
    if let Some(Some(value)) = found {
        set_reg(m.core, op.src, op.width(), value.into());
    }
    let zero = if found.is_some() { ZF } else { 0 };
    m.core.flags.replace(ZF, zero);
    Ok(Done::Next)
}

fn segment(op: &Op) -> Segment {
    match op.imm {
        0 => Segment::Es,
        1 => Segment::Cs,
        2 => Segment::Ss,
        3 => Segment::Ds,
        4 => Segment::Fs,
        _ => Segment::Gs,
    }
}

fn load_table<B: Bus>(m: &mut View<'_, B>, op: &Op, kind: Sys) -> Outcome {
    control::privileged(&m.core.sys)?;
    let limit = read_operand(m, op, 0, Width::W16)? as u16;
    let base = read_operand(m, op, 2, Width::W64)?;
    let table = segments::pseudo_descriptor(&m.core.sys, limit, base)?;
    *table_register(&mut m.core.sys, kind) = table;
    Ok(Done::Next)
}

fn store_table<B: Bus>(m: &mut View<'_, B>, op: &Op, kind: Sys) -> Outcome {
    let table = *table_register(&mut m.core.sys, kind);
    // The base is stored first: if the second store is blocked, the first is repeated with the same
    // value.
    write_operand(m, op, 2, Width::W64, table.base)?;
    write_operand(m, op, 0, Width::W16, table.limit.into())?;
    Ok(Done::Next)
}

fn table_register(sys: &mut System, kind: Sys) -> &mut Table {
    match kind {
        Sys::Lgdt | Sys::Sgdt => &mut sys.gdtr,
        _ => &mut sys.idtr,
    }
}
