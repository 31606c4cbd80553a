//! A program of a few instructions that causes each kind of exit.

mod common;

use common::{builder, can_run, within};
use lacuna_addr::Gpa;
use lacuna_kvm::RunSummary;
use lacuna_machine::{Ending, Image, Segment};
use std::sync::{Arc, Mutex};

const AT: u32 = 0x1_0000;

/// Runs `code` on one vCPU.
fn execute(code: Vec<u8>) -> (RunSummary, Vec<String>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let outcome = within(60, move || {
        let entry = Gpa::truncate(u64::from(AT));
        let image = Image {
            arch: lacuna_machine::Arch::X86_64,
            segments: vec![Segment {
                gpa: entry,
                size: 0x2000,
                bytes: &code,
            }],
            entry,
        };
        let console = move |line: &str| sink.lock().unwrap().push(line.to_owned());
        let builder = builder(4, 4, 1, "");
        builder.run(&image, console, |_| ()).unwrap()
    });
    let lines = lines.lock().unwrap().clone();
    (outcome, lines)
}

/// `mov` of a constant to the register of that number.
fn set(register: u8, value: u32) -> Vec<u8> {
    [&[0xb8 + register][..], &value.to_le_bytes()].concat()
}

const CX: u8 = 1;
const DX: u8 = 2;
const SI: u8 = 6;
const DI: u8 = 7;
const TEXT: &[u8] = b"one, two\n";

#[test]
fn string_ports_device_memory_and_the_exit_port() {
    if !can_run() {
        return;
    }
    let code = |text_at| {
        [
            // Writes the text with one instruction.
            set(DX, 0x3f8),
            set(SI, text_at),
            set(CX, TEXT.len() as u32),
            vec![0xf3, 0x6e], // rep outsb
            // Reads the line status, 0x60, four times with one instruction.
            set(DX, 0x3fd),
            set(DI, AT + 0x1000),
            set(CX, 4),
            vec![0xf3, 0x6c],       // rep insb
            vec![0x8b, 0x47, 0xfc], // mov eax, [rdi - 4]
            // A read where there is no memory gives all ones, so the sum is one less.
            set(DI, 0xd000_0000),
            vec![0x03, 0x07], // add eax, [rdi]
            vec![0x89, 0x07], // mov [rdi], eax
            set(DX, 0xf4),
            vec![0xef, 0xf4], // out dx, eax; hlt
        ]
        .concat()
    };
    let size = code(0).len() as u32;
    let (outcome, lines) = execute([code(AT + size), TEXT.to_vec()].concat());
    assert_eq!(lines, ["one, two"]);
    let ending = outcome.ending;
    assert!(matches!(ending, Ending::Exited(0x6060_605f)), "{ending:?}");
}

/// The first exit counts, and the output before it is not lost.
#[test]
fn an_unfinished_line_is_passed_on() {
    if !can_run() {
        return;
    }
    let code = [
        set(DX, 0x3f8),
        vec![0xb0, b'x', 0xee], // mov al, 'x'; out dx, al
        set(DX, 0xf4),
        vec![0xef, 0xf4],
    ];
    let (outcome, lines) = execute(code.concat());
    assert_eq!(lines, ["x"]);
    assert!(matches!(outcome.ending, Ending::Exited(_)));
}
