//! The hot loop: one `match` over decoded ops.
//!
//! `pc` indexes the code cache's op arena. Straight-line ops advance it. A branch reads its
//! links, charges the budget for the basic block that it ends, and continues at the linked
//! basic block. The loop ends
//! - at the end of a basic block: the budget is used up, there is a request, or the exit is not
//!   linked in this epoch;
//! - at a blocked op, or an op that only the run loop can execute.
//!
//! It is one function, longer than the usual 70 lines, because the compiler must see every arm to
//! keep `pc`, the arena and the register file in registers. Each arm is a line; rare instructions
//! are in `general.rs`. docs/speed-x86.md has the measurements, and says how to check that every
//! arm ends in its own indirect jump.

use crate::arith::Arith;
use crate::mem::{Memory, Touch};
use crate::op::{Code, Op, ZERO};
use crate::processor::Core;
use crate::state::{Exception, is_canonical};
use crate::{bits, divide, general, stack, string};
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
    /// The indirect branch at this index ended its basic block; [`Core::rip`] is its target.
    Indirect(u16),
}

/// The address of an op's memory operand.
#[inline(always)]
pub(crate) fn address(core: &Core, op: &Op) -> u64 {
    core.r[op.base as usize]
        .wrapping_add(core.r[op.index as usize] << (op.form & 3))
        .wrapping_add(op.disp as i64 as u64)
}

#[inline(always)]
fn get<T: Word>(core: &Core, slot: u8) -> T {
    T::narrow(core.r[slot as usize])
}

