//! A guest of a dozen instructions. Every vCPU writes one byte to each page of its share, and then
//! exits through a port. When it is entered again, it does the same again.
//!
//! So the figure is of the resident fault path alone. The guest has no kernel, no timer and no page
//! table of its own. The boot tables map by 2 MiB leaves, so the stage-1 walk is short. The clock
//! covers the vCPU's thread inside [`Vcpu::run`]: the access, the TLB miss, the walks, the
//! violation, the frame and its zeroing, the install, the TLB fill, the retry, and the three
//! instructions of the loop.

use crate::experiment::LabError;
use crate::fixture::{boot_code, builder, slot};
use crate::native::thread_cpu_ns;
use lacuna_addr::{BackingRange, PAGE_SIZE, PageCount};
use lacuna_machine::{Exit, MemorySlots as _, Vcpu as _};
use lacuna_soft::{Delivery, SlotId, Vcpu, Vm};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

const CODE: u64 = 0x10_0000;
/// The address of the first touched page.
const AREA: u64 = 0x20_0000;

/// The times of one touch of fresh pages.
#[derive(Clone, Copy, Debug)]
pub struct Touch {
    /// The number of pages that each vCPU touched.
    pub pages: u64,
    /// Thread CPU time of all vCPUs, in nanoseconds.
    pub cpu_ns: u64,
    /// From the start of the first to the end of the last, in nanoseconds.
    pub wall_ns: u64,
}

/// A VM whose vCPUs touch their shares of fresh pages, as often as wanted.
///
/// The pages are a memory slot with a region of its own. Both are new for each touch, so every page
/// faults. The host allocates the last freed frames.
pub struct Fixture {
    vm: Arc<Vm>,
    vcpus: Vec<Vcpu>,
    pages: u64,
}

/// The slot of the touched pages.
const SLOT: SlotId = SlotId(100);

impl Fixture {
    /// A VM of `vcpus` vCPUs, with frames for their shares of `pages` pages. The frames have been
    /// touched, so that the host's kernel has backed them.
    pub fn new(vcpus: usize, pages: u64) -> Result<Self, LabError> {
        let boot = PageCount::new(AREA / PAGE_SIZE as u64);
        // Room for the per-CPU page caches, and for the other needs of a VM beside the touched
        // pages.
        let frames = PageCount::new(vcpus as u64 * pages + boot.get() + 4096);
        let builder = builder(boot, frames, vcpus);
        let code = program(pages * PAGE_SIZE as u64);
        let (vm, vcpus) = boot_code(&builder, Delivery::Bitmap, &[(CODE, &code)])?;
        Ok(Self { vm, vcpus, pages })
    }

    /// Lets every vCPU touch its share once. `before` is called before the clock starts.
    pub fn touch(&mut self, before: impl FnOnce()) -> Result<Touch, LabError> {
        touch_together(std::slice::from_mut(self), before)
    }

    fn add_area(&self) -> Result<BackingRange, LabError> {
        let pages = self.pages * self.vcpus.len() as u64;
        let notifier = self.vm.mmu().notifier();
        let region = self.vm.host().add_region(PageCount::new(pages), notifier)?;
        self.vm.add_slot(slot(SLOT, AREA, region))?;
        Ok(region)
    }
}

/// Lets all vCPUs of all `fixtures` touch their shares once, at the same time. Fixtures share
/// nothing but the machine.
pub fn touch_together(fixtures: &mut [Fixture], before: impl FnOnce()) -> Result<Touch, LabError> {
    let regions = fixtures
        .iter()
        .map(Fixture::add_area)
        .collect::<Result<Vec<_>, _>>()?;
    before();
    let touched = run(fixtures);
    for (fixture, region) in fixtures.iter().zip(regions) {
        fixture.vm.remove_slot(SLOT)?;
        fixture.vm.host().remove_region(region)?;
    }
    touched
}

