//! `lacuna lab pager`: the pager for other VMMs, with simulated VMs of one memory file.
//!
//! ```text
//! pager     `lacuna_pager`, with a memory file as its source
//! simple    a handler as simple as Firecracker's example: a thread for each VM reads one event,
//!           copies one page from a private mapping of the file, and so on
//! kernel    no handler: the VM's memory is a private mapping of the file
//! ```
//! | id | what is compared |
//! |---|---|
//! | `pager.p50_vs_simple.N` | the median time of a first touch, pager / simple, with N VMs |
//! | `pager.p99_vs_simple.N` | its 99th percentile |
//! | `pager.last_page_vs_simple.N` | time until all VMs have their pages |
//! | `pager.p50_vs_kernel.N`, ... | the same, pager / kernel |
//! | `pager.p99_beside_fill` | as p99, of a VM that is being filled / of a lazy VM |
//! | `pager.working_set_saved` | the share of a lazy run's faults that another run's record saves |
//!
//! A replayed VM runs when its fill has ended.
//!
//! A simulated VM is a thread that reads each page of its list once. All arms have the same lists,
//! and the file is in the page cache. The kernel maps neighbours of a page with it, so some touches
//! of its arm are no faults. The VMs are in this process, as the handlers are: a handler in another
//! process costs each fault a switch of address spaces more.

mod simple;
mod vms;

use crate::experiment::{LabError, LabResult, Options, skip_if_busy};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, measures, paired, quantile};
use fastrand::Rng;
use lacuna::PageCount;
use lacuna_pager::Record;
use lacuna_source::{Recorder, SourcePage, TouchedMemory, Touches};
use std::cell::Cell;
use std::sync::Arc;
use vms::{MemoryImage, Served, Vms};

/// The separately measurable parts.
pub const PARTS: &[&str] = &["faults", "fill", "replay"];

/// The result of the part `fill`.
const BESIDE_FILL: &str = "pager.p99_beside_fill";
/// How many VMs fault at the same time.
const VMS: [usize; 3] = [1, 8, 32];
/// Pages that all VMs of a slice touch.
const TOUCHES: usize = 8192;
const QUICK_TOUCHES: usize = 512;
/// The fill brings so many times the pages that are touched beside it, so that it ends late.
const FILL_RATIO: usize = 16;
/// How many touches the lab does before it looks whether the fill has ended. The touches since the
/// last look do not count then.
const CHUNK: usize = 64;

/// The arms of [`measures`]: the base, its null, and the others.
const BASE: usize = 0;
const NULL: usize = 1;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    options.begin(PARTS.len() as u64);
    if let Err(why) = vms::available() {
        PARTS
            .iter()
            .for_each(|part| report.skip(format!("pager.{part}"), &why));
        return Ok(());
    }
    report.say(
        "pager: simulated VMs read the pages of one memory file, which is in the page cache. A \
         page comes from the pager, from a handler as simple as Firecracker's example, or by the \
         kernel from a private mapping of the file.",
    );
    let touches = if options.quick {
        QUICK_TOUCHES
    } else {
        TOUCHES
    };
    let image = MemoryImage::make(&options.swap_dir, (touches / 4 * (FILL_RATIO + 1)) as u64)?;
    if options.wants("faults") {
        options.step("pager: first touches, with a simple handler and with the kernel")?;
        for vms in VMS {
            faults(&image, (vms, touches), options, report)?;
        }
    }
    if options.wants("fill") {
        options.step("pager: faults beside a fill")?;
        let done = beside_fill(&image, touches / 4, options, report);
        skip_if_busy(report, [BESIDE_FILL], done)?;
    }
    if options.wants("replay") {
        options.step("pager: faults with and without a working set")?;
        replay(&image, touches / 2, options, report)?;
    }
    Ok(())
}

/// How often each arm runs. With nine rounds, the interval leaves the best and the worst one out.
fn rounds(options: &Options) -> Rounds {
    Rounds::Count(if options.quick { 2 } else { 9 })
}

