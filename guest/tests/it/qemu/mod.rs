//! The images also boot and work on QEMU.

mod apf;
mod arm64;
mod churn;
mod disk;
mod machine;
mod pause;

use lacuna_guest::status::{self, GuestState, Kind, Status};
use machine::{assert_ended, boot, boot_file, boot_with, build, qemu_missing, temp};
use std::fs;
use std::path::Path;

#[test]
fn hello() {
    if qemu_missing() {
        return;
    }
    assert_ended(
        &boot("hello1", "hello", 1, ""),
        0,
        "hello from a guest: 1 vCPU, ",
    );
    assert_ended(
        &boot("hello4", "hello", 4, ""),
        0,
        "hello from a guest: 4 vCPU, ",
    );
}

#[test]
fn the_kernel_keeps_its_promises() {
    if qemu_missing() {
        return;
    }
    let image = temp("kernel-test.elf");
    build(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernel.c"),
        &image,
    );
    for (smp, words) in [(1, ""), (3, ""), (1, " huge=1")] {
        let outcome = boot_file(&image, smp, &format!("slice_us=10000000{words}"));
        assert_ended(&outcome, (128 + 14) & 127, "kernel: ok");
        assert!(
            outcome.console.contains("page fault at 123456789000"),
            "{}",
            outcome.console
        );
    }
}

#[test]
fn verify_finds_memory_in_order() {
    if qemu_missing() {
        return;
    }
    for pattern in ["keyed", "random"] {
        let params = format!("pages=3000 rounds=2 clear=1 pattern={pattern}");
        let outcome = boot(&format!("verify-{pattern}"), "verify", 2, &params);
        assert_ended(&outcome, 0, "failures=0");
        assert!(
            outcome.console.contains("verdict=ok"),
            "{}",
            outcome.console
        );
    }
}

#[test]
fn an_arena_of_2_mib_pages_is_the_same_memory() {
    if qemu_missing() {
        return;
    }
    let pages = |huge: u32| {
        let params = format!("rounds=1 clear=1 huge={huge}");
        let outcome = boot(&format!("verify-huge{huge}"), "verify", 2, &params);
        assert_ended(&outcome, 0, "failures=0");
        let (_, rest) = outcome.console.split_once(" pages=").expect("a result");
        rest.split_whitespace().next().map(str::to_owned)
    };
    assert_eq!(pages(1), pages(0));
}

#[test]
fn zipf_finds_its_pages_in_order() {
    if qemu_missing() {
        return;
    }
    for params in [
        "accesses=50000",
        "accesses=50000 scatter=1 huge=1",
        "seconds=1 skew=0",
    ] {
        let name = format!("zipf-{}", params.len());
        let outcome = boot(&name, "zipf", 2, &format!("bytes=16M {params}"));
        assert_ended(&outcome, 0, "verdict=ok");
    }
}

#[test]
fn bm_counts_on_every_cpu() {
    if qemu_missing() {
        return;
    }
    let outcome = boot("bm", "bm", 2, "seconds=1 bytes=16M");
    assert_ended(&outcome, 0, "RESULT workers_total=");
    for thread in ["worker0", "worker1", "faulter0", "faulter1"] {
        let line = outcome
            .console
            .lines()
            .find(|l| l.contains(&format!("thread={thread} ")));
        let line = line.unwrap_or_else(|| panic!("{thread} in {}", outcome.console));
        assert!(
            line.ends_with(|c: char| c.is_ascii_digit()) && !line.ends_with("count=0"),
            "{line}"
        );
    }
    let counted = boot(
        "bm-count",
        "bm",
        1,
        "faulters=2 workers=1 accesses=1000 bytes=4M",
    );
    assert_ended(&counted, 0, "faulters_total=2000 ");
}

