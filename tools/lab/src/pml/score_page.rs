//! What a page costs that is dirtied, apart from any rate: a guest of a dozen instructions writes
//! one byte to each of its pages, in a pseudo-random order, and leaves; the host harvests; again.
//!
//! Timed is the vCPU's thread inside `Vcpu::run`: what the arm without logging takes for the same
//! writes is taken off. The guest maps 4 KiB pages, by tables of its own. It has half as many pages
//! as the processor's TLB has entries, so that only a harvest's flush makes them walk, and that is
//! part of the cost. In the details are figures of four times as many, where every write walks in
//! every arm, and what is left is what noticing costs, less sharply seen.

use super::score::{Set, rings};
use super::score_charge::{Counted, EXIT_NS};
use super::turns::reap;
use crate::experiment::{LabError, Options};
use crate::native::thread_cpu_ns;
use crate::report::{align, figure};
use crate::result::{Better, Measurement, Report};
use crate::session::resident;
use crate::stats::{Summary, measures};
use lacuna_addr::{Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{Exit, Image, Segment, Vcpu as _};
use lacuna_soft::{Apf, Delivery, Detection, Logging, SlotId, Vcpu, Vm, VmConfig};
use lacuna_sync::{Clock, HostClock};
use std::sync::Arc;

const CODE: u64 = 0x10_0000;
/// The guest's page tables: one of each upper level, then those of 2 MiB each.
const TABLES: u64 = 0x20_0000;
const AREA: u64 = 0x40_0000;
const BLOCK: u64 = 0x20_0000;
/// From one write to the next page's: so not all go to the same place of the caches.
const STRIDE: u64 = PAGE_SIZE as u64 + 64;

/// How many pages, and what is said of them.
const WORKS: [(u64, &str); 2] = [(2048, "inside the TLB"), (16384, "beyond the TLB")];
/// Arms: whether all slots log, and how. The second is the null.
const ARMS: [(&str, Option<Detection>); 4] = [
    ("none", None),
    ("null", None),
    ("wp", Some(Detection::WriteProtect)),
    ("pml", Some(Detection::Pml)),
];
const NONE: usize = 0;
const WP: usize = 2;
const PML: usize = 3;

/// A sweep's cost and what it did.
struct Costs {
    /// Nanoseconds a dirtied page above those without logging, in each round; of each arm and set.
    ns: Vec<[Vec<f64>; 2]>,
    none_ns: Vec<f64>,
}

/// `pml.ns_per_dirty_page` and `pml.cost_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let mut rows = vec![
        [
            "a dirtied page",
            "pages",
            "raw ns",
            "interval",
            "with exits ns",
        ]
        .map(str::to_owned),
    ];
    for (suffix, delivery) in [("", Delivery::Bitmap), ("_ring", rings())] {
        for (work, (pages, about)) in WORKS.into_iter().enumerate() {
            let costs = costs(options, pages, delivery)?;
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
            if work == 0 {
                tell(report, suffix, pages, &costs);
            }
        }
    }
    report.detail(align(&rows));
    Ok(())
}

fn tell(report: &mut Report, suffix: &str, pages: u64, costs: &Costs) {
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
            let ratio: Vec<f64> = of(WP)
                .iter()
                .zip(of(PML))
                .map(|(wp, pml)| wp / pml)
                .collect();
            let id = format!("pml.cost_ratio.{}", set.name());
            let result = Measurement::new(id, "x", Better::Higher, Summary::of(&ratio))
                .bar(3.0)
                .param("pages", pages)
                .arm("wp_ns", Summary::of(of(WP)))
                .arm("pml_ns", Summary::of(of(PML)));
            report.push(set.marked(result));
        }
    }
}

/// Measures all arms.
fn costs(options: &Options, pages: u64, delivery: Delivery) -> Result<Costs, LabError> {
    let (rounds, sweeps) = if options.quick { (3, 8) } else { (31, 12) };
    let mut rig = Rig::new(pages, delivery)?;
    let runs = measures(ARMS.len(), rounds, |arm| rig.slice(ARMS[arm].1, sweeps))?;
    let none_ns = runs[NONE][0].clone();
    let above = |arm: &[Vec<f64>; 3]| {
        let [ns, exits, dirtied] = arm;
        let raw: Vec<f64> = (0..ns.len())
            .map(|run| (ns[run] - none_ns[run]) * pages as f64 / dirtied[run])
            .collect();
        let charge = |(run, raw): (usize, &f64)| raw + exits[run] * EXIT_NS / dirtied[run];
        let charged = raw.iter().enumerate().map(charge).collect();
        [raw, charged]
    };
    Ok(Costs {
        ns: runs.iter().map(above).collect(),
        none_ns,
    })
}

/// One vCPU, its pages, and a host that has frames for all of them.
struct Rig {
    vm: Arc<Vm>,
    vcpu: Vcpu,
    slot: SlotId,
    words: Vec<u64>,
    pages: u64,
}

