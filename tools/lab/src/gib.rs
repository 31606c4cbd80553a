//! What the size of a huge page costs the host: 1 GiB of guest memory in 512 huge pages of 2 MiB,
//! or in one of 1 GiB.
//!
//! | id | the time, 2 MiB pages / 1 GiB page |
//! |---|---|
//! | `thp.gib.map` | of the faults that map all of it, with its pages in memory |
//! | `thp.gib.call` | of the notifier call that unmaps all of it |
//! | `pml.gib.on` | to turn the log on: each 2 MiB leaf loses W; the 1 GiB leaf is split first |
//! | `pml.gib.off` | to turn it off: the leaves become one again |
//!
//! Both VMs are the same but for the size of their pages. No vCPU runs, so no call waits for one.
//! The machine needs both reserves, 512 pages and one page. Without them, the results are skipped.

use crate::experiment::{LabError, LabResult, Options};
use crate::fixture::resident;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, collected, paired};
use lacuna::Builder as _;
use lacuna::dirty::{HugeLeaves, Initially, Logging, set_logging_everywhere};
use lacuna::memory::MemoryKind;
use lacuna::soft::{Vm, VmBuilder};
use lacuna::{Arch, Gfn, GfnRange, MemorySlots as _};
use lacuna_addr::{Access, Level};
use lacuna_soft::{Arm64, Ept, Format, Mmu, RmapWalk};
use std::sync::Arc;
use std::time::{Duration, Instant};

const GIB: u64 = Level::L1G.pages();
/// The pages of each arm. The second is the null.
const ARMS: [MemoryKind; 3] = [
    MemoryKind::Hugetlbfs,
    MemoryKind::Hugetlbfs,
    MemoryKind::Hugetlbfs1G,
];
const SMALL: usize = 0;
const NULL: usize = 1;
const GIB_PAGE: usize = 2;

const LAZY: Logging = Logging::On {
    initially: Initially::Clean,
    huge: HugeLeaves::Lazy,
};

/// The measured steps of a round, in this order: each begins where the last one ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Map,
    LogOn,
    LogOff,
    Call,
}

/// Every step and the end of its result's id.
const STEPS: [(Step, &str); 4] = [
    (Step::Map, "map"),
    (Step::LogOn, "on"),
    (Step::LogOff, "off"),
    (Step::Call, "call"),
];

/// Measures `EXPERIMENT.gib.STEP` for each of `steps`.
///
/// # Errors
/// A step failed, or the leaves are not those of the arm.
pub fn measure(
    options: &Options,
    report: &mut Report,
    experiment: &str,
    steps: &[Step],
) -> LabResult {
    let ids = STEPS.iter().filter(|(step, _)| steps.contains(step));
    let ids = ids.map(|(step, name)| (*step as usize, format!("{experiment}.gib.{name}")));
    let vm = |kind| {
        let builder = VmBuilder {
            arch: options.arch,
            memory_kind: kind,
            ..resident(1024, 1)
        };
        builder.build()
    };
    let vms = match (vm(ARMS[SMALL]), vm(ARMS[GIB_PAGE])) {
        (Ok(small), Ok(gib)) => [Arc::clone(&small), small, gib],
        (Err(why), _) | (_, Err(why)) => {
            ids.for_each(|(_, id)| report.skip(id, &why));
            return Ok(());
        }
    };
    let rounds: Rounds = if options.quick { 2 } else { 31 }.into();
    let runs = match options.arch {
        Arch::Arm64 => runs::<Arm64>(&vms, rounds)?,
        _ => runs::<Ept>(&vms, rounds)?,
    };
    for (step, id) in ids {
        let [small, null, gib] = [SMALL, NULL, GIB_PAGE].map(|arm| &runs[arm][step][..]);
        let us = |times: &[f64]| Summary::of(times).scaled(1e6);
        report.push(
            Measurement::new(id, "x", Better::Higher, paired(gib, small))
                .param("bytes", GIB << 12)
                .arm("2m_us", us(small))
                .arm("1g_us", us(gib))
                .arm("null", paired(null, small)),
        );
    }
    Ok(())
}

