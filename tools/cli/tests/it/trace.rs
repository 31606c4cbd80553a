//! `--trace`: the engine's events of a run, as Perfetto reads them.

use crate::guest::{has_kvm, lacuna};
use lacuna_skip::test;
use serde_json::Value;
use std::path::Path;

/// The events of a run of `verify` with these options, by time.
fn events(options: &str) -> Vec<Value> {
    events_of(&format!("verify --memory 8M --append rounds=2 {options}"))
}

/// The events of a run, by time.
fn events_of(run: &str) -> Vec<Value> {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let output = lacuna(&format!("run {run} --quiet --trace {}", path.display()));
    assert!(output.status.success(), "{output:?}");
    let mut events = read(&path);
    let names = events.iter().filter(|event| event["ph"] == "M");
    let names: Vec<_> = names.map(|event| event["args"]["name"].clone()).collect();
    for vcpu in ["vcpu0", "vcpu1"] {
        assert!(names.contains(&vcpu.into()), "{names:?}");
    }
    events.retain(|event| event["ph"] != "M");
    events.sort_by(|one, other| at(one).total_cmp(&at(other)));
    events
}

fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read(path).unwrap();
    let json: Value = serde_json::from_slice(&text).unwrap();
    json["traceEvents"].as_array().unwrap().clone()
}

fn at(event: &Value) -> f64 {
    event["ts"].as_f64().expect("every event has a time")
}

/// The only event with this name and these arguments.
fn only<'e>(events: &'e [Value], name: &str, args: &[(&str, &Value)]) -> &'e Value {
    let has = |event: &Value| {
        args.iter()
            .all(|(arg, value)| &event["args"][arg] == *value)
    };
    let mut found = events.iter().filter(|event| event["name"] == name);
    let event = found.find(|event| has(event));
    assert!(!found.any(has), "several of {name} {args:?}");
    event.unwrap_or_else(|| panic!("no {name} {args:?}"))
}

fn has(events: &[Value], names: &[&str]) {
    for name in names {
        assert!(events.iter().any(|event| event["name"] == *name), "{name}");
    }
}

/// The pages of each invalidation. Each has taken time.
fn invalidated(events: &[Value]) -> Vec<u64> {
    let spans = events.iter().filter(|event| event["name"] == "invalidate");
    let pages = spans.map(|span| {
        let pages = span["args"]["pages"].as_u64();
        assert!(
            pages > Some(0) && span["dur"].as_f64() > Some(0.0),
            "{span}"
        );
        pages.unwrap()
    });
    pages.collect()
}

#[test]
fn the_removal_of_a_gibibyte_is_one_invalidation() {
    let events = events_of("hello --memory 1G --memory-kind memfd");
    assert_eq!(invalidated(&events), [1 << 18]);
}

/// On kvm, KVM's worker retries the fault, and the thread of the userfaultfd brings the page.
#[test]
fn kvm_has_the_same_events() {
    has_kvm();
    let (_dir, source) = memory_file();
    let events = events_of(&format!(
        "verify --memory 8M --backend kvm --resident 6M --swap mem --exit-on-missing {source}"
    ));
    let names = [
        "age",
        "exit",
        "batch is reclaimed",
        "fault",
        "read",
        "accept",
        "ready",
    ];
    has(&events, &names);
    assert!(!invalidated(&events).is_empty());
    let of = |name: &'static str| events.iter().filter(move |event| event["name"] == name);
    assert!(of("page-not-present").count() > 0);
    for absent in of("page-not-present").take(50) {
        let args = &absent["args"];
        let id = [("token", &args["token"]), ("vcpu", &args["vcpu"])];
        let ready = only(&events, "page-ready", &id);
        assert_eq!(ready["args"]["gfn"], args["gfn"]);
        assert!(at(absent) <= at(ready));
    }
}

