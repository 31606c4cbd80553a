//! Decodes words to basic blocks.

use crate::lower::{Extent, Flow, Lower};
use crate::monitor;
use crate::op::{Code, Op};
use lacuna_addr::PAGE_SIZE;
use lacuna_cpu::HostPage;

/// The most instructions in a basic block: an interrupt waits until they are done.
const INSTRUCTIONS_MAX: usize = 48;

/// Appends the basic block of the instructions at `pc`, which lie in `page`.
pub(crate) fn basic_block(page: HostPage, pc: u64, ops: &mut Vec<Op>) {
    decode(page, pc, ops, Extent::Block);
}

/// Appends a basic block of the one instruction at `pc`.
pub(crate) fn one(page: HostPage, pc: u64, ops: &mut Vec<Op>) {
    decode(page, pc, ops, Extent::Alone);
}

fn decode(page: HostPage, pc: u64, ops: &mut Vec<Op>, extent: Extent) {
    let max = match extent {
        Extent::Block => INSTRUCTIONS_MAX,
        Extent::Alone => 1,
    };
    let start = ops.len();
    let offset = pc as usize & (PAGE_SIZE - 1);
    let mut flow = Flow::On;
    for (n, at) in (offset..PAGE_SIZE).step_by(4).take(max).enumerate() {
        let mut lower = Lower {
            word: page.load_u32(at),
            extent,
            pc: pc.wrapping_add(4 * n as u64),
            ops,
            start,
        };
        flow = lower.instruction();
        if flow == Flow::End {
            break;
        }
    }
    if flow == Flow::On {
        ops.push(Op::new(Code::Jump));
        ops.push(Op::unlinked(0));
    }
    monitor::mark_quiet(&mut ops[start..]);
    close(&mut ops[start..]);
}

/// Writes the number of the basic block's instructions into its links.
fn close(ops: &mut [Op]) {
    let count: u64 = ops.iter().map(|op| u64::from(op.len)).sum();
    if let Some(last) = ops.last_mut().filter(|op| op.code == Code::Links) {
        *last = Op::unlinked(count as u8);
    }
}