/// The times of all steps of each arm, in seconds.
fn runs<F: Format>(vms: &[Arc<Vm>; 3], rounds: Rounds) -> LabResult<Vec<[Vec<f64>; 4]>> {
    collected(rounds, || {
        let round = |vm: &Arc<Vm>| Ok(round::<F>(vm)?.map(|time| time.as_secs_f64()));
        vms.iter().map(round).collect::<LabResult<Vec<_>>>()
    })
}

/// Maps the memory, logs its writes, ends the log, and unmaps it.
fn round<F: Format>(vm: &Arc<Vm>) -> LabResult<[Duration; 4]> {
    let mmu: &Arc<Mmu<F>> = F::of(vm.mmu()).expect("tables of the guest's processor");
    let gfns = vm.memory_slots()[0].gfns;
    let map = timed(|| fault_in(mmu, gfns))?;
    let size = leaf_size(vm)?;
    let on = timed(|| Ok(set_logging_everywhere(&**vm, LAZY)?))?;
    let logged = vm.mmu().counts().of(Level::L2M);
    let off = timed(|| Ok(set_logging_everywhere(&**vm, Logging::Off)?))?;
    if (leaf_size(vm)?, logged) != (size, GIB / Level::L2M.pages()) {
        let text = format!("{logged} leaves of 2 MiB were logged, and not all became one again");
        return Err(LabError::Guest(text));
    }
    let slots = vm.mmu().slots();
    let slot = slots.find(gfns.start()).expect("its memory");
    let call = timed(|| {
        mmu.invalidate_as(RmapWalk::PerLevel, slot.backing);
        Ok(())
    })?;
    Ok([map, on, off, call])
}

/// Maps `gfns`: a fault for each leaf.
fn fault_in<F: Format>(mmu: &Arc<Mmu<F>>, gfns: GfnRange) -> LabResult {
    let mut vcpu = mmu.vcpu_mmu()?;
    let mut next = Some(gfns.start());
    while let Some(gfn) = next.filter(|gfn| gfns.contains(*gfn)) {
        // The leaves are counted afterwards.
        let _ = mmu.fault(&mut vcpu, gfn, Access::Write);
        vcpu.retired();
        let pages = match mmu.counts().of(Level::L1G) {
            0 => Level::L2M.pages(),
            _ => GIB,
        };
        next = Gfn::new(gfn.get() + pages);
    }
    Ok(())
}

/// The size of the leaves that map all of the memory.
fn leaf_size(vm: &Vm) -> LabResult<Level> {
    let leaves = vm.mmu().counts().leaves;
    match leaves {
        [0, 512, 0] => Ok(Level::L2M),
        [0, 0, 1] => Ok(Level::L1G),
        _ => Err(LabError::Guest(format!(
            "leaves of 4 KiB, 2 MiB, 1 GiB: {leaves:?}"
        ))),
    }
}

fn timed(step: impl FnOnce() -> LabResult) -> LabResult<Duration> {
    let began = Instant::now();
    step()?;
    Ok(began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with free huge pages of both sizes the results are measured.
    #[test]
    fn each_step_is_measured_or_skipped() {
        for arch in [Arch::X86_64, Arch::Arm64] {
            let mut report = Report::new("a test");
            let options = crate::experiment::tests::options(arch, Vec::new());
            let steps = STEPS.map(|(step, _)| step);
            measure(&options, &mut report, "thp", &steps).unwrap();
            let measured = report.results.iter().map(|result| &result.id);
            let skipped = report.skipped.iter().map(|result| &result.id);
            let ids: Vec<_> = measured.chain(skipped).collect();
            assert_eq!(
                ids,
                STEPS.map(|(_, name)| format!("thp.gib.{name}")).each_ref()
            );
        }
    }
}
