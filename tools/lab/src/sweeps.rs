//! A guest whose vCPUs access every page of their memory once, again and again. It has no kernel,
//! like the guests of Linux's `dirty_log_perf_test` and `access_tracking_perf_test`. It runs on any
//! backend, and on both processors ([`program`]).
//!
//! ```text
//! host    threads of the vCPUs start ──────────────────────────► joined: they are out of the guest
//! guest                 every page once, in all vCPUs together │
//!         a ring is full: its vCPU waits until the others are done too; the host harvests; again
//! ```
//! The memory is the VM's own, in the last slot of its boot layout, or in slots of its own
//! (`--slots`).

pub mod program;

use crate::cores::Cores;
use crate::experiment::{LabError, LabResult};
use crate::fixture::{self, joined};
use crate::interrupt;
use crate::native::thread_cpu_ns;
use crate::options::GuestOptions;
use lacuna::boot::Segment;
use lacuna::memory::{MemoryKind, SlotFlags, SlotId};
use lacuna::{
    Arch, Builder, Exit, Gfn, GfnRange, Gpa, Image, PAGE_SIZE, PageCount, Vcpu, Vm, kvm, soft,
};
use lacuna_addr::Level;
use program::{AT_RANDOM, BY_ADDRESS, Variant, Work, pieces, room};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Where slots of their own begin, and where a large memory continues.
const HIGH: u64 = 4 << 30;
/// The end of x86-64 memory below [`HIGH`].
const LOW_END: u64 = 3 << 30;
/// The number of the first slot of its own.
const FIRST_SLOT: u16 = 8;
/// Frames beyond the pages and their tables, because reclaim keeps some free.
const SPARE: u64 = 1 << 14;

impl GuestOptions {
    /// As [`GuestOptions::check`], for a guest that accesses all pages again and again.
    pub fn check_sweeps(&self) -> Result<(), &'static str> {
        let (each, _) = self.pages();
        match () {
            () if each == 0 || each > u64::from(u32::MAX / 2) => {
                Err("--bytes: give each vCPU at least 4K, and less than 8T")
            }
            () if self.slots > 1 && self.memory_kind != MemoryKind::Budget => Err(
                "--slots: memory in several slots is the backend's own: leave --memory-kind out",
            ),
            () => self.check(),
        }
    }

    /// The guest's memory of the boot layout, and the address of the accessed memory.
    fn layout(&self) -> (PageCount, u64) {
        let (_, pages) = self.pages();
        let bytes = pages * PAGE_SIZE as u64;
        let base = match self.arch {
            Arch::Arm64 => 1 << 30,
            _ => 0,
        };
        let low = room(self.arch, pages);
        let (size, first) = match () {
            () if self.slots > 1 => (low - base, HIGH),
            () if self.arch == Arch::X86_64 && low + bytes > LOW_END => (LOW_END + bytes, HIGH),
            () => (low + bytes - base, low),
        };
        // Memory in huge pages is a multiple of them.
        let page = self.memory_kind.page_size().max(Level::L2M).bytes();
        (PageCount::from_bytes(size.next_multiple_of(page)), first)
    }

    /// A VM for this guest on soft.
    pub fn soft(&self) -> soft::VmBuilder {
        let (_, pages) = self.pages();
        let frames = match self.memory_kind {
            MemoryKind::Budget => pages + pages / 64,
            _ => 0,
        };
        soft::VmBuilder {
            arch: self.arch,
            memory_kind: self.memory_kind,
            ..fixture::builder(self.layout().0, PageCount::new(frames + SPARE), self.vcpus)
        }
    }

    /// As [`GuestOptions::soft`], on `/dev/kvm`.
    pub fn kvm(&self) -> kvm::VmBuilder {
        kvm::VmBuilder {
            memory_kind: self.memory_kind,
            ..fixture::on_kvm(self.layout().0, self.vcpus)
        }
    }
}

/// What the vCPUs do with their pages.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sweep {
    /// The share of the pages that is written; the others are read.
    pub write_percent: f64,
    /// In a random order.
    pub random: bool,
}

impl Sweep {
    /// Writes every page, in the order of the addresses.
    pub const POPULATE: Self = Self {
        write_percent: 100.0,
        random: false,
    };

    /// What the guest reads at the beginning of a sweep.
    fn answers(self) -> [u32; 2] {
        let limit = f64::from(1_u32 << 31) * self.write_percent / 100.0;
        let multiplier = if self.random { AT_RANDOM } else { BY_ADDRESS };
        [limit as u32, multiplier]
    }
}

/// The counts of a sweep.
#[derive(Clone, Copy, Debug, Default)]
pub struct Swept {
    /// From the first access to the last one, without harvests.
    pub time: Duration,
    /// Processor time of all vCPUs' threads, in nanoseconds.
    pub cpu_ns: u64,
    /// Written pages, of all vCPUs; of overlapping ones each time.
    pub written: u64,
}

/// A VM with the guest.
pub struct Sweeps<V: Vm> {
    pub vm: Arc<V>,
    /// The accessed pages.
    pub area: GfnRange,
    vcpus: Vec<Sweeper<V::Vcpu>>,
}

