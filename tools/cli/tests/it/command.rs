//! The command as a script uses it: the output of successful runs. `table` has the failing runs.

use assert_cmd::Command;
use lacuna_skip::test;

/// In a build without guests, a test with a guest ends as skipped.
fn lacuna(line: &str) -> assert_cmd::assert::Assert {
    if let Some(reason) = lacuna_guest::unavailable()
        && !line.starts_with("doctor")
    {
        lacuna_skip::skip_test(reason);
    }
    command(line)
}

fn command(line: &str) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("lacuna").expect("cargo builds it for this test");
    command.args(line.split_whitespace()).assert()
}

fn stdout(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8_lossy(&assert.get_output().stdout).into_owned()
}

#[test]
fn doctor_speaks_to_people_and_machines() {
    let text = stdout(&lacuna("doctor").success());
    assert!(
        text.contains("\nmemory ") && text.contains("\nkvm "),
        "{text}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&lacuna("doctor --json").success())).unwrap();
    assert_eq!(json["schema"], 1);
    assert!(
        json["checks"]
            .as_array()
            .is_some_and(|checks| checks.len() >= 8)
    );
}

#[test]
fn a_small_limit_on_the_stack_stops_no_run() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let lacuna = env!("CARGO_BIN_EXE_lacuna");
    let mut shell = Command::new("sh");
    let line = format!("ulimit -s 96; exec {lacuna} run hello --memory 16M --quiet");
    shell.args(["-c", &line]).assert().success();
}

#[test]
fn doctor_examines_the_folder_it_is_given() {
    let text = stdout(&lacuna("doctor --swap-dir /nonexistent").success());
    assert!(text.contains("/nonexistent cannot hold a file"), "{text}");
}

fn json_of(assert: &assert_cmd::assert::Assert) -> serde_json::Value {
    serde_json::from_str(&stdout(assert)).expect("stdout carries the JSON and nothing else")
}

#[test]
fn a_build_without_guests_says_so() {
    let Some(reason) = lacuna_guest::unavailable() else {
        return;
    };
    for line in ["run hello", "lab apf --quick"] {
        let assert = command(line).failure();
        let errors = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        assert!(errors.contains(reason), "{line}: {errors}");
    }
}

#[test]
fn a_run_tells_its_result() {
    let line = "run verify --memory 32M --resident 8M --append rounds=1";
    let text = stdout(&lacuna(line).success());
    for word in [
        "swap ",
        "faults ",
        "vcpu 0 ",
        "vcpu 1 ",
        "apf ",
        "apf guest ",
        "outcome   done",
    ] {
        assert!(text.contains(word), "{word} is missing in {text}");
    }
    let json = json_of(&lacuna(&format!("{line} --quiet --json -")).success());
    assert_eq!(
        (json["exit_code"].as_u64(), json["outcome"].as_str()),
        (Some(0), Some("done"))
    );
    assert!(
        json["last"]["swap_in"]
            .as_u64()
            .is_some_and(|pages| pages > 1000),
        "{json}"
    );
    assert!(
        json["last"]["threads"]
            .as_array()
            .is_some_and(|threads| threads.len() >= 2)
    );
    let apf = &json["last"]["apf"];
    assert!(
        apf["taken"].as_u64().is_some_and(|taken| taken > 0),
        "{json}"
    );
    assert_eq!(apf["guest"]["lost"], 0, "{json}");
    assert_eq!(json["options"]["append"], "smp=2 ap=direct rounds=1");
}

#[test]
fn without_asynchronous_faults_none_are_told() {
    let line = "run verify --memory 32M --resident 8M --append rounds=1 --apf off --quiet --json -";
    let json = json_of(&lacuna(line).success());
    assert_eq!(json["options"]["apf"], false);
    assert!(json["last"]["apf"].is_null(), "{json}");
}

/// The guest's memory is where the user wants it, and all of it may be resident there.
#[test]
fn memory_of_each_kind() {
    let run = |kind: &str| {
        let line = "run verify --memory 32M --append rounds=1 --quiet --json -";
        let json = json_of(&lacuna(&format!("{line} --memory-kind {kind}")).success());
        let kind = kind.split(' ').next();
        assert_eq!(json["options"]["memory_kind"].as_str(), kind, "{json}");
        let [budget, resident] = ["budget_bytes", "resident_bytes"];
        let bytes = |name: &str| json["last"][name].as_u64().unwrap();
        (bytes(budget), bytes(resident))
    };
    let (all, most) = (32 << 20, 16 << 20);
    let (budget, resident) = run("pool --resident 8M");
    assert!(budget == 8 << 20 && resident <= budget, "{resident}");
    let check = |kind| {
        let (budget, resident) = run(kind);
        assert_eq!(budget, all, "{kind}");
        assert!(resident > most && resident <= all, "{kind}: {resident}");
    };
    for kind in ["anonymous", "memfd", "anonymous --seed 7"] {
        check(kind);
    }
    let _reserved = lacuna_skip::HugePages::reserve(16);
    check("hugetlbfs");
}

