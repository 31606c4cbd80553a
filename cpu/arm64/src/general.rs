//! Integer instructions that are too rare for their own arm in dispatch.rs.

use crate::lower_memory::access;
use crate::lower_register::unary;
use crate::mem::{Memory, Target, Touch, offset};
use crate::op::{Op, SP};
use crate::processor::{Core, Why};
use crate::state::Exception;
use crate::sysreg::sctlr;
use lacuna_addr::Access;
use lacuna_cpu::{Bus, Privilege};

/// Bits of SP that must be zero when it is the base of an access.
pub(crate) const SP_ALIGNMENT: u64 = 15;
/// Bytes that DC ZVA zeroes: DCZID_EL0.BS is 4.
pub(crate) const ZERO_BLOCK: usize = 64;

/// SDIV: division by zero gives zero. The lowest number divided by -1 gives the lowest number.
#[inline(always)]
pub(crate) fn divide_32(a: u32, b: u32) -> u32 {
    match b {
        0 => 0,
        _ => (a as i32).wrapping_div(b as i32) as u32,
    }
}

/// [`divide_32`] for 64 bits.
#[inline(always)]
pub(crate) fn divide_64(a: u64, b: u64) -> u64 {
    match b {
        0 => 0,
        _ => (a as i64).wrapping_div(b as i64) as u64,
    }
}

/// Sets SP. A basic block runs only while SP is aligned to 16 bytes, so no access in it has to
/// check that. An instruction that misaligns SP is executed alone, and so are the instructions
/// behind it.
pub(crate) fn set_sp(core: &mut Core, op: &Op) -> Touch<()> {
    let value = core.r[op.src as usize];
    if value & SP_ALIGNMENT != 0 {
        alone(core)?;
    }
    core.r[SP as usize] = value;
    Ok(())
}

/// The check of SP by an access executed alone (Arm ARM D1.8.2).
pub(crate) fn check_sp(core: &mut Core) -> Touch<()> {
    let enabled = match core.user {
        Privilege::User => sctlr::SA0,
        Privilege::Supervisor => sctlr::SA,
    };
    if core.r[SP as usize] & SP_ALIGNMENT != 0 && core.sys.sctlr & enabled != 0 {
        return core.raise(Exception::SP_ALIGNMENT);
    }
    Ok(())
}

/// This instruction must be executed alone.
pub(crate) fn alone(core: &mut Core) -> Touch<()> {
    if core.stepping {
        return Ok(());
    }
    core.block(Why::Step)
}

/// ADC, ADCS, SBC and SBCS: `aux` is op and S, `form` is sf.
pub(crate) fn carry(core: &mut Core, op: &Op) {
    let bits = 32 << op.form;
    let mask = u64::MAX >> (64 - bits);
    let (a, b) = (core.r[op.base as usize] & mask, core.r[op.src as usize]);
    let b = if op.aux & 2 != 0 { !b } else { b } & mask;
    let wide = u128::from(a) + u128::from(b) + u128::from(core.flags.c());
    let result = wide as u64 & mask;
    if op.aux & 1 != 0 {
        let sign = 1 << (bits - 1);
        let overflow = (a ^ result) & (b ^ result) & sign != 0;
        let flags = [result & sign != 0, result == 0, wide >> bits != 0, overflow];
        let bits = flags.iter().fold(0, |bits, &on| bits << 1 | u64::from(on));
        core.flags.set_bits(bits << 28);
    }
    core.r[op.dst as usize] = result;
}

/// The one-source instructions without their own arm: `form` is sf.
pub(crate) fn unary(core: &mut Core, op: &Op) {
    let value = core.r[op.src as usize];
    let both = |narrow: fn(u32) -> u32, wide: fn(u64) -> u64| match op.form {
        0 => u64::from(narrow(value as u32)),
        _ => wide(value),
    };
    let swap_16 = |x: u64| {
        let odd = 0x00ff_00ff_00ff_00ff;
        (x & odd) << 8 | x >> 8 & odd
    };
    core.r[op.dst as usize] = match op.aux {
        unary::RBIT => both(u32::reverse_bits, u64::reverse_bits),
        unary::REV16 if op.form == 0 => swap_16(value & 0xffff_ffff),
        unary::REV16 => swap_16(value),
        unary::REV32 => value.swap_bytes().rotate_left(32),
        // The sign bits below the first one.
        _ => both(sign_bits_32, sign_bits_64),
    };
}

fn sign_bits_32(x: u32) -> u32 {
    (x ^ (x as i32 >> 31) as u32).leading_zeros() - 1
}

fn sign_bits_64(x: u64) -> u64 {
    u64::from((x ^ (x as i64 >> 63) as u64).leading_zeros() - 1)
}

/// CRC32 and CRC32C: bit 2 of `aux` is C, the others are log2 of the bytes.
pub(crate) fn crc32(core: &mut Core, op: &Op) {
    // The polynomials, bit-reversed.
    let polynomial = if op.aux & 4 == 0 {
        0xedb8_8320
    } else {
        0x82f6_3b78
    };
    let value = core.r[op.src as usize].to_le_bytes();
    let mut crc = core.r[op.base as usize] as u32;
    for &byte in &value[..1 << (op.aux & 3)] {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            let low = if crc & 1 != 0 { polynomial } else { 0 };
            crc = crc >> 1 ^ low;
        }
    }
    core.r[op.dst as usize] = crc.into();
}

/// LDTR and STTR: an access with the rights of EL0.
pub(crate) fn unprivileged(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let va = core.r[op.base as usize].wrapping_add(op.disp as i64 as u64);
    let bytes = 1 << (op.aux & access::SIZE);
    if op.aux & access::STORE != 0 {
        let value = core.r[op.src as usize];
        return core.store_as(bus, va, bytes, value, Privilege::User);
    }
    let value = core.load_as(bus, va, bytes, Privilege::User)?;
    let up = 64 - 8 * bytes as u32;
    let signed = (value << up) as i64 >> up;
    core.r[op.dst as usize] = match op.aux & (access::SIGNED | access::TO_32) {
        0 => value,
        access::SIGNED => signed as u64,
        _ => u64::from(signed as u32),
    };
    Ok(())
}

/// DC ZVA.
pub(crate) fn zero_block(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    if core.user == Privilege::User && core.sys.sctlr & sctlr::DZE == 0 {
        return core.raise(Exception::system_trap(0xd50b_7420 | u32::from(op.aux)));
    }
    let va = core.r[op.base as usize];
    let page = match core.translations.front.tlb.writable_page(va) {
        Some(page) => page,
        None => match core.translate(bus, va, Access::Write, core.user)? {
            Target::Memory(gfn, page) => {
                core.note_code_write(gfn, page)?;
                page
            }
            Target::Device(_) => return core.misaligned(va, Access::Write),
        },
    };
    page.fill(offset(va) & !(ZERO_BLOCK - 1), ZERO_BLOCK, 0);
    Ok(())
}
