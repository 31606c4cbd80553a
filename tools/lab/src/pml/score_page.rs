//! The cost of a dirtied page, independent of any rate. A guest of a dozen instructions writes one
//! byte to each of its pages, in a pseudo-random order, and exits. That is a sweep. Then the host
//! harvests. There is a VM for each arm, and a turn is one sweep.
//!
//! The clock covers the vCPU's thread inside `Vcpu::run`. The time of the arm without logging is
//! subtracted. The guest maps 4 KiB pages by its own tables and loads CR3 before each sweep. So
//! every write walks, in every arm, and the difference is the cost of detection.
//!
//! `.refill` is the whole cost of a dirtied page: CR3 is not loaded, and only a harvest's flush
//! causes walks. So logging arms also pay for the TLB's refill. The details have one more figure:
//! with four times as many pages as the TLB has entries, most writes miss the TLB anyway.

use super::score::{Set, rings};
use super::score_charge::Counted;
use crate::exit_cost::EXIT_NS;
use crate::experiment::{LabError, Options};
use crate::first_look::{Found, Row};
use crate::fixture::{boot_code, resident};
use crate::native::thread_cpu_ns;
use crate::players::reap;
use crate::report::{align, figure};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, across_shifts, paired};
use crate::turns::{round, shifts};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{DetectionChoice as _, DirtyTracking as _, Exit, Vcpu as _};
use lacuna_soft::{Delivery, Detection, Logging, SlotId, Vcpu, Vm};
use std::sync::Arc;

const CODE: u64 = 0x10_0000;
/// The guest's page tables: one of each upper level, then one for each 2 MiB.
const TABLES: u64 = 0x20_0000;
const AREA: u64 = 0x40_0000;
const BLOCK: u64 = 0x20_0000;
/// From a write to the next page's write: not a multiple of the page size, because all writes would
/// then use the same sets of the caches.
const STRIDE: u64 = PAGE_SIZE as u64 + 64;

/// Which writes walk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Walks {
    /// Every write.
    All,
    /// Those after a harvest's flush.
    Flushed,
}

/// The number of pages, which writes walk, and the words for it.
const WORKS: [(u64, Walks, &str); 3] = [
    (2048, Walks::All, "every write walks"),
    (2048, Walks::Flushed, "with the TLB's refill after a flush"),
    (16384, Walks::All, "four times the TLB's entries"),
];
/// The work in which the refill of the TLB counts.
const REFILL: usize = 1;
/// An arm: its name, and what detects writes if slots log.
type Arm = (&'static str, Option<Detection>);

/// The arms; the second is the null.
const ARMS: [Arm; 4] = [
    ("none", None),
    ("null", None),
    ("wp", Some(Detection::WriteProtect)),
    ("pml", Some(Detection::Pml)),
];
const NONE: usize = 0;
const WP: usize = 2;
const PML: usize = 3;
/// The arms of the first look, where the null is write protection once more.
const LOOK_ARMS: [Arm; 4] = [ARMS[NONE], ("wp_again", ARMS[WP].1), ARMS[WP], ARMS[PML]];

/// The costs of all arms.
struct Costs {
    /// For each arm, set and round: nanoseconds of a dirtied page, less the nanoseconds without
    /// logging.
    ns: Vec<[Vec<f64>; 2]>,
    none_ns: Vec<f64>,
}

/// `pml.ns_per_dirty_page` and `pml.cost_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let mut rows = vec![
        [
            "CPU time of a dirtied page",
            "pages",
            "raw, ns",
            "95 % interval",
            "exitcost, ns",
        ]
        .map(str::to_owned),
    ];
    for (suffix, delivery) in [("", Delivery::Bitmap), ("_ring", rings())] {
        for (work, (pages, walks, about)) in WORKS.into_iter().enumerate() {
            let costs = costs(&ARMS, amount(options), (pages, walks), delivery)?;
            for (arm, (name, _)) in ARMS.iter().enumerate().skip(NONE + 1) {
                let [raw, charged] = costs.ns[arm].each_ref().map(|ns| Summary::of(ns));
                rows.push([
                    format!("  {name}{suffix}, {about}"),
                    pages.to_string(),
                    figure(raw.median),
                    format!("{} .. {}", figure(raw.low), figure(raw.high)),
                    figure(charged.median),
                ]);
            }
            match work {
                0 => record(report, suffix, pages, &costs),
                REFILL => tell_refill(report, suffix, pages, &costs),
                _ => {}
            }
        }
    }
    report.detail(align(&rows));
    Ok(())
}

