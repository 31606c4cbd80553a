//! Missing memory of a guest on `/dev/kvm`: exits, against vCPUs that sleep in a userfaultfd.
//!
//! ```text
//! exits            fault ─► userfaultfd ─► our reader: kick ─► KVM_RUN ends ─► exit
//!                                         the vCPU's thread provides the page, and enters again
//! queue_N_readers  fault ─► userfaultfd ─► one of N readers of the lab copies the page ─► wake-up
//! source           fault ─► userfaultfd ─► our reader asks the page source ─► wake-up
//! ```
//! KVM has no exit for memory that a userfaultfd fills, so the backend makes one of a fault's event
//! and a kick. An exit here takes the same two wake-ups as a queue, and a signal and an entry more.
//! `source` differs from `exits` in the slots' flag alone. The readers of `queue_N_readers` are the
//! lab's, as for Linux memory on soft. They copy the page and do nothing else.

use super::MOST_AT_ONCE;
use super::arms::{EXITS, ONE_READER, Runs};
use super::fixture::{Arm, Fixture, Work};
use crate::experiment::{LabResult, Options};
use crate::report::Progress;
use crate::result::Report;
use lacuna::kvm::{Vm, VmBuilder};
use lacuna::memory::MemoryKind;
use lacuna::{Arch, Builder as _};

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2 * VCPUS.len() as u64;

const VCPUS: [usize; 2] = [1, 2];

/// The guest's timer tick, in microseconds. It is long, because a tick is expensive where KVM
/// emulates the guest's kernel.
const TICK_US: u64 = 100_000;

/// The second is the null, and the last one is for several vCPUs.
const ARMS: [Arm; 5] = [
    Arm::Exits,
    Arm::Exits,
    Arm::Queue(1),
    Arm::Source,
    Arm::Queue(2),
];
const SOURCE: usize = 3;

fn id(other: &str, vcpus: usize) -> String {
    format!("paging.kvm.exit_vs_{other}.{vcpus}vcpu")
}

fn batch_id(vcpus: usize) -> String {
    format!("{}_batch", id("queue", vcpus))
}

/// The ids of its results.
pub fn ids() -> impl Iterator<Item = String> {
    let of = |vcpus| [id("queue", vcpus), id("source", vcpus), batch_id(vcpus)];
    VCPUS.into_iter().flat_map(of)
}

fn fixture(work: Work) -> Fixture<Vm> {
    let builder = VmBuilder {
        memory_kind: MemoryKind::Linux,
        vcpus: work.vcpus,
        command_line: format!("{} tick_us={TICK_US}", work.words()),
        ..VmBuilder::new(work.memory(), work.memory())
    };
    let line = builder.full_command_line();
    let make = move |apf, source| {
        let source = Some(source);
        let builder = VmBuilder {
            apf,
            source,
            ..builder.clone()
        };
        Ok(builder.build()?)
    };
    Fixture::of(Box::new(make), MemoryKind::Linux, line, work)
}

/// `paging.kvm.*`; skipped without a usable `/dev/kvm`.
pub fn measure(options: &Options, report: &mut Report, progress: &Progress) -> LabResult {
    if let Err(why) = lacuna::kvm::available() {
        ids().for_each(|id| report.skip(id, &why));
        return Ok(());
    }
    // A VM takes some tenths of a second to boot here.
    let (rounds, pages) = if options.quick { (1, 512) } else { (9, 8192) };
    for vcpus in VCPUS {
        progress.step(format!("/dev/kvm, missing pages, {vcpus} vCPUs"))?;
        let work = Work::new(Arch::X86_64, vcpus, pages);
        let arms = &ARMS[..SOURCE + vcpus];
        let runs = Runs::measure(&fixture(work), arms, rounds)?;
        for (other, queue) in [("queue", ONE_READER), ("source", SOURCE)] {
            report.push(runs.against(id(other, vcpus), queue));
        }
        report.say(format!(
            "/dev/kvm, {vcpus} vCPUs: {} missing pages a second by exits, {} through one \
             userfaultfd with one reader, and {} by a page source without exits.",
            runs.rate(EXITS),
            runs.rate(ONE_READER),
            runs.rate(SOURCE),
        ));
        progress.step(format!("/dev/kvm, {vcpus} vCPUs, 512 pages at once"))?;
        let work = Work {
            pages: 8 * pages,
            batch: MOST_AT_ONCE,
            ..work
        };
        let arms = &ARMS[..=ONE_READER];
        let runs = Runs::measure(&fixture(work), arms, rounds)?;
        report.push(runs.against(batch_id(vcpus), ONE_READER));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    /// Single pages and runs of pages arrive in every arm that provides them.
    #[test]
    fn every_arm_touches_all_pages() {
        needs_guests();
        if let Err(why) = lacuna::kvm::available() {
            lacuna_skip::skip_test(why.to_string());
        }
        for (batch, arms) in [(1, &ARMS[..]), (MOST_AT_ONCE, &ARMS[..=ONE_READER])] {
            let work = Work::new(Arch::X86_64, 2, 1024);
            let fixture = fixture(Work { batch, ..work });
            for arm in arms {
                assert!(fixture.rate(*arm).unwrap() > 0.0, "{arm:?}");
            }
        }
    }
}
