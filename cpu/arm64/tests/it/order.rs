//! Litmus tests: threads look for outcomes that the architecture forbids (Arm ARM B2.3).
//!
//! Both threads meet twice in each round. First they store and load without a barrier, which shows
//! whether they run at the same time: then both load the old value, again and again, because each
//! has a store buffer. Then they run the test. A run without this sign proves nothing, and is
//! repeated. Without the fences of `atomics.rs` the tests fail.

use crate::support;

use lacuna_cpu::testing::Ram;
use support::{DATA, STRIDE, memory_of, read, run_on_threads};

const COUNT: u64 = 20_000;
/// Runs until two threads have met.
const TRIES: usize = 100;
/// The addresses of the variables, of each thread's results, and of each thread's round.
const X: u64 = DATA;
const Y: u64 = X + COUNT * STRIDE;
const FIRST: u64 = Y + COUNT * STRIDE;
const SECOND: u64 = FIRST + COUNT * STRIDE;
const ROUNDS: u64 = SECOND + COUNT * STRIDE;
const BYTES: u64 = 4 * COUNT * STRIDE + 4096;

/// Waits for the other thread's round, but not for ever: it may have no processor.
/// ```text
/// 1: add x10, x10, #1     the round
///    stlr x10, [x8]
///    mov x12, #256
/// 2: ldar x11, [x9]
///    cmp x11, x10
///    b.hs 3f
///    subs x12, x12, #1
///    b.ne 2b
/// 3:
/// ```
const MEET: [u32; 8] = [
    0x9100054a, 0xc89ffd0a, 0xd280200c, 0xc8dffd2b, 0xeb0a017f, 0x54000062, 0xf100058c, 0x54ffff81,
];

/// The part that shows whether the threads run at the same time. It has its own variables.
/// ```text
///    str x4, [x13], #128
///    ldr x5, [x14], #128
///    str x5, [x2, #16]
/// ```
const CONTROL: [u32; 3] = [0xf80805a4, 0xf84805c5, 0xf9000845];

/// ```text
///    add x0, x0, #128
///    add x1, x1, #128
///    stp x5, x6, [x2], #128
///    subs x3, x3, #1
/// ```
const NEXT: [u32; 4] = [0x91020000, 0x91020021, 0xa8881845, 0xf1000463];

/// Instructions on the two variables, at x0 and x1. They store x4, which is 1, and load x5 and x6.
mod access {
    /// `str x4, [x0]`
    pub(super) const STORE: u32 = 0xf9000004;
    /// `str x4, [x1]`
    pub(super) const STORE_SECOND: u32 = 0xf9000024;
    /// `stlr x4, [x0]`
    pub(super) const RELEASE: u32 = 0xc89ffc04;
    /// `stlr x4, [x1]`
    pub(super) const RELEASE_SECOND: u32 = 0xc89ffc24;
    /// `swpal x4, x7, [x0]`
    pub(super) const SWAP: u32 = 0xf8e48007;
    /// `dmb ish`
    pub(super) const BARRIER: u32 = 0xd5033bbf;
    /// `dmb ishst`
    pub(super) const STORES: u32 = 0xd5033abf;
    /// `dmb ishld`
    pub(super) const LOADS: u32 = 0xd50339bf;
    /// `ldr x5, [x1]`
    pub(super) const LOAD: u32 = 0xf9400025;
    /// `ldar x5, [x1]`
    pub(super) const ACQUIRE: u32 = 0xc8dffc25;
    /// `ldapr x5, [x1]`
    pub(super) const ACQUIRE_RCPC: u32 = 0xf8bfc025;
    /// `ldr x6, [x0]`
    pub(super) const LOAD_FIRST: u32 = 0xf9400006;
    /// `eor x7, x5, x5; ldr x6, [x0, x7]`: the address depends on the load before.
    pub(super) const LOAD_AFTER: [u32; 2] = [0xca0500a7, 0xf8676806];
    /// `eor x7, x5, x5; add x7, x7, #1; str x7, [x0]`: the value depends on the load before.
    pub(super) const STORE_AFTER: [u32; 3] = [0xca0500a7, 0x910004e7, 0xf9000007];
}
use access::*;

/// The loop around `body`.
fn rounds(body: &[u32]) -> Vec<u32> {
    let mut words = [&MEET, &CONTROL[..], &MEET, body, &NEXT].concat();
    // b.ne to the start; b .
    let back = (words.len() as u32).wrapping_neg() & 0x7_ffff;
    words.extend([0x5400_0001 | back << 5, 0x1400_0000]);
    words
}

/// The values that two threads have loaded in a round of a test: x5 and x6 of each.
type Loaded = [(u64, u64); 2];