fn record(report: &mut Report, suffix: &str, pages: u64, costs: &Costs) {
    for set in Set::ALL {
        let of = |arm: usize| &costs.ns[arm][set as usize];
        for arm in [WP, PML] {
            let id = format!(
                "pml.ns_per_dirty_page.{}{suffix}.{}",
                ARMS[arm].0,
                set.name()
            );
            let result = Measurement::new(id, "ns", Better::Lower, Summary::of(of(arm)))
                .param("pages", pages)
                .arm("write_without_logging_ns", Summary::of(&costs.none_ns))
                .arm("null_ns", Summary::of(of(1)));
            report.push(set.marked(result));
        }
        if suffix.is_empty() {
            report.push(cost_ratio(set, pages, costs));
        }
    }
}

/// The costs with the refill of the TLB. A guest loses this time, and the time of exits, to a
/// harvest.
fn tell_refill(report: &mut Report, suffix: &str, pages: u64, costs: &Costs) {
    let of = |arm: usize| &costs.ns[arm][Set::Raw as usize];
    for arm in [WP, PML] {
        let id = format!("pml.ns_per_dirty_page.{}{suffix}.refill", ARMS[arm].0);
        let result = Measurement::new(id, "ns", Better::Lower, Summary::of(of(arm)))
            .param("pages", pages)
            .arm("null_ns", Summary::of(of(1)));
        report.push(result);
    }
    if suffix.is_empty() {
        report.push(refill_ratio(pages, costs));
    }
}

/// A dirtied page with the refill of the TLB, write protection / PML.
fn refill_ratio(pages: u64, costs: &Costs) -> Measurement {
    let of = |arm: usize| &costs.ns[arm][Set::Raw as usize];
    let ratio = paired(of(PML), of(WP));
    Measurement::new("pml.cost_ratio.refill", "x", Better::Higher, ratio)
        .param("pages", pages)
        .arm("wp_ns", Summary::of(of(WP)))
        .arm("pml_ns", Summary::of(of(PML)))
}

fn cost_ratio(set: Set, pages: u64, costs: &Costs) -> Measurement {
    let of = |arm: usize| &costs.ns[arm][set as usize];
    let id = format!("pml.cost_ratio.{}", set.name());
    let result = Measurement::new(id, "x", Better::Higher, paired(of(PML), of(WP)))
        .bar(3.0)
        .param("pages", pages)
        .arm("wp_ns", Summary::of(of(WP)))
        .arm("pml_ns", Summary::of(of(PML)));
    set.marked(result)
}

/// The row of the first look: the costs of write protection and of PML, with the refill of the TLB
/// and without exits.
pub fn first_look(_: &Options, rounds: Rounds) -> Result<Found, LabError> {
    let amount = Amount {
        rounds,
        writes: ROUND / 8,
    };
    let (pages, walks, _) = WORKS[REFILL];
    let costs = costs(&LOOK_ARMS, amount, (pages, walks), Delivery::Bitmap)?;
    let of = |arm: usize| &costs.ns[arm][Set::Raw as usize];
    let ns = |arm: usize| format!("{} ns", figure(Summary::of(of(arm)).median));
    let row = Row {
        system: "page-modification logging, 2015",
        what: "CPU time of a dirtied page, no exit charged; without, write protection",
        without: ns(WP),
        with: ns(PML),
        ratio: paired(of(PML), of(WP)),
        null: paired(of(1), of(WP)),
        published: "2.1x of the score lost (KVM series)",
    };
    let results = vec![refill_ratio(pages, &costs)];
    Ok(Found { row, results })
}

/// Writes of an arm in a round.
const ROUND: u64 = 1 << 18;

/// Rounds, and writes in a round.
#[derive(Clone, Copy)]
struct Amount {
    /// Rounds. They are shared among all assignments of VMs to arms.
    rounds: Rounds,
    /// Writes of an arm in a round.
    writes: u64,
}

const fn amount(options: &Options) -> Amount {
    match options.quick {
        true => Amount {
            rounds: Rounds::Count(1),
            writes: ROUND / 8,
        },
        false => Amount {
            rounds: Rounds::Count(16),
            writes: ROUND,
        },
    }
}