/// A file of zeros as the page source of a guest of 8 MiB.
fn memory_file() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let memory = dir.path().join("memory");
    let file = std::fs::File::create(&memory).unwrap();
    file.set_len(8 << 20).unwrap();
    let source = format!("--pages-from file:{}", memory.display());
    (dir, source)
}

#[test]
fn a_token_is_followed_from_the_fault_to_page_ready() {
    let events = events("--resident 4M --apf on --swap mem,latency=1ms");
    let mut followed = 0;
    for absent in events
        .iter()
        .filter(|event| event["name"] == "page-not-present")
    {
        let args = &absent["args"];
        let id = [("token", &args["token"]), ("vcpu", &args["vcpu"])];
        let ready = only(&events, "page-ready", &id);
        assert_eq!(ready["args"]["gfn"], args["gfn"]);
        assert_eq!(ready["tid"], absent["tid"], "both on the vCPU's thread");
        // The last fault on the gfn before says which page it is.
        let is_fault = |event: &&Value| {
            event["name"] == "fault"
                && event["args"]["gfn"] == args["gfn"]
                && at(event) <= at(absent)
        };
        let fault = events.iter().rfind(is_fault).expect("a fault");
        let page = &fault["args"]["page"];
        let is_end = |event: &&Value| event["ph"] == "e" && &event["args"]["page"] == page;
        let between = |event: &&Value| (at(absent)..=at(ready)).contains(&at(event));
        let arrivals = events.iter().filter(is_end).filter(between);
        assert!(arrivals.count() > 0, "{absent} {ready}");
        followed += 1;
    }
    assert!(followed > 0, "the guest has enabled async page faults");
    assert!(!invalidated(&events).is_empty());
    has(
        &events,
        &["age", "exit", "batch is reclaimed", "fault is retried"],
    );
}

#[test]
fn a_token_of_an_exit_is_accepted_and_then_ready() {
    let (_dir, source) = memory_file();
    let events = events(&format!("--exit-on-missing {source}"));
    let accepted = events.iter().find(|event| event["name"] == "accept");
    let accepted = accepted.expect("the guest has enabled async page faults");
    let args = &accepted["args"];
    let ready = only(
        &events,
        "ready",
        &[("token", &args["token"]), ("vcpu", &args["vcpu"])],
    );
    assert!(at(accepted) <= at(ready));
}

#[test]
fn an_unwritable_trace_is_refused_before_the_run() {
    let output = lacuna("run verify --trace /nonexistent/trace");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.contains("cannot write the trace to /nonexistent/trace: No such"),
        "{errors}"
    );
    assert_eq!(output.status.code(), Some(3));
}

/// `--profile`: the functions of the image in which the vCPUs were.
#[test]
fn a_profile_has_the_functions_of_the_image() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    // The second vCPU has no process, and halts in the kernel.
    let run = "run bm --memory 16M --vcpus 2 --quiet --profile --json - --append";
    let append = "seconds=1 workers=1 faulters=0";
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lacuna"));
    let output = command.args(run.split(' ')).arg(append).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let exits = report["last"]["exits"].as_array().unwrap();
    for vcpu in exits {
        assert!(vcpu["interrupted"].as_u64() > Some(0), "{exits:?}");
    }
    assert_eq!(exits.len(), 2);
    let rows = report["profile"].as_array().unwrap();
    let percent: f64 = rows
        .iter()
        .map(|row| row["percent"].as_f64().unwrap())
        .sum();
    assert!((percent - 100.0).abs() < 1e-6, "{rows:?}");
    // The processes of `bm` are in a program without symbols, and its kernel has some.
    let of = |privilege: &'static str| rows.iter().filter(move |row| row["privilege"] == privilege);
    assert!(of("user").count() > 0, "{rows:?}");
    let named = of("kernel").filter(|row| !row["symbol"].as_str().unwrap().starts_with("0x"));
    assert!(named.count() > 0, "{rows:?}");
}
