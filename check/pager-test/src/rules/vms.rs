//! A handler that serves several VMs keeps serving the others.

use crate::memory::load;
use crate::rule::{Check, Line, Needs, Rule, Subject, event, expect};
use crate::verdict::Verdict;
use crate::vm::{Connection, Vm};
use crate::worker::{Worker, join_all};
use fastrand::Rng;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "two-vms-at-once",
        requires: "two VMs are served at the same time, and a removal in one changes no page of \
                   the other",
        origin: "cloud-hypervisor#8644: one manager for several VMs",
        check: Check::Handler(Needs::SeveralVms, two_vms_at_once),
    },
    Rule {
        name: "silent-client",
        requires: "a connection without a message stops no other VM",
        origin: "cloud-hypervisor#8644: one manager for several VMs",
        check: Check::Handler(Needs::SeveralVms, silent_client),
    },
    Rule {
        name: "killed-vm",
        requires: "after a VM was killed in the middle of its faults the handler serves the next \
                   one, although no event reports the death and fills fail with ESRCH",
        origin: "fcvm#744",
        check: Check::Handler(Needs::KilledVms, next_vm),
    },
];

/// Checks that a new VM is served.
pub(crate) fn next_vm(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    event("the next VM");
    vm.connect()?;
    vm.check_contents([1, 0])
}

fn two_vms_at_once(subject: &Subject) -> Verdict {
    let (one, other) = (Vm::new(subject)?, Vm::new(subject)?);
    one.connect()?;
    other.connect()?;
    for page in 0..16 {
        one.check_contents([page])?;
        other.check_contents([page])?;
    }
    one.remove_and_wait(0..32)?;
    one.check_all_zeros([0, 31])?;
    other.check_contents([0, 31])
}

fn silent_client(subject: &Subject) -> Verdict {
    let silent = Connection::open(subject)?;
    let served = next_vm(subject);
    drop(silent);
    served
}

/// The process of a VM whose threads fault and remove pages until the suite kills it.
pub(crate) fn be_killed(subject: &Subject) -> Verdict {
    const THREADS: u64 = 8;
    const ENOUGH: u64 = 200;
    let vm = &Vm::new(subject)?;
    vm.connect()?;
    expect(format!("{ENOUGH} pages are filled"));
    let read = &AtomicU64::new(0);
    thread::scope(|scope| {
        let start = |seed| {
            Worker::start(scope, move || {
                let mut random = Rng::with_seed(seed);
                loop {
                    let page = random.u64(..vm.pages());
                    let _ = load(vm.address(page));
                    vm.remove(page..page + 1)?;
                    if read.fetch_add(1, Ordering::Relaxed) == ENOUGH {
                        // The suite kills this process when it reads the line.
                        Line::Pass.print();
                    }
                }
            })
        };
        join_all((0..THREADS).map(start).collect())
    })
}
