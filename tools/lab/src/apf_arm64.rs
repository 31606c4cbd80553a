//! `lacuna lab apf-arm64`: the experiment in the cover letter of the arm64 series of 2020 (RFCv2).
//! It measures the gain of asynchronous page faults.
//!
//! Half of the guest's memory is resident. A memory-bound thread allocates all memory, accesses and
//! frees it. A CPU-bound process counts on the same vCPU.
//!
//! | id | what is compared |
//! |---|---|
//! | `apf_arm64.cpu_bound_ratio.FORM.Nvcpu` | blocks a minute of the CPU-bound process, on / off |
//! | `apf_arm64.memory_bound_ratio.FORM.Nvcpu` | pages a minute of the other thread, on / off |
//! | `apf_arm64.alone_time_ratio.FORM` | the time of the memory-bound thread alone, on / off |
//! | `apf_arm64.MEASURE.latency_1ms.FORM` | workers beside faulters, as in [`crate::apf`] |
//!
//! `FORM` is the contract between host and guest: `rfcv2` or `v4` of arm64 guests, `x86` of x86-64
//! guests (`--arch x86_64`), which run the same programs.
//!
//! ```text
//! latency    injected: each swap-in takes the next of a sequence with the letter's shortest,
//!            longest and mean time (`disk`); all arms of a round begin at the same place in it
//! work       what the memory-bound thread computes on each page, chosen in the run: alone, and
//!            without asynchronous faults, it waits for pages 30 % of its time (`calibrate`)
//! arms       one guest in one VM; the mechanism is switched between slices
//! ```
//!
//! Figures are stated as in the letter. A gain is the progress with asynchronous faults over the
//! progress without, less one: 8,286,827,472 blocks a minute to 7,029,030,180 are +17.8 %. The
//! share of swap-ins is a share of the time *with* asynchronous faults, and with the memory-bound
//! thread alone: 12.7 s of 42.2 s are 30 %.

mod alone;
mod calibrate;
mod disk;
mod pair;

use crate::apf::device;
use crate::experiment::{LabError, Options, skip_if_busy};
use crate::fixture::builder;
use crate::report::Progress;
use crate::result::Report;
use lacuna_addr::PageCount;
use lacuna_machine::Arch;
use lacuna_soft::{Apf, VmBuilder};

/// A contract between host and guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Form {
    /// Its word in result ids.
    id: &'static str,
    /// For people.
    about: &'static str,
    /// The word that chooses it on the guest kernel's command line.
    word: &'static str,
}

const ARM64: [Form; 2] = [
    Form {
        id: "rfcv2",
        about: "arm64, RFCv2: both events are data aborts",
        word: "apf=abort",
    },
    Form {
        id: "v4",
        about: "arm64, v1 to v4: an SDEI event and an interrupt",
        word: "apf=sdei",
    },
];
const X86: [Form; 1] = [Form {
    id: "x86",
    about: "x86-64: a page fault and an interrupt",
    word: "apf=int",
}];

fn forms(arch: Arch) -> &'static [Form] {
    match arch {
        Arch::Arm64 => &ARM64,
        _ => &X86,
    }
}

/// Guest memory for each vCPU in MiB; half of it is resident. It is small, so that the memory-bound
/// thread goes through all of it in some seconds.
const MEMORY_MIB: u64 = 6;
/// The guest's time slice in microseconds: as in [`crate::apf`].
const SLICE_US: u64 = 4000;
/// The guest's timer tick, in microseconds.
const TICK_US: u64 = 1000;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let forms = forms(options.arch);
    let steps = forms.len() * (pair::VCPUS.len() + 2);
    let progress = Progress::new(steps as u64, options.verbosity);
    report.say(format!(
        "apf-arm64: the experiment of the arm64 series' cover letter (RFCv2, 2020), with {} \
         guests. Half of the memory is resident. A memory-bound thread allocates, accesses and \
         frees all of it, and a CPU-bound process counts on the same vCPU. A swap-in takes {}. The \
         time slice is {} ms. On and off are the same guest in turns. As in the letter, a gain is \
         on / off - 1 (+17.8 % there), and swap-ins take a share of the time with asynchronous \
         faults of the memory-bound thread alone (12.7 s of 42.2 s there: 30 %).",
        options.arch,
        disk::ABOUT,
        SLICE_US / 1000,
    ));
    for form in forms {
        if options.wants("pair") {
            for &vcpus in pair::counts(options) {
                progress.step(format!("{}, {vcpus} vCPUs: both threads", form.id))?;
                let done = pair::measure(form, vcpus, options, report);
                skip_if_busy(report, pair::ids(form, vcpus), done)?;
            }
        }
        if options.wants("alone") {
            progress.step(format!("{}: the memory-bound thread alone", form.id))?;
            alone::measure(form, options, report)?;
        }
        if options.wants("share") {
            progress.step(format!("{}: workers and faulters, 1 ms a page", form.id))?;
            let [device, ..] = &device::DEVICES;
            let guests = device::Guests {
                experiment: "apf_arm64",
                form: form.id,
                words: form.word,
            };
            let done = device::measure(device, guests, options, report);
            skip_if_busy(report, guests.ids(device), done)?;
        }
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["pair", "alone", "share"];

/// A VM for `membound` with a memory-bound thread for each vCPU, and with `more` words on the
/// command line. The guest runs until it is ended. Its swap-ins take no time until the latency is
/// set.
fn membound(form: &Form, vcpus: usize, more: &str, options: &Options) -> VmBuilder {
    let mib = MEMORY_MIB * vcpus as u64;
    let [memory, resident] = [mib, mib / 2].map(|mib| PageCount::from_bytes(mib << 20));
    VmBuilder {
        arch: options.arch,
        apf: Apf::On,
        latency: disk::latency(),
        command_line: format!(
            "threads={vcpus} rounds={} {} slice_us={SLICE_US} tick_us={TICK_US} {more}",
            crate::apf::alone::ROUNDS,
            form.word,
        ),
        ..builder(memory, resident, vcpus)
    }
}