impl<V: Vm<Error: Into<LabError>>> Sweeps<V> {
    /// The guest of `options` in a VM of `builder`, which [`GuestOptions::soft`] or
    /// [`GuestOptions::kvm`] has made. No page has been accessed.
    pub fn new(
        builder: &impl Builder<Vm = V>,
        options: &GuestOptions,
        variant: Variant,
    ) -> LabResult<Self> {
        let vm = builder.build().map_err(Into::into)?;
        let ((each, all), (_, first)) = (options.pages(), options.layout());
        let area = Gfn::new(first / PAGE_SIZE as u64).and_then(|gfn| GfnRange::new(gfn, all));
        let area = area.expect("addresses of a guest that was built");
        if options.slots > 1 {
            add_slots(&*vm, area, options.slots as u64)?;
        }
        let pieces = pieces(&Work {
            arch: options.arch,
            vcpus: options.vcpus,
            first,
            next: if options.overlap {
                0
            } else {
                each * PAGE_SIZE as u64
            },
            pages: each,
            end: first + all * PAGE_SIZE as u64,
            variant,
        });
        let at = |address: u64| Gpa::new(address).expect("a small address");
        let segments = pieces.iter().map(|(address, bytes)| Segment {
            gpa: at(*address),
            bytes,
            size: bytes.len() as u64,
        });
        let image = Image {
            arch: options.arch,
            segments: segments.collect(),
            entry: at(pieces[0].0),
        };
        let vcpus = vm.boot(&image, "").map_err(Into::into)?;
        let vcpus = vcpus.into_iter();
        let vcpus = vcpus.map(|vcpu| Sweeper::new(vcpu, options.pin.clone()));
        Ok(Self {
            area,
            vcpus: vcpus.collect(),
            vm,
        })
    }

    /// Lets every vCPU access each of its pages once. No slot logs.
    pub fn sweep(&mut self, sweep: Sweep) -> LabResult<Swept> {
        let mut swept = Swept::default();
        while !self.run(sweep, &mut swept)? {}
        Ok(swept)
    }

    /// As [`Sweeps::sweep`], and adds its counts to `sum`. Returns `false` if vCPUs have left early
    /// because their dirty rings are full: the caller harvests and calls this again.
    pub fn run(&mut self, sweep: Sweep, sum: &mut Swept) -> LabResult<bool> {
        interrupt::check()?;
        let mut left: Vec<_> = self.vcpus.iter_mut().filter(|vcpu| !vcpu.done).collect();
        let runs = run_all(&mut left, sweep.answers())?;
        let first = runs.iter().map(|run| run.start).min();
        let last = runs.iter().map(|run| run.end).max();
        let (first, last) = first.zip(last).expect("at least one vCPU");
        sum.time += last - first;
        sum.cpu_ns += runs.iter().map(|run| run.cpu_ns).sum::<u64>();
        sum.written += runs.iter().map(|run| run.written).sum::<u64>();
        let done = self.vcpus.iter().all(|vcpu| vcpu.done);
        if done {
            self.vcpus.iter_mut().for_each(|vcpu| vcpu.done = false);
        }
        Ok(done)
    }
}

/// Slots of about the same size for `area`.
fn add_slots(vm: &impl Vm, area: GfnRange, slots: u64) -> LabResult {
    for slot in 0..slots {
        let [start, end] = [slot, slot + 1].map(|slot| area.pages() * slot / slots);
        let first = area.start().checked_add(start).expect("in the area");
        let part = GfnRange::new(first, end - start).expect("in the area");
        let id = SlotId(FIRST_SLOT + slot as u16);
        vm.add_memory(id, part, SlotFlags::empty())?;
    }
    Ok(())
}

/// One vCPU.
struct Sweeper<C> {
    vcpu: C,
    cores: Option<Cores>,
    /// How many of the answers of this sweep the guest has read.
    read: usize,
    /// The guest has reached the end of this sweep.
    done: bool,
}

/// One run of a vCPU, up to the end of its sweep or of its ring.
struct Run {
    start: Instant,
    end: Instant,
    cpu_ns: u64,
    /// The written pages of a whole sweep.
    written: u64,
}

impl<C: Vcpu> Sweeper<C> {
    const fn new(vcpu: C, cores: Option<Cores>) -> Self {
        Self {
            vcpu,
            cores,
            read: 0,
            done: false,
        }
    }

    fn run(&mut self, answers: [u32; 2]) -> LabResult<Run> {
        if let Some(cores) = &self.cores {
            let pinned = cores.pin(self.vcpu.index());
            pinned.map_err(|error| LabError::Other(Box::new(error)))?;
        }
        let (mut start, mut cpu) = (Instant::now(), thread_cpu_ns());
        let written = loop {
            match self.vcpu.run() {
                Ok(Exit::IoIn { .. } | Exit::MmioRead { .. }) => {
                    self.vcpu.complete_read(u64::from(answers[self.read]));
                    self.read += 1;
                    (start, cpu) = (Instant::now(), thread_cpu_ns());
                }
                Ok(Exit::IoOut { value, .. }) => break Some(u64::from(value)),
                Ok(Exit::MmioWrite { value, .. }) => break Some(value),
                Ok(Exit::DirtyRingFull) => break None,
                // A harvest kicks the vCPUs.
                Ok(Exit::Interrupted) => {}
                other => return Err(LabError::Guest(format!("the guest left with {other:?}"))),
            }
        };
        let (end, cpu_ns) = (Instant::now(), thread_cpu_ns() - cpu);
        if written.is_some() {
            (self.read, self.done) = (0, true);
        }
        Ok(Run {
            start,
            end,
            cpu_ns,
            written: written.unwrap_or(0),
        })
    }
}

/// Runs all `vcpus`: a single one on the calling thread, unless it has a core.
fn run_all<C: Vcpu>(vcpus: &mut [&mut Sweeper<C>], answers: [u32; 2]) -> LabResult<Vec<Run>> {
    if let [alone] = vcpus
        && alone.cores.is_none()
    {
        return Ok(vec![alone.run(answers)?]);
    }
    thread::scope(|scope| {
        let vcpus = vcpus.iter_mut();
        let threads = vcpus.map(|vcpu| scope.spawn(move || vcpu.run(answers)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(joined).collect()
    })
}

#[cfg(test)]
mod tests;
