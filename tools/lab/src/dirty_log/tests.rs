use super::*;
use crate::options::options_of;
use crate::pml::is_lacking;
use lacuna::DirtyTracking as _;
use lacuna_skip::test;

fn outcome(line: &str) -> Outcome {
    let options: DirtyLog = options_of(line);
    options.check().unwrap();
    options.run(Verbosity::Quiet).unwrap()
}

fn pages(outcome: &Outcome) -> Vec<u64> {
    outcome
        .iterations
        .iter()
        .map(|done| done.dirty_pages)
        .collect()
}

/// Iterations whose log has exactly the written pages.
fn exact(line: &str) -> Vec<u64> {
    let outcome = outcome(line);
    let written = outcome.iterations.iter().map(|done| done.written_pages);
    assert_eq!(pages(&outcome), written.collect::<Vec<_>>(), "{line}");
    pages(&outcome)
}

#[test]
fn each_vcpu_writes_its_share_or_all_write_the_same() {
    for arch in ["x86_64", "arm64"] {
        let line = format!("--vcpus 3 --bytes 1M --arch {arch}");
        assert_eq!(exact(&line), [768, 768]);
        let same = outcome(&format!("{line} --overlap --iterations 1"));
        let done = same.iterations[0];
        assert_eq!((done.dirty_pages, done.written_pages), (256, 768), "{arch}");
    }
}

#[test]
fn a_share_of_the_pages_is_written_in_each_iteration() {
    for (line, low, high) in [
        ("--write-percent 0", 0, 0),
        ("--write-percent 25 --random --arch arm64", 400, 650),
        (
            "--write-percent 25 --delivery ring --detection wp",
            400,
            650,
        ),
        ("--write-percent 75 --manual-clear", 1400, 1700),
    ] {
        let found = exact(&format!("--bytes 8M --iterations 3 {line}"));
        assert_eq!(found.len(), 3);
        let range = low..=high;
        assert!(
            found.iter().all(|pages| range.contains(pages)),
            "{line}: {found:?}"
        );
        assert!(
            high == 0 || found[0] != found[1],
            "the pages are others each time"
        );
    }
}

#[test]
fn the_memory_has_so_many_slots_and_is_of_that_kind() {
    for (line, slots) in [
        ("", 1),
        ("--slots 5", 5),
        ("--slots 5 --arch arm64", 5),
        ("--memory-kind anonymous", 1),
        ("--memory-kind memfd", 1),
    ] {
        let line = format!("--bytes 1M --vcpus 2 {line}");
        assert_eq!(exact(&line), [512, 512], "{line}");
        assert_eq!(outcome(&line).slots, slots, "{line}");
    }
    let file = |kind: &str| {
        let options: DirtyLog = options_of(&format!("--bytes 1M --memory-kind {kind}"));
        let test = DirtyTest::soft(&options, Variant::default()).unwrap();
        test.sweeps.vm.shared_file().is_some()
    };
    assert!(file("memfd") && !file("anonymous") && !file("pool"));
}

#[test]
fn huge_pages_are_logged_by_4_kib() {
    let _reserved = lacuna_skip::HugePages::reserve(3);
    assert_eq!(exact("--bytes 1M --memory-kind hugetlbfs")[..], [256, 256]);
}

#[test]
fn writes_are_detected_as_chosen() {
    let stats = |detection: &str| {
        let options: DirtyLog = options_of(&format!("--bytes 1M --detection {detection}"));
        let mut test = DirtyTest::soft(&options, Variant::default()).unwrap();
        test.sweeps.sweep(Sweep::POPULATE).unwrap();
        test.set_logging(Logging::LAZY).unwrap();
        test.iterate(Sweep::POPULATE, &mut Harvested::default())
            .unwrap();
        let stats = test.sweeps.vm.detection().unwrap().dirty_stats()[0];
        (stats.faults + stats.fast_page_faults, stats.logged)
    };
    let ((faults, logged), (faults_of_pml, logged_of_pml)) = (stats("wp"), stats("pml"));
    assert!(faults >= 256 && logged == 0, "{faults} {logged}");
    assert!(
        faults_of_pml == 0 && logged_of_pml >= 256,
        "{faults_of_pml} {logged_of_pml}"
    );
}

