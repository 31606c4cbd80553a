//! The hot loop: one `match` over decoded ops.
//!
//! `pc` indexes the code cache's op arena. Straight-line ops advance it. A branch reads its links,
//! charges the budget for the basic block that it ends, and continues at the linked basic block.
//! The loop ends
//! - at the end of a basic block: the budget is used up, there is a request, or the exit is not
//!   linked in this epoch;
//! - at a blocked op, or an op that only the run loop can execute.
//!
//! It is one function, longer than the usual 70 lines, because the compiler must see every arm to
//! keep `pc`, the arena and the register file in registers. Each arm is a line. docs/speed-x86.md
//! says why every arm must end in its own indirect jump, and how to check it.

use crate::mem::Memory;
use crate::op::{Code, ZERO};
use crate::operand::{adds_immediate, displaced, get, imm, indexed, wide};
use crate::operand::{moved, ones, product, sign_field, signed_product};
use crate::processor::Core;
use crate::{atomics, general, monitor, system};
use lacuna_cpu::code::Decoded;
use lacuna_cpu::{Bus, Word};
use lacuna_sync::VcpuSlot;

/// The reason for the loop's end, and its op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leave {
    /// The op at this index was not executed: [`Core::why`].
    Blocked(u16),
    /// The [`Code::System`] op at this index is next.
    System(u16),
    /// The direct branch at this index ended its basic block, with this outcome.
    Branch(u16, bool),
    /// An indirect branch ended its basic block; [`Core::pc`] is its target.
    Indirect,
}