/// The quantiles of a slice's touches in nanoseconds, and its length.
fn times(vms: &Vms, lists: &[Vec<u64>]) -> [f64; 3] {
    let (touches, length) = vms.touch(lists);
    [
        quantile(&touches, 0.5),
        quantile(&touches, 0.99),
        length.as_nanos() as f64,
    ]
}

fn faults(
    image: &MemoryImage,
    (count, touches): (usize, usize),
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let served = Served::new(image, None, None)?;
    let slices = Cell::new(0);
    let runs = measures(4, rounds(options), |arm| {
        // A round has eight slices, all with the same lists.
        let round = slices.replace(slices.get() + 1) / 8;
        let list = |vm| image.list(touches / count, (round * 64 + vm) as u64);
        let lists: Vec<_> = (0..count).map(list).collect();
        let vms = match arm {
            BASE | NULL => Vms::simple(image, count)?,
            2 => Vms::paged(&served, image, count)?,
            _ => Vms::mapped(image, count)?,
        };
        let times = times(&vms, &lists);
        drop(vms);
        served.wait_until_idle();
        Ok(times)
    })?;
    let [simple, null, pager, kernel] = [0, 1, 2, 3].map(|arm| &runs[arm]);
    for (at, name) in ["p50", "p99", "last_page"].into_iter().enumerate() {
        for (other, base) in [("simple", simple), ("kernel", kernel)] {
            let id = format!("pager.{name}_vs_{other}.{count}");
            let ratio = paired(&base[at], &pager[at]);
            let found = Measurement::new(id, "x", Better::Lower, ratio)
                .param("vms", count)
                .param("touches", touches)
                .arm(other, Summary::of(&base[at]))
                .arm("pager", Summary::of(&pager[at]));
            report.push(match other {
                "simple" => found.arm("null", paired(&simple[at], &null[at])),
                _ => found,
            });
        }
    }
    Ok(())
}

/// One VM touches a part of its memory, while the rest is filled.
fn beside_fill(
    image: &MemoryImage,
    touches: usize,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let rest = (touches as u64..image.pages()).map(SourcePage);
    let lazy = Served::new(image, None, None)?;
    let filled = Served::new(image, Some(set_of(image, rest)), None)?;
    let slices = Cell::new(0);
    let runs = measures(3, rounds(options), |arm| {
        let round = slices.replace(slices.get() + 1) / 6;
        let mut list: Vec<u64> = (1..touches as u64).collect();
        Rng::with_seed(round as u64).shuffle(&mut list);
        let served = if arm > NULL { &filled } else { &lazy };
        let vms = Vms::paged(served, image, 1)?;
        let (mut found, mut filled) = (Vec::new(), 0);
        for part in list.chunks(CHUNK) {
            let (more, _) = vms.touch(&[part.to_vec()]);
            if served.is_filled() {
                break;
            }
            found.extend(more);
            filled = served.filled();
        }
        drop(vms);
        served.wait_until_idle();
        if found.is_empty() {
            let text = "a fill ended before the faults beside it";
            return Err(LabError::Busy(text.into()));
        }
        let of = |share| quantile(&found, share);
        Ok([of(0.99), of(0.5), filled as f64])
    })?;
    let [lazy, null, beside] = [0, 1, 2].map(|arm| &runs[arm]);
    let ratio = paired(&lazy[0], &beside[0]);
    report.push(
        Measurement::new(BESIDE_FILL, "x", Better::Lower, ratio)
            .bar(3.0)
            .param("touches", touches)
            .arm("lazy_p99_ns", Summary::of(&lazy[0]))
            .arm("beside_p99_ns", Summary::of(&beside[0]))
            .arm("lazy_p50_ns", Summary::of(&lazy[1]))
            .arm("beside_p50_ns", Summary::of(&beside[1]))
            .arm("filled_pages", Summary::of(&beside[2]))
            .arm("null", paired(&lazy[0], &null[0])),
    );
    Ok(())
}

