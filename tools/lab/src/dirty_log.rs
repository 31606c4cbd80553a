//! `lacuna test dirty-log`: the time of a guest's writes and of the harvests while slots log.
//!
//! It is Linux's `dirty_log_perf_test`, on both backends:
//!
//! ```text
//! populate ─► enable ─► [ write and read every page ─► get the log ─► clear it ]... ─► disable
//! ```
//! With a bitmap and `--manual-clear`, *get* reads the bitmap, and *clear* re-arms its pages in a
//! second call (`KVM_CLEAR_DIRTY_LOG`). Without that, *get* does both. With rings, *get* reaps the
//! entries and *clear* resets them. A vCPU whose ring is full waits for a harvest, whose time is in
//! the iteration's *get* and *clear*.
//!
//! [`crate::pml`] measures harvests and dirtied pages with tests of these options in turns.

use crate::experiment::{LabError, LabResult};
use crate::native::thread_cpu_ns;
use crate::options::{GuestOptions, Recorder, up_to};
use crate::report::{Progress, Verbosity, align};
use crate::size::Size;
use crate::sweeps::program::Variant;
use crate::sweeps::{Sweep, Sweeps, Swept};
use clap::{Args, ValueEnum};
use lacuna::dirty::{Backup, Detection, HugeLeaves, Initially, Logging};
use lacuna::kvm::Tracker;
use lacuna::memory::MemorySlot;
use lacuna::{Backend, Builder, Vm, kvm, soft};
use serde::Serialize;
use std::fmt;
use std::time::{Duration, Instant};

/// What a test of dirty logging does.
#[derive(Clone, PartialEq, Debug, Args)]
pub struct DirtyLog {
    /// The guest
    #[command(flatten)]
    pub guest: GuestOptions,
    /// The share of the pages that is written in an iteration, in percent; the others are read
    #[arg(long, value_name = "PERCENT", default_value = "100", value_parser = percent)]
    pub write_percent: f64,
    /// Times that the guest accesses every page while it is logged
    #[arg(long, value_name = "N", default_value = "2", value_parser = up_to(1_000_000))]
    pub iterations: usize,
    /// How writes are detected: by write protection, by page-modification logging, or by
    /// userfaultfd's asynchronous write protection [default: pml on soft, KVM's own choice on kvm]
    #[arg(long, value_enum, value_name = "wp|pml|wp-async")]
    pub detection: Option<Detector>,
    /// Where writes are recorded: one bitmap for each slot, or the largest ring for each vCPU
    #[arg(long, value_enum, value_name = "bitmap|ring", default_value_t = Recorder::Bitmap)]
    pub delivery: Recorder,
    /// Clear the bitmap in a step of its own (KVM_CLEAR_DIRTY_LOG)
    #[arg(long)]
    pub manual_clear: bool,
    /// Begin with a bitmap in which all pages are set (KVM_DIRTY_LOG_INITIALLY_SET)
    #[arg(long)]
    pub initially_all_set: bool,
}

/// `--detection`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Detector {
    /// Write protection (soft)
    Wp,
    /// Page-modification logging (soft)
    Pml,
    /// userfaultfd's asynchronous write protection (kvm)
    WpAsync,
}

fn percent(text: &str) -> Result<f64, String> {
    let percent = text.parse().ok();
    let percent = percent.filter(|percent| (0.0..=100.0).contains(percent));
    percent.ok_or_else(|| "give a number from 0 to 100".into())
}

