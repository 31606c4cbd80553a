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
    let words = "bm --memory 16M --vcpus 3 --pin 1,0 --append seconds=1000000";
    let cores = std::thread::available_parallelism().unwrap().get();
    if cores < 2 {
        lacuna_skip::skip_test("this host has one processor");
    }
    let guest = Guest::start(dir.path(), words);
    // A pause waits for the threads of the vCPUs.
    guest.client().state("pause");
    for (vcpu, core) in ["1", "0", "1"].into_iter().enumerate() {
        let found = allowed(guest.child.id(), &format!("vcpu{vcpu}"));
        assert_eq!(found.as_deref(), Some(core), "vCPU {vcpu}");
    }
    guest.client().state("stop");
    assert_eq!(guest.end().0, 4);
}

#[test]
fn a_missing_processor_is_named() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let (code, text) = failure("run hello --pin 0,1000");
    assert_eq!(code, 3, "{text}");
    assert!(
        text.contains("--pin: processor 1000 of this host"),
        "{text}"
    );
}
