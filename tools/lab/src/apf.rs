//! `lacuna lab apf`: what asynchronous page faults give to threads that compute, and to threads
//! that fault.
//!
//! | id | what is compared |
//! |---|---|
//! | `apf.worker_share_percent.DEVICE` | workers beside faulters, on / workers alone |
//! | `apf.worker_ratio.DEVICE` | workers beside faulters, on / off: the 2010 talk's figure |
//! | `apf.faulter_ratio.DEVICE` | faulters beside workers, on / off |
//! | `apf.faulter_alone_ratio.DEVICE` | faulters without workers, on / off |
//! | `apf.break_even_us` | the page latency from which no thread does worse with them |
//! | `apf.memory_alone_time_ratio` | a memory-bound program's time, on / off, nothing beside it |
//! | `apf.kvm.task_share_percent.LATENCY` | the worker's share under `/dev/kvm` |
//! | `apf.kvm.faults` | asynchronous faults that KVM completed, each token matched |
//!
//! *On* and *off* are one guest in one VM at different times: `slices` turns the mechanism itself,
//! between slices of a fraction of a second, and pauses processes by a word on the status page. So
//! arms differ in nothing else, not in where pages lie, nor in what the host has cached.
//!
//! | device | what it is |
//! |---|---|
//! | `latency_1ms` | compressed memory, 1 ms away, for any number of transfers at once |
//! | `file` | the plain file, by direct I/O where the file system allows |
//! | `mem` | compressed memory (lz4): a page is a few microseconds away |

pub use device::first_look;

mod alone;
mod device;
mod kvm;
mod slices;
mod sweep;

use crate::experiment::{LabError, Options, vcpus};
use crate::fixture::builder;
use crate::report::Progress;
use crate::result::{Measurement, Report};
use lacuna_addr::PageCount;
use lacuna_soft::{Apf, Swap, VmBuilder};
use slices::Pace;
use std::time::Duration;

/// Memory the guest believes it has, in MiB: four times [`RESIDENT_MIB`].
const MEMORY_MIB: u64 = 256;
/// Memory it gets, in MiB.
const RESIDENT_MIB: u64 = 64;
/// The guest's time slice, in microseconds: what the 2010 benchmark's kernel gave.
const SLICE_US: u64 = 4000;
/// The guest's timer tick, in microseconds.
const TICK_US: u64 = 1000;
/// Faults a vCPU may have outstanding (KVM's `ASYNC_PF_PER_VCPU`, and ours).
const OUTSTANDING: u64 = 64;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The first experiment that could not be carried out. What this machine lacks is skipped.
pub fn run(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let steps = device::DEVICES.len() + sweep::steps(options) + 1;
    let progress = Progress::new(steps as u64 + kvm::STEPS, options.verbosity);
    report.say(format!(
        "apf: when a page of the guest must come from swap, the guest is told, runs another \
         process, and is told again when it is there. {vcpus} vCPUs, {MEMORY_MIB} MiB of guest \
         memory in {RESIDENT_MIB}; on each vCPU one process that computes (a worker) and one that \
         touches random pages (a faulter), half of them to write; time slice {} ms. On / off is \
         the same guest, with the mechanism turned on and off in turns.",
        SLICE_US / 1000,
        vcpus = vcpus(),
    ));
    if options.wants("device") {
        for device in &device::DEVICES {
            progress.step(format!("on and off: {}", device.about))?;
            device::measure(device, options, report)?;
        }
    }
    if options.wants("sweep") {
        sweep::measure(options, report, &progress)?;
    }
    if options.wants("alone") {
        progress.step("a memory-bound program alone")?;
        alone::measure(options, report)?;
    }
    if options.wants("kvm") {
        kvm::measure(options, report, &progress)?;
    }
    Ok(())
}

/// What can be measured alone.
pub const PARTS: &[&str] = &["device", "sweep", "alone", "kvm"];

/// `bm` with a worker and a faulter for each vCPU, until it is ended.
fn bm(swap: Swap) -> VmBuilder {
    let vcpus = vcpus();
    let [memory, resident] = [MEMORY_MIB, RESIDENT_MIB].map(|mib| PageCount::from_bytes(mib << 20));
    VmBuilder {
        swap,
        apf: Apf::On,
        command_line: bm_words(vcpus),
        ..builder(memory, resident, vcpus)
    }
}

/// The command line of `bm` with `each` workers and as many faulters.
fn bm_words(each: usize) -> String {
    format!(
        "workers={each} faulters={each} populate=1 seconds=1000000 \
         slice_us={SLICE_US} tick_us={TICK_US}"
    )
}

/// `result` with what every experiment with [`bm`] has in common.
fn with_params(result: Measurement, pace: Pace) -> Measurement {
    result
        .param("memory_mib", MEMORY_MIB)
        .param("resident_mib", RESIDENT_MIB)
        .param("vcpus", vcpus())
        .param("workers", vcpus())
        .param("faulters", vcpus())
        .param("write_percent", 50)
        .param("guest_slice_us", SLICE_US)
        .param("guest_tick_us", TICK_US)
        .param("outstanding_per_vcpu", OUTSTANDING)
        .param("slice_ms", ms(pace.slice))
        .param("settle_ms", ms(pace.settle))
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
