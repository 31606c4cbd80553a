//! `lacuna lab paging`: a guest starts without its memory, and gets it page by page.
//!
//! It is [`crate::demand_paging`] with lists of options, the arms, which take turns:
//!
//! ```text
//! queue_N_readers  vCPU sleeps ─► one queue for all vCPUs ─► one of N threads provides ─► wake-up
//! queue_each       vCPU sleeps ─► a queue for each vCPU ─► its reader provides ─► wake-up
//! exits            vCPU exits, its own thread provides the page, and enters it again
//! exits_apf        vCPU exits, the guest gets the event and runs; another thread provides the page
//! source           vCPU sleeps; the backend asks a page source, which answers at once
//! ```
//! All copy the same page. For Linux memory each arm uses UFFDIO_COPY. Exits provide by
//! [`MissingMemory::provide`]; so do the readers of the pool's lists.
//!
//! KVM has no exit for memory that a userfaultfd fills, so that backend makes one of a fault's
//! event and a kick. An exit there takes the same two wake-ups as a queue, and a signal and an
//! entry more. `source` differs from `exits` in the slots' flag alone. The readers of a queue are
//! the lab's; they copy the page and do nothing else.
//!
//! | id | what is compared |
//! |---|---|
//! | `paging.exit_vs_queue.Nvcpu` | pages a second, exits / one queue with one reader |
//! | `paging.exit_vs_best_queue.Nvcpu` | the same against the best number of readers |
//! | `paging.exit_vs_best_queue.Nvcpu.exitcost` | the same, the exit of each page charged |
//! | `paging.wake_up_us` | the wake-up time of an idle thread in the same rounds |
//! | `paging.exit_vs_queue.Nvcpu_same` | all vCPUs touch the same pages |
//! | `paging.exit_vs_queue.Nvcpu_batch` | 512 pages are provided for each fault |
//! | `paging.hugetlb.exit_vs_queue.Nvcpu` | the same for huge pages, which one copy fills |
//! | `paging.scaling_2vcpu` | pages a second by exits, two vCPUs / two VMs in two processes |
//! | `paging.crowd_loss_points.Nvcpu` | loss of N vCPUs on fewer cores, less the threads' loss |
//! | `paging.kvm.exit_vs_queue.Nvcpu` | the first, on `/dev/kvm`; and `.Nvcpu_batch` |
//! | `paging.kvm.exit_vs_source.Nvcpu` | exits / vCPUs that sleep until a page source answers |
//!
//! All but `paging.hugetlb` and `paging.kvm` are measured twice: for Linux memory, which a
//! userfaultfd fills, and for the soft backend's own pool of frames, with ids that begin with
//! `paging.pool`.

pub use arms::first_look;
pub(crate) use arms::{SERIES, SOURCE, charged};

mod arms;
mod crowd;
mod wake_up;

use crate::demand_paging::{DemandPaging, unavailable};
use crate::experiment::{LabResult, Options};
use crate::options::GuestOptions;
use crate::result::Report;
use crate::size::Size;
#[cfg(doc)]
use lacuna::MissingMemory;
use lacuna::memory::MemoryKind;
use lacuna::{Arch, Backend, PAGE_SIZE};

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    options.begin(2 * (arms::STEPS + crowd::STEPS) + arms::KVM_STEPS);
    report.say(
        "paging: memory that was never provided. A vCPU that needs a page waits in a queue for a \
         reader's answer, or it exits, and its own thread provides the page.",
    );
    for kind in [MemoryKind::Linux, MemoryKind::Budget] {
        let base = work(options.arch, kind, 1, 512);
        if let Some(why) = unavailable(&base) {
            report.skip(format!("{}.*", prefix(&base)), why);
            continue;
        }
        if options.wants("arms") {
            arms::measure(kind, options, report)?;
        }
        if options.wants_x86("crowd", crowd::ids(kind), report) {
            crowd::measure(kind, options, report)?;
        }
    }
    if options.wants("arms") {
        arms::measure_huge(options, report)?;
    }
    if options.wants_x86("kvm", arms::kvm_ids(options), report) {
        arms::measure_kvm(options, report)?;
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["arms", "crowd", "kvm"];

/// A guest whose vCPUs have shares of `pages` pages.
fn work(arch: Arch, memory_kind: MemoryKind, vcpus: usize, pages: u64) -> DemandPaging {
    let base = DemandPaging::default();
    DemandPaging {
        guest: GuestOptions {
            arch,
            memory_kind,
            vcpus,
            bytes: Size(pages / vcpus as u64 * PAGE_SIZE as u64),
            ..base.guest
        },
        ..base
    }
}

/// The beginning of the result ids for such guests.
const fn prefix(work: &DemandPaging) -> &'static str {
    match (work.guest.backend, work.guest.memory_kind) {
        (Backend::Kvm, _) => "paging.kvm",
        (_, MemoryKind::Budget) => "paging.pool",
        (_, MemoryKind::Linux | MemoryKind::Shared) => "paging",
        (_, MemoryKind::Hugetlbfs | MemoryKind::Hugetlbfs1G) => "paging.hugetlb",
    }
}
