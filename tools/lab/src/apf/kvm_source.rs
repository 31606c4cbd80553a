//! The worker's share under `/dev/kvm` while a source provides the guest's pages, each at its first
//! touch: accepted exits, and each of the two mechanisms alone.
//!
//! | arm | a missing page |
//! |---|---|
//! | both | exits; the run loop accepts, and asks the source; the backend notifies the guest |
//! | exits alone | exits; the guest is offered no async page faults: its vCPU waits |
//! | async faults alone | no exit: the backend asks the source and notifies the guest |
//!
//! Each arm has a VM of its own, with the worker alone in turns, as the arms of `kvm` have. A page
//! is missing once, so the guest's memory is larger than what the faulter touches in a run.

use super::kvm::pace;
use super::slices::{Arm, Role, Runs, take_turns};
use super::{SLICE_US, ms};
use crate::experiment::{LabError, Options};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::session::{image, on};
use crate::stats::Summary;
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_kvm::VmBuilder;
use lacuna_machine::{Apf, Arch, MemorySlots as _, PageRequest, PageSource, SlotFlags};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = ARMS.len() as u64;

const ID: &str = "apf.kvm.source_share_percent.1ms";
const LATENCY: Duration = Duration::from_millis(1);
const MEMORY_MIB: u64 = 256;

/// The ids of its results.
pub fn ids() -> impl Iterator<Item = String> {
    std::iter::once(ID.to_owned())
}

/// A way to bring in a missing page.
struct Way {
    name: &'static str,
    apf: Apf,
    flags: SlotFlags,
}

const BOTH: usize = 0;
const ARMS: [Way; 3] = [
    Way {
        name: "both",
        apf: Apf::On,
        flags: SlotFlags::EXIT_ON_MISSING,
    },
    Way {
        name: "exits_alone",
        apf: Apf::Off,
        flags: SlotFlags::EXIT_ON_MISSING,
    },
    Way {
        name: "async_alone",
        apf: Apf::On,
        flags: SlotFlags::empty(),
    },
];

/// A source of zeros. Each page comes [`LATENCY`] after its request.
#[derive(Debug)]
struct Late(Mutex<Sender<(Instant, PageRequest)>>);

impl Late {
    /// A source whose thread ends when it is dropped.
    fn start() -> Arc<Self> {
        let (sender, requests) = channel::<(Instant, PageRequest)>();
        thread::spawn(move || {
            // All requests have the same delay, so they are due in their order.
            for (due, request) in requests {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                // Late: the VM has ended.
                let _ = request.provide(&[0; PAGE_SIZE]);
            }
        });
        Arc::new(Self(Mutex::new(sender)))
    }
}

impl PageSource for Late {
    fn describe(&self) -> String {
        "zeros, 1 ms away".into()
    }

    fn fetch(&self, request: PageRequest) {
        let sender = self.0.lock().expect("no panic under this lock");
        // A dropped request says that the page is lost.
        let _ = sender.send((Instant::now() + LATENCY, request));
    }
}

/// `apf.kvm.source_share_percent.1ms`, with a usable `/dev/kvm`.
///
/// # Errors
/// The guest ends, or its memory cannot be read.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    if let Err(why) = lacuna_kvm::available() {
        ids().for_each(|id| report.skip(id, &why));
        return Ok(());
    }
    let mut all = Vec::new();
    for way in &ARMS {
        progress.step(format!("/dev/kvm, pages from a source, {}", way.name))?;
        let runs = turns(options, way)?;
        let share = runs.ratio(Arm::Alone, beside(way), Role::Workers)?;
        all.push((way, runs, share.scaled(100.0)));
    }
    let shares: Vec<Summary> = all.iter().map(|(.., share)| *share).collect();
    let mut result = Measurement::new(ID, "%", Better::Higher, shares[BOTH])
        .param("memory_mib", MEMORY_MIB)
        .param("vcpus", 1)
        .param("workers", 1)
        .param("faulters", 1)
        .param("injected_latency_ms", ms(LATENCY))
        .param("guest_slice_us", SLICE_US);
    for (way, runs, share) in &all {
        report.detail(runs.table(&format!(
            "/dev/kvm, a source 1 ms (injected) away, {}",
            way.name
        )));
        let pages = runs.rate(beside(way), Role::Faulters);
        report.say(format!(
            "/dev/kvm, a source 1 ms (injected) away, {}: beside a faulter, a worker keeps {:.0} % \
             of its speed, and the faulter makes {:.0} accesses a second.",
            way.name, share.median, pages.median,
        ));
        result = result
            .arm(&format!("share_percent_{}", way.name), *share)
            .arm(&format!("faulter_{}", way.name), pages);
    }
    report.push(result);
    Ok(())
}

fn beside(way: &Way) -> Arm {
    match way.apf {
        Apf::On => Arm::On,
        Apf::Off => Arm::Off,
    }
}

fn turns(options: &Options, way: &Way) -> Result<Runs, LabError> {
    let memory = PageCount::from_bytes(MEMORY_MIB << 20);
    let builder = VmBuilder {
        apf: way.apf,
        source: Some(Late::start()),
        command_line: super::kvm::words("populate=0"),
        ..VmBuilder::new(memory, memory)
    };
    on(&builder, &image(Arch::X86_64, "bm")?, |session| {
        session.guest.prepared()?;
        for slot in session.vm.memory_slots() {
            session.vm.set_slot_flags(slot.id, way.flags)?;
        }
        take_turns(session, &[Arm::Alone, beside(way)], pace(options, Apf::On))
    })
}
