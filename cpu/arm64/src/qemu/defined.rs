//! Which words are instructions: random words, and encodings of instructions with some changed
//! bits.
//!
//! The program executes each word once, without addresses in the registers. Its signal handler
//! records SIGILL, and continues behind the word.

use super::kinds::{KINDS, random_word};
use super::{BASE, HEADER, bytes_of, elf_header, is_defined, is_installed, run};
use fastrand::Rng;
use lacuna_a64::{ADR, Asm, B, BR, CBZ, RET, SVC};

const WORDS: usize = 1 << 15;
const SIGILL: u64 = 4;
/// With SIGTRAP, SIGBUS and SIGSEGV.
const SIGNALS: [u64; 4] = [SIGILL, 5, 7, 11];
/// An unmapped address.
const NOWHERE: u64 = 0x10;
/// Four words: the next stub, the next place of output, the stubs left, the last stub's signal.
const STATE: u64 = BASE + 0x4000;
/// A `struct sigaction` and a `stack_t`.
const ACTION: u64 = STATE + 0x40;
const STACK: u64 = STATE + 0x80;
const STACK_BYTES: u64 = 0x1_0000;
const OUTPUT: u64 = BASE + 0x2_0000;
const STUBS: u64 = OUTPUT + 8 * WORDS as u64;
/// PC in the `ucontext_t` of Linux on arm64.
const FRAME_PC: u32 = 176 + 8 + 31 * 8 + 8;

/// A word of a group in which this processor has instructions. Branches and system instructions are
/// left out: their execution shows nothing, or ends the program.
fn word(rng: &mut Rng) -> u32 {
    loop {
        let word = match rng.u32(..4) {
            0 => rng.u32(..),
            _ => {
                let pattern = KINDS[rng.usize(..KINDS.len())].1;
                let word = random_word(pattern.split('|').next().unwrap(), rng);
                (0..rng.u32(..3)).fold(word, |word, _| word ^ 1 << rng.u32(..32))
            }
        };
        let group = word >> 25 & 15;
        let covered = matches!(group, 0b0101 | 0b1101 | 0b1000 | 0b1001 | 0b0100 | 0b1100);
        if covered && !is_limited_ordering(word) && !uses_stub_address(word) {
            return word;
        }
    }
}

/// A load or store with x30 in its address: x30 is the stub's.
fn uses_stub_address(word: u32) -> bool {
    let [base, index] = [5, 16].map(|low| word >> low & 31);
    word >> 27 & 1 != 0 && word >> 25 & 1 == 0 && (base == 30 || index == 30)
}

/// LDLAR and STLLR, which Neoverse N1 has and this processor lacks.
fn is_limited_ordering(word: u32) -> bool {
    word & 0x3fa0_8000 == 0x0880_0000
}

fn system_call(a: &mut Asm, number: u64, arguments: &[u64]) {
    for (register, &value) in (0..).zip(arguments) {
        a.set(register, value);
    }
    a.set(8, number).raw(SVC);
}

/// The program, the address of its handler, and each stub's return address.
fn program() -> (Vec<u8>, u64, u64) {
    let mut a = Asm::at(BASE + HEADER as u64);
    let [handler, back, next, finish] = [(); 4].map(|()| a.label());
    // sigaltstack, rt_sigaction
    system_call(&mut a, 132, &[STACK, 0]);
    for signal in SIGNALS {
        system_call(&mut a, 134, &[signal, ACTION, 0, 8]);
    }
    a.branch(B, next);
    // x0 is the signal, x2 the frame.
    a.place(handler).set(3, STATE).store(8, 0, 3, 24);
    a.branch(ADR | 3, back).store(8, 3, 2, FRAME_PC).raw(RET);
    a.place(back).set(1, STATE);
    a.raw(0xa940_0c22); // ldp x2, x3, [x1]
    a.raw(0xa941_1424); // ldp x4, x5, [x1, #16]
    a.raw(0xf800_8465); // str x5, [x3], #8
    a.add(2, 2, 8);
    a.raw(0xd100_0484); // sub x4, x4, #1
    a.raw(0xa900_0c22); // stp x2, x3, [x1]
    a.raw(0xa901_7c24); // stp x4, xzr, [x1, #16]
    a.branch(CBZ | 4, finish);
    a.place(next).set(30, STATE).load(8, 30, 30, 0);
    a.set(0, NOWHERE).add(31, 0, 0);
    for register in 1..30 {
        a.add(register, 0, 0);
    }
    a.raw(BR | 30 << 5).place(finish);
    system_call(&mut a, 64, &[1, OUTPUT, 8 * WORDS as u64]);
    system_call(&mut a, 93, &[0]);
    (a.bytes(), a.address(handler), a.address(back))
}

fn image(words: &[u32]) -> Vec<u8> {
    let length = STUBS + 8 * words.len() as u64 - BASE;
    let mut image = vec![0; length as usize];
    let mut put = |at: u64, bytes: &[u8]| {
        let at = (at - BASE) as usize;
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    let (code, handler, back) = program();
    put(BASE, &elf_header(length));
    put(BASE + HEADER as u64, &code);
    let mut put_words = |at: u64, words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        put(at, &bytes);
    };
    put_words(STATE, &[STUBS, OUTPUT, words.len() as u64, 0]);
    // SA_SIGINFO and SA_ONSTACK.
    put_words(ACTION, &[handler, 0x0800_0004, 0, 0]);
    put_words(STACK, &[BASE + 0x8000, 0, STACK_BYTES]);
    let stubs: Vec<u32> = (STUBS + 4..)
        .step_by(8)
        .zip(words)
        .flat_map(|(at, &word)| {
            let displacement = back.wrapping_sub(at) as i64 / 4;
            [word, B | displacement as u32 & 0x3ff_ffff]
        })
        .collect();
    put(STUBS, &bytes_of(&stubs));
    image
}

#[test]
fn the_same_words_are_instructions() {
    if !is_installed() {
        return;
    }
    let mut rng = Rng::with_seed(1);
    let words: Vec<u32> = (0..WORDS).map(|_| word(&mut rng)).collect();
    let signals = run(&image(&words), "defined");
    assert_eq!(signals.len(), WORDS, "qemu-aarch64 wrote less");
    let undefined = signals.iter().filter(|&&signal| signal == SIGILL).count();
    assert!(
        (WORDS / 10..WORDS / 2).contains(&undefined),
        "{undefined} words are undefined"
    );
    let differ = |&(&word, signal): &(&u32, u64)| is_defined(word) == (signal == SIGILL);
    let wrong: Vec<_> = words
        .iter()
        .zip(signals.iter().copied())
        .filter(differ)
        .collect();
    for (word, signal) in wrong.iter().take(40) {
        println!("{word:08x}: signal {signal} in QEMU");
    }
    assert!(wrong.is_empty(), "{} words differ", wrong.len());
}