impl DirtyLog {
    /// Why there is no such test.
    ///
    /// # Errors
    /// The options that exclude each other, and what to do.
    pub fn check(&self) -> Result<(), &'static str> {
        self.guest.check_sweeps()?;
        let why = match (self.guest.backend, self.detection) {
            (Backend::Kvm, Some(Detector::Wp | Detector::Pml)) => {
                "--detection: on /dev/kvm the kernel chooses how it detects writes: leave it out, \
                 or give wp-async"
            }
            (Backend::Soft, Some(Detector::WpAsync)) => {
                "--detection wp-async is for --backend kvm: give wp or pml"
            }
            _ if self.delivery == Recorder::Ring
                && (self.manual_clear || self.initially_all_set) =>
            {
                "--manual-clear and --initially-all-set are for bitmaps: leave --delivery ring out"
            }
            _ => return Ok(()),
        };
        Err(why)
    }

    /// Runs the test.
    ///
    /// # Errors
    /// The host or the guest cannot do it.
    pub fn run(&self, verbosity: Verbosity) -> LabResult<Outcome> {
        match self.guest.backend {
            Backend::Soft => self.run_on(DirtyTest::soft(self, Variant::default())?, verbosity),
            Backend::Kvm => {
                let builder = kvm::VmBuilder {
                    delivery: self.delivery.delivery(Backup::None),
                    tracker: match self.detection {
                        Some(Detector::WpAsync) => Tracker::Pagemap,
                        _ => Tracker::Kvm,
                    },
                    ..self.guest.kvm()
                };
                self.run_on(
                    DirtyTest::new(&builder, self, Variant::default())?,
                    verbosity,
                )
            }
        }
    }

    fn run_on<V: Vm<Error: Into<LabError>>>(
        &self,
        mut test: DirtyTest<V>,
        verbosity: Verbosity,
    ) -> LabResult<Outcome> {
        let progress = Progress::new(self.iterations as u64 + 1, verbosity);
        progress.step("populate")?;
        let populate = test.sweeps.sweep(Sweep::POPULATE)?.time;
        let enable = test.set_logging(Logging::On {
            initially: match self.initially_all_set {
                true => Initially::AllSet,
                false => Initially::Clean,
            },
            huge: HugeLeaves::Lazy,
        })?;
        let sweep = Sweep {
            write_percent: self.write_percent,
            random: self.guest.random,
        };
        let mut iterations = Vec::new();
        for iteration in 1..=self.iterations {
            progress.step(format!("iteration {iteration} of {}", self.iterations))?;
            let mut log = Harvested::default();
            let swept = test.iterate(sweep, &mut log)?;
            let (dirty_pages, written_pages) = (log.pages, swept.written);
            if dirty_pages < written_pages && !self.guest.overlap {
                return Err(LabError::Guest(format!(
                    "the guest wrote {written_pages} pages, and the log has {dirty_pages}: this is \
                     an error in Lacuna"
                )));
            }
            iterations.push(Iteration {
                dirty_s: swept.time.as_secs_f64(),
                get_s: log.get.as_secs_f64(),
                clear_s: log.clear.as_secs_f64(),
                harvests: log.count,
                dirty_pages,
                written_pages,
            });
        }
        Ok(Outcome {
            test: "dirty-log",
            vcpus: self.guest.vcpus,
            bytes: self.guest.bytes.0,
            slots: test.slots.len(),
            write_percent: self.write_percent,
            detected_by: test.sweeps.vm.detected_by().to_string(),
            populate_s: populate.as_secs_f64(),
            enable_s: enable.as_secs_f64(),
            iterations,
            disable_s: test.set_logging(Logging::Off)?.as_secs_f64(),
        })
    }
}

/// A VM with the guest, and how its log is harvested.
pub(crate) struct DirtyTest<V: Vm> {
    pub sweeps: Sweeps<V>,
    /// The slots of the accessed memory, and whether they log.
    slots: Vec<MemorySlot>,
    pub logs: bool,
    /// Pages of the first slot before the accessed ones. Walks write to the guest's page tables
    /// there, which are not counted.
    before: usize,
    manual_clear: bool,
}

/// The cost of harvests, and what they found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Harvested {
    /// The time to get the log, and to clear it where that is a step of its own.
    pub get: Duration,
    pub clear: Duration,
    /// Processor time of both, in nanoseconds.
    pub cpu_ns: u64,
    /// Dirty pages.
    pub pages: u64,
    /// More than one in an iteration in which a ring was full.
    pub count: u64,
}

impl DirtyTest<soft::Vm> {
    /// The test of `options` on soft.
    pub fn soft(options: &DirtyLog, variant: Variant) -> LabResult<Self> {
        let builder = soft::VmBuilder {
            delivery: options.delivery.delivery(Backup::None),
            detection: match options.detection {
                Some(Detector::Wp) => Detection::WriteProtect,
                _ => Detection::Pml,
            },
            ..options.guest.soft()
        };
        Self::new(&builder, options, variant)
    }

    /// From now on the slots log as `watch` says; `None`: they do not log. Pages may be left
    /// write-protected: the caller lets the guest write to all pages.
    pub fn watch(&mut self, watch: Option<Detection>) -> LabResult {
        self.set_logging(Logging::Off)?;
        if let Some(detection) = watch {
            self.sweeps.vm.set_detection(detection);
            self.set_logging(Logging::LAZY)?;
        }
        Ok(())
    }
}

impl<V: Vm<Error: Into<LabError>>> DirtyTest<V> {
    fn new(
        builder: &impl Builder<Vm = V>,
        options: &DirtyLog,
        variant: Variant,
    ) -> LabResult<Self> {
        let sweeps = Sweeps::new(builder, &options.guest, variant)?;
        let slots = sweeps.vm.memory_slots().into_iter();
        let slots = slots.filter(|slot| slot.gfns.intersect(sweeps.area).is_some());
        let slots: Vec<_> = slots.collect();
        let [first, area] = [slots[0].gfns, sweeps.area].map(|gfns| gfns.start().get());
        Ok(Self {
            before: area.saturating_sub(first) as usize,
            slots,
            sweeps,
            logs: false,
            manual_clear: options.manual_clear,
        })
    }

