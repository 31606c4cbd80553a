//! `--pin`: the processors of the vCPUs' threads.

use crate::guest::{Guest, failure};
use lacuna_skip::test;
use std::fs;

/// The processors on which the threads of this name may run, as `/proc` lists them.
fn allowed(pid: u32, name: &str) -> Option<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    tasks.flatten().find_map(|task| {
        let comm = fs::read_to_string(task.path().join("comm")).ok()?;
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let mut lines = status.lines();
        let list = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        (comm.trim() == name).then(|| list.trim().to_owned())
    })
}

#[test]
fn every_vcpu_has_its_processor() {
    let dir = tempfile::tempdir().unwrap();
    let mine = rustix::thread::sched_getaffinity(None).unwrap();
    let mut mine = (0..1024).filter(|core| mine.is_set(*core));
    let (Some(one), Some(other)) = (mine.next(), mine.next()) else {
        lacuna_skip::skip_test("this process may use one processor");
    };
    let words = format!("bm --memory 16M --vcpus 3 --pin {other},{one} --append seconds=1000000");
    let guest = Guest::start(dir.path(), &words);
    // A pause waits for the threads of the vCPUs.
    guest.client().state("pause");
    for (vcpu, core) in [other, one, other].into_iter().enumerate() {
        let found = allowed(guest.child.id(), &format!("vcpu{vcpu}"));
        assert_eq!(found, Some(core.to_string()), "vCPU {vcpu}");
    }
    guest.client().state("stop");
    assert_eq!(guest.end().0, 4);
}

#[test]
fn a_missing_processor_is_named() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    for (command, expected) in [
        ("run hello", 3),
        ("test dirty-log", 3),
        ("test demand-paging", 1),
    ] {
        let (code, text) = failure(&format!("{command} --vcpus 2 --pin 0,1000"));
        assert_eq!(code, expected, "{text}");
        assert!(
            text.contains("--pin: processor 1000 of this host"),
            "{text}"
        );
    }
}