impl Rig {
    fn new(pages: u64, delivery: Delivery) -> Result<Self, LabError> {
        let end = (AREA + pages * STRIDE).next_multiple_of(BLOCK);
        let memory = PageCount::from_bytes(end);
        let launch = resident(end >> 20, 1);
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let config = VmConfig {
            memory,
            vcpus: 1,
            apf: Apf::Off,
        };
        let vm = Vm::new(launch.host(Arc::clone(&clock))?, clock, config)?;
        vm.set_delivery(delivery)?;
        let (code, tables) = (program(pages), tables(end));
        let segment = |at: u64, bytes| Segment {
            gpa: Gpa::new(at).expect("a small address"),
            bytes,
            size: <[u8]>::len(bytes) as u64,
        };
        let image = Image {
            segments: vec![segment(CODE, &code), segment(TABLES, &tables)],
            entry: Gpa::new(CODE).expect("a small address"),
        };
        let vcpu = vm.boot(&image, "")?.remove(0);
        let slots = vm.mmu().slots().snapshot();
        let slot = slots.iter().next().expect("a VM has memory");
        let mut rig = Self {
            slot: slot.id,
            words: vec![0; slot.gfns.pages().div_ceil(64) as usize],
            vm,
            vcpu,
            pages,
        };
        // First touch, and the frames once more.
        rig.sweep()?;
        rig.sweep()?;
        Ok(rig)
    }

    /// Every page is written once; CPU nanoseconds.
    fn sweep(&mut self) -> Result<u64, LabError> {
        let start = thread_cpu_ns();
        match self.vcpu.run() {
            Ok(Exit::IoOut { .. }) => Ok(thread_cpu_ns() - start),
            other => Err(LabError::Guest(format!(
                "the sweeping guest ended with {other:?}"
            ))),
        }
    }

    /// How many pages were written since the last time.
    fn harvest(&mut self) -> Result<u64, LabError> {
        if self.vm.mmu().delivery() != Delivery::Bitmap {
            return Ok(reap(&self.vm));
        }
        self.vm.get_dirty(self.slot, &mut self.words)?;
        Ok(self.words.iter().map(|w| u64::from(w.count_ones())).sum())
    }

    /// Of sweeps with a harvest after each: nanoseconds a page of the middle one, and exits and
    /// pages dirtied in a sweep.
    fn slice(&mut self, detection: Option<Detection>, sweeps: u64) -> Result<[f64; 3], LabError> {
        self.vm
            .set_detection(detection.unwrap_or(Detection::WriteProtect));
        let logging = detection.map_or(Logging::Off, |_| Logging::LAZY);
        self.vm.set_logging(self.slot, logging)?;
        // Not counted: the arm before has left some pages armed.
        self.sweep()?;
        if detection.is_some() {
            self.harvest()?;
        }
        let before = self.vm.dirty_stats()[0];
        let (mut times, mut counted) = (Vec::new(), Counted::default());
        for _ in 0..sweeps {
            times.push(self.sweep()? as f64 / self.pages as f64);
            if detection.is_some() {
                counted.dirtied += self.harvest()?;
                counted.harvests += 1;
            }
        }
        let stats = self.vm.dirty_stats()[0];
        let counted = counted
            .and(&Counted {
                stats,
                ..Counted::default()
            })
            .since(&Counted {
                stats: before,
                ..Counted::default()
            });
        self.vm.set_logging(self.slot, Logging::Off)?;
        let exits = detection.map_or(0, |detection| counted.exits(detection, 1));
        let each = |count: u64| count as f64 / sweeps as f64;
        let dirtied = match detection {
            Some(_) => each(counted.dirtied),
            None => self.pages as f64,
        };
        Ok([Summary::of(&times).median, each(exits), dirtied])
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

/// The machine code. Pages are numbered by a linear congruential generator of full period.
fn program(pages: u64) -> Vec<u8> {
    assert!(pages.is_power_of_two(), "the generator's period");
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
        &[0xeb, 0xcb], // jmp again
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each page once a sweep, and as many exits as the detection has.
    #[test]
    fn a_sweep_writes_every_page_once() {
        for delivery in [Delivery::Bitmap, rings()] {
            let mut rig = Rig::new(2048, delivery).unwrap();
            let [_, exits, dirtied] = rig.slice(None, 2).unwrap();
            assert_eq!((exits, dirtied), (0.0, 2048.0));
            let [ns, exits, dirtied] = rig.slice(Some(Detection::WriteProtect), 4).unwrap();
            // The pages, and some tables that a walk dirties.
            assert!((2048.0..2100.0).contains(&dirtied), "{dirtied}");
            assert!(ns > 0.0 && exits >= 2049.0, "{exits}");
            let [_, exits, logged] = rig.slice(Some(Detection::Pml), 4).unwrap();
            assert!((2048.0..2100.0).contains(&logged), "{logged}");
            assert!((2.0 + 4.0..10.0).contains(&exits), "{exits}");
            let before = rig.vm.dirty_stats();
            rig.slice(None, 2).unwrap();
            assert_eq!(rig.vm.dirty_stats(), before, "nobody looks any more");
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
