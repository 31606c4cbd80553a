//! Removed pages read zeros, and a removal stops no thread for ever.
//!
//! MADV_DONTNEED waits until the handler has read its event. Until then each fill fails with
//! EAGAIN. A read of the descriptor returns faults first, so the handler may get a fault before an
//! earlier removal.

use crate::queue::LOOK;
use crate::rule::{Check, Needs, Rule, Subject, event, expect};
use crate::verdict::{Stop, Verdict};
use crate::vm::{Vm, range_text, second_begins};
use crate::worker::{Worker, join_all};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "removed-reads-zeros",
        requires: "a page that was removed reads zeros, also after it was written and removed \
                   again, because the guest has given its content up",
        origin: "firecracker#5021; e2b-dev/infra#1896",
        check: Check::Handler(Needs::OneVm, removed_reads_zeros),
    },
    Rule {
        name: "removed-never-read",
        requires: "a page that is removed before its first access reads zeros",
        origin: "firecracker#5566: a balloon after a restore",
        check: Check::Handler(Needs::OneVm, removed_never_read),
    },
    Rule {
        name: "removed-range-ends",
        requires: "the pages beside a removed range keep their content: the event's end is the \
                   first address behind the range",
        origin: "userfaultfd(2): UFFD_EVENT_REMOVE",
        check: Check::Handler(Needs::OneVm, removed_range_ends),
    },
    Rule {
        name: "removed-region",
        requires: "a whole region can be removed: all of its pages read zeros, the other region \
                   keeps its content",
        origin: "userfaultfd(2): UFFD_EVENT_REMOVE",
        check: Check::Handler(Needs::OneVm, removed_region),
    },
    Rule {
        name: "removed-across-regions",
        requires: "one removal may cover pages of two regions, because the kernel merges adjacent \
                   mappings",
        origin: "userfaultfd(2): UFFD_EVENT_REMOVE",
        check: Check::Handler(Needs::OneVm, removed_across_regions),
    },
    Rule {
        name: "removal-without-fault",
        requires: "the handler reads removals also after it has filled all pages, because the \
                   removing thread waits for that",
        origin: "firecracker#4990: a frozen VM",
        check: Check::Handler(Needs::OneVm, removal_without_fault),
    },
    Rule {
        name: "fault-beside-removal",
        requires: "if a fill fails with EAGAIN, the handler reads the removal and tries again, \
                   also if no other event follows",
        origin: "firecracker#5056: endless EAGAIN",
        check: Check::Handler(Needs::OneVm, fault_beside_removal),
    },
    Rule {
        name: "fault-before-removal",
        requires: "a fault that is read before the removal of its page gets zeros if its fill \
                   comes after the removal, never the old content",
        origin: "firecracker#5056; e2b-dev/infra#2520",
        check: Check::Handler(Needs::OneVm, fault_before_removal),
    },
    Rule {
        name: "many-removals",
        requires: "the handler reads all unread removals before it gives a fault up, because each \
                   of them causes EAGAIN",
        origin: "firecracker#5056; fcvm#961",
        check: Check::Handler(Needs::OneVm, many_removals),
    },
    Rule {
        name: "removal-storm",
        requires: "under removals and faults of many threads no page is wrong and no thread waits \
                   for ever",
        origin: "firecracker#5566; buildbuddy#8406",
        check: Check::Handler(Needs::OneVm, removal_storm),
    },
];

fn removed_reads_zeros(subject: &Subject) -> Verdict {
    const PAGE: u64 = 3;
    let vm = Vm::new(subject)?;
    vm.connect()?;
    vm.check_contents([PAGE])?;
    for value in 1..=3 {
        vm.write(PAGE, value);
        vm.check_value(PAGE, value)?;
        vm.remove_and_wait(PAGE..PAGE + 1)?;
        vm.check_all_zeros([PAGE])?;
    }
    Ok(())
}

fn removed_never_read(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    vm.connect()?;
    vm.remove_and_wait(20..40)?;
    vm.check_all_zeros(20..40)
}

fn removed_range_ends(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    vm.connect()?;
    vm.remove_and_wait(50..60)?;
    vm.check_contents([60, 49, 61, 48])
}

fn removed_region(subject: &Subject) -> Verdict {
    let vm = Vm::with_two_regions(subject)?;
    vm.connect()?;
    let (second, end) = (second_begins(vm.pages()), vm.pages());
    vm.check_contents([second + 1, 1])?;
    vm.remove_and_wait(second..end)?;
    vm.check_all_zeros([second + 1, second, (second + end) / 2, end - 1])?;
    vm.check_contents([0, 1, second - 1])
}

fn removed_across_regions(subject: &Subject) -> Verdict {
    let vm = Vm::with_adjacent_regions(subject)?;
    vm.connect()?;
    let second = second_begins(vm.pages());
    vm.remove_and_wait(second - 3..second + 3)?;
    vm.check_all_zeros(second - 3..second + 3)?;
    vm.check_contents([second - 4, second + 3])
}

