//! Random command lines for `lacuna`. Each must end within a time limit, without a crash, with a
//! documented exit code, and with a message if that is not 0.

use crate::run::Run;
use crate::values::pick;
use fastrand::Rng;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// Command lines for each seed.
const LINES: usize = 8;
/// The time limit. No line drawn here takes a second on an idle machine; a busy one is slower.
const LIMIT: Duration = Duration::from_secs(60);
/// 0 success, 1 the guest failed, 2 wrong arguments or image, 3 a failure of the host.
const DOCUMENTED: [i32; 4] = [0, 1, 2, 3];

/// Runs one seed.
pub fn run(run: &mut Run<'_>) {
    if !run.binary.exists() {
        run.tally.note("command", "skipped: no lacuna to drive");
        return;
    }
    let mut rng = Rng::with_seed(run.seed);
    let folder = tempfile::tempdir().expect("a temporary folder");
    for _ in 0..LINES {
        let line = draw(&mut rng, folder.path());
        run.pulse.doing(&format!("lacuna {line:?}"));
        let (status, out, err) = drive(run.binary, &line, folder.path());
        run.tally.operations += 1;
        judge(&line, status, &out, &err);
        let code = status.code().unwrap_or(-1);
        run.tally.note("exit codes", code.to_string());
        if code == 2 || code == 3 {
            let first = err
                .lines()
                .find(|line| !line.trim().is_empty())
                .unwrap_or("");
            let kind: Vec<&str> = first.split(|c: char| !c.is_alphabetic()).take(8).collect();
            let kind: String = kind.join(" ").trim().chars().take(40).collect();
            run.tally.note("messages", kind);
        }
    }
}

fn judge(line: &[String], status: ExitStatus, out: &str, err: &str) {
    let shown = || format!("lacuna {line:?}: {status}\nstdout: {out}\nstderr: {err}");
    let code = status.code();
    assert!(
        code.is_some(),
        "killed by signal {:?}: {}",
        status.signal(),
        shown()
    );
    let is_documented = code.is_some_and(|code| DOCUMENTED.contains(&code));
    assert!(
        is_documented,
        "an exit code that is not documented: {}",
        shown()
    );
    let is_panic = err.contains("panicked at");
    assert!(!is_panic, "a panic: {}", shown());
    let has_message = format!("{out}{err}").trim().len() >= 4;
    assert!(
        code == Some(0) || has_message,
        "an error without a message: {}",
        shown()
    );
}

/// Runs the command until it ends, or kills it after the limit.
fn drive(binary: &Path, line: &[String], folder: &Path) -> (ExitStatus, String, String) {
    let mut child = Command::new(binary)
        .args(line)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("lacuna can be started");
    let mut out = child.stdout.take().expect("piped");
    let mut err = child.stderr.take().expect("piped");
    let out = thread::spawn(move || text_of(&mut out));
    let err = thread::spawn(move || text_of(&mut err));
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break status;
        }
        if began.elapsed() > LIMIT {
            // The report is the same if the kill fails.
            let _ = child.kill();
            let _ = child.wait();
            panic!("lacuna {line:?} has not ended in {} s", LIMIT.as_secs());
        }
        sleep(Duration::from_millis(2));
    };
    let joined = |thread: thread::JoinHandle<String>| thread.join().expect("it only reads");
    (status, joined(out), joined(err))
}

