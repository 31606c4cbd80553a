//! Each option does what its name says.

use super::*;
use crate::fixture::{gpa_of, needs_guests};
use clap::Parser;
use lacuna::{Arch, GuestMemory as _, MemorySlots as _, Vm as _};
use lacuna_skip::test;
use rustix::fs::{FallocateFlags, fallocate};
use std::sync::Arc;

#[derive(Parser)]
#[command(no_binary_name = true, args_override_self = true)]
struct Line {
    #[command(flatten)]
    options: DemandPaging,
}

/// The options of this command line, whose guest touches 2 MiB for each vCPU unless it says
/// otherwise.
fn options(line: &str) -> DemandPaging {
    let words = ["--bytes", "2M"].into_iter().chain(line.split_whitespace());
    let options = Line::parse_from(words).options;
    assert_eq!(options.check(), Ok(()), "{line}");
    options
}

/// The fixture for `options`, or the end of the test as skipped.
fn fixture(options: &DemandPaging) -> Fixture {
    needs_guests();
    if let Some(why) = unavailable(options) {
        lacuna_skip::skip_test(why.to_string());
    }
    Fixture::soft(options).unwrap()
}

fn ran(line: &str) -> Outcome {
    let options = options(line);
    fixture(&options).run(&options, || Ok(())).unwrap().0
}

fn sum(counts: &[u64]) -> u64 {
    counts.iter().sum()
}

#[test]
fn options_that_exclude_each_other_are_refused() {
    for line in [
        "--bytes 5000",
        "--by exits --readers 2",
        "--by tokens --queue-each",
        "--overlap --queue-each",
        "--by source --batch 2",
        "--queue-each --memory-kind hugetlbfs",
        "--fill continue",
        "--fill continue --memory-kind memfd --by source",
        "--vcpus 2 --bytes 8388608T",
        "--bytes 2M --slots 1000",
        "--vcpus 2 --bytes 12K --queue-each --batch 512",
        "--backend kvm --memory-kind pool",
        "--backend kvm --arch arm64",
        "--backend kvm --slots 2",
    ] {
        let options = Line::parse_from(line.split_whitespace()).options;
        assert!(options.check().is_err(), "{line}");
    }
    for line in [
        "--batch 3",
        "--batch 1024",
        "--vcpus 0",
        "--arch mips",
        "--pin 9999",
        "--slots 1001",
    ] {
        assert!(
            Line::try_parse_from(line.split_whitespace()).is_err(),
            "{line}"
        );
    }
}

/// The threads and the guest count what the way to provide a page says, for each kind of memory.
fn each_way_is_counted(kind: &str) {
    let line = |by: &str| format!("--vcpus 2 --bytes 1M --memory-kind {kind} {by}");
    let base = options(&line(""));
    let fixture = fixture(&base);
    let host = Arc::clone(fixture.empty_vm(Arch::X86_64).unwrap().host());
    for by in [
        "exits",
        "tokens",
        "source",
        "queue",
        "queue --readers 3",
        "queue --queue-each",
    ] {
        let before = host.stats().provided;
        if by == "source" && base.fill == Fill::Continue {
            continue; // the answer of a source is copied
        }
        let options = options(&line(&format!("--by {by}")));
        let (outcome, _) = fixture.run(&options, || Ok(())).unwrap();
        assert_eq!(outcome.pages, 512, "{by}");
        // A page that an exit continues was not requested, so it does not count as provided.
        let is_counted = host.stats().provided - before >= 512;
        assert!(is_counted || options.fill == Fill::Continue, "{by}");
        let counts = [&outcome.exits, &outcome.tokens, &outcome.queues].map(|counts| sum(counts));
        let [exits, tokens, faults] = counts;
        match options.by {
            By::Exits => assert!(exits >= 512 && tokens + faults == 0, "{by}: {outcome:?}"),
            By::Tokens => {
                assert!(
                    tokens > 0 && exits >= 512 && faults == 0,
                    "{by}: {outcome:?}"
                );
            }
            By::Source => assert_eq!(counts, [0; 3], "{by}"),
            By::Queue => assert!(faults >= 512 && exits + tokens == 0, "{by}: {outcome:?}"),
        }
        let queues = match options.by {
            By::Queue => 1 + usize::from(options.queue_each),
            _ => 0,
        };
        assert_eq!(outcome.queues.len(), queues, "{by}");
        assert_eq!([outcome.exits.len(), outcome.tokens.len()], [2; 2]);
        if options.queue_each {
            // The second vCPU's share. The kernel's first pages are the first vCPU's.
            let second = outcome.queues[1];
            let is_exact = kind == "anonymous";
            let is_all = second == 256 || !is_exact && second > 256;
            assert!(is_all, "{outcome:?}");
        }
    }
}

