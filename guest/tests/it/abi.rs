//! The C headers and their Rust mirror agree; patterns compress and draws follow Zipf's law.

use lacuna_guest::{
    EXIT_FAULT, EXIT_PANIC, HOST_EXIT, HOST_STATUS, MAX_CPUS, MAX_MEMORY, PORT_CONSOLE, PORT_EXIT,
    PORT_STATUS, status as s,
};
use lz4_flex::block::compress_into;
use std::path::{Path, PathBuf};
use std::process::Command;

fn probe(test: &str) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("probe-{test}"));
    let guest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let cc = std::env::var_os("LACUNA_GUEST_CC").unwrap_or("cc".into());
    let built = Command::new(cc)
        .args(["-std=gnu11", "-Wall", "-Werror", "-I"])
        .arg(guest.join("include"))
        .arg(guest.join("tests/probe.c"))
        .arg("-o")
        .arg(&out)
        .output()
        .expect("the compiler that built the guest runs");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    out
}

#[test]
fn rust_mirrors_the_c_headers() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let output = Command::new(probe("abi")).output().unwrap();
    let kinds = [s::Kind::Worker, s::Kind::Faulter, s::Kind::Other];
    let kinds = kinds.map(|kind| kind.paused_bit().trailing_zeros().to_string());
    let expected = [
        format!("magic {}", s::MAGIC),
        format!("version {}", s::VERSION),
        format!("threads {}", s::MAX_THREADS),
        format!("more_bytes {}", s::MORE_BYTES),
        format!("cpus {MAX_CPUS}"),
        // The hole below 4 GiB, where devices are, is 1 GiB.
        format!("memory_end_gib {}", (MAX_MEMORY >> 30) + 1),
        format!("ports {PORT_CONSOLE} {PORT_EXIT} {PORT_STATUS}"),
        format!("host {HOST_EXIT} {HOST_STATUS}"),
        format!("exits {EXIT_PANIC} {EXIT_FAULT}"),
        format!("entry_bytes {}", s::ENTRY_BYTES),
        format!("name_bytes {}", s::NAME_BYTES),
        format!("lacuna_status.magic {}", s::MAGIC_AT),
        format!("lacuna_status.version {}", s::VERSION_AT),
        format!("lacuna_status.nthreads {}", s::NTHREADS_AT),
        format!("lacuna_status.state {}", s::STATE_AT),
        format!("lacuna_status.exit_code {}", s::EXIT_CODE_AT),
        format!("lacuna_status.apf_not_present {}", s::APF_AT),
        format!("lacuna_status.apf_ready {}", s::APF_AT + 4),
        format!("lacuna_status.apf_wake_all {}", s::APF_AT + 8),
        format!("lacuna_status.apf_dummy {}", s::APF_AT + 12),
        format!("lacuna_status.apf_idle {}", s::APF_AT + 16),
        format!("lacuna_status.apf_lost {}", s::APF_AT + 20),
        format!("lacuna_status.paused {}", s::PAUSED_AT),
        format!("lacuna_status.setting {}", s::SETTING_AT),
        format!("lacuna_status.entry {}", s::ENTRIES_AT),
        format!("kinds {}", kinds.join(" ")),
        format!("lacuna_status_entry.counter {}", s::COUNTER_AT),
        format!("lacuna_status_entry.goal {}", s::GOAL_AT),
        format!("lacuna_status_entry.kind {}", s::KIND_AT),
        format!("lacuna_status_entry.cpu {}", s::CPU_AT),
        format!("lacuna_status_entry.name {}", s::NAME_AT),
        format!("lacuna_status_entry.latency_ns {}", s::LATENCY_AT),
    ];
    let found = String::from_utf8(output.stdout).unwrap();
    assert_eq!(found.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn keyed_pattern_compresses_and_random_does_not() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let probe = probe("pattern");
    let page = |pattern: &str| Command::new(&probe).arg(pattern).output().unwrap().stdout;
    let [keyed, random] = ["keyed", "random"].map(page);
    assert_eq!((keyed.len(), random.len()), (4096, 4096));
    let mut out = [0; 8192];
    let packed = compress_into(&keyed, &mut out).unwrap();
    assert!(packed * 6 < 4096, "{packed} bytes");
    assert!(compress_into(&random, &mut out).unwrap() >= 4096);
}

/// Half of the accesses write, whatever the rank: within five standard deviations for each rank.
fn written_by_chance(drawn: &[f64], written: &[f64]) {
    for (rank, (drawn, written)) in drawn.iter().zip(written).enumerate() {
        let off = (written - drawn / 2.0).abs();
        let deviation = drawn.sqrt() / 2.0;
        assert!(
            off <= 5.0 * deviation,
            "rank {rank}: {written} of {drawn} write"
        );
    }
}

/// Compares the draws with the law in floating point: each frequent rank, and the sum of ranks
/// above each power of two.
#[test]
fn ranks_are_drawn_by_zipfs_law() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let probe = probe("zipf");
    for hundredths in [0, 50, 99, 150] {
        let output = Command::new(&probe)
            .args(["zipf", &hundredths.to_string()])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().map(|line| line.split_once(' ').unwrap());
        let numbers = lines.map(|(drawn, written)| [drawn, written].map(|n| n.parse().unwrap()));
        let (drawn, written): (Vec<f64>, Vec<f64>) = numbers.map(<(f64, f64)>::from).unzip();
        assert_eq!(drawn.len(), 3000);
        written_by_chance(&drawn, &written);
        let weight = |rank: usize| (rank as f64).powf(-f64::from(hundredths) / 100.0);
        let weights: Vec<f64> = (1..=3000).map(weight).collect();
        let share =
            |of: &[f64], from: usize| of[from..].iter().sum::<f64>() / of.iter().sum::<f64>();
        for from in (0..12).map(|k| (1 << k) - 1) {
            let (found, law) = (share(&drawn, from), share(&weights, from));
            assert!(
                (found - law).abs() < 0.001,
                "s {hundredths}: {found} and {law} from {from}"
            );
        }
        // Within five standard deviations, rank by rank.
        let scale = drawn.iter().sum::<f64>() / weights.iter().sum::<f64>();
        for (rank, (found, weight)) in drawn.iter().zip(&weights).enumerate() {
            let expected = weight * scale;
            let off = (found - expected).abs();
            assert!(
                off < 5.0 * expected.sqrt() + 0.002 * expected,
                "rank {rank}: {found}"
            );
        }
    }
}