fn text_of(pipe: &mut impl std::io::Read) -> String {
    let mut bytes = Vec::new();
    // The bytes before an error count.
    let _ = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn draw(rng: &mut Rng, folder: &Path) -> Vec<String> {
    let mut line: Vec<String> = match rng.u8(..12) {
        0 => strange(rng),
        1 => vec!["doctor".into()],
        // A valid lab command takes minutes, so none may be drawn.
        2 => vec![
            "lab".into(),
            pick(rng, &["--help", "nothing", "--jsn", "-x"]).into(),
        ],
        _ => run_line(rng, folder),
    };
    if rng.u8(..6) == 0 {
        let at = rng.usize(..=line.len());
        let more = odd(rng);
        // A lab command without its wrong word would be valid.
        if line.first().is_none_or(|word| word != "lab") {
            line.insert(at, more);
        }
    }
    // An empty command line runs the lab too.
    let is_empty = line.iter().all(|word| word == "--");
    if is_empty || line == ["lab"] {
        line = vec!["--version".into()];
    }
    line
}

fn strange(rng: &mut Rng) -> Vec<String> {
    match rng.u8(..4) {
        0 => vec![pick(rng, &["--help", "--version", "help", "-h", "-V"]).into()],
        _ => (0..rng.usize(1..4))
            .map(|_| odd(rng))
            .filter(|word| word != "lab")
            .collect(),
    }
}

/// A word that no option expects.
fn odd(rng: &mut Rng) -> String {
    match rng.u8(..8) {
        0 => (0..rng.usize(..20))
            .map(|_| rng.char(..))
            .filter(|c| *c != '\0')
            .collect(),
        1 => "x".repeat(rng.usize(..5000)),
        2 => size(rng),
        _ => pick(
            rng,
            &[
                "",
                "--",
                "-",
                "--memory",
                "--quiet",
                "--quiet",
                "--seed",
                "=",
                "--apf=",
                "--json=",
                "run",
                "doctor",
                "--help",
                "\u{1b}[2J",
                "--vcpus=0",
                "-1",
            ],
        )
        .into(),
    }
}

/// A small size, or an impossible one. Sizes that the machine might try to allocate are left out.
fn size(rng: &mut Rng) -> String {
    match rng.u8(..3) {
        0 => pick(
            rng,
            &[
                "",
                "0",
                "1",
                "4095",
                "4096",
                "4097",
                "1k",
                "1K",
                "1M",
                "1MiB",
                "0x100",
                "-1M",
                "1.5M",
                "1e6",
                " 8M",
                "8M ",
                "8m",
                "8MB",
                "9999999999999999999999",
                "18446744073709551615",
                "18446744073709551616",
                "16777216T",
                "M",
                "\u{ff11}M",
            ],
        )
        .into(),
        _ => format!("{}M", rng.u32(1..64)),
    }
}

/// A short guest in little memory, with options that may be wrong.
fn arch(rng: &mut Rng) -> Vec<String> {
    const NAMES: [&str; 7] = ["arm64", "arm64", "x86_64", "aarch64", "ARM64", "", "riscv"];
    match rng.u8(..3) {
        0 => vec!["--arch".into(), pick(rng, &NAMES).into()],
        _ => Vec::new(),
    }
}

fn run_line(rng: &mut Rng, folder: &Path) -> Vec<String> {
    let image = match rng.u8(..12) {
        0 => odd(rng),
        1 => "/dev/null".into(),
        2 => folder.display().to_string(),
        3 => "/nowhere/image.elf".into(),
        _ => pick(rng, &["hello", "triple", "msr", "hello", "smc", "maxpage"]).into(),
    };
    let memory = match rng.u8(..5) {
        0 => size(rng),
        _ => format!("{}M", rng.u32(4..48)),
    };
    let mut line: Vec<String> = ["run", &image, "--memory", &memory]
        .map(String::from)
        .into();
    line.extend(kind(rng));
    line.extend(arch(rng));
    let mut option = |name: &str, value: String| line.extend([name.to_owned(), value]);
    if rng.bool() {
        option(
            "--vcpus",
            pick(rng, &["1", "2", "3", "4", "0", "65", "64", "x", ""]).into(),
        );
    }
    if rng.bool() {
        option("--swap", swap(rng, folder));
    }
    if rng.u8(..3) == 0 {
        option("--apf", pick(rng, &["on", "off", "ON", "", "maybe"]).into());
    }
    if rng.u8(..3) == 0 {
        option(
            "--thp",
            pick(rng, &["never", "madvise", "always", "sometimes"]).into(),
        );
    }
    if rng.u8(..3) == 0 {
        option(
            "--seed",
            pick(rng, &["0", "7", "18446744073709551615", "-1", "x"]).into(),
        );
    }
    if rng.u8(..3) == 0 {
        let words = match rng.bool() {
            true => odd(rng),
            false => pick(
                rng,
                &[
                    "rounds=1",
                    "rounds=",
                    "=",
                    "smp=99",
                    "x=99999999999999999999",
                ],
            )
            .into(),
        };
        option("--append", words);
    }
    if rng.u8(..3) == 0 {
        let file = pick(rng, &["-", "out.json", "", "/nowhere/out.json", "."]);
        option("--json", file.into());
    }
    if rng.u8(..3) == 0 {
        line.push("--quiet".into());
    }
    line
}

/// The kind of memory, and how much of it is resident. Mostly only one of the two, which exclude
/// each other except in the pool.
fn kind(rng: &mut Rng) -> Vec<String> {
    let kinds = [
        "pool",
        "anonymous",
        "memfd",
        "hugetlbfs",
        "hugetlbfs-1g",
        "tape",
    ];
    let resident = match rng.u8(..5) {
        0 => size(rng),
        _ => format!("{}M", rng.u32(2..48)),
    };
    let kind = ["--memory-kind".to_owned(), pick(rng, &kinds).into()];
    let resident = ["--resident".to_owned(), resident];
    match rng.u8(..12) {
        0 => [kind, resident].concat(),
        1..4 => kind.into(),
        _ => resident.into(),
    }
}

fn swap(rng: &mut Rng, folder: &Path) -> String {
    let options = [
        "",
        ",",
        ",latency=0",
        ",latency=10us",
        ",latency=1ms",
        ",latency=",
        ",latency=x",
        ",latency=-1ms",
        ",size=1",
        ",dir=",
        ",dir=/nowhere",
        ",dir=/dev/null",
        ",dir=.",
    ];
    let kind = pick(rng, &["file", "mem", "mem", "file", "zram", ""]);
    let mut text = format!("{kind}{}", pick(rng, &options));
    if rng.u8(..4) == 0 {
        text.push_str(&format!(",dir={}", folder.display()));
    }
    text
}
