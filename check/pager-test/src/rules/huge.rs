//! Huge pages: transparent ones beside missing pages, and pages of hugetlbfs.

use crate::memory::{BLOCK, HeldHugePage, Region, store};
use crate::queue::LOOK;
use crate::rule::{Check, Needs, Rule, Subject, event, expect};
use crate::verdict::{Stop, Verdict};
use crate::vm::Vm;
use crate::worker::{Worker, join_all};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs;
use std::thread;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "huge-page-neighbours",
        requires: "beside and within a transparent huge page, a fault or a removal changes its own \
                   page alone",
        origin: "cloud-hypervisor#8663: zero neighbours",
        check: Check::Handler(Needs::OneVm, huge_page_neighbours),
    },
    Rule {
        name: "hugetlb-content",
        requires: "a region of huge pages is filled in whole pages of page_size bytes",
        origin: "firecracker#6064; the handshake: page_size",
        check: Check::Handler(Needs::OneVm, hugetlb_content),
    },
    Rule {
        name: "hugetlb-removed",
        requires: "a removed huge page reads zeros; UFFDIO_ZEROPAGE does not make one, so the \
                   handler copies zeros",
        origin: "userfaultfd(2): UFFDIO_ZEROPAGE",
        check: Check::Handler(Needs::OneVm, hugetlb_removed),
    },
    Rule {
        name: "hugetlb-exhausted",
        requires: "if a fill fails because no huge page is free, the thread waits, and is served \
                   when one is free",
        origin: "ioctl_userfaultfd(2): ENOMEM; some kernels report EEXIST",
        check: Check::Handler(Needs::OneVm, hugetlb_exhausted),
    },
];

const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// The most free huge pages that a rule takes away from other programs.
const TAKEN: usize = 64;

fn huge_page_neighbours(subject: &Subject) -> Verdict {
    let region = Region::map(subject.image.pages()).map_err(Stop::host("map memory"))?;
    region
        .advise_huge()
        .map_err(Stop::host("use transparent huge pages"))?;
    let value = 0x4855_4745;
    for page in BLOCK..2 * BLOCK {
        store(region.address(page).expect("in the region"), value);
    }
    if !has_huge_page() {
        return Err(Stop::Skipped(
            "the kernel gives no transparent huge page".into(),
        ));
    }
    event("the second 2 MiB are one huge page, the others are missing");
    let vm = Vm::of(subject, vec![region])?;
    vm.connect()?;
    vm.check_contents([100, 99, 101, BLOCK - 1])?;
    vm.remove_and_wait(BLOCK + 5..BLOCK + 6)?;
    vm.check_all_zeros([BLOCK + 5])?;
    vm.remove_and_wait(100..101)?;
    vm.check_all_zeros([100])?;
    vm.check_contents([99, 101, 0, 102, BLOCK - 1])?;
    [BLOCK, BLOCK + 4, BLOCK + 6, 2 * BLOCK - 1]
        .into_iter()
        .try_for_each(|page| vm.check_value(page, value))
}

/// Whether this process has a transparent huge page of private memory.
fn has_huge_page() -> bool {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let mut lines = rollup
        .lines()
        .filter_map(|line| line.strip_prefix("AnonHugePages:"));
    lines.any(|line| line.trim() != "0 kB")
}

fn free_huge_pages() -> u64 {
    let text = fs::read_to_string(FREE).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// A VM of huge pages of hugetlbfs.
fn of_huge_pages(subject: &Subject) -> Result<Vm<'_>, Stop> {
    if free_huge_pages() < 2 {
        let reason = "2 free huge pages are needed: echo 2 > /proc/sys/vm/nr_hugepages";
        return Err(Stop::Skipped(reason.into()));
    }
    let region = Region::map_huge(subject.image.pages()).map_err(Stop::host("map huge pages"))?;
    Vm::of(subject, vec![region])
}

fn hugetlb_content(subject: &Subject) -> Verdict {
    let vm = of_huge_pages(subject)?;
    vm.connect()?;
    vm.check_contents([BLOCK + 200, BLOCK, 2 * BLOCK - 1, 3, 0, BLOCK - 1])
}

fn hugetlb_removed(subject: &Subject) -> Verdict {
    let vm = of_huge_pages(subject)?;
    vm.connect()?;
    vm.check_contents([3])?;
    vm.remove_and_wait(0..BLOCK)?;
    vm.check_all_zeros([3, 0, BLOCK - 1])?;
    vm.check_contents([BLOCK])
}

/// Linux 6.18 reports EEXIST in place of ENOMEM: a right handler wakes the thread, whose next fault
/// follows at once.
fn hugetlb_exhausted(subject: &Subject) -> Verdict {
    const PAGE: u64 = 3;
    let vm = &of_huge_pages(subject)?;
    // The kernel may also make pages beyond its reserve (nr_overcommit_hugepages).
    let mut held = Vec::new();
    while let Ok(page) = HeldHugePage::take() {
        held.push(page);
        if held.len() > TAKEN {
            let reason =
                format!("more than {TAKEN} huge pages are free: other programs may need them");
            return Err(Stop::Skipped(reason));
        }
    }
    event(format!(
        "the suite holds all {} free huge pages",
        held.len()
    ));
    thread::scope(|scope| {
        let first = Worker::start(scope, || vm.check_content(PAGE));
        first.wait_until_asleep();
        vm.connect()?;
        expect("the handler reads the fault");
        wait_until_read(vm);
        // The handler reads this fault after its first try to fill the other page.
        let second = Worker::start(scope, || vm.check_content(BLOCK + PAGE));
        second.wait_until_asleep();
        expect("the handler reads the second fault");
        wait_until_read(vm);
        held.clear();
        event("the suite has freed them");
        expect("both threads read their pages");
        join_all(vec![first, second])
    })
}

/// Waits until the handler has read all events.
fn wait_until_read(vm: &Vm<'_>) {
    let mut fds = [PollFd::new(vm.uffd(), PollFlags::IN)];
    let now = Timespec::default();
    while poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0) {
        thread::sleep(LOOK);
        fds[0].clear_revents();
    }
}
