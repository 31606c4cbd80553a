//! `--metrics`: the counters of a running guest by HTTP. `LACUNA_LOG`: events of the engine.

use lacuna_skip::test;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::thread;

/// The answer to a request.
fn ask(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The values of the metrics without labels.
fn values(answer: &str) -> HashMap<&str, u64> {
    let lines = answer.lines().filter_map(|line| line.split_once(' '));
    let values = lines.filter_map(|(name, value)| Some((name, value.parse().ok()?)));
    values.collect()
}

/// The documentation's rows for the metrics of an answer.
fn documented_rows(answer: &str) -> Vec<String> {
    let lines: Vec<_> = answer.lines().collect();
    let rows = lines.windows(2).filter_map(|pair| {
        let (name, help) = pair[0].strip_prefix("# HELP ")?.split_once(' ')?;
        let kind = pair[1].rsplit(' ').next()?;
        Some(format!("| {name} | {kind} | {help} |\n"))
    });
    rows.collect()
}

#[test]
fn events_of_the_engine_are_lines_on_stderr() {
    let run = |wanted: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
        command.args(["run", "verify", "--memory", "8M", "--resident", "4M"]);
        command.args(["--quiet", "--append", "rounds=2"]);
        let output = command.env("LACUNA_LOG", wanted).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), errors)
    };
    let (code, errors) = run("lacuna::fault=trace");
    assert!(
        errors.contains(" TRACE lacuna::fault: read begins"),
        "{errors}"
    );
    assert!(!errors.contains("lacuna::reclaim"), "{errors}");
    assert_eq!(code, Some(0), "{errors}");
    let (code, errors) = run("lacuna=loud=now");
    assert!(errors.contains("LACUNA_LOG: invalid filter"), "{errors}");
    assert_eq!(code, Some(2), "{errors}");
}

#[test]
fn a_running_guest_is_counted() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command.args(["run", "bm", "--memory", "16M", "--resident", "8M"]);
    command.args(["--quiet", "--metrics", "127.0.0.1:0"]);
    command.args(["--append", "seconds=1000000"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut run = command.spawn().unwrap();
    let mut lines = BufReader::new(run.stderr.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let (_, rest) = line.split_once("metrics at http://").expect("an address");
    let address = rest.trim().strip_suffix("/metrics").expect("a path");
    // Its stderr is read, so that it can write.
    let reading = thread::spawn(move || lines.read_to_string(&mut String::new()));
    for (request, told) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "HTTP/1.1 404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 400"),
        (b"\r\n\r\n", "HTTP/1.1 400"),
    ] {
        let answer = ask(address, request);
        assert!(answer.starts_with(told), "{answer}");
    }
    // It is closed without an answer, and the next one is answered.
    let _silent = TcpStream::connect(address).unwrap();
    let mut before = 0;
    loop {
        let answer = ask(address, b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        for told in [
            "# TYPE lacuna_host_faults_zero_fill_total counter\n",
            "lacuna_vcpu_exits_total{vcpu=\"1\",kind=\"interrupted\"} ",
            "lacuna_vcpu_stall_seconds{vcpu=\"0\",quantile=\"0.99\"} ",
            "lacuna_apf_taken_total{vcpu=\"0\"} ",
            "lacuna_dirty_logged_total{vcpu=\"0\"} ",
        ] {
            assert!(body.contains(told), "{told} in {body}");
        }
        let counted = values(body);
        assert!(counted["lacuna_vm_resident_bytes"] <= 8 << 20, "{body}");
        let swapped = counted["lacuna_host_swapped_in_total"];
        assert!(swapped >= before, "{body}");
        if before > 0 && swapped > before {
            let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
            let page = std::fs::read_to_string(page).unwrap();
            let rows = documented_rows(body);
            let missing: Vec<_> = rows.iter().filter(|row| !page.contains(*row)).collect();
            assert!(
                rows.len() > 50 && missing.is_empty(),
                "docs/metrics.md lacks {missing:#?}"
            );
            break;
        }
        before = swapped;
    }
    kill_process(Pid::from_child(&run), Signal::TERM).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(143));
    reading.join().unwrap().unwrap();
}
