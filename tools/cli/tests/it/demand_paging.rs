//! `lacuna test demand-paging` as a user sees it.

use lacuna_skip::test;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

fn command(line: &str) -> Command {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command.args([
        "test",
        "demand-paging",
        "--memory-kind",
        "pool",
        "--bytes",
        "1M",
    ]);
    command.args(line.split_whitespace());
    command
}

fn stdout(line: &str) -> String {
    let output = command(line).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_counts_are_a_table_and_json() {
    let text = stdout("--vcpus 2 --by tokens");
    for words in [
        "512 pages in ",
        " pages a second",
        "vCPU  exits  accepted tokens",
    ] {
        assert!(text.contains(words), "{words} is missing in {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&stdout("--json -")).unwrap();
    assert_eq!((&json["schema"], &json["pages"]), (&1.into(), &256.into()));
    assert!(json["queues"][0].as_u64() >= Some(256), "{json}");
    assert_eq!(json["exits"], serde_json::json!([0]));
}

/// The thread of the first vCPU runs on the named core. The guest waits at its gate meanwhile.
#[test]
fn a_vcpu_is_pinned() {
    let cores = |line: &str| {
        let mut child = command(&format!("--by exits --lockstep {line}"));
        let mut child = child
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.as_mut().unwrap().write_all(b"boot\n").unwrap();
        let mut ready = String::new();
        let mut from = BufReader::new(child.stdout.take().unwrap());
        from.read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n");
        let threads = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        let allowed = threads.filter_map(|thread| {
            let status = std::fs::read_to_string(thread.ok()?.path().join("status")).ok()?;
            let cores = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            Some(cores?.trim().to_owned())
        });
        let allowed: Vec<_> = allowed.collect();
        child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        from.read_line(&mut ready).unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        allowed
    };
    let all = cores("");
    if !all[0].contains(['-', ',']) {
        lacuna_skip::skip_test("one core");
    }
    assert!(all.iter().all(|cores| *cores == all[0]), "{all:?}");
    let first = all[0].split(['-', ',']).next().unwrap();
    let pinned = cores(&format!("--pin {first}"));
    let others = pinned.iter().filter(|cores| **cores != all[0]);
    let others: Vec<_> = others.collect();
    assert!(
        matches!(&others[..], [one] if one.parse::<u32>().is_ok()),
        "{pinned:?}"
    );
}
