//! Boots images on QEMU and collects how they end.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than a guest takes on a machine with far more work than cores.
const TIMEOUT: Duration = Duration::from_secs(300);

pub struct Outcome {
    /// The guest's output on its serial line.
    pub console: String,
    /// The guest's exit code, on x86-64 only its low seven bits; `None` if QEMU ended in another
    /// way.
    pub code: Option<i32>,
}

pub fn qemu_missing() -> bool {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return true;
    }
    program_missing("qemu-system-x86_64", "qemu-system-x86")
}

/// Whether a program does not run here. If so, the test is skipped, and the reason names the Debian
/// package.
pub fn program_missing(program: &str, package: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        lacuna_skip::skip(format!(
            "{program} is not installed (apt install {package})"
        ));
    }
    !found
}

pub fn temp(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

pub fn boot_file(image: &Path, smp: u32, params: &str) -> Outcome {
    boot_with(image, smp, params, &[])
}

pub fn boot_with(image: &Path, smp: u32, params: &str, extra: &[&str]) -> Outcome {
    let cpus = smp.to_string();
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args([
        "-M", "q35", "-m", "64M", "-smp", &cpus, "-display", "none", "-serial", "stdio",
    ])
    .args([
        "-monitor",
        "none",
        "-no-reboot",
        "-device",
        "isa-debug-exit,iobase=0xf4,iosize=4",
    ])
    .args(["-append", &format!("smp={smp} {params}"), "-kernel"])
    .arg(image)
    .args(extra);
    let (console, status) = run(&mut qemu);
    Outcome {
        console,
        code: status.code().filter(|c| c & 1 == 1).map(|c| c >> 1),
    }
}

/// Runs QEMU until it ends. Returns its standard output and its exit status.
pub fn run(qemu: &mut Command) -> (String, ExitStatus) {
    let mut child = qemu
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("QEMU starts");
    let mut stdout = child.stdout.take().expect("piped");
    let reader = thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stdout.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).replace('\r', "")
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("QEMU can be waited for") {
            break Some(status);
        }
        if start.elapsed() > TIMEOUT {
            child.kill().expect("QEMU can be ended");
            child.wait().expect("QEMU can be waited for");
            break None;
        }
        thread::sleep(Duration::from_millis(20));
    };
    let console = reader.join().expect("the reader ends");
    let status = status.unwrap_or_else(|| panic!("no end within {TIMEOUT:?}:\n{console}"));
    (console, status)
}

/// Boots an embedded image. The file is named after the test, because tests run side by side.
pub fn boot(test: &str, name: &str, smp: u32, params: &str) -> Outcome {
    let path = temp(&format!("{test}.elf"));
    fs::write(
        &path,
        lacuna_guest::image(name).expect("in the catalog").file,
    )
    .unwrap();
    boot_file(&path, smp, params)
}

pub fn build(source: &Path, image: &Path) {
    build_for("x86_64", source, image);
}

pub fn build_for(arch: &str, source: &Path, image: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("build-guest.sh");
    let built = Command::new("sh")
        .arg(script)
        .args(["--arch", arch])
        .arg(source)
        .arg("-o")
        .arg(image)
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
}

#[track_caller]
pub fn assert_ended(outcome: &Outcome, code: i32, says: &str) {
    assert_eq!(outcome.code, Some(code), "{}", outcome.console);
    assert!(
        outcome.console.contains(says),
        "{says:?} in {}",
        outcome.console
    );
}