#[test]
fn each_way_is_counted_in_the_pool() {
    each_way_is_counted("pool");
}

#[test]
fn each_way_is_counted_in_linux_memory() {
    each_way_is_counted("anonymous");
}

#[test]
fn each_way_is_counted_in_a_memory_file() {
    each_way_is_counted("memfd");
    each_way_is_counted("memfd --fill continue");
}

/// With an overlap the vCPUs' pages are the same, and fewer are provided.
#[test]
fn vcpus_touch_the_same_pages_or_their_own() {
    for by in ["exits", "queue"] {
        let provided = |overlap: &str| {
            let line = format!("--vcpus 2 --memory-kind pool --by {by} {overlap}");
            let options = options(&line);
            let (outcome, vm) = fixture(&options).run(&options, || Ok(())).unwrap();
            (outcome.pages, vm.host().stats().provided)
        };
        let (own, same) = (provided(""), provided("--overlap"));
        assert_eq!([own.0, same.0], [1024, 512], "{by}");
        // The guest's kernel needs some pages in both, and page tables for its arena.
        assert!(
            own.1 >= 1024 && own.1 - same.1 > 256,
            "{by}: {own:?} {same:?}"
        );
    }
}

/// The guest writes into each page the number of its touch.
#[test]
fn pages_are_touched_in_order_or_at_random() {
    let order = |line: &str| {
        let options = options(line);
        let fixture = fixture(&options);
        let (_, vm) = fixture.run(&options, || Ok(())).unwrap();
        let first = *fixture.arena.get().expect("the guest has booted");
        let word = |page| {
            let mut word = [0; 8];
            vm.read(gpa_of(Arch::X86_64, first + page), &mut word)
                .unwrap();
            u64::from_le_bytes(word)
        };
        (0..512).map(word).collect::<Vec<_>>()
    };
    let in_order: Vec<_> = (0..512).collect();
    assert_eq!(order("--memory-kind pool --by exits"), in_order);
    let mut random = order("--memory-kind pool --by exits --random");
    assert_ne!(random, in_order);
    random.sort_unstable();
    assert_eq!(random, in_order);
}

/// A run of pages needs one exit or one fault, also where the guest's kernel has needed some of
/// them before. From a list a vCPU gets its page before the run is whole, and may fault again.
#[test]
fn a_fault_brings_a_run_of_pages() {
    for line in [
        "--by exits",
        "--by queue",
        "--by exits --memory-kind memfd --fill continue",
    ] {
        let outcome = ran(&format!("--bytes 4M --batch 256 {line}"));
        let faults = sum(&outcome.exits) + sum(&outcome.queues);
        let is_few = outcome.pages == 1024 && faults < 512;
        assert!(is_few, "{line}: {outcome:?}");
    }
}

/// Huge pages are provided as a whole, by exits and through the kernel's queue.
#[test]
fn huge_pages_are_provided_as_a_whole() {
    let line = "--vcpus 2 --bytes 4M --memory-kind hugetlbfs";
    // 8 MiB, and the guest's other memory.
    let _reserved = lacuna_skip::HugePages::reserve(4 + BESIDE_MIB / 2);
    for by in ["exits", "queue"] {
        let outcome = ran(&format!("{line} --by {by}"));
        let faults = sum(&outcome.exits) + sum(&outcome.queues);
        assert!(outcome.pages == 2048 && faults <= 512, "{by}: {outcome:?}");
    }
}

