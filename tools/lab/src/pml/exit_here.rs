//! The time of an exit to the VMM, and of the entry after it, on this host's KVM: a guest of two
//! instructions writes to a port again and again. The scores are charged with it as well, beside
//! the published constant ([`crate::exit_cost`]).
//!
//! This time is an upper bound for the cost of detection: a write fault and a full log are handled
//! in the kernel. Where KVM has no hardware support (`kvm_pvm`), it includes the emulation of the
//! guest's instructions.

use super::kvm::is_lacking;
use crate::experiment::{LabError, Options};
use crate::native::thread_cpu_ns;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, rounds};
use lacuna_addr::{Gpa, PageCount};
use lacuna_kvm::VmBuilder;
use lacuna_machine::{Apf, Arch, Builder as _, Exit, Image, Segment, Vcpu as _, Vm as _};

/// Its result.
const ID: &str = "pml.kvm.exit_ns";
/// Exits of a slice.
const EXITS: u32 = 2000;
const MEMORY: u64 = 32 << 20;
const CODE: u64 = 0x10_0000;
/// `again: out 0xf4, al; jmp again`.
const PROGRAM: [u8; 4] = [0xe6, 0xf4, 0xeb, 0xfc];

/// Measures `pml.kvm.exit_ns`. Returns nothing if this host has no KVM.
pub fn measure(options: &Options, report: &mut Report) -> Result<Option<f64>, LabError> {
    match exit_ns(options) {
        Ok(ns) => {
            let result = Measurement::new(ID, "ns", Better::Lower, ns);
            report.push(result.param("exits", EXITS));
            Ok(Some(ns.median))
        }
        Err(why) if is_lacking(&why) => {
            report.skip(ID, why);
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Processor time of the vCPU's thread for each exit, in nanoseconds.
fn exit_ns(options: &Options) -> Result<Summary, LabError> {
    let memory = PageCount::from_bytes(MEMORY);
    let builder = VmBuilder {
        vcpus: 1,
        apf: Apf::Off,
        ..VmBuilder::new(memory, memory)
    };
    let vm = builder.build()?;
    let at = Gpa::new(CODE).expect("a small address");
    let image = Image {
        arch: Arch::X86_64,
        segments: vec![Segment {
            gpa: at,
            bytes: &PROGRAM,
            size: PROGRAM.len() as u64,
        }],
        entry: at,
    };
    let mut vcpus = vm.boot(&image, "")?;
    let vcpu = vcpus.first_mut().expect("one vCPU");
    let times = if options.quick { 2 } else { 15 };
    let runs = rounds(1, times, |_| {
        let before = thread_cpu_ns();
        for _ in 0..EXITS {
            match vcpu.run() {
                Ok(Exit::IoOut { .. }) => {}
                other => {
                    let what = format!("a guest that writes to a port ended with {other:?}");
                    return Err(LabError::Guest(what));
                }
            }
        }
        Ok((thread_cpu_ns() - before) as f64 / f64::from(EXITS))
    })?;
    Ok(Summary::of(&runs[0]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verbosity;

    #[test]
    fn an_exit_of_this_hosts_kvm_takes_time() {
        if let Err(why) = lacuna_kvm::available() {
            lacuna_skip::skip_test(why.to_string());
        }
        let options = Options {
            quick: true,
            arch: Arch::X86_64,
            lacuna: "lacuna".into(),
            swap_dir: std::env::temp_dir(),
            verbosity: Verbosity::Quiet,
            parts: Vec::new(),
        };
        let mut report = Report::new("lacuna lab");
        let ns = measure(&options, &mut report).unwrap().unwrap();
        assert!(ns > 0.0);
        assert_eq!(report.results[0].id, ID);
    }
}
