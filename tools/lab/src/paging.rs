//! `lacuna lab paging`: a guest starts without its memory, and gets it page by page.
//!
//! It is the demand-paging test of the 2023 series: each vCPU touches its own share of the memory
//! once, or all touch the same. The arms differ in how a missing page is provided:
//!
//! ```text
//! queue_N_readers  vCPU sleeps ─► one queue for all vCPUs ─► one of N threads provides ─► wake-up
//! queue_each       vCPU sleeps ─► a queue for each vCPU ─► its reader provides ─► wake-up
//! exits            vCPU exits, its own thread provides the page, and enters it again
//! exits_apf        vCPU exits, the guest gets the event and runs; another thread provides the page
//! ```
//! All copy the same page. For Linux memory each arm uses UFFDIO_COPY. The queue is the kernel's
//! (`kernel_queue`): one userfaultfd with N readers, or one for each vCPU. Exits provide by
//! [`MissingMemory::provide`]. For the pool, the queue is a list of the lab's own (`queue`), and
//! all arms provide by that call.
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

mod arms;
mod crowd;
mod fixture;
mod kernel_queue;
mod kvm;
mod machine;
pub mod processes;
mod queue;
mod wake_up;

use crate::experiment::{LabResult, Options};
use crate::report::Progress;
use crate::result::Report;
use fixture::Work;
#[cfg(doc)]
use lacuna::MissingMemory;
use lacuna::PAGE_SIZE;
use lacuna::memory::MemoryKind;

/// The content of all pages: the guest expects zeros. All arms copy from here.
static PAGES: [[u8; PAGE_SIZE]; MOST_AT_ONCE] = [[0; PAGE_SIZE]; MOST_AT_ONCE];
/// The most pages provided at once: 2 MiB.
const MOST_AT_ONCE: usize = 512;

/// The measured numbers of vCPUs, and thousand pages a second in the 2023 series: through one
/// userfaultfd, and by exits.
const SERIES: [(usize, f64, f64); 5] = [
    (1, 150.0, 340.0),
    (2, 191.0, 477.0),
    (4, 210.0, 809.0),
    (8, 155.0, 1239.0),
    (16, 130.0, 1595.0),
];
/// Where [`SERIES`] is from.
const SOURCE: &str = "KVM_CAP_MEM_FAULT_NOWAIT, kvm list, 2023-02-15; KVM, 256 cores";

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    let progress = Progress::new(
        2 * (arms::STEPS + crowd::STEPS) + kvm::STEPS,
        options.verbosity,
    );
    report.say(
        "paging: memory that was never provided. A vCPU that needs a page waits in a queue for a \
         reader's answer, or it exits, and its own thread provides the page.",
    );
    for kind in [MemoryKind::Linux, MemoryKind::Budget] {
        if let Some(why) = fixture::unavailable(kind, Work::new(options.arch, 1, 512)) {
            report.skip(format!("{}.*", fixture::prefix(kind)), why);
            continue;
        }
        if options.wants("arms") {
            arms::measure(kind, options, report, &progress)?;
        }
        if options.wants_x86("crowd", crowd::ids(kind), report) {
            crowd::measure(kind, options, report, &progress)?;
        }
    }
    if options.wants("arms") {
        arms::measure_huge(options, report, &progress)?;
    }
    if options.wants_x86("kvm", kvm::ids(), report) {
        kvm::measure(options, report, &progress)?;
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["arms", "crowd", "kvm"];
