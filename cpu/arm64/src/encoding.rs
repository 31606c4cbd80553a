//! The A64 encodings of this processor (Arm ARM C4.1). A word without a matching row is undefined.
//!
//! A pattern has a character for each bit, from bit 31 down: `0` and `1` must match, and `.` is an
//! operand for the lowering of the class. Blanks are for the reader. No two rows match the same
//! word, which a test checks. The lowering still refuses unallocated operands, such as a shift of a
//! 32-bit register by 32.

/// An instruction's class: one class of the manual, or one instruction of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[rustfmt::skip]
pub(crate) enum Class {
    Adr, AddSubImmediate, LogicalImmediate, MoveWide, Bitfield, Extract,
    Branch, CompareBranch, TestBranch, ConditionalBranch, BranchRegister,
    Hint, Clrex, Barrier, Isb, ZeroBlock, System,
    Exclusive, ExclusivePair, Ordered, Cas, CasPair, Atomic, Swap, LoadRcpc,
    Literal, Pair, Unscaled, PostIndex, Unprivileged, PreIndex, RegisterOffset, UnsignedOffset,
    TwoSource, OneSource, LogicalShifted, AddSubShifted, AddSubExtended, Carry,
    ConditionalCompare, ConditionalSelect, ThreeSource,
}

struct Row {
    mask: u32,
    bits: u32,
    class: Class,
}

const fn row(pattern: &str, class: Class) -> Row {
    let (text, mut at) = (pattern.as_bytes(), 0);
    let (mut mask, mut bits, mut count) = (0, 0, 0);
    while at < text.len() {
        let (fixed, bit) = match text[at] {
            b'0' => (1, 0),
            b'1' => (1, 1),
            b'.' => (0, 0),
            b' ' => {
                at += 1;
                continue;
            }
            _ => panic!("a pattern has the characters 0, 1, dot and blank"),
        };
        mask = mask << 1 | fixed;
        bits = bits << 1 | bit;
        count += 1;
        at += 1;
    }
    assert!(count == 32, "a pattern has 32 bits");
    Row { mask, bits, class }
}

use Class::*;

/// Data processing with an immediate: bits 28 to 26 are 100.
#[rustfmt::skip]
const IMMEDIATE: &[Row] = &[
    row(". .. 10000 ................... .....", Adr),
    row(". . . 100010 . ............ ..... .....", AddSubImmediate),
    row(". .. 100100 . ...... ...... ..... .....", LogicalImmediate),
    row(". .. 100101 .. ................ .....", MoveWide),
    row(". .. 100110 . ...... ...... ..... .....", Bitfield),
    row(". 00 100111 . 0 ..... ...... ..... .....", Extract),
];

/// Branches, exceptions and system instructions: bits 28 to 26 are 101.
#[rustfmt::skip]
const BRANCHES: &[Row] = &[
    row(". 00101 ..........................", Branch),
    row(". 011010 . ................... .....", CompareBranch),
    row(". 011011 . ..... .............. .....", TestBranch),
    row("0101010 0 ................... 0 ....", ConditionalBranch),
    row("1101011 00 .. 11111 000000 ..... 00000", BranchRegister),
    // HINT: NOP, YIELD, WFE, SEV, SEVL, PACs, BTI. WFI, CRm 0 and op2 3, is below.
    //
    // WFE never waits, and so never traps by SCTLR_EL1.nTWE: the architecture lets it end for any
    // reason. A wait would need all that ends it: an event register, SEV to other vCPUs, the event
    // stream, and an event from each exclusive monitor that a store clears, so plain stores would
    // have to look at monitors. The price: a vCPU that waits by WFE executes its loop. CNTKCTL_EL1
    // keeps the bits of the event stream, without an effect.
    row("11010101000000110010 .... 1.. 11111", Hint),
    row("11010101000000110010 .... 00. 11111", Hint),
    row("11010101000000110010 ...1 01. 11111", Hint),
    row("11010101000000110010 ..10 01. 11111", Hint),
    row("11010101000000110010 .100 01. 11111", Hint),
    row("11010101000000110010 1000 01. 11111", Hint),
    row("11010101000000110010 0000 010 11111", Hint),
    row("11010101000000110010 0000 011 11111", System),
    row("11010101000000110011 .... 010 11111", Clrex),
    // DSB, which also waits for TLB invalidations.
    row("11010101000000110011 .... 100 11111", System),
    // DMB.
    row("11010101000000110011 .... 101 11111", Barrier),
    row("11010101000000110011 .... 110 11111", Isb),
    // MSR (immediate).
    row("1101010100000 ... 0100 .... ... 11111", System),
    // DC ZVA.
    row("1101010100 0 01 011 0111 0100 001 .....", ZeroBlock),
    // SYS and SYSL: everything but DC ZVA.
    row("1101010100 0 01 0.. .... .... ... .....", System),
    row("1101010100 0 01 1.. .... .... ... .....", System),
    row("1101010100 1 01 ... .... .... ... .....", System),
    // MSR and MRS (register).
    row("1101010100 . 1. ... .... .... ... .....", System),
    // SVC, HVC, SMC, BRK, HLT.
    row("11010100 000 ................ 000 01", System),
    row("11010100 000 ................ 000 10", System),
    row("11010100 000 ................ 000 11", System),
    row("11010100 001 ................ 000 00", System),
    row("11010100 010 ................ 000 00", System),
    // ERET.
    row("1101011 0100 11111 000000 11111 00000", System),
];

