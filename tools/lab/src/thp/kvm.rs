//! Takes 2 MiB from a guest on `/dev/kvm`, as its balloon does: one huge page, or 512 small ones.
//!
//! The call is [`Balloon::discard`]: `MADV_DONTNEED`, for which Linux's notifier makes KVM remove
//! its mappings, and the work of this library around it. Two VMs live side by side. They differ in
//! Linux's huge pages for their memory, and the guest maps its memory by 2 MiB pages in both.
//!
//! ```text
//! slice   as many memory slots as the arm has
//! call    the guest touches all of its memory ─ it pauses ─ discard, timed ─ discard, timed
//! ```
//! The second discard finds nothing: its time is the library's own work and an empty
//! `MADV_DONTNEED`. In the arms `running` the guest does not pause: a vCPU that touches the block
//! is made to leave the guest, and its faults wait for the call.
//!
//! A call counts if it has freed a huge page, or no huge page. It does not count if a guest that
//! should pause has run meanwhile.

use super::medians;
use crate::experiment::{LabError, LabResult, Options};
use crate::fixture::on_kvm;
use crate::host_info::kib;
use crate::result::{Better, Measurement, Report};
use crate::session::{Session, image, on};
use crate::stats::{Summary, measures, paired};
use lacuna::kvm::{Vm, VmBuilder};
use lacuna::memory::{Balloon, HugePages, SlotFlags, SlotId};
use lacuna::{Arch, Gfn, GfnRange, MemorySlots as _, PageCount, Vm as _};
use lacuna_addr::Level;
use lacuna_guest::status::Kind;
use std::fs::read_to_string;
use std::time::{Duration, Instant};

const MEMORY: PageCount = PageCount::from_bytes(32 << 20);
/// The first page of the other slots, above 4 GiB. Each has one page.
const OTHERS: u64 = 1 << 22;
/// The guest's tick, its time slice and the time between two looks of a paused thread, in
/// microseconds.
const TICK_US: u64 = 4000;
/// Accesses to a page of the guest, on average, before a call. Half of them write: 3 pages in 10000
/// are not written.
const ACCESSES: u64 = 16;
const REFILL: Duration = Duration::from_secs(20);

/// The guest's only vCPU during a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Vcpu {
    Paused,
    Running,
}

/// What two arms have in common: the end of an id, the slots, and the vCPU.
type Case = (&'static str, u16, Vcpu);
const CASES: [Case; 5] = [
    ("1slot", 1, Vcpu::Paused),
    ("8slots", 8, Vcpu::Paused),
    ("64slots", 64, Vcpu::Paused),
    ("512slots", 512, Vcpu::Paused),
    ("running", 1, Vcpu::Running),
];
const FIRST: usize = 0;
const MANY: usize = 3;
const HUGE: usize = 0;
const SMALL: usize = 1;
/// The names of the two VMs.
const SIZES: [&str; 2] = ["huge", "small"];
/// The null comes after all cases.
const NULL: usize = 2 * CASES.len();

fn ratio_id(case: Case) -> String {
    format!("thp.kvm.small_vs_huge.{}", case.0)
}

fn growth_id(size: usize) -> String {
    format!("thp.kvm.slots_growth_512.{}", SIZES[size])
}

/// The ids of its results.
pub fn ids() -> impl Iterator<Item = String> {
    let ratios = CASES.into_iter().map(ratio_id);
    ratios.chain([HUGE, SMALL].map(growth_id))
}

/// `thp.kvm.*`; skipped without a usable `/dev/kvm`.
///
/// # Errors
/// A VM could not be made, or its guest failed.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    if let Err(why) = lacuna::kvm::available() {
        ids().for_each(|id| report.skip(id, &why));
        return Ok(());
    }
    let (rounds, calls) = if options.quick { (1, 2) } else { (15, 20) };
    let runs = with_guests(|mut guests| {
        measures(NULL + 1, rounds, |arm| {
            let (_, slots, vcpu) = CASES[arm / 2 % CASES.len()];
            guests[arm % 2].slice(slots, vcpu, calls)
        })
    })?;
    record(&runs, report);
    Ok(())
}

/// `runs` has, for each arm, the microseconds of the first discards and of the second ones.
fn record(runs: &[[Vec<f64>; 2]], report: &mut Report) {
    let us = |case: usize, size: usize, discard: usize| &runs[2 * case + size][discard];
    for (at, case @ (_, slots, vcpu)) in CASES.into_iter().enumerate() {
        let [huge, small] = [HUGE, SMALL].map(|size| us(at, size, 0));
        let mut result = Measurement::new(ratio_id(case), "x", Better::Higher, paired(huge, small))
            .param("slots", slots)
            .arm("huge_us", Summary::of(huge))
            .arm("small_us", Summary::of(small))
            .arm("null", paired(us(FIRST, HUGE, 0), &runs[NULL][0]));
        if vcpu == Vcpu::Paused {
            for size in [HUGE, SMALL] {
                let nothing = Summary::of(us(at, size, 1));
                result = result.arm(&format!("{}_nothing_us", SIZES[size]), nothing);
            }
        }
        report.push(result);
    }
    for size in [HUGE, SMALL] {
        let growth = paired(us(FIRST, size, 0), us(MANY, size, 0));
        let id = growth_id(size);
        report.push(Measurement::new(id, "x", Better::Lower, growth));
    }
}

