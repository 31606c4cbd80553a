//! Each thread that waits for a page continues.

use crate::rule::{Check, Needs, Rule, Subject, event, expect};
use crate::verdict::{Stop, Verdict};
use crate::vm::Vm;
use crate::worker::{Worker, join_all};
use std::thread;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "filled-by-another",
        requires: "if UFFDIO_COPY fails with EEXIST, the handler calls UFFDIO_WAKE, because the \
                   page may be in place while its threads still sleep",
        origin: "crosvm's vmm-swap, repaired there; the handshake: EEXIST means done, then wake",
        check: Check::Handler(Needs::OneVm, filled_by_another),
    },
    Rule {
        name: "one-page-many-threads",
        requires: "all threads that wait for one page continue, whatever number of events they \
                   have caused",
        origin: "userfaultfd(2): each thread has its own event",
        check: Check::Handler(Needs::OneVm, one_page_many_threads),
    },
];

/// The pages arrive before the handler has the descriptor, and wake no thread.
fn filled_by_another(subject: &Subject) -> Verdict {
    const THREADS: u64 = 8;
    let vm = &Vm::new(subject)?;
    thread::scope(|scope| {
        let start = |page| Worker::start(scope, move || vm.check_content(page));
        let workers: Vec<Worker<'_>> = (0..THREADS).map(start).collect();
        workers.iter().for_each(Worker::wait_until_asleep);
        event(format!(
            "{THREADS} threads wait for pages 0 to {}",
            THREADS - 1
        ));
        for page in 0..THREADS {
            vm.fill_without_wake(page)
                .map_err(Stop::host("fill a page"))?;
        }
        event("the VMM has filled these pages itself, and has woken no thread");
        vm.connect()?;
        expect("the handler gets EEXIST for each of these pages and wakes its thread");
        join_all(workers)
    })
}

fn one_page_many_threads(subject: &Subject) -> Verdict {
    const THREADS: u64 = 16;
    const PAGE: u64 = 5;
    let vm = &Vm::new(subject)?;
    thread::scope(|scope| {
        let start = |_| Worker::start(scope, || vm.check_content(PAGE));
        let workers: Vec<Worker<'_>> = (0..THREADS).map(start).collect();
        workers.iter().for_each(Worker::wait_until_asleep);
        event(format!("{THREADS} threads wait for page {PAGE}"));
        vm.connect()?;
        expect("all of them read the page");
        join_all(workers)?;
        vm.check_contents([PAGE + 1])
    })
}