#[inline(always)]
fn imm<T: Word>(op: &Op) -> T {
    T::narrow(op.imm64())
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
        }};
    }
    macro_rules! indirect {
        ($target:expr) => {{
            let target: u64 = $target;
            let links = &ops[pc.wrapping_add(1) as usize];
            let budget = core.budget - links.block_instructions();
            core.rip = target;
            match code.jumps.find(target, core.user, code.epoch) {
                Some(next) if budget > 0 && !slot.has_request() => {
                    core.budget = budget;
                    pc = next;
                }
                _ => return leave_at(core, budget, Leave::Indirect(pc)),
            }
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
            ($t:ty) => {
                done!(core.load::<$t>(bus, address(core, op)))
            };
        }
        macro_rules! store {
            ($value:expr) => {
                call!(core.store(bus, address(core, op), $value))
            };
        }
        macro_rules! add {
            ($a:expr, $b:expr) => {{
                let b = $b;
                let result = $a.wrapping_add(b);
                core.flags.set_add(result, b);
                set!(result)
            }};
        }
        macro_rules! add_to_memory {
            ($t:ty, $b:expr) => {{
                let (b, at) = ($b, address(core, op));
                let old = done!(core.update(bus, at, |old: $t| old.wrapping_add(b)));
                core.flags.set_add(old.wrapping_add(b), b);
            }};
        }
        macro_rules! cmp {
            ($a:expr, $b:expr) => {{
                let b = $b;
                let result = $a.wrapping_sub(b);
                core.flags.set_sub(result, b);
                result
            }};
        }
        macro_rules! logic {
            ($result:expr) => {{
                let result = $result;
                core.flags.set_given(result, 0);
                result
            }};
        }
        // The condition of a fused compare-and-branch, which also leaves the compare's flags.
        macro_rules! jump_cmp {
            ($t:ty, $b:expr, |$x:ident, $y:ident| $condition:expr) => {{
                let ($x, $y) = (r!(dst: $t), $b);
                core.flags.set_sub($x.wrapping_sub($y), $y);
                branch!(op, $condition);
                continue;
            }};
        }
        macro_rules! jump_test {
            ($t:ty, $b:expr, |$x:ident| $condition:expr) => {{
                let $x = logic!(r!(dst: $t) & $b);
                branch!(op, $condition);
                continue;
            }};
        }
        // A fused count-and-branch: keeps the result, and jumps if it is zero.
        macro_rules! jump_set {
            ($value:expr) => {{
                let value = $value;
                core.r[op.dst as usize] = value.widen();
                branch!(op, value == 0);
                continue;
            }};
        }
        match op.code {
            Code::AddRr32 => add!(r!(base: u32), r!(src: u32)),
            Code::AddRr64 => add!(r!(base: u64), r!(src: u64)),
            Code::AddRi32 => add!(r!(src: u32), imm::<u32>(op)),
            Code::AddRi64 => add!(r!(src: u64), imm::<u64>(op)),
            Code::AddRm32 => add!(r!(dst: u32), load!(u32)),
            Code::AddRm64 => add!(r!(dst: u64), load!(u64)),
            Code::AddMr32 => add_to_memory!(u32, r!(src: u32)),
            Code::AddMr64 => add_to_memory!(u64, r!(src: u64)),
            Code::AddMi32 => add_to_memory!(u32, imm::<u32>(op)),
            Code::AddMi64 => add_to_memory!(u64, imm::<u64>(op)),
            Code::SubRr32 => set!(cmp!(r!(base: u32), r!(src: u32))),
            Code::SubRr64 => set!(cmp!(r!(base: u64), r!(src: u64))),
            Code::SubRi32 => set!(cmp!(r!(src: u32), imm::<u32>(op))),
            Code::SubRi64 => set!(cmp!(r!(src: u64), imm::<u64>(op))),
            Code::SubRm32 => set!(cmp!(r!(dst: u32), load!(u32))),
            Code::SubRm64 => set!(cmp!(r!(dst: u64), load!(u64))),
            Code::AndRr32 => set!(logic!(r!(base: u32) & r!(src: u32))),
            Code::AndRr64 => set!(logic!(r!(base: u64) & r!(src: u64))),
            Code::AndRi32 => set!(logic!(r!(src: u32) & imm::<u32>(op))),
            Code::AndRi64 => set!(logic!(r!(src: u64) & imm::<u64>(op))),
            Code::AndRm32 => set!(logic!(r!(dst: u32) & load!(u32))),
            Code::AndRm64 => set!(logic!(r!(dst: u64) & load!(u64))),
            Code::OrRr32 => set!(logic!(r!(base: u32) | r!(src: u32))),
            Code::OrRr64 => set!(logic!(r!(base: u64) | r!(src: u64))),
            Code::OrRi32 => set!(logic!(r!(src: u32) | imm::<u32>(op))),
            Code::OrRi64 => set!(logic!(r!(src: u64) | imm::<u64>(op))),
            Code::OrRm32 => set!(logic!(r!(dst: u32) | load!(u32))),
            Code::OrRm64 => set!(logic!(r!(dst: u64) | load!(u64))),
            Code::XorRr32 => set!(logic!(r!(base: u32) ^ r!(src: u32))),
            Code::XorRr64 => set!(logic!(r!(base: u64) ^ r!(src: u64))),
            Code::XorRi32 => set!(logic!(r!(src: u32) ^ imm::<u32>(op))),
            Code::XorRi64 => set!(logic!(r!(src: u64) ^ imm::<u64>(op))),
            Code::XorRm32 => set!(logic!(r!(dst: u32) ^ load!(u32))),
            Code::XorRm64 => set!(logic!(r!(dst: u64) ^ load!(u64))),
            Code::CmpRr32 => _ = cmp!(r!(dst: u32), r!(src: u32)),
            Code::CmpRr64 => _ = cmp!(r!(dst: u64), r!(src: u64)),
            Code::CmpRi32 => _ = cmp!(r!(dst: u32), imm::<u32>(op)),
            Code::CmpRi64 => _ = cmp!(r!(dst: u64), imm::<u64>(op)),
            Code::CmpRm32 => _ = cmp!(r!(dst: u32), load!(u32)),
            Code::CmpRm64 => _ = cmp!(r!(dst: u64), load!(u64)),
            Code::CmpMr32 => _ = cmp!(load!(u32), r!(src: u32)),
            Code::CmpMr64 => _ = cmp!(load!(u64), r!(src: u64)),
            Code::CmpMi8 => _ = cmp!(load!(u8), imm::<u8>(op)),
            Code::CmpMi32 => _ = cmp!(load!(u32), imm::<u32>(op)),
            Code::CmpMi64 => _ = cmp!(load!(u64), imm::<u64>(op)),
            Code::CmpRr8 => _ = cmp!(r!(dst: u8), r!(src: u8)),
            Code::CmpRi8 => _ = cmp!(r!(dst: u8), imm::<u8>(op)),
            Code::TestRr8 => _ = logic!(r!(dst: u8) & r!(src: u8)),
            Code::TestRr32 => _ = logic!(r!(dst: u32) & r!(src: u32)),
            Code::TestRr64 => _ = logic!(r!(dst: u64) & r!(src: u64)),
            Code::TestRi8 => _ = logic!(r!(dst: u8) & imm::<u8>(op)),
            Code::TestRi32 => _ = logic!(r!(dst: u32) & imm::<u32>(op)),
            Code::TestRi64 => _ = logic!(r!(dst: u64) & imm::<u64>(op)),
            Code::TestMi8 => _ = logic!(load!(u8) & imm::<u8>(op)),
            Code::MovRr32 => set!(r!(src: u32)),
            Code::MovRr64 => set!(r!(src: u64)),
            Code::MovRi32 => set!(imm::<u32>(op)),
            Code::MovRi64 => set!(imm::<u64>(op)),
            Code::Const => set!(op.wide()),
            Code::Address => set!(general::far_address(core, op)),
            Code::Load32 => set!(load!(u32)),
            Code::Load64 => set!(load!(u64)),
            Code::LoadZx8 => set!(load!(u8)),
            Code::LoadZx16 => set!(load!(u16)),
            Code::LoadSx8To32 => set!(load!(u8) as i8 as u32),
            Code::LoadSx8To64 => set!(load!(u8) as i8 as u64),
            Code::LoadSx16To32 => set!(load!(u16) as i16 as u32),
            Code::LoadSx16To64 => set!(load!(u16) as i16 as u64),
            Code::LoadSx32To64 => set!(load!(u32) as i32 as u64),
            Code::Store8 => store!(r!(src: u8)),
            Code::Store16 => store!(r!(src: u16)),
            Code::Store32 => store!(r!(src: u32)),
            Code::Store64 => store!(r!(src: u64)),
            Code::StoreImm8 => store!(imm::<u8>(op)),
            Code::StoreImm32 => store!(imm::<u32>(op)),
            Code::StoreImm64 => store!(imm::<u64>(op)),
            Code::MovZx8 => set!(r!(src: u8)),
            Code::MovZx16 => set!(r!(src: u16)),
            Code::MovSx8To32 => set!(r!(src: u8) as i8 as u32),
            Code::MovSx8To64 => set!(r!(src: u8) as i8 as u64),
            Code::MovSx16To32 => set!(r!(src: u16) as i16 as u32),
            Code::MovSx16To64 => set!(r!(src: u16) as i16 as u64),
            Code::MovSx32To64 => set!(r!(src: u32) as i32 as u64),
            Code::Lea32 => set!(address(core, op) as u32),
            Code::Lea64 => set!(address(core, op)),
            Code::ShlRi32 => set!(r!(src: u32).shl(&mut core.flags, op.imm as u32)),
            Code::ShlRi64 => set!(r!(src: u64).shl(&mut core.flags, op.imm as u32)),
            Code::ShrRi32 => set!(r!(src: u32).shr(&mut core.flags, op.imm as u32)),
            Code::ShrRi64 => set!(r!(src: u64).shr(&mut core.flags, op.imm as u32)),
            Code::SarRi32 => set!(r!(src: u32).sar(&mut core.flags, op.imm as u32)),
            Code::SarRi64 => set!(r!(src: u64).sar(&mut core.flags, op.imm as u32)),
            Code::IncR32 => set!(r!(dst: u32).inc(&mut core.flags)),
            Code::IncR64 => set!(r!(dst: u64).inc(&mut core.flags)),
            Code::DecR32 => set!(r!(dst: u32).dec(&mut core.flags)),
            Code::DecR64 => set!(r!(dst: u64).dec(&mut core.flags)),
            Code::NegR32 => set!(cmp!(0_u32, r!(dst: u32))),
            Code::NegR64 => set!(cmp!(0_u64, r!(dst: u64))),
            Code::ImulRr32 => set!(r!(dst: u32).multiply(r!(src: u32), &mut core.flags)),
            Code::ImulRr64 => set!(r!(dst: u64).multiply(r!(src: u64), &mut core.flags)),
            Code::ImulRri32 => set!(r!(src: u32).multiply(imm::<u32>(op), &mut core.flags)),
            Code::ImulRri64 => set!(r!(src: u64).multiply(imm::<u64>(op), &mut core.flags)),
            Code::ImulRm32 => set!(r!(dst: u32).multiply(load!(u32), &mut core.flags)),
            Code::ImulRm64 => set!(r!(dst: u64).multiply(load!(u64), &mut core.flags)),
            Code::CmovRr32 => set!(get::<u32>(core, chosen(core, op))),
            Code::CmovRr64 => set!(get::<u64>(core, chosen(core, op))),
            Code::SetccR => {
                let value = u64::from(core.flags.condition(op.aux));
                set!(core.r[op.dst as usize] & !0xff | value)
            }
            Code::PushR => call!(push(core, bus, r!(src: u64))),
            Code::PushI => call!(push(core, bus, imm::<u64>(op))),
            Code::PopR => {
                let rsp = core.r[RSP];
                let value = done!(core.load::<u64>(bus, rsp));
                core.r[RSP] = rsp.wrapping_add(8);
                set!(value)
            }
            Code::TargetR => set!(done!(call_target(r!(src: u64), core))),
            Code::TargetM => set!(done!(call_target(load!(u64), core))),
            // The arm must not be empty: the loop's head would be its own successor, and then LLVM
            // copies the head into no other arm.
            Code::Nop => core.r[ZERO as usize] = 0,
            Code::QuietAddRr32 => set!(r!(base: u32).wrapping_add(r!(src: u32))),
            Code::QuietAddRr64 => set!(r!(base: u64).wrapping_add(r!(src: u64))),
            Code::QuietAddRi32 => set!(r!(src: u32).wrapping_add(imm::<u32>(op))),
            Code::QuietAddRi64 => set!(r!(src: u64).wrapping_add(imm::<u64>(op))),
            Code::QuietSubRr32 => set!(r!(base: u32).wrapping_sub(r!(src: u32))),
            Code::QuietSubRr64 => set!(r!(base: u64).wrapping_sub(r!(src: u64))),
            Code::QuietAndRr32 => set!(r!(base: u32) & r!(src: u32)),
            Code::QuietAndRr64 => set!(r!(base: u64) & r!(src: u64)),
            Code::QuietAndRi32 => set!(r!(src: u32) & imm::<u32>(op)),
            Code::QuietAndRi64 => set!(r!(src: u64) & imm::<u64>(op)),
            Code::QuietOrRr32 => set!(r!(base: u32) | r!(src: u32)),
            Code::QuietOrRr64 => set!(r!(base: u64) | r!(src: u64)),
            Code::QuietOrRi32 => set!(r!(src: u32) | imm::<u32>(op)),
            Code::QuietOrRi64 => set!(r!(src: u64) | imm::<u64>(op)),
            Code::QuietXorRr32 => set!(r!(base: u32) ^ r!(src: u32)),
            Code::QuietXorRr64 => set!(r!(base: u64) ^ r!(src: u64)),
            Code::QuietXorRi32 => set!(r!(src: u32) ^ imm::<u32>(op)),
            Code::QuietXorRi64 => set!(r!(src: u64) ^ imm::<u64>(op)),
            Code::QuietShlRi32 => set!(r!(src: u32).wrapping_shl(op.imm as u32)),
            Code::QuietShlRi64 => set!(r!(src: u64).wrapping_shl(op.imm as u32)),
            Code::QuietShrRi32 => set!(r!(src: u32).wrapping_shr(op.imm as u32)),
            Code::QuietShrRi64 => set!(r!(src: u64).wrapping_shr(op.imm as u32)),
            Code::QuietSarRi32 => set!((r!(src: u32) as i32).wrapping_shr(op.imm as u32) as u32),
            Code::QuietSarRi64 => set!((r!(src: u64) as i64).wrapping_shr(op.imm as u32) as u64),
            Code::QuietRolRi32 => set!(r!(src: u32).rotate_left(op.imm as u32)),
            Code::QuietRolRi64 => set!(r!(src: u64).rotate_left(op.imm as u32)),
            Code::QuietImulRr32 => set!(r!(dst: u32).wrapping_mul(r!(src: u32))),
            Code::QuietImulRr64 => set!(r!(dst: u64).wrapping_mul(r!(src: u64))),
            Code::QuietImulRri32 => set!(r!(src: u32).wrapping_mul(imm::<u32>(op))),
            Code::QuietImulRri64 => set!(r!(src: u64).wrapping_mul(imm::<u64>(op))),
            Code::Jump => {
                branch!(op, true);
                continue;
            }
            Code::JumpR => {
                indirect!(r!(src: u64));
                continue;
            }
            Code::Ret => {
                let rsp = core.r[RSP];
                let target = done!(core.load::<u64>(bus, rsp));
                core.r[RSP] = rsp.wrapping_add(8).wrapping_add(op.imm64());
                indirect!(target);
                continue;
            }
            Code::JumpZ => {
                branch!(op, core.flags.zf());
                continue;
            }
            Code::JumpCc => {
                branch!(op, core.flags.condition(op.aux));
                continue;
            }
            Code::JumpSlot => {
                branch!(op, r!(src: u64) != 0);
                continue;
            }
            Code::JumpCmpEqRr32 => jump_cmp!(u32, r!(src: u32), |a, b| a == b),
            Code::JumpCmpBelowRr32 => jump_cmp!(u32, r!(src: u32), |a, b| a < b),
            Code::JumpCmpBeRr32 => jump_cmp!(u32, r!(src: u32), |a, b| a <= b),
            Code::JumpCmpLessRr32 => jump_cmp!(u32, r!(src: u32), |a, b| (a as i32) < b as i32),
            Code::JumpCmpLeRr32 => jump_cmp!(u32, r!(src: u32), |a, b| a as i32 <= b as i32),
            Code::JumpCmpEqRr64 => jump_cmp!(u64, r!(src: u64), |a, b| a == b),
            Code::JumpCmpBelowRr64 => jump_cmp!(u64, r!(src: u64), |a, b| a < b),
            Code::JumpCmpBeRr64 => jump_cmp!(u64, r!(src: u64), |a, b| a <= b),
            Code::JumpCmpLessRr64 => jump_cmp!(u64, r!(src: u64), |a, b| (a as i64) < b as i64),
            Code::JumpCmpLeRr64 => jump_cmp!(u64, r!(src: u64), |a, b| a as i64 <= b as i64),
            Code::JumpCmpEqRi32 => jump_cmp!(u32, imm::<u32>(op), |a, b| a == b),
            Code::JumpCmpBelowRi32 => jump_cmp!(u32, imm::<u32>(op), |a, b| a < b),
            Code::JumpCmpBeRi32 => jump_cmp!(u32, imm::<u32>(op), |a, b| a <= b),
            Code::JumpCmpLessRi32 => jump_cmp!(u32, imm::<u32>(op), |a, b| (a as i32) < b as i32),
            Code::JumpCmpLeRi32 => jump_cmp!(u32, imm::<u32>(op), |a, b| a as i32 <= b as i32),
            Code::JumpCmpEqRi64 => jump_cmp!(u64, imm::<u64>(op), |a, b| a == b),
            Code::JumpCmpBelowRi64 => jump_cmp!(u64, imm::<u64>(op), |a, b| a < b),
            Code::JumpCmpBeRi64 => jump_cmp!(u64, imm::<u64>(op), |a, b| a <= b),
            Code::JumpCmpLessRi64 => jump_cmp!(u64, imm::<u64>(op), |a, b| (a as i64) < b as i64),
            Code::JumpCmpLeRi64 => jump_cmp!(u64, imm::<u64>(op), |a, b| a as i64 <= b as i64),
            Code::JumpTestZRr32 => jump_test!(u32, r!(src: u32), |x| x == 0),
            Code::JumpTestZRr64 => jump_test!(u64, r!(src: u64), |x| x == 0),
            Code::JumpTestZRi32 => jump_test!(u32, imm::<u32>(op), |x| x == 0),
            Code::JumpTestZRi64 => jump_test!(u64, imm::<u64>(op), |x| x == 0),
            Code::JumpTestSRr32 => jump_test!(u32, r!(src: u32), |x| (x as i32) < 0),
            Code::JumpTestSRr64 => jump_test!(u64, r!(src: u64), |x| (x as i64) < 0),
            Code::JumpTestLeRr32 => jump_test!(u32, r!(src: u32), |x| x as i32 <= 0),
            Code::JumpTestLeRr64 => jump_test!(u64, r!(src: u64), |x| x as i64 <= 0),
            Code::JumpCmpEqRr8 => jump_cmp!(u8, r!(src: u8), |a, b| a == b),
            Code::JumpCmpEqRi8 => jump_cmp!(u8, imm::<u8>(op), |a, b| a == b),
            Code::JumpTestZRr8 => jump_test!(u8, r!(src: u8), |x| x == 0),
            Code::JumpTestZRi8 => jump_test!(u8, imm::<u8>(op), |x| x == 0),
            Code::JumpDecZ32 => jump_set!(r!(dst: u32).dec(&mut core.flags)),
            Code::JumpDecZ64 => jump_set!(r!(dst: u64).dec(&mut core.flags)),
            Code::JumpSubZRi32 => jump_set!(cmp!(r!(src: u32), imm::<u32>(op))),
            Code::JumpSubZRi64 => jump_set!(cmp!(r!(src: u64), imm::<u64>(op))),
            Code::System => return Leave::System(pc),
            Code::Alu => call!(general::alu_e(core, bus, op)),
            Code::AluReverse => call!(general::alu_g(core, bus, op)),
            Code::Shift => call!(general::shift_e(core, bus, op)),
            Code::DoubleShift => call!(general::double_shift(core, bus, op)),
            Code::Not | Code::Neg => call!(general::unary(core, bus, op)),
            Code::Inc | Code::Dec => call!(general::step(core, bus, op)),
            Code::Mul | Code::Imul => call!(divide::multiply(core, bus, op)),
            Code::Div | Code::Idiv => call!(divide::divide(core, bus, op)),
            Code::ImulG | Code::ImulGImm => call!(divide::multiply_into(core, bus, op)),
            Code::MovE => call!(general::move_e(core, bus, op)),
            Code::MovG => call!(general::move_g(core, bus, op)),
            Code::MovZx | Code::MovSx => call!(general::extend_g(core, bus, op)),
            Code::CmovG => call!(general::move_conditional(core, bus, op)),
            Code::SetccE => call!(general::set_condition(core, bus, op)),
            Code::Xchg => call!(general::exchange(core, bus, op)),
            Code::Xadd => call!(general::exchange_add(core, bus, op)),
            Code::Cmpxchg => call!(general::compare_exchange(core, bus, op)),
            Code::Cmpxchg8b => call!(general::compare_exchange_8(core, bus, op)),
            Code::BitTest => call!(bits::bit_test(core, bus, op)),
            Code::BitOffset => bits::bit_offset(core, op),
            Code::BitScan => call!(bits::bit_scan(core, bus, op)),
            Code::Bswap | Code::Widen | Code::SignFill => general::registers(core, op),
            Code::Lahf | Code::Sahf | Code::Carry | Code::Direction => general::flags(core, op),
            Code::LoopCount => call!(general::loop_count(core, op)),
            Code::Fence => std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst),
            Code::PushE => call!(stack::push_operand(core, bus, op)),
            Code::PopE => call!(stack::pop_operand(core, bus, op)),
            Code::Pushf => call!(stack::push_flags(core, bus, op)),
            Code::Leave => call!(stack::leave(core, bus, op)),
            Code::Enter => call!(stack::enter(core, bus, op)),
            Code::String => call!(string::execute(core, bus, op)),
            Code::RefuseIf => call!(general::refuse_if(core, op)),
            Code::Links | Code::Float | Code::Undefined => done!(general::undefined(core, op)),
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

/// The slot of CMOVcc's source.
#[inline(always)]
fn chosen(core: &Core, op: &Op) -> u8 {
    if core.flags.condition(op.aux) {
        op.src
    } else {
        op.dst
    }
}

/// The target of an indirect call, if it is canonical: else the call raises #GP(0) before it
/// pushes.
#[inline(always)]
fn call_target(target: u64, core: &mut Core) -> Touch<u64> {
    if is_canonical(target) {
        Ok(target)
    } else {
        core.raise(Exception::GP0)
    }
}

/// RSP's slot.
pub(crate) const RSP: usize = 4;

#[inline(always)]
fn push(core: &mut Core, bus: &mut impl Bus, value: u64) -> Touch<()> {
    let rsp = core.r[RSP].wrapping_sub(8);
    core.store(bus, rsp, value)?;
    core.r[RSP] = rsp;
    Ok(())
}