/// Carries out `work` with a guest on huge pages and one on small pages.
fn with_guests<T>(work: impl FnOnce([Taken<'_>; 2]) -> LabResult<T>) -> LabResult<T> {
    let image = image(Arch::X86_64, "bm")?;
    let builder = |huge| VmBuilder {
        huge,
        command_line: format!(
            "workers=0 faulters=1 huge=1 populate=1 seconds=1000000 tick_us={TICK_US} \
             slice_us={TICK_US} look_ms={}",
            TICK_US / 1000
        ),
        ..on_kvm(MEMORY, 1)
    };
    on(&builder(HugePages::Never), &image, |small| {
        let small = Taken::new(small, false)?;
        on(&builder(HugePages::Always), &image, |huge| {
            work([Taken::new(huge, true)?, small])
        })
    })
}

/// A guest whose last 2 MiB are taken.
struct Taken<'a> {
    session: &'a Session<'a, Vm>,
    balloon: &'a dyn Balloon,
    block: GfnRange,
    /// The number of slots with which it booted.
    boot_slots: u16,
    /// Its slots besides the first.
    others: u16,
    is_huge: bool,
}

impl<'a> Taken<'a> {
    fn new(session: &'a Session<'a, Vm>, is_huge: bool) -> LabResult<Self> {
        session.guest.prepared()?;
        session.guest.pause(&[Kind::Faulter])?;
        let slots = session.vm.memory_slots();
        let last = slots.last().expect("a VM has memory").gfns;
        let first = Gfn::new(last.end_raw() - Level::L2M.pages()).expect("a page of the slot");
        let block = GfnRange::new(first, Level::L2M.pages()).expect("a part of the slot");
        Ok(Self {
            session,
            balloon: session.vm.balloon().expect("its memory is all resident"),
            block,
            boot_slots: slots.len() as u16,
            others: 0,
            is_huge,
        })
    }

    /// The microseconds of the first discards, and of the second ones.
    fn slice(&mut self, slots: u16, vcpu: Vcpu, calls: usize) -> LabResult<[f64; 2]> {
        self.set_slots(slots)?;
        medians(calls, || self.call(vcpu))
    }

    /// Adds or removes slots, until there are `slots`.
    fn set_slots(&mut self, slots: u16) -> LabResult {
        let vm = self.session.vm;
        let others = slots.saturating_sub(self.boot_slots);
        for other in self.others..others {
            let first = Gfn::new(OTHERS + 2 * u64::from(other)).expect("a small address");
            let page = GfnRange::new(first, 1).expect("one page");
            vm.add_memory(SlotId(self.boot_slots + other), page, SlotFlags::empty())?;
        }
        for other in others..self.others {
            vm.remove_slot(SlotId(self.boot_slots + other))?;
        }
        self.others = others;
        Ok(())
    }

    /// Lets the guest touch its memory, and takes the block twice. `None`: the call does not count.
    fn call(&self, vcpu: Vcpu) -> LabResult<Option<[f64; 2]>> {
        let guest = &self.session.guest;
        guest.pause(&[])?;
        let done = guest.count()?.faulters + ACCESSES * MEMORY.get();
        guest.run_until(REFILL, |status| {
            let faulters = status.threads.iter().filter(|t| t.kind == Kind::Faulter);
            (faulters.map(|thread| thread.counter).sum::<u64>() >= done).then_some(())
        })?;
        if vcpu == Vcpu::Running {
            let call = [self.discard()?, self.discard()?];
            guest.pause(&[Kind::Faulter])?;
            return Ok(Some(call));
        }
        guest.pause(&[Kind::Faulter])?;
        guest.run_for(Duration::from_millis(1))?;
        let (before, count) = (huge_bytes()?, guest.count()?.faulters);
        let call = [self.discard()?, self.discard()?];
        let freed = before - huge_bytes()?;
        let is_whole = freed == if self.is_huge { 2 << 20 } else { 0 };
        Ok((is_whole && guest.count()?.faulters == count).then_some(call))
    }

    /// Takes the block. Returns the call's microseconds.
    fn discard(&self) -> LabResult<f64> {
        let start = Instant::now();
        self.balloon.discard(self.block)?;
        Ok(start.elapsed().as_nanos() as f64 / 1e3)
    }
}

/// Bytes of this process in transparent huge pages.
fn huge_bytes() -> LabResult<i64> {
    let path = "/proc/self/smaps_rollup";
    let text = read_to_string(path).map_err(LabError::io(format!("read {path}")))?;
    let bytes = kib(&text, "AnonHugePages").map(|bytes| bytes as i64);
    bytes.ok_or_else(|| LabError::Guest(format!("{path} has no line AnonHugePages")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    /// Every call that counts has freed what it should, among any number of slots.
    #[test]
    fn a_huge_page_and_small_pages_are_taken() {
        needs_guests();
        if let Err(why) = lacuna::kvm::available() {
            lacuna_skip::skip_test(why.to_string());
        }
        with_guests(|mut guests| {
            for guest in &mut guests {
                for (slots, vcpu) in [(4, Vcpu::Paused), (2, Vcpu::Running)] {
                    let [first, again] = guest.slice(slots, vcpu, 2)?;
                    assert!(first > 0.0 && again > 0.0);
                    assert_eq!(guest.session.vm.memory_slots().len(), usize::from(slots));
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
