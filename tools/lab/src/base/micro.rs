//! A guest of a dozen instructions. Every vCPU writes one byte to each page of its share, and then
//! exits through a port, again and again.
//!
//! So the figure is of the resident fault path alone. The guest has no kernel, no timer and no page
//! table of its own. The boot tables map by 2 MiB leaves, so the stage-1 walk is short. The clock
//! covers the vCPU's thread inside `Vcpu::run`: the access, the TLB miss, the walks, the violation,
//! the frame and its zeroing, the install, the TLB fill, the retry, and the three instructions of
//! the loop.

use crate::cores::pin;
use crate::experiment::LabResult;
use crate::fixture::{boot_code, builder, joined, time_to_port};
use lacuna::memory::{SlotFlags, SlotId};
use lacuna::soft::{Vcpu, Vm};
use lacuna::{Gfn, GfnRange, MemorySlots as _, PAGE_SIZE, PageCount};
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
/// The pages are a memory slot of its own, new for each touch, so every page faults. The host
/// allocates the last freed frames.
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
    pub fn new(vcpus: usize, pages: u64) -> LabResult<Self> {
        let boot = PageCount::new(AREA / PAGE_SIZE as u64);
        // Room for the per-CPU page caches, and for the other needs of a VM beside the touched
        // pages.
        let frames = PageCount::new(vcpus as u64 * pages + boot.get() + 4096);
        let builder = builder(boot, frames, vcpus);
        let code = program(pages * PAGE_SIZE as u64);
        let (vm, vcpus) = boot_code(&builder, &[(CODE, &code)])?;
        Ok(Self { vm, vcpus, pages })
    }

    fn add_area(&self) -> LabResult {
        let first = Gfn::new(AREA / PAGE_SIZE as u64).expect("a small address");
        let area = GfnRange::new(first, self.pages * self.vcpus.len() as u64);
        let area = area.expect("small addresses");
        Ok(self.vm.add_memory(SLOT, area, SlotFlags::empty())?)
    }
}

/// Lets all vCPUs of all `fixtures` touch their shares once, at the same time. Fixtures share
/// nothing but the machine. `before` is called before the clock starts.
pub fn touch_together(fixtures: &mut [Fixture], before: impl FnOnce()) -> LabResult<Touch> {
    fixtures.iter().try_for_each(Fixture::add_area)?;
    before();
    let touched = run(fixtures);
    for fixture in fixtures.iter() {
        fixture.vm.remove_slot(SLOT)?;
    }
    touched
}

fn run(fixtures: &mut [Fixture]) -> LabResult<Touch> {
    let pages = fixtures[0].pages;
    let vcpus = fixtures.iter_mut().flat_map(|fixture| &mut fixture.vcpus);
    let vcpus: Vec<_> = vcpus.collect();
    let missing = AtomicUsize::new(vcpus.len());
    let shares = thread::scope(|scope| {
        let start = |(index, vcpu)| {
            let missing = &missing;
            scope.spawn(move || {
                pin(index);
                share(vcpu, missing)
            })
        };
        let threads: Vec<_> = vcpus.into_iter().enumerate().map(start).collect();
        let shares = threads.into_iter().map(joined);
        shares.collect::<LabResult<Vec<Share>>>()
    })?;
    let first = shares.iter().map(|share| share.start).min();
    let last = shares.iter().map(|share| share.end).max();
    let (first, last) = first.zip(last).expect("at least one vCPU");
    Ok(Touch {
        pages,
        cpu_ns: shares.iter().map(|share| share.cpu_ns).sum(),
        wall_ns: (last - first).as_nanos() as u64,
    })
}

struct Share {
    start: Instant,
    end: Instant,
    cpu_ns: u64,
}

/// The threads wait for each other before the clock starts. They spin, because a wake-up takes as
/// long as a hundred faults.
fn share(vcpu: &mut Vcpu, missing: &AtomicUsize) -> LabResult<Share> {
    missing.fetch_sub(1, Ordering::AcqRel);
    while missing.load(Ordering::Acquire) > 0 {
        std::hint::spin_loop();
    }
    let start = Instant::now();
    let cpu_ns = time_to_port(vcpu)?;
    Ok(Share {
        start,
        end: Instant::now(),
        cpu_ns,
    })
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