#[test]
fn huge_pages_are_made_where_wanted() {
    let run = |thp: &str| {
        let line = "run touch --memory 64M --resident 64M --quiet --json -";
        json_of(&lacuna(&format!("{line} --thp {thp} --append huge=1")).success())
    };
    let json = run("always");
    assert_eq!(json["options"]["thp"], "always");
    let huge = &json["last"]["huge"];
    assert!(
        huge["pages"].as_u64().is_some_and(|pages| pages > 16),
        "{json}"
    );
    assert!(run("never")["last"]["huge"].is_null());
}

/// Two rounds of each system, so that nothing is decided.
#[test]
fn the_first_look_is_a_row_a_system_in_forty_lines() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("look.json");
    let text = stdout(&lacuna(&format!("lab --quick --json {}", file.display())).success());
    assert!(text.lines().count() <= 40, "{text}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 120),
        "{text}"
    );
    for words in [
        "x86 async page faults, 2010: ",
        "huge pages, 2012: ",
        "page-modification logging, 2015: ",
        "arm64 async page faults, 2020: ",
        "missing memory, 2023: ",
        "resident fault: ",
        "vCPU: ",
        "not measured: apf.kvm",
        "lacuna lab --full",
    ] {
        assert!(text.contains(words), "{words} is missing in {text}");
    }
    assert_eq!(text.matches(" undecided ").count(), 6, "{text}");
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(file).expect("written")).expect("JSON");
    let ids: Vec<_> = json["results"]
        .as_array()
        .expect("results")
        .iter()
        .collect();
    // Where this host has no userfaultfd, the missing memory is the pool's.
    let ids = ids.iter().filter_map(|result| result["id"].as_str());
    let ids: Vec<_> = ids
        .map(|id| id.replace("paging.pool.", "paging."))
        .collect();
    let mut expected = vec![
        "apf.worker_ratio.latency_1ms",
        "apf.faulter_ratio.latency_1ms",
        "thp.call.elsewhere",
        "thp.call.shootdown_us.elsewhere",
        "pml.cost_ratio.refill",
        "arm64.apf.worker_ratio.latency_1ms",
        "arm64.apf.faulter_ratio.latency_1ms",
        "paging.exit_vs_best_queue.1vcpu",
        "paging.exit_vs_best_queue.1vcpu.exitcost",
        "paging.wake_up_us",
        "fault.soft_vs_host",
        "cpu.x86.minstr_per_s.alu",
    ];
    if std::thread::available_parallelism().map_or(1, usize::from) == 1 {
        expected.retain(|id| *id != "paging.wake_up_us");
    }
    assert_eq!(ids, expected);
}

#[test]
fn a_seed_is_a_run() {
    for arch in ["x86_64", "arm64"] {
        let hash = |seed: u32| {
            let line = format!(
                "run hello --arch {arch} --memory 16M --resident 16M --quiet --json - --seed {seed}"
            );
            json_of(&lacuna(&line).success())["trace_hash"]
                .as_str()
                .expect("seeded")
                .to_owned()
        };
        assert_eq!(hash(1), hash(1), "{arch}");
        assert_ne!(hash(1), hash(2), "{arch}");
    }
}

/// The status page, by which the view and the summary show the guest's threads.
#[test]
fn the_guests_threads_are_shown() {
    let [x86, arm64] = ["x86_64", "arm64"].map(|arch| {
        let line = format!(
            "run bm --arch {arch} --memory 16M --resident 8M --vcpus 2 --seed 5 --apf on --quiet \
             --append accesses=500 --json -"
        );
        let last = json_of(&lacuna(&line).success())["last"].clone();
        let guest = &last["apf"]["guest"];
        assert!(guest["wake_all"].as_u64() > Some(0), "{arch}: {guest}");
        let threads = last["threads"].as_array().expect("a status page").iter();
        threads
            .map(|thread| thread["name"].to_string())
            .collect::<Vec<_>>()
    });
    assert!(x86.len() > 2, "{x86:?}");
    assert_eq!(x86, arm64);
}

/// These tests need no guest image.
#[test]
fn tests_print_text_and_json_and_refuse_what_they_cannot_do() {
    let dirty = command("test dirty-log --vcpus 2 --bytes 256K --write-percent 50 --json -");
    let dirty = json_of(&dirty.success());
    assert_eq!(dirty["iterations"].as_array().map(Vec::len), Some(2));
    assert_eq!(
        dirty["iterations"][0]["dirty_pages"],
        dirty["iterations"][0]["written_pages"]
    );
    let text = stdout(&command("test access-tracking --bytes 256K").success());
    assert!(
        text.contains("write to idle memory") && text.contains("0 of 64"),
        "{text}"
    );
    let refused = command("test access-tracking --backend kvm").code(2);
    let why = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(why.contains("give --backend soft"), "{why}");
    command("test dirty-log --write-percent 101").code(2);
}