/// Guest memory is a file here, so that the test can read the status page as a host would.
#[test]
fn the_status_page_says_what_happened() {
    if qemu_missing() {
        return;
    }
    let (image, memory) = (temp("status.elf"), temp("status.memory"));
    fs::write(
        &image,
        lacuna_guest::image("bm").expect("in the catalog").file,
    )
    .unwrap();
    let file = memory.display();
    let backend = format!("memory-backend-file,id=ram,size=64M,share=on,mem-path={file}");
    let extra = ["-object", &backend, "-machine", "memory-backend=ram"];
    let params = "faulters=1 workers=1 accesses=5000 bytes=4M";
    assert_ended(
        &boot_with(&image, 2, params, &extra),
        0,
        "faulters_total=5000 ",
    );

    let bytes = fs::read(&memory).unwrap();
    fs::remove_file(&memory).unwrap();
    let mut pages = bytes.chunks_exact(status::PAGE_BYTES);
    let page = pages
        .find(|p| p.starts_with(b"LACUNAST"))
        .expect("a status page");
    let status = Status::parse(page).unwrap();
    assert_eq!(status.state, GuestState::Done(0));
    let seen: Vec<_> = status
        .threads
        .iter()
        .map(|t| (t.name.as_str(), t.kind, t.goal))
        .collect();
    let expected = [
        ("bm", Kind::Other, None),
        ("faulter0", Kind::Faulter, Some(5000)),
        ("worker0", Kind::Worker, None),
    ];
    assert_eq!(seen, expected);
    assert_eq!(status.threads[1].counter, 5000);
    assert!(status.threads[2].counter > 0);
}

#[test]
fn litmus_sees_nothing_forbidden() {
    if qemu_missing() {
        return;
    }
    for smp in [1, 2] {
        let outcome = boot(
            &format!("litmus{smp}"),
            "litmus",
            smp,
            "iters=2000 adds=2000",
        );
        assert_ended(&outcome, 0, "RESULT verdict=ok");
    }
}

#[test]
fn the_other_workloads_pass() {
    if qemu_missing() {
        return;
    }
    assert_ended(
        &boot("touch", "touch", 2, "order=random bytes=8M"),
        0,
        "pages=2048 ",
    );
    assert_ended(
        &boot("membound", "membound", 1, "bytes=8M nop=1"),
        0,
        "RESULT rounds=3 ",
    );
    assert_ended(
        &boot("reads", "reads", 2, "reads=20000 bytes=16M huge=1"),
        0,
        "RESULT threads=2 reads=4",
    );
    assert_ended(
        &boot("gaps", "gaps", 1, "seconds=1 bytes=16M"),
        0,
        "RESULT threads=1 steps=",
    );
    assert_ended(
        &boot("paced", "paced", 2, "writes=9000 hot=4M bytes=16M"),
        0,
        "verdict=ok",
    );
    assert_ended(
        &boot("maxpage", "maxpage", 1, ""),
        0,
        "instruction=push_mem iterations=1000",
    );
    assert_ended(
        &boot("smc", "smc", 2, "iters=500"),
        0,
        "test=cross iterations=500 wrong=0",
    );
    assert_ended(&boot("msr", "msr", 1, "count=100"), 0, "RESULT reads=");
    assert_ended(
        &boot("random", "random", 2, "count=100"),
        0,
        "RESULT rounds=100 ",
    );
    assert_ended(
        &boot("cpubench", "cpubench", 1, "test=branchy iters=10"),
        0,
        "insns=216040 ",
    );
    assert_ended(
        &boot("params", "touch", 1, "threads=0"),
        2,
        "cannot run with threads=0",
    );
    let triple = boot("triple", "triple", 1, "");
    assert_eq!(
        (triple.code, triple.console.as_str()),
        (None, "triple: now\n")
    );
}

#[test]
fn the_readme_example_builds_and_runs() {
    if qemu_missing() {
        return;
    }
    let readme = include_str!("../../../README.md");
    let code = readme
        .split("```c\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    let source = temp("mine.c");
    fs::write(&source, code.expect("the README has a C example")).unwrap();
    build(&source, &temp("mine.elf"));
    assert_ended(
        &boot_file(&temp("mine.elf"), 1, ""),
        0,
        "touched 1000 pages",
    );
}