/// Loads and stores of general registers: bit 27 is 1, bits 26 (V) and 25 are 0.
#[rustfmt::skip]
const MEMORY: &[Row] = &[
    row(".. 001000 0 . 0 ..... . ..... ..... .....", Exclusive),
    row("1. 001000 0 . 1 ..... . ..... ..... .....", ExclusivePair),
    row("0. 001000 0 . 1 ..... . 11111 ..... .....", CasPair),
    row(".. 001000 1 . 0 ..... 1 ..... ..... .....", Ordered),
    row(".. 001000 1 . 1 ..... . 11111 ..... .....", Cas),
    row(".. 011 0 00 ................... .....", Literal),
    row(".. 101 0 0 .. . ....... ..... ..... .....", Pair),
    row(".. 111 0 00 .. 0 ......... 00 ..... .....", Unscaled),
    row(".. 111 0 00 .. 0 ......... 01 ..... .....", PostIndex),
    row(".. 111 0 00 .. 0 ......... 10 ..... .....", Unprivileged),
    row(".. 111 0 00 .. 0 ......... 11 ..... .....", PreIndex),
    row(".. 111 0 00 .. 1 ..... .1. . 10 ..... .....", RegisterOffset),
    row(".. 111 0 01 .. ............ ..... .....", UnsignedOffset),
    row(".. 111 0 00 .. 1 ..... 0 ... 00 ..... .....", Atomic),
    row(".. 111 0 00 .. 1 ..... 1 000 00 ..... .....", Swap),
    row(".. 111 0 00 10 1 11111 1 100 00 ..... .....", LoadRcpc),
];

/// Data processing with registers: bits 27 to 25 are 101.
#[rustfmt::skip]
const REGISTERS: &[Row] = &[
    row(". 0 0 11010110 ..... ...... ..... .....", TwoSource),
    row(". 1 0 11010110 00000 ...... ..... .....", OneSource),
    row(". .. 01010 .. . ..... ...... ..... .....", LogicalShifted),
    row(". . . 01011 .. 0 ..... ...... ..... .....", AddSubShifted),
    row(". . . 01011 00 1 ..... ... ... ..... .....", AddSubExtended),
    row(". . . 11010000 ..... 000000 ..... .....", Carry),
    row(". . 1 11010010 ..... .... . 0 ..... 0 ....", ConditionalCompare),
    row(". . 0 11010100 ..... .... 0. ..... .....", ConditionalSelect),
    row(". 00 11011 ... ..... . ..... ..... .....", ThreeSource),
];

/// The class of `word`; `None` if the word is undefined.
pub(crate) fn class(word: u32) -> Option<Class> {
    let rows = match word >> 25 & 15 {
        0b1000 | 0b1001 => IMMEDIATE,
        0b1010 | 0b1011 => BRANCHES,
        0b0100 | 0b1100 => MEMORY,
        0b0101 | 0b1101 => REGISTERS,
        // 0110 and 1110 are loads and stores, x111 data processing of SIMD and floating point.
        _ => return None,
    };
    let row = rows.iter().find(|row| word & row.mask == row.bits)?;
    Some(row.class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_rows_match_the_same_word() {
        for rows in [IMMEDIATE, BRANCHES, MEMORY, REGISTERS] {
            for (i, a) in rows.iter().enumerate() {
                for b in &rows[i + 1..] {
                    let common = a.mask & b.mask;
                    let same = a.bits & common == b.bits & common;
                    // DC ZVA is one word of the row of SYS behind it.
                    let inside = a.class == ZeroBlock;
                    assert!(!same || inside, "{:?} and {:?}", a.class, b.class);
                }
            }
        }
    }

    #[test]
    fn each_row_is_in_the_group_that_is_searched_for_its_words() {
        for rows in [IMMEDIATE, BRANCHES, MEMORY, REGISTERS] {
            for row in rows {
                assert_eq!(class(row.bits), Some(row.class), "{:#010x}", row.bits);
                let ones = row.bits | !row.mask;
                assert_eq!(class(ones), Some(row.class), "{ones:#010x}");
            }
        }
    }
}
