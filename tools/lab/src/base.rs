//! `lacuna lab base`: the memory overhead of a run, the time of a fault, the speed of a soft vCPU.
//!
//! | id | what is compared |
//! |---|---|
//! | `run.memory_overhead_percent` | the peak resident memory of a process above its budget |
//! | `fault.soft_vs_host` | CPU time of a guest's first touch / a host anonymous fault |
//! | `fault.soft_vs_host.cold` | the same, caches flushed before each batch |
//! | `fault.host_ns`, `fault.host_ns.cold` | the host's own fault in the same runs |
//! | `fault.scaling_2vcpu` | pages a second, two vCPUs on their own shares / one |
//! | `cpu.x86.minstr_per_s.*` | guest instructions a second, beside native and QEMU (TCG) |
//! | `cpu.x86.native_minstr_per_s.*` | the same program natively, in the same rounds |
//! | `cpu.x86.vs_qemu_tcg.mem64m` | ours / QEMU's, same program, same run |
//!
//! Both arms of the fault figures include zeroing. The memory figure is for `bm` with 2 GiB in
//! 512 MiB. It counts frames, tables, program and the swap page cache.

mod cpu;
mod fault;
mod memory;
mod micro;

use crate::experiment::{LabResult, Options};
use crate::result::Report;

pub use cpu::first_look as vcpu_first_look;
pub use fault::first_look as fault_first_look;
pub use micro::{Fixture, Touch, touch_together};

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment. Results that need QEMU are skipped without it.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    options.begin(8);
    if options.wants("memory") {
        options.step("memory overhead: bm, 2 GiB in 512 MiB")?;
        memory::overhead(options, report)?;
    }
    if options.wants_x86("fault", fault::IDS, report) {
        options.step("fault, warm caches")?;
        fault::measure(options, report, false)?;
        options.step("fault, cold caches")?;
        fault::measure(options, report, true)?;
    }
    if options.wants_x86("scaling", [fault::SCALING], report) {
        options.step("fault, 1 and 2 vCPUs")?;
        fault::scaling(options, report)?;
    }
    if options.wants("cpu") {
        cpu::rates(options, report)?;
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["memory", "fault", "scaling", "cpu"];

/// The rounds of each experiment.
const fn rounds(options: &Options) -> usize {
    if options.quick { 2 } else { 10 }
}
