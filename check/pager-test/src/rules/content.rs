//! A missing page gets the content that the memory file has for it.

use crate::memory::{WORDS, load, store_word};
use crate::rule::{Check, Needs, Rule, Subject, event, expect};
use crate::verdict::{Stop, Verdict};
use crate::vm::{Vm, second_begins};
use crate::worker::{Worker, join_all};
use fastrand::Rng;
use std::thread;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "content-in-order",
        requires: "each page has the content of its place in the memory file, read from the first \
                   to the last",
        origin: "the handshake: copy from offset + (address - base)",
        check: Check::Handler(Needs::OneVm, content_in_order),
    },
    Rule {
        name: "content-random",
        requires: "each page has its content in any order of the faults, because a handler that \
                   reads ahead may fill a page twice",
        origin: "the handshake: EEXIST means done",
        check: Check::Handler(Needs::OneVm, content_random),
    },
    Rule {
        name: "content-threads",
        requires: "each page has its content if many threads fault at once, because one read of \
                   the descriptor may return several events",
        origin: "userfaultfd(2); cloud-hypervisor#8756",
        check: Check::Handler(Needs::OneVm, content_threads),
    },
    Rule {
        name: "first-access-writes",
        requires: "a write to a missing page keeps the rest of the page's content",
        origin: "userfaultfd(2): UFFD_PAGEFAULT_FLAG_WRITE",
        check: Check::Handler(Needs::OneVm, first_access_writes),
    },
    Rule {
        name: "two-regions",
        requires: "the page of an address comes from its own region's offset, also if the second \
                   region is at lower addresses",
        origin: "the handshake: offsets add up over the regions",
        check: Check::Handler(Needs::OneVm, two_regions),
    },
];

fn content_in_order(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    vm.connect()?;
    let pages: Vec<u64> = (0..vm.pages()).collect();
    vm.check_in_chunks(&pages, "in order")
}

fn shuffled(vm: &Vm<'_>) -> Vec<u64> {
    let mut pages: Vec<u64> = (0..vm.pages()).collect();
    Rng::with_seed(1).shuffle(&mut pages);
    pages
}

fn content_random(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    vm.connect()?;
    vm.check_in_chunks(&shuffled(&vm), "in random order")
}

/// The first faults of all threads are in the queue before the handler has the descriptor.
fn content_threads(subject: &Subject) -> Verdict {
    const THREADS: usize = 16;
    let vm = &Vm::new(subject)?;
    let pages = shuffled(vm);
    let share = pages.len().div_ceil(THREADS);
    thread::scope(|scope| {
        let shares = pages.chunks(share).zip(1..);
        let mut workers = Vec::new();
        for (pages, number) in shares {
            workers.push(Worker::start(scope, move || {
                vm.check_content(pages[0])?;
                vm.check_in_chunks(pages, &format!("by thread {number}"))
            }));
        }
        workers.iter().for_each(Worker::wait_until_asleep);
        event(format!("{THREADS} threads wait for {THREADS} pages"));
        vm.connect()?;
        expect("all threads read their pages");
        join_all(workers)
    })
}

fn first_access_writes(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    vm.connect()?;
    for page in [0, 7, vm.pages() - 1] {
        let (value, index) = (0x1234_5678 + page, WORDS / 3);
        expect(format!("a write to the missing page {page} returns"));
        store_word(vm.address(page), index, value);
        let mut wanted = vm.image().page(page);
        wanted[index] = value;
        if load(vm.address(page)) != wanted {
            return Err(Stop::failed(
                format!("page {page} has the written word, and its content around it"),
                crate::image::describe(&load(vm.address(page))),
            ));
        }
        event(format!("page {page} is whole around the written word"));
    }
    Ok(())
}

fn two_regions(subject: &Subject) -> Verdict {
    let vm = Vm::with_two_regions(subject)?;
    vm.connect()?;
    let (second, end) = (second_begins(vm.pages()), vm.pages());
    vm.check_contents([
        0,
        second - 1,
        second,
        end - 1,
        second / 2,
        (second + end) / 2,
    ])
}