    /// Turns the log of all slots of the accessed memory on or off; returns the time.
    pub fn set_logging(&mut self, logging: Logging) -> LabResult<Duration> {
        let start = Instant::now();
        let mut slots = self.slots.iter();
        slots.try_for_each(|slot| self.sweeps.vm.set_logging(slot.id, logging))?;
        self.logs = logging != Logging::Off;
        Ok(start.elapsed())
    }

    /// Lets the guest access all pages. Harvests, if the slots log, and adds that to `sum`.
    pub fn iterate(&mut self, sweep: Sweep, sum: &mut Harvested) -> LabResult<Swept> {
        let mut swept = Swept::default();
        loop {
            let done = self.sweeps.run(sweep, &mut swept)?;
            if self.logs {
                self.harvest(sum)?;
            }
            if done {
                return Ok(swept);
            }
        }
    }

    /// Adds one harvest to `sum`.
    pub fn harvest(&self, sum: &mut Harvested) -> LabResult {
        let cpu = thread_cpu_ns();
        if let Some(rings) = self.sweeps.vm.dirty_rings() {
            let start = Instant::now();
            rings.reap_rings(&mut |_, page| sum.pages += u64::from(page >= self.before))?;
            let reaped = Instant::now();
            rings.reset_rings()?;
            sum.get += reaped - start;
            sum.clear += reaped.elapsed();
        } else {
            let mut slots = self.slots.iter();
            slots.try_for_each(|slot| self.harvest_bitmap(slot, sum))?;
        }
        sum.cpu_ns += thread_cpu_ns() - cpu;
        sum.count += 1;
        Ok(())
    }

    /// Harvests the bitmap of one slot.
    fn harvest_bitmap(&self, slot: &MemorySlot, sum: &mut Harvested) -> LabResult {
        let pages = slot.gfns.pages() as usize;
        let mut words = vec![0; pages.div_ceil(64)];
        let two_steps = match self.manual_clear {
            true => Some(self.sweeps.vm.two_step_log().ok_or_else(|| {
                LabError::Guest("--manual-clear: this VM's log has one step: leave it out".into())
            })?),
            false => None,
        };
        let start = Instant::now();
        match two_steps {
            Some(log) => log.peek_dirty(slot.id, &mut words)?,
            None => self.sweeps.vm.get_dirty(slot.id, &mut words)?,
        }
        let got = Instant::now();
        sum.get += got - start;
        // The accessed pages begin with a block.
        sum.pages += words[self.before / 64..]
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum::<u64>();
        if let Some(log) = two_steps {
            let start = Instant::now();
            log.clear_dirty(slot.id, 0, pages, &mut words)?;
            sum.clear += start.elapsed();
        }
        Ok(())
    }
}

/// One iteration: times in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Iteration {
    dirty_s: f64,
    get_s: f64,
    clear_s: f64,
    /// More than one if a ring was full.
    harvests: u64,
    /// Pages in the log, and written pages as the guest has counted them.
    dirty_pages: u64,
    written_pages: u64,
}

/// The result of a test: its JSON form, with times in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    test: &'static str,
    vcpus: usize,
    bytes: u64,
    slots: usize,
    write_percent: f64,
    detected_by: String,
    populate_s: f64,
    enable_s: f64,
    iterations: Vec<Iteration>,
    disable_s: f64,
}

/// For people, in the selftest's order.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |time: f64| format!("{time:.6} s");
        let header = [
            "iteration",
            "dirty memory",
            "get log",
            "clear log",
            "harvests",
            "dirty pages",
            "written",
        ];
        let row = |(number, done): (usize, &Iteration)| {
            let [dirty, get, clear] = [done.dirty_s, done.get_s, done.clear_s].map(seconds);
            let [harvests, pages, written] =
                [done.harvests, done.dirty_pages, done.written_pages].map(|n| n.to_string());
            [
                (number + 1).to_string(),
                dirty,
                get,
                clear,
                harvests,
                pages,
                written,
            ]
        };
        let rows = self.iterations.iter().enumerate().map(row);
        let rows: Vec<_> = std::iter::once(header.map(str::to_owned))
            .chain(rows)
            .collect();
        write!(
            f,
            "{} vCPUs, {} each, {} slots, writes detected by {}\n\
             populate memory        {}\nenable dirty logging   {}\n\n{}\n\
             disable dirty logging  {}\n",
            self.vcpus,
            Size(self.bytes),
            self.slots,
            self.detected_by,
            seconds(self.populate_s),
            seconds(self.enable_s),
            align(&rows),
            seconds(self.disable_s),
        )
    }
}

#[cfg(test)]
mod tests;