fn run(fixtures: &mut [Fixture]) -> Result<Touch, LabError> {
    let pages = fixtures[0].pages;
    let vcpus = || fixtures.iter().map(|fixture| fixture.vcpus.len()).sum();
    let start_line = StartLine::new(vcpus());
    let results: Vec<Share> = thread::scope(|scope| {
        let start = |(index, vcpu)| {
            let start_line = &start_line;
            scope.spawn(move || {
                pin(index);
                share(vcpu, start_line)
            })
        };
        let vcpus = fixtures.iter_mut().flat_map(|fixture| &mut fixture.vcpus);
        let threads: Vec<_> = vcpus.enumerate().map(start).collect();
        let join = |t: thread::ScopedJoinHandle<'_, _>| {
            t.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads
            .into_iter()
            .map(join)
            .collect::<Result<_, LabError>>()
    })?;
    let first = results.iter().map(|r| r.start).min();
    let last = results.iter().map(|r| r.end).max();
    let (first, last) = first.zip(last).expect("at least one vCPU");
    Ok(Touch {
        pages,
        cpu_ns: results.iter().map(|r| r.cpu_ns).sum(),
        wall_ns: u64::try_from((last - first).as_nanos()).unwrap_or(u64::MAX),
    })
}

struct Share {
    start: Instant,
    end: Instant,
    cpu_ns: u64,
}

/// Pins the calling thread to a core. Without that, a new thread may start on the core of another
/// one, and a touch is over before the scheduler moves it.
pub fn pin(index: usize) {
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let mine = (0..CpuSet::MAX_CPU)
        .filter(|&cpu| allowed.is_set(cpu))
        .nth(index);
    if let Some(cpu) = mine {
        let mut only = CpuSet::new();
        only.set(cpu);
        // If the kernel refuses, the figure is less precise.
        let _ = sched_setaffinity(None, &only);
    }
}

/// Where threads wait for each other. They spin, because a wake-up takes as long as a hundred
/// faults.
struct StartLine {
    missing: AtomicUsize,
}

impl StartLine {
    const fn new(threads: usize) -> Self {
        Self {
            missing: AtomicUsize::new(threads),
        }
    }

    fn wait(&self) {
        self.missing.fetch_sub(1, Ordering::AcqRel);
        while self.missing.load(Ordering::Acquire) > 0 {
            std::hint::spin_loop();
        }
    }
}

fn share(vcpu: &mut Vcpu, start_line: &StartLine) -> Result<Share, LabError> {
    start_line.wait();
    let (start, cpu) = (Instant::now(), thread_cpu_ns());
    let exit = vcpu.run();
    let (end, cpu_ns) = (Instant::now(), thread_cpu_ns() - cpu);
    match exit {
        Ok(Exit::IoOut { .. }) => Ok(Share { start, end, cpu_ns }),
        other => Err(LabError::Guest(format!(
            "the touching guest ended with {other:?}"
        ))),
    }
}

/// The machine code; `bytes` is one vCPU's share.
fn program(bytes: u64) -> Vec<u8> {
    let bytes = u32::try_from(bytes)
        .expect("a share below 2 GiB")
        .to_le_bytes();
    let area = u32::try_from(AREA).expect("a small address").to_le_bytes();
    [
        &[0xb8, 1, 0, 0, 0][..], // again: mov eax, 1
        &[0x0f, 0xa2],           // cpuid
        &[0xc1, 0xeb, 24],       // shr ebx, 24       the APIC id
        &[0x48, 0x69, 0xfb],
        &bytes, // imul rdi, rbx, bytes
        &[0x48, 0x81, 0xc7],
        &area, // add rdi, area
        &[0x48, 0x8d, 0xb7],
        &bytes,                             // lea rsi, [rdi + bytes]
        &[0xc6, 0x07, 1],                   // touch: mov byte [rdi], 1
        &[0x48, 0x81, 0xc7, 0, 0x10, 0, 0], // add rdi, 4096
        &[0x48, 0x39, 0xf7],                // cmp rdi, rsi
        &[0x72, 0xf1],                      // jb touch
        &[0xe6, 0xf4],                      // out 0xf4, al
        &[0xeb, 0xce],                      // jmp again
    ]
    .concat()
}