/// Measures `arms` in turns of one sweep, with a VM for each.
fn costs(
    arms: &[Arm],
    amount: Amount,
    (pages, walks): (u64, Walks),
    delivery: Delivery,
) -> Result<Costs, LabError> {
    // The first assignment finds the number of rounds; all others have as many.
    let mut rounds = amount.rounds.split(arms.len());
    let mut counted = 0;
    let sweeps = (amount.writes / pages).max(2);
    let rigs = arms.iter().map(|_| Rig::new(pages, walks, delivery));
    let mut rigs = rigs.collect::<Result<Vec<_>, _>>()?;
    let mut runs = vec![[const { Vec::new() }; 3]; arms.len()];
    for vms in shifts(arms.len()) {
        for (arm, vm) in arms.iter().zip(&vms) {
            rigs[*vm].watch(arm.1)?;
        }
        counted = rounds.repeat(|| {
            let found = one_round(&mut rigs, &vms, sweeps)?;
            for (all, one) in runs.iter_mut().flatten().zip(found.into_iter().flatten()) {
                all.push(one);
            }
            Ok(())
        })?;
        rounds = Rounds::Count(counted);
    }
    let none_ns = runs[NONE][0].clone();
    let above = |arm: &[Vec<f64>; 3]| {
        let [ns, exits, dirtied] = arm;
        let raw: Vec<f64> = (0..ns.len())
            .map(|run| (ns[run] - none_ns[run]) * pages as f64 / dirtied[run])
            .collect();
        let charge = |(run, raw): (usize, &f64)| raw + exits[run] * EXIT_NS / dirtied[run];
        let charged: Vec<f64> = raw.iter().enumerate().map(charge).collect();
        [raw, charged].map(|ns| across_shifts(&ns, counted))
    };
    Ok(Costs {
        ns: runs.iter().map(above).collect(),
        none_ns: across_shifts(&none_ns, counted),
    })
}

/// For each arm: nanoseconds for each page of its median sweep, exits in a sweep, and pages dirtied
/// in a sweep.
fn one_round(rigs: &mut [Rig], vms: &[usize], sweeps: u64) -> Result<Vec<[f64; 3]>, LabError> {
    let before: Vec<_> = vms.iter().map(|vm| rigs[*vm].counted()).collect();
    let mut times = vec![Vec::new(); vms.len()];
    round(vms.len(), sweeps as usize / 2, |arm, _| {
        times[arm].push(rigs[vms[arm]].sweep_and_harvest()?);
        Ok::<_, LabError>(())
    })?;
    let found = vms.iter().zip(before).zip(times);
    let found = found.map(|((vm, before), times)| {
        let rig = &rigs[*vm];
        let counted = rig.counted().since(&before);
        let each = |count: u64| count as f64 / times.len() as f64;
        let (exits, dirtied) = match rig.watch {
            Some(how) => (counted.exits(how, 1), each(counted.dirtied)),
            None => (0, rig.pages as f64),
        };
        [Summary::of(&times).median, each(exits), dirtied]
    });
    Ok(found.collect())
}

/// One vCPU, its pages, and a host with frames for all of them.
struct Rig {
    vm: Arc<Vm>,
    vcpu: Vcpu,
    slot: SlotId,
    words: Vec<u64>,
    pages: u64,
    watch: Option<Detection>,
    /// The counts of its harvests.
    harvested: Counted,
}

impl Rig {
    fn new(pages: u64, walks: Walks, delivery: Delivery) -> Result<Self, LabError> {
        let end = (AREA + pages * STRIDE).next_multiple_of(BLOCK);
        let (code, tables) = (program(pages, walks), tables(end));
        let pieces = [(CODE, &*code), (TABLES, &*tables)];
        let (vm, mut vcpus) = boot_code(&resident(end >> 20, 1), delivery, &pieces)?;
        let vcpu = vcpus.remove(0);
        let slots = vm.mmu().slots();
        let slot = slots.iter().next().expect("a VM has memory");
        let mut rig = Self {
            slot: slot.id,
            words: vec![0; slot.gfns.pages().div_ceil(64) as usize],
            vm,
            vcpu,
            pages,
            watch: None,
            harvested: Counted::default(),
        };
        // The first sweep allocates the frames, the second warms them.
        rig.sweep()?;
        rig.sweep()?;
        Ok(rig)
    }

    /// Lets the guest write to every page once; returns nanoseconds of CPU time.
    fn sweep(&mut self) -> Result<u64, LabError> {
        let start = thread_cpu_ns();
        match self.vcpu.run() {
            Ok(Exit::IoOut { .. }) => Ok(thread_cpu_ns() - start),
            other => Err(LabError::Guest(format!(
                "the sweeping guest ended with {other:?}"
            ))),
        }
    }

    /// Returns how many pages were written since the last harvest.
    fn harvest(&mut self) -> Result<u64, LabError> {
        if self.vm.mmu().delivery() != Delivery::Bitmap {
            return Ok(reap(&self.vm));
        }
        self.vm.get_dirty(self.slot, &mut self.words)?;
        Ok(self.words.iter().map(|w| u64::from(w.count_ones())).sum())
    }

    /// From now on slots log as `watch` says. It begins with a sweep, because the arm before may
    /// have left pages write-protected.
    fn watch(&mut self, watch: Option<Detection>) -> Result<(), LabError> {
        let detection = watch.unwrap_or(Detection::WriteProtect);
        self.vm.set_logging(self.slot, Logging::Off)?;
        self.vm.set_detection(detection);
        if watch.is_some() {
            self.vm.set_logging(self.slot, Logging::LAZY)?;
        }
        self.watch = watch;
        self.sweep_and_harvest().map(drop)
    }