fn removal_without_fault(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    vm.connect()?;
    let pages: Vec<u64> = (0..vm.pages()).collect();
    vm.check_in_chunks(&pages, "in order")?;
    vm.remove_and_wait(7..9)?;
    vm.check_all_zeros([8])
}

/// What one thread removes and another one reads, both before the handler has the descriptor.
fn remove_and_read(subject: &Subject, removed: u64, read: u64) -> Result<Vm<'_>, Stop> {
    let vm = Vm::new(subject)?;
    thread::scope(|scope| {
        let vm = &vm;
        let remover = Worker::start(scope, move || vm.remove(removed..removed + 1));
        remover.wait_until_asleep();
        event(format!(
            "a thread removes page {removed}, and waits until the event is read"
        ));
        let reader = Worker::start(scope, move || {
            // The read is concurrent with the removal of its page: it may return either content.
            let _ = crate::memory::load(vm.address(read));
            Ok(())
        });
        reader.wait_until_asleep();
        event(format!(
            "a thread waits for page {read}; the kernel returns this event first"
        ));
        vm.connect()?;
        expect("the handler reads the removal, and then fills the page: both threads continue");
        join_all(vec![remover, reader])
    })?;
    event("both threads have continued");
    Ok(vm)
}

fn fault_beside_removal(subject: &Subject) -> Verdict {
    let vm = remove_and_read(subject, 5, 9)?;
    vm.check_contents([9])
}

fn fault_before_removal(subject: &Subject) -> Verdict {
    let vm = remove_and_read(subject, 5, 5)?;
    vm.check_all_zeros([5])
}

fn many_removals(subject: &Subject) -> Verdict {
    const REMOVERS: u64 = 12;
    const READERS: u64 = 4;
    let vm = &Vm::new(subject)?;
    thread::scope(|scope| {
        let remove = |page| Worker::start(scope, move || vm.remove(page..page + 1));
        let read = |page| Worker::start(scope, move || vm.check_content(page));
        let removed = 0..REMOVERS;
        let mut workers: Vec<Worker<'_>> = removed.clone().map(remove).collect();
        workers.extend((REMOVERS..REMOVERS + READERS).map(read));
        workers.iter().for_each(Worker::wait_until_asleep);
        let text = range_text(&removed);
        event(format!(
            "{REMOVERS} threads remove {text}, {READERS} wait for other pages"
        ));
        vm.connect()?;
        expect("the handler reads all removals, then fills the pages: all threads continue");
        join_all(workers)?;
        vm.check_all_zeros(removed)
    })
}

/// Threads that remove pages in bursts, beside threads with pages of their own. Without the pauses
/// a right handler could get EAGAIN for ever: a removal is unread at each of its tries. A pause is
/// as long as its burst, which a slow handler prolongs.
fn removal_storm(subject: &Subject) -> Verdict {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 16;
    const BURST: usize = 16;
    let vm = &Vm::new(subject)?;
    vm.connect()?;
    let is_over = &AtomicBool::new(false);
    // Behind the pages of the others.
    let scratch = THREADS * ROUNDS + 1;
    thread::scope(|scope| {
        let storm = |number: u64| {
            Worker::start(scope, move || {
                let first = scratch + number * 8;
                while !is_over.load(Ordering::Relaxed) {
                    let begin = Instant::now();
                    (0..BURST).try_for_each(|_| vm.remove(first..first + 8))?;
                    thread::sleep(begin.elapsed().max(LOOK));
                }
                Ok(())
            })
        };
        let removers: Vec<Worker<'_>> = (0..2).map(storm).collect();
        let own = |number: u64| {
            Worker::start(scope, move || {
                (0..ROUNDS).try_for_each(|round| storm_round(vm, number, number * ROUNDS + round))
            })
        };
        let readers: Vec<Worker<'_>> = (0..THREADS).map(own).collect();
        let read = join_all(readers);
        is_over.store(true, Ordering::Relaxed);
        expect("the removing threads return");
        read.and(join_all(removers))
    })?;
    vm.check_all_zeros([scratch, scratch + 15])
}

/// One thread reads, writes and removes one page that no other thread accesses.
fn storm_round(vm: &Vm<'_>, thread: u64, page: u64) -> Verdict {
    expect(format!(
        "thread {thread} reads, writes and removes page {page} beside removals"
    ));
    vm.check_content(page)?;
    for value in [page + 1, page + 2] {
        vm.write(page, value);
        vm.check_value(page, value)?;
        vm.remove(page..page + 1)?;
        vm.check_zeros(page)?;
    }
    event(format!("thread {thread} is done with page {page}"));
    Ok(())
}