/// Executes from `pc` until there is a reason to leave.
pub(crate) fn dispatch<B: Bus>(
    core: &mut Core,
    code: Decoded<'_, Code>,
    mut pc: u16,
    bus: &mut B,
    slot: &VcpuSlot,
) -> Leave {
    let ops = code.ops;
    macro_rules! done {
        ($touch:expr) => {
            match $touch {
                Ok(value) => value,
                Err(_) => return Leave::Blocked(pc),
            }
        };
    }
    macro_rules! branch {
        ($op:expr, $condition:expr) => {{
            let taken: bool = $condition;
            let links = &ops[pc.wrapping_add(1) as usize];
            let budget = core.budget - links.block_instructions();
            let next = links.target(taken) as u16;
            if next == 0 || links.epoch() != code.epoch || budget <= 0 || slot.has_request() {
                return leave_at(core, budget, Leave::Branch(pc, taken));
            }
            core.budget = budget;
            pc = next;
            continue;
        }};
    }
    macro_rules! indirect {
        ($target:expr) => {{
            let target: u64 = $target;
            let links = &ops[pc.wrapping_add(1) as usize];
            let budget = core.budget - links.block_instructions();
            core.pc = target;
            match code.jumps.find(target, core.user, code.epoch) {
                Some(next) if budget > 0 && !slot.has_request() => {
                    core.budget = budget;
                    pc = next;
                }
                _ => return leave_at(core, budget, Leave::Indirect),
            }
            continue;
        }};
    }
    // A call that may be blocked. LLVM copies the loop's head, with its jump, only into an arm with
    // a basic block after its last condition: the store makes one (docs/speed-x86.md).
    macro_rules! call {
        ($touch:expr) => {{
            done!($touch);
            core.r[ZERO as usize] = 0;
        }};
    }
    loop {
        let op = &ops[pc as usize];
        macro_rules! r {
            ($slot:ident : $t:ty) => {
                get::<$t>(core, op.$slot)
            };
        }
        macro_rules! set {
            ($value:expr) => {{
                let value = $value;
                core.r[op.dst as usize] = value.widen();
            }};
        }
        macro_rules! load {
            ($t:ty, $address:expr) => {
                done!(core.load::<$t>(bus, $address))
            };
        }
        macro_rules! store {
            ($t:ty, $address:expr) => {
                call!(core.store(bus, $address, r!(src: $t)))
            };
        }
        macro_rules! adds {
            ($t:ty, $b:expr) => {{
                let b: $t = $b;
                let result = r!(base: $t).wrapping_add(b);
                core.flags.set_add(result, b);
                result
            }};
        }
        macro_rules! subs {
            ($a:expr, $b:expr) => {{
                let b = $b;
                let result = $a.wrapping_sub(b);
                core.flags.set_sub(result, b);
                result
            }};
        }
        macro_rules! ands {
            ($result:expr) => {{
                let result = $result;
                core.flags.set_logic(result);
                result
            }};
        }
        // The base operand and the shifted source.
        macro_rules! shifted {
            ($t:ty, |$a:ident, $b:ident| $result:expr, $shift:ident) => {{
                let ($a, $b) = (r!(base: $t), r!(src: $t).$shift(op.imm as u32));
                set!($result)
            }};
        }
        // A subtraction and the branch behind it.
        macro_rules! jump_sub {
            ($a:expr, $b:expr, |$x:ident, $y:ident| $condition:expr) => {{
                let ($x, $y) = ($a, $b);
                set!(subs!($x, $y));
                branch!(op, $condition);
            }};
        }
        macro_rules! jump_rr {
            ($t:ty, $($condition:tt)*) => {
                jump_sub!(r!(base: $t), r!(src: $t), $($condition)*)
            };
        }
        macro_rules! jump_ri {
            ($t:ty, $($condition:tt)*) => {
                jump_sub!(r!(src: $t), imm::<$t>(op), $($condition)*)
            };
        }
        macro_rules! jump_zero {
            ($result:expr) => {{
                let result = $result;
                set!(result);
                branch!(op, result == 0);
            }};
        }
        // A conditional selection; `$other` is the value if the condition does not hold.
        macro_rules! select {
            ($t:ty, |$x:ident| $other:expr) => {{
                let $x = r!(src: $t);
                let other = $other;
                set!(if core.flags.condition(op.aux) { r!(base: $t) } else { other })
            }};
        }
        macro_rules! compare_if {
            ($compare:expr) => {{
                if core.flags.condition(op.aux) {
                    $compare;
                } else {
                    core.flags.set_bits(u64::from(op.imm as u32));
                }
                core.r[ZERO as usize] = 0;
            }};
        }
        macro_rules! pair {
            ($t:ty, $address:expr, |$x:ident| $value:expr) => {{
                let [first, second] = done!(core.load_pair::<$t>(bus, $address));
                let widened = |$x: $t| $value;
                core.r[op.dst as usize] = widened(first);
                core.r[op.index as usize] = widened(second);
            }};
        }
        macro_rules! back {
            ($base:expr) => {
                core.r[op.base as usize] = $base.wrapping_add(op.imm64())
            };
        }
        match op.code {
            Code::AddRr32 => set!(r!(base: u32).wrapping_add(r!(src: u32))),
            Code::AddRr64 => set!(r!(base: u64).wrapping_add(r!(src: u64))),
            Code::AddRi32 => set!(r!(src: u32).wrapping_add(imm::<u32>(op))),
            Code::AddRi64 => set!(r!(src: u64).wrapping_add(imm::<u64>(op))),
            Code::SubRr32 => set!(r!(base: u32).wrapping_sub(r!(src: u32))),
            Code::SubRr64 => set!(r!(base: u64).wrapping_sub(r!(src: u64))),
            Code::AddsRr32 => set!(adds!(u32, r!(src: u32))),
            Code::AddsRr64 => set!(adds!(u64, r!(src: u64))),
            Code::AddsRi32 => set!(adds_immediate::<u32>(core, op)),
            Code::AddsRi64 => set!(adds_immediate::<u64>(core, op)),
            Code::SubsRr32 => set!(subs!(r!(base: u32), r!(src: u32))),
            Code::SubsRr64 => set!(subs!(r!(base: u64), r!(src: u64))),
            Code::SubsRi32 => set!(subs!(r!(src: u32), imm::<u32>(op))),
            Code::SubsRi64 => set!(subs!(r!(src: u64), imm::<u64>(op))),
            Code::AddLsl32 => shifted!(u32, |a, b| a.wrapping_add(b), wrapping_shl),
            Code::AddLsl64 => shifted!(u64, |a, b| a.wrapping_add(b), wrapping_shl),
            Code::AddLsr32 => shifted!(u32, |a, b| a.wrapping_add(b), wrapping_shr),
            Code::AddLsr64 => shifted!(u64, |a, b| a.wrapping_add(b), wrapping_shr),
            Code::SubLsl32 => shifted!(u32, |a, b| a.wrapping_sub(b), wrapping_shl),
            Code::SubLsl64 => shifted!(u64, |a, b| a.wrapping_sub(b), wrapping_shl),
            Code::SubLsr32 => shifted!(u32, |a, b| a.wrapping_sub(b), wrapping_shr),
            Code::SubLsr64 => shifted!(u64, |a, b| a.wrapping_sub(b), wrapping_shr),
            Code::AddUxtw => {
                let index = r!(src: u32).widen().wrapping_shl(op.imm as u32);
                set!(r!(base: u64).wrapping_add(index))
            }
            Code::AddSxtw => {
                let index = (r!(src: u32) as i32 as u64).wrapping_shl(op.imm as u32);
                set!(r!(base: u64).wrapping_add(index))
            }
            Code::AndRr32 => set!(r!(base: u32) & r!(src: u32)),
            Code::AndRr64 => set!(r!(base: u64) & r!(src: u64)),
            Code::AndRi32 => set!(r!(src: u32) & wide::<u32>(op)),
            Code::AndRi64 => set!(r!(src: u64) & wide::<u64>(op)),
            Code::AndLsl32 => shifted!(u32, |a, b| a & b, wrapping_shl),
            Code::AndLsl64 => shifted!(u64, |a, b| a & b, wrapping_shl),
            Code::AndLsr32 => shifted!(u32, |a, b| a & b, wrapping_shr),
            Code::AndLsr64 => shifted!(u64, |a, b| a & b, wrapping_shr),
            Code::OrrRr32 => set!(r!(base: u32) | r!(src: u32)),
            Code::OrrRr64 => set!(r!(base: u64) | r!(src: u64)),
            Code::OrrRi32 => set!(r!(src: u32) | wide::<u32>(op)),
            Code::OrrRi64 => set!(r!(src: u64) | wide::<u64>(op)),
            Code::OrrLsl32 => shifted!(u32, |a, b| a | b, wrapping_shl),
            Code::OrrLsl64 => shifted!(u64, |a, b| a | b, wrapping_shl),
            Code::OrrLsr32 => shifted!(u32, |a, b| a | b, wrapping_shr),
            Code::OrrLsr64 => shifted!(u64, |a, b| a | b, wrapping_shr),
            Code::EorRr32 => set!(r!(base: u32) ^ r!(src: u32)),
            Code::EorRr64 => set!(r!(base: u64) ^ r!(src: u64)),
            Code::EorRi32 => set!(r!(src: u32) ^ wide::<u32>(op)),
            Code::EorRi64 => set!(r!(src: u64) ^ wide::<u64>(op)),
            Code::EorLsl32 => shifted!(u32, |a, b| a ^ b, wrapping_shl),
            Code::EorLsl64 => shifted!(u64, |a, b| a ^ b, wrapping_shl),
            Code::EorLsr32 => shifted!(u32, |a, b| a ^ b, wrapping_shr),
            Code::EorLsr64 => shifted!(u64, |a, b| a ^ b, wrapping_shr),
            Code::AndsRr32 => set!(ands!(r!(base: u32) & r!(src: u32))),
            Code::AndsRr64 => set!(ands!(r!(base: u64) & r!(src: u64))),
            Code::AndsRi32 => set!(ands!(r!(src: u32) & wide::<u32>(op))),
            Code::AndsRi64 => set!(ands!(r!(src: u64) & wide::<u64>(op))),
            Code::BicRr32 => set!(r!(base: u32) & !r!(src: u32)),
            Code::BicRr64 => set!(r!(base: u64) & !r!(src: u64)),
            Code::OrnRr32 => set!(r!(base: u32) | !r!(src: u32)),
            Code::OrnRr64 => set!(r!(base: u64) | !r!(src: u64)),
            Code::EonRr32 => set!(r!(base: u32) ^ !r!(src: u32)),
            Code::EonRr64 => set!(r!(base: u64) ^ !r!(src: u64)),
            Code::BicsRr32 => set!(ands!(r!(base: u32) & !r!(src: u32))),
            Code::BicsRr64 => set!(ands!(r!(base: u64) & !r!(src: u64))),
            Code::MovRr32 => set!(r!(src: u32)),
            Code::MovRr64 => set!(r!(src: u64)),
            Code::Const => set!(op.wide()),
            Code::Movk32 => set!(moved(r!(src: u64), op) as u32),
            Code::Movk64 => set!(moved(r!(src: u64), op)),
            // The arm must not be empty: the loop's head would be its own successor, and then LLVM
            // copies the head into no other arm.
            Code::Nop => core.r[ZERO as usize] = 0,
            Code::LslRi32 => set!(r!(src: u32).wrapping_shl(op.imm as u32)),
            Code::LslRi64 => set!(r!(src: u64).wrapping_shl(op.imm as u32)),
            Code::LsrRi32 => set!(r!(src: u32).wrapping_shr(op.imm as u32)),
            Code::LsrRi64 => set!(r!(src: u64).wrapping_shr(op.imm as u32)),
            Code::AsrRi32 => set!((r!(src: u32) as i32).wrapping_shr(op.imm as u32) as u32),
            Code::AsrRi64 => set!((r!(src: u64) as i64).wrapping_shr(op.imm as u32) as u64),
            Code::Extr32 => {
                let both = r!(base: u32).widen() << 32 | r!(src: u32).widen();
                set!(both.wrapping_shr(op.imm as u32) as u32)
            }
            Code::Extr64 => {
                let both = u128::from(r!(base: u64)) << 64 | u128::from(r!(src: u64));
                set!(both.wrapping_shr(op.imm as u32) as u64)
            }
            Code::Ubfx => set!(r!(src: u64).wrapping_shr(op.imm as u32) & ones(op.aux)),
            Code::Ubfiz => set!((r!(src: u64) & ones(op.aux)).wrapping_shl(op.imm as u32)),
            Code::SignField32 => set!(sign_field(r!(src: u64), op) as u32),
            Code::SignField64 => set!(sign_field(r!(src: u64), op)),
            Code::Sxtw => set!(r!(src: u32) as i32 as u64),
            Code::Insert32 => {
                let (field, value) = (wide::<u32>(op), r!(src: u32).rotate_right(op.aux.into()));
                set!(r!(base: u32) & !field | value & field)
            }
            Code::Insert64 => {
                let (field, value) = (op.wide(), r!(src: u64).rotate_right(op.aux.into()));
                set!(r!(base: u64) & !field | value & field)
            }
            Code::Lslv32 => set!(r!(base: u32).wrapping_shl(r!(src: u32))),
            Code::Lslv64 => set!(r!(base: u64).wrapping_shl(r!(src: u32))),
            Code::Lsrv32 => set!(r!(base: u32).wrapping_shr(r!(src: u32))),
            Code::Lsrv64 => set!(r!(base: u64).wrapping_shr(r!(src: u32))),
            Code::Asrv32 => set!((r!(base: u32) as i32).wrapping_shr(r!(src: u32)) as u32),
            Code::Asrv64 => set!((r!(base: u64) as i64).wrapping_shr(r!(src: u32)) as u64),
            Code::Rorv32 => set!(r!(base: u32).rotate_right(r!(src: u32) & 31)),
            Code::Rorv64 => set!(r!(base: u64).rotate_right(r!(src: u32) & 63)),
            Code::Madd32 => {
                let product = r!(base: u32).wrapping_mul(r!(src: u32));
                set!(r!(index: u32).wrapping_add(product))
            }
            Code::Madd64 => {
                let product = r!(base: u64).wrapping_mul(r!(src: u64));
                set!(r!(index: u64).wrapping_add(product))
            }
            Code::Msub32 => {
                let product = r!(base: u32).wrapping_mul(r!(src: u32));
                set!(r!(index: u32).wrapping_sub(product))
            }
            Code::Msub64 => {
                let product = r!(base: u64).wrapping_mul(r!(src: u64));
                set!(r!(index: u64).wrapping_sub(product))
            }
            Code::Smaddl => set!(r!(index: u64).wrapping_add(signed_product(core, op))),
            Code::Smsubl => set!(r!(index: u64).wrapping_sub(signed_product(core, op))),
            Code::Umaddl => set!(r!(index: u64).wrapping_add(product(core, op))),
            Code::Umsubl => set!(r!(index: u64).wrapping_sub(product(core, op))),
            Code::Smulh => {
                let (a, b) = (r!(base: u64) as i64, r!(src: u64) as i64);
                set!(((i128::from(a) * i128::from(b)) >> 64) as u64)
            }
            Code::Umulh => {
                let (a, b) = (r!(base: u64), r!(src: u64));
                set!(((u128::from(a) * u128::from(b)) >> 64) as u64)
            }
            Code::Udiv32 => set!(r!(base: u32).checked_div(r!(src: u32)).unwrap_or(0)),
            Code::Udiv64 => set!(r!(base: u64).checked_div(r!(src: u64)).unwrap_or(0)),
            Code::Sdiv32 => set!(general::divide_32(r!(base: u32), r!(src: u32))),
            Code::Sdiv64 => set!(general::divide_64(r!(base: u64), r!(src: u64))),
            Code::Csel32 => select!(u32, |x| x),
            Code::Csel64 => select!(u64, |x| x),
            Code::Csinc32 => select!(u32, |x| x.wrapping_add(1)),
            Code::Csinc64 => select!(u64, |x| x.wrapping_add(1)),
            Code::Csinv32 => select!(u32, |x| !x),
            Code::Csinv64 => select!(u64, |x| !x),
            Code::Csneg32 => select!(u32, |x| x.wrapping_neg()),
            Code::Csneg64 => select!(u64, |x| x.wrapping_neg()),
            Code::Ccmp32 => compare_if!(subs!(r!(base: u32), r!(src: u32))),
            Code::Ccmp64 => compare_if!(subs!(r!(base: u64), r!(src: u64))),
            Code::Ccmn32 => compare_if!(adds!(u32, r!(src: u32))),
            Code::Ccmn64 => compare_if!(adds!(u64, r!(src: u64))),
            Code::Clz32 => set!(r!(src: u32).leading_zeros()),
            Code::Clz64 => set!(r!(src: u64).leading_zeros()),
            Code::Rev32 => set!(r!(src: u32).swap_bytes()),
            Code::Rev64 => set!(r!(src: u64).swap_bytes()),
            Code::LoadU8 => set!(load!(u8, displaced(core, op))),
            Code::LoadU16 => set!(load!(u16, displaced(core, op))),
            Code::LoadU32 => set!(load!(u32, displaced(core, op))),
            Code::LoadU64 => set!(load!(u64, displaced(core, op))),
            Code::LoadS8To32 => set!(load!(u8, displaced(core, op)) as i8 as u32),
            Code::LoadS8To64 => set!(load!(u8, displaced(core, op)) as i8 as u64),
            Code::LoadS16To32 => set!(load!(u16, displaced(core, op)) as i16 as u32),
            Code::LoadS16To64 => set!(load!(u16, displaced(core, op)) as i16 as u64),
            Code::LoadS32To64 => set!(load!(u32, displaced(core, op)) as i32 as u64),
            Code::LoadU8X => set!(load!(u8, indexed(core, op))),
            Code::LoadU16X => set!(load!(u16, indexed(core, op))),
            Code::LoadU32X => set!(load!(u32, indexed(core, op))),
            Code::LoadU64X => set!(load!(u64, indexed(core, op))),
            Code::LoadS8To32X => set!(load!(u8, indexed(core, op)) as i8 as u32),
            Code::LoadS8To64X => set!(load!(u8, indexed(core, op)) as i8 as u64),
            Code::LoadS16To32X => set!(load!(u16, indexed(core, op)) as i16 as u32),
            Code::LoadS16To64X => set!(load!(u16, indexed(core, op)) as i16 as u64),
            Code::LoadS32To64X => set!(load!(u32, indexed(core, op)) as i32 as u64),
            Code::Store8 => store!(u8, displaced(core, op)),
            Code::Store16 => store!(u16, displaced(core, op)),
            Code::Store32 => store!(u32, displaced(core, op)),
            Code::Store64 => store!(u64, displaced(core, op)),
            Code::Store8X => store!(u8, indexed(core, op)),
            Code::Store16X => store!(u16, indexed(core, op)),
            Code::Store32X => store!(u32, indexed(core, op)),
            Code::Store64X => store!(u64, indexed(core, op)),
            Code::LoadPair32 => pair!(u32, displaced(core, op), |x| x.widen()),
            Code::LoadPair64 => pair!(u64, displaced(core, op), |x| x),
            Code::LoadPairS32 => pair!(u32, displaced(core, op), |x| x as i32 as u64),
            Code::LoadPairBack64 => {
                let base = core.r[op.base as usize];
                pair!(u64, displaced(core, op), |x| x);
                back!(base);
            }
            Code::StorePair32 => {
                let values = [r!(src: u32), r!(index: u32)];
                call!(core.store_pair(bus, displaced(core, op), values))
            }
            Code::StorePair64 => {
                let values = [r!(src: u64), r!(index: u64)];
                call!(core.store_pair(bus, displaced(core, op), values))
            }
            Code::StorePairBack64 => {
                let values = [r!(src: u64), r!(index: u64)];
                done!(core.store_pair(bus, displaced(core, op), values));
                back!(core.r[op.base as usize]);
            }
            Code::Jump => branch!(op, true),
            Code::Call => {
                core.r[30] = op.wide();
                branch!(op, true);
            }
            Code::JumpR => indirect!(r!(src: u64)),
            Code::CallR => {
                let target = r!(src: u64);
                core.r[30] = op.wide();
                indirect!(target);
            }
            Code::JumpZ => branch!(op, core.flags.z()),
            Code::JumpCc => branch!(op, core.flags.condition(op.aux)),
            Code::Cbz32 => branch!(op, r!(src: u32) == 0),
            Code::Cbz64 => branch!(op, r!(src: u64) == 0),
            Code::Tbz => branch!(op, r!(src: u64).wrapping_shr(op.aux.into()) & 1 == 0),
            Code::JumpSubEqRr32 => jump_rr!(u32, |a, b| a == b),
            Code::JumpSubLoRr32 => jump_rr!(u32, |a, b| a < b),
            Code::JumpSubLsRr32 => jump_rr!(u32, |a, b| a <= b),
            Code::JumpSubLtRr32 => jump_rr!(u32, |a, b| (a as i32) < b as i32),
            Code::JumpSubLeRr32 => jump_rr!(u32, |a, b| a as i32 <= b as i32),
            Code::JumpSubEqRr64 => jump_rr!(u64, |a, b| a == b),
            Code::JumpSubLoRr64 => jump_rr!(u64, |a, b| a < b),
            Code::JumpSubLsRr64 => jump_rr!(u64, |a, b| a <= b),
            Code::JumpSubLtRr64 => jump_rr!(u64, |a, b| (a as i64) < b as i64),
            Code::JumpSubLeRr64 => jump_rr!(u64, |a, b| a as i64 <= b as i64),
            Code::JumpSubEqRi32 => jump_ri!(u32, |a, b| a == b),
            Code::JumpSubLoRi32 => jump_ri!(u32, |a, b| a < b),
            Code::JumpSubLsRi32 => jump_ri!(u32, |a, b| a <= b),
            Code::JumpSubLtRi32 => jump_ri!(u32, |a, b| (a as i32) < b as i32),
            Code::JumpSubLeRi32 => jump_ri!(u32, |a, b| a as i32 <= b as i32),
            Code::JumpSubEqRi64 => jump_ri!(u64, |a, b| a == b),
            Code::JumpSubLoRi64 => jump_ri!(u64, |a, b| a < b),
            Code::JumpSubLsRi64 => jump_ri!(u64, |a, b| a <= b),
            Code::JumpSubLtRi64 => jump_ri!(u64, |a, b| (a as i64) < b as i64),
            Code::JumpSubLeRi64 => jump_ri!(u64, |a, b| a as i64 <= b as i64),
            Code::JumpAddEqRi32 => jump_zero!(adds_immediate::<u32>(core, op)),
            Code::JumpAddEqRi64 => jump_zero!(adds_immediate::<u64>(core, op)),
            Code::JumpAndEqRr32 => jump_zero!(ands!(r!(base: u32) & r!(src: u32))),
            Code::JumpAndEqRr64 => jump_zero!(ands!(r!(base: u64) & r!(src: u64))),
            Code::JumpAndEqRi32 => jump_zero!(ands!(r!(src: u32) & imm::<u32>(op))),
            Code::JumpAndEqRi64 => jump_zero!(ands!(r!(src: u64) & imm::<u64>(op))),
            Code::System => return Leave::System(pc),
            Code::SetSp => call!(general::set_sp(core, op)),
            Code::CheckSp => call!(general::check_sp(core)),
            Code::Alone => call!(general::alone(core)),
            Code::Carry => general::carry(core, op),
            Code::Unary => general::unary(core, op),
            Code::Crc32 => general::crc32(core, op),
            Code::Unprivileged => call!(general::unprivileged(core, bus, op)),
            Code::ZeroBlock => call!(general::zero_block(core, bus, op)),
            Code::Ordered => call!(atomics::ordered(core, bus, op)),
            Code::Atomic => call!(atomics::atomic(core, bus, op)),
            Code::Cas => call!(atomics::compare_and_swap(core, bus, op)),
            Code::CasPair => call!(atomics::compare_and_swap_pair(core, bus, op)),
            Code::LoadExclusive => call!(monitor::load(core, bus, op, pc)),
            Code::StoreExclusive => call!(monitor::store(core, bus, op)),
            Code::ReadSystem => call!(system::read_register(core, op)),
            Code::Clrex => core.monitor.clear(),
            Code::Fence => atomics::fence(op),
            Code::Links | Code::Undefined => done!(core.undefined()),
        }
        pc = pc.wrapping_add(1);
    }
}

/// Charges the budget for the basic block that ends the run. The function is out of line, so that
/// the continuing path has its own store.
#[cold]
#[inline(never)]
fn leave_at(core: &mut Core, budget: i64, leave: Leave) -> Leave {
    core.budget = budget;
    leave
}
