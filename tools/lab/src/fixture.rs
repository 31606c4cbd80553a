//! The fixtures of the experiments, from the largest to the smallest.
//!
//! | fixture | what it has | for |
//! |---|---|---|
//! | [`crate::session`] | one running guest, any backend | arms that are switched while it runs |
//! | [`crate::players`] | VMs with one guest image that take turns | arms with a VM each |
//! | [`boot_code`] | a VM that runs some bytes of machine code | one path, without a guest kernel |
//! | [`Tables`] | slots, tables and a host, without a processor | work on tables alone |

use crate::experiment::LabError;
use lacuna_addr::{BackingRange, Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{Arch, Image, Layout, Segment, Vm as _};
use lacuna_soft::{
    Apf, CpuModel, Delivery, Host, HugePages, LatencySetting, MemoryKind, Mmu, MmuNotifier,
    SlotFlags, SlotId, SlotSpec, Swap, Vcpu, Vm, VmBuilder, VmConfig,
};
use lacuna_sync::{Clock, HostClock, Qsbr};
use std::sync::Arc;

/// A VM with `memory` and as many frames as `resident`: 4 KiB pages, compressed memory as swap, no
/// async page faults. The kernel backs the memory before it is used, so no measured fault waits for
/// that.
pub fn builder(memory: PageCount, resident: PageCount, vcpus: usize) -> VmBuilder {
    VmBuilder {
        arch: Arch::X86_64,
        memory,
        resident,
        vcpus,
        memory_kind: MemoryKind::Budget,
        backing: None,
        prefault: true,
        huge: HugePages::Never,
        swap: Swap::Memory,
        source: None,
        latency: LatencySetting::default(),
        apf: Apf::Off,
        cpu: CpuModel::Host,
        seed: None,
        command_line: String::new(),
    }
}

/// A VM with `mib` MiB and a frame for each of its pages. The host has more frames than reclaim
/// keeps free, so nothing is ever reclaimed.
pub fn resident(mib: u64, vcpus: usize) -> VmBuilder {
    let memory = PageCount::from_bytes(mib << 20);
    let frames = PageCount::new(memory.get() + memory.get() / 8 + 16384);
    builder(memory, frames, vcpus)
}

/// The address of page number `page` of a source, in guests of `arch` with one slot.
///
/// # Panics
/// If there is no such address.
pub fn gpa_of(arch: Arch, page: u64) -> Gpa {
    let layout = Layout::of(arch, PageCount::from_bytes(1 << 20)).expect("a small guest");
    let start = layout.ranges()[0].start();
    let at = start.gpa().checked_add(page * PAGE_SIZE as u64);
    at.expect("a page of a guest")
}

/// The VM of `builder`, with vCPUs at the start of `image`. They do not run yet.
///
/// # Errors
/// The VM could not be made.
pub fn boot(
    builder: &VmBuilder,
    delivery: Delivery,
    image: &Image<'_>,
    command_line: &str,
) -> Result<(Arc<Vm>, Vec<Vcpu>), LabError> {
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let config = VmConfig {
        memory: builder.memory,
        vcpus: builder.vcpus,
        arch: builder.arch,
        apf: builder.apf,
        delivery,
        ..VmConfig::default()
    };
    let vm = Vm::new(builder.host(Arc::clone(&clock))?, clock, config)?;
    let vcpus = vm.boot(image, command_line)?;
    Ok((vm, vcpus))
}

/// [`boot`] of machine code: pieces of memory with their addresses. The vCPUs start at the first
/// piece.
///
/// # Errors
/// The VM could not be made.
///
/// # Panics
/// If there is no piece, or an address is too large.
pub fn boot_code(
    builder: &VmBuilder,
    delivery: Delivery,
    pieces: &[(u64, &[u8])],
) -> Result<(Arc<Vm>, Vec<Vcpu>), LabError> {
    let at = |address: u64| Gpa::new(address).expect("a small address");
    let segments = pieces.iter().map(|&(address, bytes)| Segment {
        gpa: at(address),
        bytes,
        size: bytes.len() as u64,
    });
    let image = Image {
        arch: Arch::X86_64,
        segments: segments.collect(),
        entry: at(pieces[0].0),
    };
    boot(builder, delivery, &image, "")
}

/// The memory of a VM without its processors, for measuring work on tables and reverse maps.
pub struct Tables {
    /// The host memory manager.
    pub host: Arc<Host>,
    /// Quiescent states, for one vCPU.
    pub qsbr: Arc<Qsbr>,
    /// Its memory-management unit.
    pub mmu: Arc<Mmu>,
}

impl Tables {
    /// Memory without slots, with at most `tables` table pages.
    ///
    /// # Errors
    /// The host or the MMU could not be made.
    pub fn new(builder: &VmBuilder, tables: u32) -> Result<Self, LabError> {
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(clock)?;
        let qsbr = Arc::new(Qsbr::new(1));
        let mmu = Mmu::new(Arc::clone(&host), Arc::clone(&qsbr), tables)?;
        Ok(Self { host, qsbr, mmu })
    }

    /// Adds a slot of `pages` pages at `guest`, with a region of its own behind it.
    ///
    /// # Errors
    /// The region or the slot was refused.
    pub fn add_slot(&self, id: SlotId, guest: u64, pages: u64) -> Result<BackingRange, LabError> {
        let notifier = Arc::clone(&self.mmu) as Arc<dyn MmuNotifier>;
        let region = self.host.add_region(PageCount::new(pages), notifier)?;
        self.mmu.add_slot(slot(id, guest, region))?;
        Ok(region)
    }
}

/// A slot at `guest`, without flags, with all of `region` behind it.
pub fn slot(id: SlotId, guest: u64, region: BackingRange) -> SlotSpec {
    SlotSpec {
        id,
        guest,
        backing: region.start(),
        bytes: region.pages() * PAGE_SIZE as u64,
        flags: SlotFlags::empty(),
    }
}

/// Ends the test as skipped where the build has no guests.
#[cfg(test)]
pub fn needs_guests() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
}

/// Calls `attempt` until it succeeds, for at least two minutes. Tests use it for progress in a
/// short slice of time. On a busy machine, a thread may get no processor time in one slice.
///
/// # Panics
/// If no attempt succeeds, with the message of the last one.
#[cfg(test)]
pub fn eventually<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    use std::time::{Duration, Instant};
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        match attempt() {
            Ok(found) => return found,
            Err(why) => assert!(Instant::now() < deadline, "{why}"),
        }
    }
}
