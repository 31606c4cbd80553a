//! Whether exiting vCPUs delay each other: two vCPUs against two VMs, and more vCPUs than cores
//! against as many plain threads.

use super::{prefix, work};
use crate::cores::Cores;
use crate::demand_paging::lockstep::{Process, together};
use crate::demand_paging::{By, DemandPaging, Fixture, PAGES};
use crate::experiment::{LabResult, Options};
use crate::fixture::{gpa_of, joined};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, paired, rounds};
use lacuna::memory::MemoryKind;
use lacuna::{Arch, PageCount, Vm as _};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 1 + CROWDS.len() as u64;

/// Numbers of vCPUs on fewer cores.
const CROWDS: [usize; 3] = [4, 8, 16];

/// The ids of its results.
pub fn ids(kind: MemoryKind) -> impl Iterator<Item = String> {
    let crowds = CROWDS.into_iter().map(move |vcpus| crowd_id(kind, vcpus));
    std::iter::once(scaling_id(kind)).chain(crowds)
}

fn scaling_id(kind: MemoryKind) -> String {
    format!("{}.scaling_2vcpu", prefix(&exits(kind, 2, 2)))
}

fn crowd_id(kind: MemoryKind, vcpus: usize) -> String {
    let guest = exits(kind, vcpus, 16);
    format!("{}.crowd_loss_points.{vcpus}vcpu", prefix(&guest))
}

/// Measures `scaling_2vcpu` and `crowd_loss_points.*`.
pub fn measure(kind: MemoryKind, options: &Options, report: &mut Report) -> LabResult {
    options.step("missing pages, two vCPUs and two VMs")?;
    let id = scaling_id(kind);
    if thread::available_parallelism().map_or(1, usize::from) < 2 {
        report.skip(id, "this machine has one core");
    } else {
        report.push(two_vcpus(kind, &id, options)?);
    }
    for vcpus in CROWDS {
        options.step(format!("missing pages, {vcpus} vCPUs and as many threads"))?;
        report.push(crowd(kind, vcpus, options)?);
    }
    Ok(())
}

const fn pages(options: &Options) -> u64 {
    if options.quick { 4096 } else { 65536 }
}

const fn times(options: &Options) -> usize {
    if options.quick { 2 } else { 75 }
}

/// A guest whose vCPUs exit and share `pages` pages.
fn exits(kind: MemoryKind, vcpus: usize, pages: u64) -> DemandPaging {
    DemandPaging {
        by: By::Exits,
        ..work(Arch::X86_64, kind, vcpus, pages)
    }
}

/// Two vCPUs of one VM against two VMs with one each, in two processes.
fn two_vcpus(kind: MemoryKind, id: &str, options: &Options) -> LabResult<Measurement> {
    let pages = pages(options);
    let process = |cores: &[usize]| {
        let vcpus = cores.len();
        let mut guest = exits(kind, vcpus, vcpus as u64 * pages / 2);
        guest.guest.pin = Some(Cores::allowed_at(cores.iter().copied()));
        Process::start(&options.lacuna, &guest)
    };
    let mut each = [process(&[0])?, process(&[1])?];
    let mut two = [process(&[0, 1])?];
    let rates = rounds(4, times(options), |arm| match arm {
        0 => together(&mut each[..1]),
        1 => together(&mut each),
        _ => together(&mut two),
    })?;
    let ratio = paired(&rates[1], &rates[2]);
    Ok(Measurement::new(id, "x", Better::Higher, ratio)
        .bar(0.95)
        .param("pages", pages)
        .arm("one_vcpu_pages_per_s", Summary::of(&rates[0]))
        .arm("two_vms_pages_per_s", Summary::of(&rates[1]))
        .arm("two_vcpus_pages_per_s", Summary::of(&rates[2]))
        .arm("two_vms_scaling", paired(&rates[0], &rates[1]))
        .arm("null", paired(&rates[2], &rates[3])))
}

/// The loss of `vcpus` vCPUs against two, less the loss of as many plain threads against two. The
/// threads provide pages by the same call, without a vCPU.
fn crowd(kind: MemoryKind, vcpus: usize, options: &Options) -> LabResult<Measurement> {
    let pages = pages(options);
    let of = |vcpus| {
        let guest = exits(kind, vcpus, pages);
        Fixture::soft(&guest).map(|fixture| (fixture, guest))
    };
    let ((few, two), (many, all)) = (of(2)?, of(vcpus)?);
    let rates = rounds(5, times(options), |arm| match arm {
        0 => few.rate(&two),
        1 | 4 => many.rate(&all),
        2 => threads(&few, 2, pages),
        _ => threads(&few, vcpus, pages),
    })?;
    let points = |few: usize, many: usize, threads: [usize; 2]| {
        let round = |i: usize| {
            let kept = |a: usize, b: usize| 100.0 * rates[b][i] / rates[a][i];
            kept(threads[0], threads[1]) - kept(few, many)
        };
        Summary::of(&(0..rates[0].len()).map(round).collect::<Vec<_>>())
    };
    let id = crowd_id(kind, vcpus);
    Ok(
        Measurement::new(id, "points", Better::Lower, points(0, 1, [2, 3]))
            .bar(5.0)
            .param("pages", pages)
            .arm("two_vcpus_pages_per_s", Summary::of(&rates[0]))
            .arm("vcpus_pages_per_s", Summary::of(&rates[1]))
            .arm("two_threads_pages_per_s", Summary::of(&rates[2]))
            .arm("threads_pages_per_s", Summary::of(&rates[3]))
            .arm("vcpus_kept", paired(&rates[0], &rates[1]))
            .arm("threads_kept", paired(&rates[2], &rates[3]))
            .arm("null", points(0, 1, [0, 4])),
    )
}

/// Pages a second of plain threads that provide the pages of a VM without a guest, each its own
/// share.
fn threads(fixture: &Fixture, count: usize, pages: u64) -> LabResult<f64> {
    let vm = fixture.empty_vm(Arch::X86_64)?;
    let memory = vm.missing_memory().expect("it has a source");
    assert!(
        PageCount::new(pages) <= vm.config().memory,
        "shares inside the memory"
    );
    let (share, start) = (pages / count as u64, Barrier::new(count));
    let provide = &|first: u64| {
        start.wait();
        let began = Instant::now();
        for page in first..first + share {
            memory.provide(gpa_of(Arch::X86_64, page), &PAGES[0])?;
        }
        Ok((began, Instant::now()))
    };
    let spans = thread::scope(|scope| {
        let firsts = (0..count as u64).map(|index| index * share);
        let threads: Vec<_> = firsts
            .map(|first| scope.spawn(move || provide(first)))
            .collect();
        let spans = threads.into_iter().map(joined);
        spans.collect::<LabResult<Vec<(Instant, Instant)>>>()
    })?;
    let first = spans.iter().map(|span| span.0).min();
    let last = spans.iter().map(|span| span.1).max();
    let (first, last) = first.zip(last).expect("at least one thread");
    Ok((share * count as u64) as f64 / (last - first).as_secs_f64())
}
