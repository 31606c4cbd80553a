//! The AArch64 images on QEMU's `virt`: two processors, and one of them has LSE, ASIDs and PAN.

use super::machine::{Outcome, assert_ended, build_for, program_missing, run, temp};
use lacuna_guest::status::{self, GuestState, Kind, Status};
use lacuna_guest::{Arch, HOST_COMPATIBLE, HOST_EXIT, HOST_STATUS};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Armv8.0: atomic operations are loops of exclusives.
const A72: &str = "cortex-a72";
/// All features of QEMU.
pub const MAX: &str = "max";

pub fn qemu_missing() -> bool {
    program_missing("qemu-system-aarch64", "qemu-system-arm")
}

pub fn boot_file(image: &Path, cpu: &str, smp: u32, params: &str, extra: &[&str]) -> Outcome {
    let cpus = smp.to_string();
    let mut qemu = Command::new("qemu-system-aarch64");
    qemu.args(["-M", "virt,gic-version=3", "-cpu", cpu, "-m", "64M", "-smp"])
        .args([&cpus, "-display", "none", "-serial", "stdio"])
        .args(["-monitor", "none", "-no-reboot", "-semihosting"])
        .args(["-append", &format!("exit=semihosting {params}"), "-kernel"])
        .arg(image)
        .args(extra);
    let (console, status) = run(&mut qemu);
    Outcome {
        console,
        code: status.code(),
    }
}

/// Boots an image of the catalog. The file is named after the test, because tests run side by side.
fn boot(test: &str, name: &str, cpu: &str, smp: u32, params: &str) -> Outcome {
    let path = temp(&format!("{test}-{cpu}-{smp}.Image"));
    let image = Arch::Arm64.image(name).expect("in the catalog");
    fs::write(&path, image.file).unwrap();
    boot_file(&path, cpu, smp, params, &[])
}

/// Boots a workload with 1, 2 and 4 processors, on each kind.
#[track_caller]
fn passes(name: &str, params: &str, says: &str) {
    if qemu_missing() {
        return;
    }
    for (smp, cpu) in [(1, A72), (2, MAX), (4, A72), (4, MAX)] {
        let outcome = boot(&format!("arm64-{name}"), name, cpu, smp, params);
        assert_ended(&outcome, 0, says);
    }
}

#[test]
fn hello() {
    if qemu_missing() {
        return;
    }
    for (cpu, smp) in [(A72, 1), (A72, 4), (MAX, 1), (MAX, 2)] {
        let says = format!("hello from a guest: {smp} vCPU, ");
        assert_ended(&boot("arm64-hello", "hello", cpu, smp, ""), 0, &says);
    }
    let one_of_two = boot("arm64-one", "hello", MAX, 2, "smp=1");
    assert_ended(&one_of_two, 0, "hello from a guest: 1 vCPU, ");
    let more = boot("arm64-more", "hello", A72, 2, "smp=3");
    assert_ended(&more, 125, "panic: processor 2 (0) does not start");
}

#[test]
fn without_semihosting_the_machine_is_powered_off() {
    if qemu_missing() {
        return;
    }
    let path = temp("arm64-off.Image");
    fs::write(&path, Arch::Arm64.image("touch").unwrap().file).unwrap();
    let mut qemu = Command::new("qemu-system-aarch64");
    qemu.args(["-M", "virt,gic-version=3", "-cpu", A72, "-m", "64M"])
        .args(["-display", "none", "-serial", "stdio", "-monitor", "none"])
        .args(["-append", "threads=0", "-kernel"])
        .arg(path);
    let (console, status) = run(&mut qemu);
    assert!(console.contains("cannot run with threads=0"), "{console}");
    assert_eq!(status.code(), Some(0), "PSCI has no exit code");
}

/// QEMU's device tree with one word in place of another of the same length.
fn device_tree(from: &str, to: &str) -> PathBuf {
    let path = temp("arm64.dtb");
    let dump = format!("virt,gic-version=3,dumpdtb={}", path.display());
    let dumped = Command::new("qemu-system-aarch64")
        .args(["-M", &dump, "-cpu", A72, "-m", "64M", "-display", "none"])
        .output()
        .expect("QEMU starts");
    assert!(dumped.status.success(), "{dumped:?}");
    let mut tree = fs::read(&path).unwrap();
    let (from, to) = (from.as_bytes(), to.as_bytes());
    assert_eq!(from.len(), to.len());
    let at = tree.windows(from.len()).position(|word| word == from);
    let at = at.expect("the word is in the tree");
    tree[at..at + to.len()].copy_from_slice(to);
    fs::write(&path, tree).unwrap();
    path
}

