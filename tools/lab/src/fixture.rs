//! The fixtures of the experiments, from the largest to the smallest.
//!
//! | fixture | what it has | for |
//! |---|---|---|
//! | [`crate::session`] | one running guest, any backend | arms that are switched while it runs |
//! | [`crate::guests`] | a guest at a gate, or an incoming one | restores and migrations |
//! | [`crate::players`] | VMs with one guest image that take turns | arms with a VM each |
//! | [`crate::sweeps`] | vCPUs that access all pages, again and again | tests of the logs |
//! | [`boot_code`] | a VM that runs some bytes of machine code | one path, without a guest kernel |

use crate::experiment::{LabError, LabResult};
use crate::native::thread_cpu_ns;
use crate::result::Measurement;
use lacuna::boot::Segment;
use lacuna::soft::{Vcpu, Vm, VmBuilder};
use lacuna::{
    Apf, Arch, Clock, Exit, Gpa, HostClock, Image, Layout, PAGE_SIZE, PageCount, Vm as _, VmConfig,
    kvm,
};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;

/// A VM with `memory` and as many frames as `resident`: 4 KiB pages, compressed memory as swap, no
/// async page faults. The kernel backs the memory before it is used, so no measured fault waits for
/// that.
pub fn builder(memory: PageCount, resident: PageCount, vcpus: usize) -> VmBuilder {
    VmBuilder {
        vcpus,
        prefault: true,
        apf: Apf::Off,
        ..VmBuilder::new(memory, resident)
    }
}

/// `result` with the size of the VM of `builder`.
pub fn with_size(result: Measurement, builder: &VmBuilder) -> Measurement {
    result
        .param("memory_mib", builder.memory.bytes() >> 20)
        .param("resident_mib", builder.resident.bytes() >> 20)
        .param("vcpus", builder.vcpus)
}

/// A VM with `mib` MiB and a frame for each of its pages. The host has more frames than reclaim
/// keeps free, so nothing is ever reclaimed.
pub fn resident(mib: u64, vcpus: usize) -> VmBuilder {
    let memory = PageCount::from_bytes(mib << 20);
    let frames = PageCount::new(memory.get() + memory.get() / 8 + 16384);
    builder(memory, frames, vcpus)
}

/// A VM on `/dev/kvm` with `memory`, all of it resident, and no async page faults.
pub fn on_kvm(memory: PageCount, vcpus: usize) -> kvm::VmBuilder {
    kvm::VmBuilder {
        vcpus,
        apf: Apf::Off,
        ..kvm::VmBuilder::new(memory, memory)
    }
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
    image: &Image<'_>,
    command_line: &str,
) -> LabResult<(Arc<Vm>, Vec<Vcpu>)> {
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let config = VmConfig {
        memory: builder.memory,
        vcpus: builder.vcpus,
        arch: builder.arch,
        apf: builder.apf,
        delivery: builder.delivery,
        ..VmConfig::default()
    };
    let vm = Vm::new(builder.host(Arc::clone(&clock))?, clock, config)?;
    let vcpus = vm.boot(image, command_line)?;
    Ok((vm, vcpus))
}

/// Machine code as an image: pieces of memory with their addresses. The vCPUs start at the first
/// piece.
///
/// # Panics
/// If there is no piece, or an address is too large.
pub fn code<'a>(arch: Arch, pieces: &[(u64, &'a [u8])]) -> Image<'a> {
    let at = |address: u64| Gpa::new(address).expect("a small address");
    let segments = pieces.iter().map(|&(address, bytes)| Segment {
        gpa: at(address),
        bytes,
        size: bytes.len() as u64,
    });
    Image {
        arch,
        segments: segments.collect(),
        entry: at(pieces[0].0),
    }
}

/// [`boot`] of machine code.
///
/// # Errors
/// The VM could not be made.
pub fn boot_code(builder: &VmBuilder, pieces: &[(u64, &[u8])]) -> LabResult<(Arc<Vm>, Vec<Vcpu>)> {
    boot(builder, &code(builder.arch, pieces), "")
}

/// Lets the guest run until it writes to a port, or to a device's memory.
///
/// # Errors
/// The guest left for another reason.
pub fn run_to_port(vcpu: &mut impl lacuna::Vcpu) -> LabResult {
    match vcpu.run() {
        Ok(Exit::IoOut { .. } | Exit::MmioWrite { .. }) => Ok(()),
        other => Err(LabError::Guest(format!("the guest left with {other:?}"))),
    }
}

/// As [`run_to_port`]. Returns nanoseconds of the thread's CPU time.
pub fn time_to_port(vcpu: &mut impl lacuna::Vcpu) -> LabResult<u64> {
    let start = thread_cpu_ns();
    run_to_port(vcpu)?;
    Ok(thread_cpu_ns() - start)
}

/// Joins a thread; a panic there continues here.
pub fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    let panicked = |panic| std::panic::resume_unwind(panic);
    thread.join().unwrap_or_else(panicked)
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