/// Two threads run through the variables once. `None` if they have hardly met.
fn run_once(programs: [&[u32]; 2], variables: [[u64; 2]; 2]) -> Option<Vec<Loaded>> {
    let words = programs.map(rounds);
    let registers = |me: usize| {
        let [a, b] = variables[me];
        let round = |thread: usize| ROUNDS + thread as u64 * STRIDE;
        let results = [FIRST, SECOND][me];
        let control = [[X, Y], [Y, X]][me].map(|at| at + 64);
        let mut x = vec![a, b, results, COUNT, 1, 0, 0, 0];
        x.extend([round(me), round(1 - me), 0, 0, 0, control[0], control[1]]);
        x
    };
    let programs = [0, 1].map(|me| (registers(me), &words[me][..]));
    let mut ram = memory_of(&programs, BYTES);
    run_on_threads(&ram, &programs);
    let loaded = |ram: &mut Ram, at| (read(ram, at), read(ram, at + 8));
    let (mut all, mut met) = (Vec::new(), 0);
    for n in 0..COUNT {
        let results = [FIRST, SECOND].map(|results| results + n * STRIDE);
        met += u64::from(results.iter().all(|at| read(&mut ram, at + 16) == 0));
        all.push(results.map(|at| loaded(&mut ram, at)));
    }
    (met > COUNT / 20).then_some(all)
}

/// How many rounds of a test have the outcome `forbidden`. If this machine has no two processors
/// for it, skips the test and returns `None`.
fn count(
    programs: [&[u32]; 2],
    variables: [[u64; 2]; 2],
    forbidden: impl Fn(&Loaded) -> bool,
) -> Option<usize> {
    let loaded = (0..TRIES).find_map(|_| run_once(programs, variables));
    if loaded.is_none() {
        lacuna_skip::skip("two threads never ran at the same time: it needs two processors");
    }
    Some(loaded?.into_iter().filter(forbidden).count())
}

/// Message passing: how often the second thread sees the flag, and then not the data.
fn message_passing(writer: &[u32], reader: &[u32]) -> Option<usize> {
    count([writer, reader], [[X, Y], [X, Y]], |loaded| {
        loaded[1] == (1, 0)
    })
}

/// Each thread accesses its own variable and then the other one's, or the other way round: how
/// often both have loaded `value`.
fn both_load(value: u64, program: &[u32]) -> Option<usize> {
    let both = |loaded: &Loaded| loaded.iter().all(|(first, _)| *first == value);
    count([program, program], [[X, Y], [Y, X]], both)
}

#[test]
fn a_message_is_passed_with_its_data() {
    let writers: [&[u32]; 3] = [
        &[STORE, RELEASE_SECOND],
        &[STORE, STORES, STORE_SECOND],
        &[STORE, BARRIER, STORE_SECOND],
    ];
    let [dependence, address] = LOAD_AFTER;
    let readers: [&[u32]; 4] = [
        &[ACQUIRE, LOAD_FIRST],
        &[ACQUIRE_RCPC, LOAD_FIRST],
        &[LOAD, LOADS, LOAD_FIRST],
        &[LOAD, dependence, address],
    ];
    for (writer, reader) in [(0, 0), (0, 1), (1, 2), (1, 3), (2, 0), (2, 3)] {
        let (writer, reader) = (writers[writer], readers[reader]);
        let Some(seen) = message_passing(writer, reader) else {
            return;
        };
        assert_eq!(seen, 0, "{writer:x?} {reader:x?}");
    }
}

/// Store buffering: both threads store, and load the old value of the other's variable.
#[test]
fn ordered_accesses_and_barriers_do_not_buffer_stores() {
    let programs: [&[u32]; 4] = [
        &[RELEASE, ACQUIRE],
        &[SWAP, ACQUIRE],
        &[SWAP, LOAD],
        &[STORE, BARRIER, LOAD],
    ];
    for program in programs {
        let Some(seen) = both_load(0, program) else {
            return;
        };
        assert_eq!(seen, 0, "{program:x?}");
    }
}

/// Load buffering: each thread loads the other one's later store.
#[test]
fn no_load_sees_a_store_that_depends_on_it() {
    let [dependence, one, store] = STORE_AFTER;
    for program in [
        &[LOAD, dependence, one, store][..],
        &[LOAD, BARRIER, STORE],
        &[ACQUIRE, STORE],
        &[LOAD, RELEASE],
    ] {
        let Some(seen) = both_load(1, program) else {
            return;
        };
        assert_eq!(seen, 0, "{program:x?}");
    }
}

/// LSE: additions and compare-and-swaps on threads.
/// ```text
/// 1: ldadd x4, x5, [x0]
/// 2: ldr x1, [x0, #64]
///    mov x6, x1
///    add x2, x1, #1
///    add x7, x0, #64
///    casal x1, x2, [x7]
///    cmp x1, x6
///    b.ne 2b
///    subs x3, x3, #1
///    b.ne 1b
///    b .
/// ```
const LSE: &[u32] = &[
    0xf8240005, 0xf9402001, 0xaa0103e6, 0x91000422, 0x91010007, 0xc8e1fce2, 0xeb06003f, 0x54ffff41,
    0xf1000463, 0x54fffee1, 0x14000000,
];

#[test]
fn atomic_instructions_lose_no_addition() {
    let programs: Vec<_> = (1..4)
        .map(|by| (vec![DATA, 0, 0, COUNT, by], LSE))
        .collect();
    let mut ram = memory_of(&programs, 4096);
    run_on_threads(&ram, &programs);
    assert_eq!(read(&mut ram, DATA), 6 * COUNT);
    assert_eq!(read(&mut ram, DATA + 64), 3 * COUNT);
}