/// QEMU has no Lacuna device, but empty virtio transports with a name of the same length. One of
/// them gets the device's name, and QEMU's trace has the kernel's writes there.
#[test]
fn the_host_device_gets_status_page_and_exit_code() {
    if qemu_missing() {
        return;
    }
    let tree = device_tree("virtio,mmio\0", &format!("{HOST_COMPATIBLE}\0"));
    let (image, log) = (temp("arm64-device.Image"), temp("arm64-device.log"));
    let _ = fs::remove_file(&log);
    fs::write(&image, Arch::Arm64.image("touch").unwrap().file).unwrap();
    let [tree, trace] = [&tree, &log].map(|path| path.to_str().expect("a text"));
    let traced = ["-trace", "virtio_mmio_write_offset", "-D", trace];
    let extra = [&["-dtb", tree], &traced[..]].concat();
    let outcome = boot_file(&image, A72, 1, "threads=0", &extra);
    assert_ended(&outcome, 2, "cannot run with threads=0");
    let text = fs::read_to_string(&log).unwrap();
    let mut writes = text.lines().filter_map(|line| {
        let (_, rest) = line.split_once("offset 0x")?;
        let (offset, value) = rest.split_once(" value 0x")?;
        let hex = |number: &str| u64::from_str_radix(number.trim(), 16).ok();
        Some((hex(offset)?, hex(value)?))
    });
    let (offset, frame) = writes.next().expect("the status page");
    assert_eq!(offset, HOST_STATUS, "{text}");
    let memory = 0x4000_0000u64 >> 12..0x4400_0000 >> 12;
    assert!(memory.contains(&frame), "{text}");
    assert_eq!(writes.next(), Some((HOST_EXIT, 2)), "{text}");
    assert_eq!(writes.next(), None, "{text}");
}

#[test]
fn the_kernel_keeps_its_promises() {
    if qemu_missing() || program_missing("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu") {
        return;
    }
    let image = temp("arm64-kernel-test.Image");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernel.c");
    build_for("arm64", &source, &image);
    for (cpu, smp, words) in [
        (A72, 1, ""),
        (MAX, 3, ""),
        (MAX, 1, " huge=1 lse=0"),
        (A72, 2, " pcid=0"),
        (MAX, 2, " hafdbs=0"),
    ] {
        let outcome = boot_file(&image, cpu, smp, &format!("slice_us=10000000{words}"), &[]);
        assert_ended(&outcome, 128 + 0x24, "kernel: ok");
        let console = &outcome.console;
        assert!(console.contains("page fault at 123456789000"), "{console}");
    }
}

#[test]
fn verify() {
    passes("verify", "pages=2000 rounds=2 clear=1", "failures=0 ");
    if qemu_missing() {
        return;
    }
    let pages = |huge: u32| {
        let params = format!("rounds=1 clear=1 huge={huge}");
        let outcome = boot(&format!("arm64-huge{huge}"), "verify", MAX, 2, &params);
        assert_ended(&outcome, 0, "verdict=ok");
        let (_, rest) = outcome.console.split_once(" pages=").expect("a result");
        rest.split_whitespace().next().map(str::to_owned)
    };
    assert_eq!(pages(1), pages(0));
}

#[test]
fn bm() {
    passes("bm", "accesses=3000 bytes=8M", "RESULT workers_total=");
}

#[test]
fn touch_and_membound() {
    passes("touch", "order=random bytes=8M", "pages=2048 ");
    passes("membound", "bytes=4M nop=1", "RESULT rounds=3 ");
}

#[test]
fn zipf_and_reads() {
    passes("zipf", "accesses=20000 bytes=16M", "verdict=ok");
    passes("reads", "reads=20000 bytes=8M huge=1", "RESULT threads=");
}

#[test]
fn churn_gaps_and_paced() {
    passes("churn", "bytes=24M transactions=3000 huge=1", "verdict=ok");
    passes("paced", "writes=3000 hot=2M bytes=8M", "verdict=ok");
    passes("gaps", "seconds=1 bytes=8M", " steps=");
}