/// Without a step of its own, there is nothing left to clear.
#[test]
fn a_manual_clear_is_a_step_of_its_own() {
    for (line, clears) in [("--manual-clear", true), ("", false)] {
        let outcome = outcome(&format!("--bytes 1M --write-percent 50 {line}"));
        for done in &outcome.iterations {
            assert!(done.get_s > 0.0 && done.harvests == 1);
            assert_eq!(done.clear_s > 0.0, clears);
        }
    }
    let options: DirtyLog = options_of("--bytes 1M --manual-clear");
    let mut test = DirtyTest::soft(&options, Variant::default()).unwrap();
    test.set_logging(Logging::LAZY).unwrap();
    test.sweeps.sweep(Sweep::POPULATE).unwrap();
    let slot = test.slots[0];
    let dirty = || {
        let mut words = vec![0_u64; slot.gfns.pages().div_ceil(64) as usize];
        let log = test.sweeps.vm.two_step_log().unwrap();
        log.peek_dirty(slot.id, &mut words).unwrap();
        words.iter().map(|word| word.count_ones()).sum::<u32>()
    };
    let written = dirty();
    assert!(
        written >= 256 && dirty() == written,
        "the first step clears nothing"
    );
    test.harvest(&mut Harvested::default()).unwrap();
    assert_eq!(dirty(), 0);
}

#[test]
fn all_pages_are_set_at_first() {
    let line = "--bytes 1M --slots 2 --write-percent 50 --initially-all-set";
    for more in ["", "--manual-clear"] {
        let outcome = outcome(&format!("{line} {more}"));
        assert_eq!(pages(&outcome)[0], 256);
        assert_eq!(pages(&outcome)[1], outcome.iterations[1].written_pages);
    }
}

#[test]
fn options_that_exclude_each_other_are_refused() {
    for (line, why) in [
        ("--backend kvm --detection pml", "the kernel chooses"),
        ("--detection wp-async", "--backend kvm"),
        ("--delivery ring --manual-clear", "for bitmaps"),
        ("--delivery ring --initially-all-set", "for bitmaps"),
        ("--slots 2 --memory-kind memfd", "leave --memory-kind out"),
        ("--slots 2 --bytes 4K", "no more slots than pages"),
        ("--bytes 1K", "at least 4K"),
        ("--backend kvm --arch arm64", "x86-64 guests only"),
    ] {
        let options: DirtyLog = options_of(line);
        let text = options.check().unwrap_err();
        assert!(text.contains(why), "{line}: {text}");
    }
}

#[test]
fn the_test_is_the_same_on_kvm() {
    for line in [
        "",
        "--manual-clear",
        "--slots 3",
        "--delivery ring",
        "--detection wp-async",
    ] {
        let line = format!("--backend kvm --vcpus 2 --bytes 1M --write-percent 50 {line}");
        let options: DirtyLog = options_of(&line);
        options.check().unwrap();
        match options.run(Verbosity::Quiet) {
            Ok(outcome) => {
                let found = pages(&outcome);
                assert!(
                    found.iter().all(|pages| (150..=400).contains(pages)),
                    "{found:?}"
                );
            }
            Err(why) if is_lacking(&why) => lacuna_skip::skip_test(why.to_string()),
            Err(why) => panic!("{line}: {why}"),
        }
    }
}

#[test]
fn an_outcome_is_text_and_json() {
    let outcome = outcome("--bytes 64K --iterations 1 --detection wp");
    let text = outcome.to_string();
    for part in [
        "1 vCPUs, 64K each, 1 slots",
        "populate memory",
        "disable dirty logging",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let json = serde_json::to_value(&outcome).unwrap();
    assert_eq!(json["iterations"][0]["dirty_pages"], 16);
    assert!(json["populate_s"].as_f64() > Some(0.0));
}