/// No sleep is shorter than its time, so the bound holds on every machine.
#[test]
fn a_fill_waits_for_the_delay() {
    for by in ["exits", "queue", "source"] {
        let line = format!("--bytes 64K --memory-kind pool --delay 1ms --by {by}");
        let outcome = ran(&line);
        assert!(outcome.ns >= 16_000_000, "{by}: {outcome:?}");
    }
}

#[test]
fn the_guests_memory_is_in_so_many_slots() {
    for line in [
        "--memory-kind pool",
        "--memory-kind memfd --fill continue --batch 512",
    ] {
        let options = options(&format!("{line} --by exits --slots 10"));
        let (outcome, vm) = fixture(&options).run(&options, || Ok(())).unwrap();
        assert_eq!(outcome.pages, 512);
        let slots = vm.memory_slots();
        let pages: u64 = slots.iter().map(|slot| slot.gfns.pages()).sum();
        assert_eq!((slots.len(), pages), (10, options.memory().get()), "{line}");
    }
}

/// A page is continued only if the file has it, and copied in any case.
#[test]
fn a_page_is_copied_or_continued() {
    let page = gpa_of(Arch::X86_64, 1000);
    for (fill, is_provided) in [("copy", true), ("continue", false)] {
        let options = options(&format!("--memory-kind memfd --fill {fill}"));
        let fixture = fixture(&options);
        let vm = fixture.empty_vm(Arch::X86_64).unwrap();
        let shared = vm.shared_file().unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = PAGE_SIZE as u64;
        fallocate(shared.file, flags, shared.offset + 1000 * bytes, bytes).unwrap();
        let provided = (fixture.provide)(&vm, page, 1);
        assert_eq!(provided.is_ok(), is_provided, "{fill}: {provided:?}");
    }
}

#[test]
fn guests_of_both_processors_run() {
    for arch in ["x86_64", "arm64"] {
        let options = options(&format!("--arch {arch} --memory-kind pool --by exits"));
        let (outcome, vm) = fixture(&options).run(&options, || Ok(())).unwrap();
        let is_arm64 = vm.config().arch == Arch::Arm64;
        assert_eq!((outcome.pages, is_arm64), (512, arch == "arm64"));
    }
}

/// On `/dev/kvm`, single pages and runs of pages are provided in each way.
#[test]
fn each_way_is_counted_on_kvm() {
    needs_guests();
    if let Err(why) = lacuna::kvm::available() {
        lacuna_skip::skip_test(why.to_string());
    }
    for line in [
        "--by exits --batch 512",
        "--by queue --readers 2",
        "--by queue --batch 512",
        "--by tokens",
        "--by source",
    ] {
        let options = options(&format!("--backend kvm --vcpus 2 {line}"));
        let (outcome, _) = Fixture::kvm(&options).run(&options, || Ok(())).unwrap();
        let [exits, faults] = [sum(&outcome.exits), sum(&outcome.queues)];
        let least = if options.batch == 1 { 1024 } else { 2 };
        match options.by {
            By::Exits | By::Tokens => {
                assert!(exits >= least && faults == 0, "{line}: {outcome:?}");
            }
            By::Queue => assert!(faults >= least && exits == 0, "{line}: {outcome:?}"),
            By::Source => assert_eq!([exits, faults], [0; 2]),
        }
        assert!(
            options.batch == 1 || exits + faults < 1024,
            "{line}: {outcome:?}"
        );
    }
}

#[test]
fn a_guest_that_refuses_says_why() {
    let options = options("--memory-kind pool --by exits");
    let mut fixture = fixture(&options);
    fixture.line = "gate=1 threads=400".into();
    let error = fixture.rate(&options).unwrap_err().to_string();
    assert!(error.contains("cannot run with"), "{error}");
}