/// QEMU's translator is not the architecture: see the source.
#[test]
fn litmus() {
    passes("litmus", "iters=500 adds=1000 rcsc=0 aba=0", "verdict=ok");
    if qemu_missing() {
        return;
    }
    let exclusives = boot(
        "arm64-llsc",
        "litmus",
        MAX,
        2,
        "iters=0 adds=3000 rcsc=0 aba=0 lse=0",
    );
    assert_ended(&exclusives, 0, "test=add lse=0 expected=18000 found=18000");
    let instructions = boot(
        "arm64-lse",
        "litmus",
        MAX,
        2,
        "iters=0 adds=3000 rcsc=0 aba=0",
    );
    assert_ended(
        &instructions,
        0,
        "test=add lse=1 expected=36000 found=36000",
    );
}

#[test]
fn code_that_changes() {
    passes("smc", "iters=200", "test=cross iterations=200 wrong=0");
    passes(
        "maxpage",
        "iters=200",
        "instruction=stp_misaligned iterations=200",
    );
}

#[test]
fn nonsense() {
    passes("random", "count=60", "RESULT rounds=60 ");
    passes("msr", "", "RESULT reads=");
}

#[test]
fn cpubench_and_reset() {
    passes("cpubench", "test=branchy iters=10", "insns=192030 ");
    if qemu_missing() {
        return;
    }
    // With -no-reboot, QEMU ends at a reset.
    let reset = boot("arm64-reset", "reset", A72, 1, "");
    assert_ended(&reset, 0, "reset: now\n");
    assert!(!reset.console.contains("still here"), "{}", reset.console);
}

/// The lines of `traps` are the same here and on the soft backend, whose test compares with the
/// same file. After a change of the workload, the failed test prints the new lines.
#[test]
fn exceptions_and_translation() {
    if qemu_missing() {
        return;
    }
    for smp in [1, 2] {
        let outcome = boot("arm64-traps", "traps", MAX, smp, "count=4000");
        assert_ended(&outcome, 0, "RESULT traps=");
        assert_eq!(outcome.console, include_str!("../../traps.txt"));
    }
    let refused = boot("arm64-traps", "traps", A72, 1, "");
    assert_ended(&refused, 2, "traps: needs a processor with PAN and HAFDBS");
}

/// QEMU has no vendor services of KVM, so every probe fails.
#[test]
fn without_async_faults_nothing_is_lost() {
    if qemu_missing() {
        return;
    }
    let params = "bytes=16M accesses=500 switches=100 every_us=500 offline=4";
    let storm = boot("arm64-storm", "apfstorm", A72, 3, params);
    assert_ended(&storm, 0, "wrong=0");
    assert!(
        storm.console.contains("RESULT enables=0 "),
        "{}",
        storm.console
    );
    for case in 0..10 {
        let params = format!("case={case} form={} accesses=2000", 1 + case % 2);
        let outcome = boot("arm64-hostile", "apfhostile", MAX, 2, &params);
        assert_ended(&outcome, 0, &format!("RESULT case={case} "));
        assert!(outcome.console.contains(" wrong=0 "), "{}", outcome.console);
    }
}

/// Guest memory is a file here, so that the test can read the status page as a host would.
#[test]
fn the_status_page_says_what_happened() {
    if qemu_missing() {
        return;
    }
    let (image, memory) = (temp("arm64-status.Image"), temp("arm64-status.memory"));
    fs::write(&image, Arch::Arm64.image("bm").unwrap().file).unwrap();
    let file = memory.display();
    let backend = format!("memory-backend-file,id=ram,size=64M,share=on,mem-path={file}");
    let extra = ["-object", &backend, "-machine", "memory-backend=ram"];
    let params = "faulters=1 workers=1 accesses=5000 bytes=4M";
    let outcome = boot_file(&image, A72, 2, params, &extra);
    assert_ended(&outcome, 0, "faulters_total=5000 ");
    let bytes = fs::read(&memory).unwrap();
    fs::remove_file(&memory).unwrap();
    let mut pages = bytes.chunks_exact(status::PAGE_BYTES);
    let page = pages.find(|page| page.starts_with(b"LACUNAST"));
    let status = Status::parse(page.expect("a status page")).unwrap();
    assert_eq!(status.state, GuestState::Done(0));
    let faulter = &status.threads[1];
    assert_eq!((faulter.kind, faulter.counter), (Kind::Faulter, 5000));
}
