//! `lacuna lab apf`: the gain of asynchronous page faults for computing processes, and for faulting
//! ones.
//!
//! | id | what is compared |
//! |---|---|
//! | `apf.worker_share_percent.DEVICE` | workers beside faulters, on / workers alone |
//! | `apf.worker_ratio.DEVICE` | workers beside faulters, on / off: the 2010 talk's figure |
//! | `apf.faulter_ratio.DEVICE` | faulters beside workers, on / off |
//! | `apf.faulter_alone_ratio.DEVICE` | faulters without workers, on / off |
//! | `apf.break_even_us` | the injected page latency from which no process loses by async faults |
//! | `apf.memory_alone_time_ratio` | the time of a memory-bound program alone, on / off |
//! | `apf.kvm.task_share_percent.LATENCY` | the worker's share under `/dev/kvm` |
//! | `apf.kvm.source_share_percent.1ms` | the same, pages from a source: accepted exits |
//! | `apf.kvm.faults` | asynchronous faults completed by KVM, if every token came back |
//!
//! *On* and *off* are one guest in one VM at different times. Between slices of a fraction of a
//! second, `slices` switches the mechanism itself and pauses processes by a word on the status
//! page. So the arms differ in nothing else, such as the place of pages in memory or the host's
//! caches.
//!
//! `DEVICE` is `latency_1ms` (injected into compressed memory), `file` or `mem`.

pub use device::first_look;

pub(crate) mod alone;
pub mod arm64;
mod device;
mod kvm;
mod read_latency;
mod sweep;

use crate::experiment::{LabResult, Options, skip_if_busy, vcpus};
use crate::fixture::builder;
use crate::result::{Measurement, Report};
use crate::slices::Pace;
use lacuna::memory::Swap;
use lacuna::soft::VmBuilder;
use lacuna::{Apf, Arch, PageCount};

/// Guest memory in MiB: four times [`RESIDENT_MIB`].
const MEMORY_MIB: u64 = 256;
/// Host memory for it, in MiB.
const RESIDENT_MIB: u64 = 64;
/// The guest's time slice in microseconds, as of the kernel in the 2010 benchmark.
pub(crate) const SLICE_US: u64 = 4000;
/// The guest's timer tick, in microseconds.
pub(crate) const TICK_US: u64 = 1000;
/// The most outstanding faults of a vCPU (KVM's `ASYNC_PF_PER_VCPU`, and ours).
const OUTSTANDING: u64 = 64;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment. Results that this machine cannot measure are skipped.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    let steps = device::DEVICES.len() + sweep::steps(options) + 1;
    options.begin(steps as u64 + kvm::STEPS);
    report.say(format!(
        "apf: when a page must be read from swap, the guest gets an event and runs another \
         process. It gets another event when the page is there. The guest has {vcpus} vCPUs and \
         {MEMORY_MIB} MiB, {RESIDENT_MIB} MiB of them resident. Each vCPU has one process that \
         computes (a worker) and one that touches random pages, half of them to write (a faulter). \
         The time slice is {} ms. On and off are the same guest in turns, with the mechanism \
         switched.",
        SLICE_US / 1000,
        vcpus = vcpus(),
    ));
    for device in &device::DEVICES {
        if options.wants("device") || options.wants(device.id) {
            options.step(format!("on and off: {}", device.about))?;
            let guests = device::Guests::APF;
            let done = device::measure(device, guests, options, report);
            skip_if_busy(report, guests.ids(device), done)?;
        }
    }
    if options.wants("sweep") {
        let done = sweep::measure(options, report);
        skip_if_busy(report, [sweep::ID], done)?;
    }
    if options.wants("alone") {
        options.step("a memory-bound program alone")?;
        alone::measure(options, report)?;
    }
    kvm::measure(options, report)
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &[
    "device",
    "latency_1ms",
    "file",
    "mem",
    "sweep",
    "alone",
    "kvm",
    "source",
];

/// A VM for `bm`, with a worker and a faulter for each vCPU, and with `more` words on the command
/// line. The guest runs until it is ended.
fn bm(arch: Arch, swap: Swap, more: &str) -> VmBuilder {
    let each = vcpus();
    let [memory, resident] = [MEMORY_MIB, RESIDENT_MIB].map(|mib| PageCount::from_bytes(mib << 20));
    VmBuilder {
        arch,
        swap,
        apf: Apf::On,
        command_line: format!(
            "workers={each} faulters={each} populate=1 seconds=1000000 slice_us={SLICE_US} \
             tick_us={TICK_US} {more}"
        ),
        ..builder(memory, resident, each)
    }
}

/// `result` with the parameters of `bm` with `each` workers and faulters.
fn with_bm(
    result: Measurement,
    pace: Pace,
    [memory, resident]: [u64; 2],
    each: usize,
) -> Measurement {
    pace.with_params(result)
        .param("memory_mib", memory)
        .param("resident_mib", resident)
        .param("vcpus", each)
        .param("workers", each)
        .param("faulters", each)
        .param("guest_slice_us", SLICE_US)
}

/// `result` with the parameters that all experiments with [`bm`] share.
fn with_params(result: Measurement, pace: Pace) -> Measurement {
    with_bm(result, pace, [MEMORY_MIB, RESIDENT_MIB], vcpus())
        .param("write_percent", 50)
        .param("guest_tick_us", TICK_US)
        .param("outstanding_per_vcpu", OUTSTANDING)
}
