//! Random C programs, compiled at every level of optimisation, against `qemu-aarch64`.
//!
//! A program computes on global arrays by random statements. Its results are in a section at a
//! fixed address. `qemu-aarch64` writes them to its output; the processor here leaves them in
//! memory.

use crate::support;

use fastrand::Rng;
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_arm64::{Exit, Regs};
use lacuna_cpu::Processor;
use lacuna_cpu::testing::Ram;
use lacuna_sync::Qsbr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{EL1, processor, read};

const COMPILER: &str = "aarch64-linux-gnu-gcc";
/// The address of the results: a word that marks them as complete, and the arrays.
const RESULTS: u64 = 0x90_0000;
const ARRAYS: usize = 16 * (8 + 4 + 2 + 1);
const BYTES: usize = 8 + ARRAYS;
const STACK: u64 = 0xa0_0000;

const HEAD: &str = "\
typedef unsigned long u64; typedef long i64; typedef unsigned u32; typedef int i32;
typedef unsigned short u16; typedef short i16; typedef unsigned char u8; typedef signed char i8;
struct results { u64 done; u64 a[16]; u32 b[16]; i16 c[16]; u8 d[16]; };
struct results out __attribute__((section(\".results\"))) = { 1 };
struct node { u64 key; struct node *next; u8 tag; };
static struct node nodes[8];
#define a out.a
#define b out.b
#define c out.c
#define d out.d
#define SWAP_IF(at, e) { u64 old = y; \\
    z += __atomic_compare_exchange_n(&a[(at) & 15], &old, e, 0, 5, 5); y ^= old; }
#define WALK for (struct node *n = &nodes[x & 7]; n->key & 3; n = n->next) \\
    { z += n->tag; n->key >>= 1; }
";

const TAIL: &str = "
static long call(long n, long x, const void *y, long z) {
    register long r8 __asm__(\"x8\") = n; register long r0 __asm__(\"x0\") = x;
    register const void *r1 __asm__(\"x1\") = y; register long r2 __asm__(\"x2\") = z;
    __asm__ volatile(\"svc 0\" : \"+r\"(r0) : \"r\"(r8), \"r\"(r1), \"r\"(r2) : \"memory\");
    return r0;
}
__attribute__((noreturn)) void _start(void) {
    for (int i = 0; i < 16; i++) {
        a[i] = i * 0x9e3779b97f4a7c15; b[i] = i * 0x85ebca6b; c[i] = i * 1237; d[i] = i * 37;
    }
    for (int i = 0; i < 8; i++) nodes[i] = (struct node){ a[i], &nodes[(i * 3 + 1) & 7], i };
    for (int i = 0; i < 20; i++) a[i & 15] ^= f0(a[i & 15], i);
    *(volatile u64 *)&out.done = 2;
    call(64, 1, &out, sizeof out);
    for (;;) call(93, 0, 0, 0);
}
";

/// Makes the text of a program.
struct Writer<'a> {
    rng: &'a mut Rng,
    text: String,
    /// The functions numbered from this one on may be called.
    callable: usize,
    functions: usize,
    loops: usize,
}

impl Writer<'_> {
    fn expression(&mut self, depth: u32) -> String {
        if depth == 0 {
            return match self.rng.u32(..8) {
                0 => format!("{:#x}UL", self.rng.u64(..) >> self.rng.u32(..64)),
                1 => format!("a[{}]", self.rng.u32(..16)),
                2 => format!("(u64)b[{}]", self.rng.u32(..16)),
                3 => format!("(u64)c[{}]", self.rng.u32(..16)),
                4 => format!("d[{}]", self.rng.u32(..16)),
                _ => ["x", "y", "z"][self.rng.usize(..3)].into(),
            };
        }
        let l = self.expression(depth - 1);
        let rest = depth - 1 - self.rng.u32(..depth.min(2));
        let r = self.expression(rest);
        let binary = ["+", "-", "*", "&", "|", "^"];
        match self.rng.u32(..24) {
            0..=7 => format!("({l} {} {r})", binary[self.rng.usize(..6)]),
            8 => format!("({l} << ({r} & 63))"),
            9 => format!("({l} >> ({r} & 63))"),
            10 => format!("(u64)((i64)({l}) >> ({r} & 63))"),
            11 => format!("(u64)(u32)((u32)({l}) >> ({r} & 31))"),
            12 => format!("({l} / ({r} | 1))"),
            13 => format!("({l} % ({r} | 1))"),
            14 => format!("(u64)((i64)(i32)({l}) / ((i64)(i32)({r}) | 1))"),
            15 => format!("(u64)((i64)({l}) < (i64)({r}))"),
            16 => format!("(u64)((u32)({l}) <= (u32)({r}))"),
            17 => format!("({l} > {r} ? {l} : {r})"),
            18 => format!(
                "(u64)(i64)({})({l})",
                ["i8", "i16", "i32"][self.rng.usize(..3)]
            ),
            19 => format!("(u64)({})({l})", ["u8", "u16", "u32"][self.rng.usize(..3)]),
            20 => format!("(a[({l}) & 15] + d[({r}) & 15])"),
            21 => format!("(u64)__builtin_clzl(({l}) | 1)"),
            22 => format!("__builtin_bswap64({l})"),
            _ if self.callable < self.functions => {
                let callee = self.rng.usize(self.callable..self.functions);
                format!("f{callee}({l}, {r})")
            }
            _ => format!("(~{l} + (u64)((unsigned __int128)({l}) * ({r}) >> 64))"),
        }
    }

    fn statements(&mut self, count: usize, depth: u32) {
        for _ in 0..count {
            self.statement(depth);
        }
    }

    fn block(&mut self, head: &str, depth: u32) {
        let _ = writeln!(self.text, "{head} {{");
        let count = self.rng.usize(1..4);
        self.statements(count, depth - 1);
        self.text.push_str("}\n");
    }

    fn statement(&mut self, depth: u32) {
        let size = self.rng.u32(1..4);
        let e = self.expression(size);
        let at = self.expression(1);
        let compound = depth > 0;
        let line = match self.rng.u32(..16) {
            0..=3 => format!("{} = {e};", ["x", "y", "z"][self.rng.usize(..3)]),
            4 | 5 => format!("a[({at}) & 15] += {e};"),
            6 => format!("b[({at}) & 15] ^= (u32)({e});"),
            7 => format!("c[({at}) & 15] = (i16)({e});"),
            8 => format!("d[({at}) & 15] -= (u8)({e});"),
            9 => format!("__atomic_fetch_add(&a[({at}) & 15], {e}, 5);"),
            10 => format!("x += __atomic_exchange_n(&b[({at}) & 15], (u32)({e}), 5);"),
            11 => format!("SWAP_IF({at}, {e});"),
            12 => "WALK;".into(),
            13 if compound => return self.block(&format!("if ({e})"), depth),
            14 if compound => {
                let i = self.loops;
                self.loops += 1;
                let count = self.rng.u32(1..9);
                return self.block(
                    &format!("for (int i{i} = 0; i{i} < {count}; i{i}++)"),
                    depth,
                );
            }
            15 if compound => {
                let _ = writeln!(self.text, "switch (({e}) & 7) {{");
                for case in 0..6 {
                    let _ = writeln!(self.text, "case {case}:");
                    self.statement(depth - 1);
                    if self.rng.bool() {
                        self.text.push_str("break;\n");
                    }
                }
                self.text.push_str("default: x++;\n}\n");
                return;
            }
            _ => format!("y = x + {e};"),
        };
        self.text.push_str(&line);
        self.text.push('\n');
    }
}

fn program(rng: &mut Rng) -> String {
    const FUNCTIONS: usize = 5;
    let mut writer = Writer {
        rng,
        text: HEAD.into(),
        callable: 0,
        functions: FUNCTIONS,
        loops: 0,
    };
    for f in 0..FUNCTIONS {
        let _ = writeln!(writer.text, "static u64 f{f}(u64 x, u64 y);");
    }
    for f in 0..FUNCTIONS {
        // A function calls only later ones, and seldom, so the program ends soon.
        writer.callable = f + 1;
        let _ = writeln!(
            writer.text,
            "static u64 f{f}(u64 x, u64 y) {{\nu64 z = x ^ y;"
        );
        let count = writer.rng.usize(3..9);
        writer.statements(count, 2);
        writer.text.push_str("return x + y * 3 + z;\n}\n");
    }
    writer.text + TAIL
}

/// Compiles the program. Returns the path of the executable.
fn compile(folder: &Path, source: &Path, options: &[&str]) -> PathBuf {
    let path = folder.join("program");
    let output = Command::new(COMPILER)
        .args(options)
        .args([
            "-w",
            "-ffreestanding",
            "-fwrapv",
            "-fno-strict-aliasing",
            "-static",
            "-nostdlib",
        ])
        .args([
            "-mgeneral-regs-only",
            "-fno-pic",
            "-no-pie",
            "-fno-stack-protector",
        ])
        .args([
            "-Wl,--build-id=none,-Ttext=0x400000",
            "-Wl,--section-start=.results=0x900000",
            "-o",
        ])
        .args([&path, source])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    path
}

/// Loads the segments of an ELF64 file; returns its entry.
fn load(file: &[u8], ram: &mut Ram) -> u64 {
    let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let (headers, count) = (word(32) as usize, usize::from(file[56]));
    for header in (0..count)
        .map(|n| headers + 56 * n)
        .filter(|&at| file[at] == 1)
    {
        let [offset, va, stored, size] = [8, 16, 32, 40].map(|at| word(header + at));
        for at in va..va + size {
            let page = ram.add(Gpa::new(at).unwrap().gfn());
            if at < va + stored {
                page.store_u8(at as usize % PAGE_SIZE, file[(offset + at - va) as usize]);
            }
        }
    }
    word(24)
}

/// The results on the processor here.
fn executed(file: &[u8]) -> Vec<u8> {
    let mut ram = Ram::default();
    let entry = load(file, &mut ram);
    for at in (STACK - 0x1_0000..STACK).step_by(PAGE_SIZE) {
        ram.add(Gpa::new(at).unwrap().gfn());
    }
    let mut cpu = processor(&[]);
    cpu.set_regs(&Regs {
        pc: entry,
        sp_el1: STACK,
        pstate: EL1,
        ..Regs::default()
    });
    let qsbr = Qsbr::new(1);
    for _ in 0..2000 {
        let exit = cpu.run(&mut ram, qsbr.vcpu(0), 1 << 18);
        if read(&mut ram, RESULTS) == 2 {
            let words = (RESULTS..).step_by(8).take(BYTES / 8);
            return words
                .flat_map(|at| read(&mut ram, at).to_le_bytes())
                .collect();
        }
        match exit {
            Exit::Fuel => {}
            Exit::Exclusive => _ = cpu.run_exclusive(&mut ram, qsbr.vcpu(0)),
            exit => panic!("{exit:?} at {:#x}", cpu.regs().pc),
        }
    }
    panic!("the program has no end: {:#x}", cpu.regs().pc);
}

#[test]
fn random_programs_agree_with_qemu() {
    for (program, package) in [
        (COMPILER, "gcc-aarch64-linux-gnu"),
        ("qemu-aarch64", "qemu-user"),
    ] {
        if Command::new(program).arg("--version").output().is_err() {
            lacuna_skip::skip(format!(
                "{program} is not installed (apt install {package})"
            ));
            return;
        }
    }
    let folder = std::env::temp_dir().join(format!("lacuna-arm64-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for seed in 0..6 {
        let source = folder.join("program.c");
        std::fs::write(&source, program(&mut Rng::with_seed(seed))).unwrap();
        for (level, march) in [
            ("-O0", "-march=armv8-a"),
            ("-O1", "-march=armv8.1-a"),
            ("-O2", "-march=armv8-a+crc"),
            ("-O3", "-march=armv8.3-a+rcpc"),
        ] {
            let path = compile(&folder, &source, &[level, march, "-mno-outline-atomics"]);
            let output = Command::new("qemu-aarch64").arg(&path).output().unwrap();
            assert!(
                output.status.success(),
                "qemu-aarch64: {output:?}, seed {seed}"
            );
            let found = executed(&std::fs::read(&path).unwrap());
            assert!(output.stdout.len() >= BYTES, "qemu-aarch64 wrote less");
            assert_eq!(found, output.stdout[..BYTES], "seed {seed} at {level}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
