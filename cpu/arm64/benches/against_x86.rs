//! The same C programs on the arm64 and the x86 processor: time on each, and the ratio.
//! `cargo bench -p lacuna-arm64` needs `gcc` and `aarch64-linux-gnu-gcc`. The bus of these machines
//! costs nothing. docs/speed-arm64.md has the figures.

#[path = "../../x86/tests/it/support/mod.rs"]
mod x86;

use lacuna_arm64::{Fabric, Regs};
use lacuna_cpu::Processor;
use lacuna_cpu::testing::Wakes;
use lacuna_sync::{Qsbr, VirtualClock};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use x86::{Flat, Machine};

const NAMES: [&str; 10] = [
    "checksum",
    "sort",
    "sieve",
    "matrix",
    "collatz",
    "tree",
    "fibonacci",
    "text",
    "cases",
    "bits",
];
const RUNS: usize = 5;
const MEMORY: u64 = 32 << 20;
const RESULT: u64 = 0xff_0000;
const STACK: u64 = 0xf0_0000;
const FUEL: u64 = 100_000;

/// A run's time, and the program's result.
#[derive(Clone, Copy)]
struct Run {
    seconds: f64,
    instructions: u64,
    result: u64,
}

fn main() {
    for level in ["-O1", "-O2"] {
        let (arm, x86) = match (compile(level, Target::Arm64), compile(level, Target::X86)) {
            (Ok(arm), Ok(x86)) => (arm, x86),
            (Err(why), _) | (_, Err(why)) => return println!("skipped: {why}"),
        };
        let mut product = 1.0;
        for (which, name) in NAMES.iter().enumerate() {
            let arm = best(|| on_arm(&arm, which as u64));
            let x86 = best(|| on_x86(&x86, which as u64));
            assert_eq!(arm.result, x86.result, "{name}");
            let ratio = arm.seconds / x86.seconds;
            product *= ratio;
            let [a, x] = [arm, x86].map(|run| run.instructions as f64 / run.seconds / 1e6);
            let [ta, tx] = [arm, x86].map(|run| run.seconds * 1e3);
            println!(
                "{level} {name:10} arm64 {ta:6.2} ms at {a:4.0} M/s   \
                 x86 {tx:6.2} ms at {x:4.0} M/s   {ratio:.2}"
            );
        }
        let mean = f64::powf(product, 1.0 / NAMES.len() as f64);
        println!("{level} geometric mean {mean:.2}");
    }
}

#[derive(Clone, Copy)]
enum Target {
    Arm64,
    X86,
}

fn compile(level: &str, target: Target) -> Result<PathBuf, String> {
    let (compiler, name, options): (_, _, &[&str]) = match target {
        Target::Arm64 => ("aarch64-linux-gnu-gcc", "arm64", &[]),
        Target::X86 => ("gcc", "x86", &["-m64", "-fcf-protection=none"]),
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/kernels.c");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{name}"));
    let output = Command::new(compiler)
        .args([
            level,
            "-w",
            "-ffreestanding",
            "-nostdlib",
            "-static",
            "-mgeneral-regs-only",
        ])
        .args([
            "-fno-pic",
            "-no-pie",
            "-fno-stack-protector",
            "-fno-tree-loop-distribute-patterns",
        ])
        .args([
            "-Wl,--build-id=none,-Ttext=0x400000,-Tdata=0x800000,-e,start",
            "-o",
        ])
        .arg(&path)
        .args(options)
        .arg(source)
        .output()
        .map_err(|error| format!("{compiler}: {error}"))?;
    if output.status.success() {
        Ok(path)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Loads the segments of an ELF64 file; returns its entry.
fn load(path: &Path, memory: &mut Flat) -> u64 {
    let file = std::fs::read(path).expect("the compiler made it");
    let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().expect("8 bytes"));
    let (headers, count) = (word(32) as usize, usize::from(file[56]));
    for header in (0..count)
        .map(|n| headers + 56 * n)
        .filter(|&at| file[at] == 1)
    {
        let [offset, address, stored] = [8, 16, 32].map(|at| word(header + at));
        memory.write(address, &file[offset as usize..(offset + stored) as usize]);
    }
    word(24)
}

fn best(run: impl Fn() -> Run) -> Run {
    let runs = (0..RUNS).map(|_| run());
    let faster = |a: Run, b: Run| if a.seconds < b.seconds { a } else { b };
    runs.reduce(faster).expect("there is a run")
}

fn on_arm(path: &Path, which: u64) -> Run {
    let mut memory = Flat::new(MEMORY);
    let pc = load(path, &mut memory);
    let fabric = Arc::new(Fabric::new(1, Arc::new(Wakes::default())));
    let mut cpu = lacuna_arm64::Cpu::new(0, fabric, Arc::new(VirtualClock::default()));
    let mut regs = Regs {
        pc,
        sp_el1: STACK,
        pstate: 0x3c5,
        ..Regs::default()
    };
    regs.x[0] = which;
    cpu.set_regs(&regs);
    let (qsbr, start) = (Qsbr::new(1), processor_time());
    while memory.read_u64(RESULT + 8) == 0 {
        let exit = cpu.run(&mut memory, qsbr.vcpu(0), FUEL);
        assert_eq!(exit, lacuna_arm64::Exit::Fuel);
    }
    Run {
        seconds: processor_time() - start,
        instructions: cpu.retired(),
        result: memory.read_u64(RESULT),
    }
}

fn on_x86(path: &Path, which: u64) -> Run {
    let mut machine = Machine::with(MEMORY, |a| a.nop().expect("an instruction"));
    let pc = load(path, &mut machine.memory);
    machine.set_regs(|regs| {
        // RDI, and a stack as behind a call.
        regs.gpr[7] = which;
        regs.gpr[4] = STACK - 8;
        regs.rip = pc;
    });
    let start = processor_time();
    while machine.memory.read_u64(RESULT + 8) == 0 {
        assert_eq!(machine.run(FUEL), lacuna_x86::Exit::Fuel);
    }
    Run {
        seconds: processor_time() - start,
        instructions: machine.cpu.retired(),
        result: machine.memory.read_u64(RESULT),
    }
}

/// Processor time of this thread in seconds; the host may be busy with other threads.
fn processor_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