    /// One sweep, and a harvest if slots log. Returns nanoseconds of the sweep for each page.
    fn sweep_and_harvest(&mut self) -> Result<f64, LabError> {
        let ns = self.sweep()? as f64 / self.pages as f64;
        if self.watch.is_some() {
            self.harvested.dirtied += self.harvest()?;
            self.harvested.harvests += 1;
        }
        Ok(ns)
    }

    fn counted(&self) -> Counted {
        Counted {
            stats: self.vm.dirty_stats()[0],
            ..self.harvested
        }
    }
}

/// Page tables that map everything below `end` to itself, in pages of 4 KiB.
fn tables(end: u64) -> Vec<u8> {
    const USED: u64 = 0x67; // present, writable, user, accessed, dirty
    const PAGE: u64 = PAGE_SIZE as u64;
    let blocks = end.div_ceil(BLOCK);
    let table = |index: u64| TABLES + index * PAGE;
    let mut words = vec![0; ((3 + blocks) * PAGE / 8) as usize];
    words[0] = table(1) | USED;
    words[512] = table(2) | USED;
    for block in 0..blocks {
        words[(1024 + block) as usize] = table(3 + block) | USED;
    }
    for page in 0..blocks * 512 {
        words[(1536 + page) as usize] = (page * PAGE) | USED;
    }
    assert!(TABLES + words.len() as u64 * 8 <= AREA, "tables have room");
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// The machine code. A linear congruential generator of full period gives the order of pages.
fn program(pages: u64, walks: Walks) -> Vec<u8> {
    assert!(pages.is_power_of_two(), "the generator's period");
    let again = match walks {
        Walks::All => [0xeb, 0xcb],
        Walks::Flushed => [0xeb, 0xd3],
    };
    let long = |value: u64| u32::try_from(value).expect("a small number").to_le_bytes();
    [
        &[0xb8][..],
        &long(TABLES),       // again: mov eax, tables
        &[0x0f, 0x22, 0xd8], // mov cr3, rax
        &[0x31, 0xc0],       // xor eax, eax
        &[0xbb],
        &long(pages), // mov ebx, pages
        &[0x69, 0xc0],
        &long(1_664_525), // touch: imul eax, eax, 1664525
        &[0x05],
        &long(1_013_904_223), // add eax, 1013904223
        &[0x25],
        &long(pages - 1), // and eax, pages - 1
        &[0x48, 0x69, 0xf8],
        &long(STRIDE), // imul rdi, rax, stride
        &[0xc6, 0x87],
        &long(AREA),
        &[1],          // mov byte [rdi + area], 1
        &[0xff, 0xcb], // dec ebx
        &[0x75, 0xde], // jnz touch
        &[0xe6, 0xf4], // out 0xf4, al
        &again,        // jmp again, or to the instruction after mov cr3
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sweep writes each page once and has the exits of its detection.
    #[test]
    fn a_sweep_writes_every_page_once() {
        for delivery in [Delivery::Bitmap, rings()] {
            let mut rigs = [Rig::new(2048, Walks::All, delivery).unwrap()];
            let mut round = |watch| {
                rigs[0].watch(watch).unwrap();
                let found = one_round(&mut rigs, &[0], 4).unwrap();
                (found[0], rigs[0].vm.dirty_stats())
            };
            let ([_, exits, dirtied], _) = round(None);
            assert_eq!((exits, dirtied), (0.0, 2048.0));
            let ([ns, exits, dirtied], _) = round(Some(Detection::WriteProtect));
            // The pages, and some page tables in which walks set A and D bits.
            assert!((2048.0..2100.0).contains(&dirtied), "{dirtied}");
            assert!(ns > 0.0 && (2049.0..2110.0).contains(&exits), "{exits}");
            let ([_, exits, logged], before) = round(Some(Detection::Pml));
            assert!((2048.0..2100.0).contains(&logged), "{logged}");
            assert!((2.0 + 4.0..10.0).contains(&exits), "{exits}");
            assert_eq!(round(None).1, before, "nothing is detected any more");
        }
    }

    #[test]
    fn tables_map_everything_to_itself() {
        let end = AREA + BLOCK;
        let bytes = tables(end);
        let word = |at: usize| u64::from_le_bytes(bytes[at * 8..][..8].try_into().unwrap());
        let of = |entry: u64| (((entry & !0xfff) - TABLES) / 8) as usize;
        for address in [0, CODE, AREA, end - 1] {
            let pdpt = of(word(0));
            let directory = of(word(pdpt));
            let table = of(word(directory + (address >> 21) as usize));
            let entry = word(table + (address >> 12) as usize % 512);
            assert_eq!(entry & !0xfff, address & !0xfff);
        }
    }
}