fn set_of(image: &MemoryImage, pages: impl Iterator<Item = SourcePage>) -> Touches {
    let recorder = Recorder::new(TouchedMemory {
        checksum: None,
        pages: image.pages(),
    });
    pages.for_each(|page| recorder.note(page));
    recorder.touches()
}

/// The pages of one run of a simulated program: its own ones in an order of this run, and one of 20
/// that other runs do not touch.
fn program(image: &MemoryImage, pages: usize, seed: u64) -> Vec<u64> {
    let mut list = image.list(pages, 0);
    let mut rng = Rng::with_seed(seed);
    list.extend((0..pages / 20).map(|_| rng.u64(1..image.pages())));
    rng.shuffle(&mut list);
    list
}

/// The seed of the recorded run.
const RECORDED: u64 = 1;

fn replay(image: &MemoryImage, pages: usize, options: &Options, report: &mut Report) -> LabResult {
    let path = image.folder().join("record");
    let record = Arc::new(Record::new(path.clone(), PageCount::new(image.pages())));
    let recorded = Served::new(image, None, Some(Arc::clone(&record)))?;
    let vms = Vms::paged(&recorded, image, 1)?;
    vms.touch(&[program(image, pages, RECORDED)]);
    drop(vms);
    recorded.wait_until_idle();
    let memory = TouchedMemory {
        checksum: None,
        pages: image.pages(),
    };
    let set = Touches::load(&path, memory).map_err(|error| LabError::Other(error.into()))?;
    let lazy = Served::new(image, None, None)?;
    let filled = Served::new(image, Some(set.clone()), None)?;
    let slices = Cell::new(0);
    let runs = measures(3, rounds(options), |arm| {
        let round = slices.replace(slices.get() + 1) / 6;
        let served = if arm > NULL { &filled } else { &lazy };
        let vms = Vms::paged(served, image, 1)?;
        if arm > NULL {
            served.wait_until_filled();
        }
        let before = served.faults();
        let list = program(image, pages, RECORDED + 1 + round as u64);
        let (_, length) = vms.touch(&[list]);
        let faults = served.faults() - before;
        drop(vms);
        served.wait_until_idle();
        Ok([faults as f64, length.as_nanos() as f64])
    })?;
    let [lazy, null, replay] = [0, 1, 2].map(|arm| &runs[arm]);
    let saved = paired(&lazy[0], &replay[0]).map(|kept| 100.0 * (1.0 - kept));
    report.push(
        Measurement::new("pager.working_set_saved", "%", Better::Higher, saved)
            .bar(80.0)
            .param("pages", pages)
            .param("recorded", set.pages().len())
            .param("recorded_seed", RECORDED)
            .arm("lazy_faults", Summary::of(&lazy[0]))
            .arm("replay_faults", Summary::of(&replay[0]))
            .arm("lazy_ns", Summary::of(&lazy[1]))
            .arm("replay_ns", Summary::of(&replay[1]))
            .arm("null", paired(&lazy[0], &null[0])),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::tests::options;
    use lacuna::Arch;

    #[test]
    fn a_quick_run_has_all_results() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options {
            swap_dir: folder.path().to_owned(),
            ..options(Arch::X86_64, vec![])
        };
        let mut report = Report::new("lacuna lab pager");
        run(&options, &mut report).unwrap();
        if report.results.is_empty() {
            assert_eq!(report.skipped.len(), PARTS.len());
            return;
        }
        assert_eq!(
            report.results.len() + report.skipped.len(),
            6 * VMS.len() + 2
        );
        let of = |id: &str| report.results.iter().find(|result| result.id == id);
        // A count of faults: no time decides it.
        let saved = of("pager.working_set_saved").unwrap();
        assert_eq!(saved.met, Some(true), "{saved:?}");
        assert!(of("pager.p99_vs_kernel.32").is_some());
    }
}
