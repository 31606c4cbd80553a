//! The arm64 platform: Linux's `Image` with a device tree, PSCI and vendor services by HVC.
#![cfg(feature = "arm64")]

use crate::entry::Entry;
use crate::platform::{Platform, Power};
use crate::step::Step;
use crate::vcpu::VcpuOf;
use crate::vm::Vm;
use fastrand::Rng;
use lacuna_addr::{Access, Gfn};
use lacuna_apf::Queue;
use lacuna_apf::arm64::{Answer, Control, Features, Numbers};
use lacuna_arm64::psci::{Outcome, PowerState, Start};
use lacuna_arm64::smccc::{Call, NOT_SUPPORTED};
use lacuna_arm64::{Cpu, Fabric, Own, PHYSICAL_INTID, VIRTUAL_INTID, gic};
use lacuna_cpu::Processor;
use lacuna_host::Host;
use lacuna_machine::boot::arm64::{Boot, Machine};
use lacuna_machine::{Apf, BootError, Exit, Image, VCPUS_MAX, VmConfig, mmio};
use lacuna_stage2::{AbortedAccess, Arm64, Stage2Abort};
use rustix::rand::{GetRandomFlags, getrandom};
use std::sync::Arc;

// The device tree of `lacuna_machine` describes this processor.
const _: () = {
    assert!(mmio::DISTRIBUTOR.get() == gic::DISTRIBUTOR.get());
    assert!(mmio::DISTRIBUTOR_BYTES == gic::REGISTER_PAGE);
    let [first, second] = mmio::redistributors(VCPUS_MAX);
    assert!(first.0.get() == gic::REDISTRIBUTORS.get());
    assert!(first.1 == gic::FIRST_REGION_VCPUS as u64 * gic::REDISTRIBUTOR_STRIDE);
    assert!(second.0.get() == gic::REDISTRIBUTORS_2.get());
    assert!(mmio::REDISTRIBUTOR_BYTES == gic::REDISTRIBUTOR_STRIDE);
    assert!(gic::MAX_VCPUS >= VCPUS_MAX);
    assert!(mmio::VIRTUAL_TIMER_PPI + 16 == VIRTUAL_INTID);
    assert!(mmio::PHYSICAL_TIMER_PPI + 16 == PHYSICAL_INTID);
    let mut index = 0;
    while index < VCPUS_MAX {
        assert!(lacuna_machine::boot::arm64::affinity(index) == gic::affinity(index));
        index += 1;
    }
};

/// The bytes that seed the guest's random numbers. In a seeded run they follow from the seed.
fn rng_seed(host: &Host) -> Result<[u8; 32], BootError> {
    let mut bytes = [0; 32];
    match host.seed() {
        Some(seed) => Rng::with_seed(seed).fill(&mut bytes),
        None => {
            let got = getrandom(&mut bytes, GetRandomFlags::empty());
            got.map_err(|errno| BootError::Random(errno.to_string()))?;
        }
    }
    Ok(bytes)
}

impl Platform for Cpu {
    type Format = Arm64;
    type Boot = Boot;
    type Apf = Control;

    fn load(vm: &Vm, image: &Image<'_>, command_line: &str) -> Result<Boot, BootError> {
        let machine = Machine {
            vcpus: vm.config.vcpus,
            command_line,
            rng_seed: rng_seed(vm.host())?,
        };
        Boot::load(image, &vm.layout, &machine, vm)
    }

    fn fabric_of(vm: &Vm) -> Arc<Fabric> {
        Arc::clone(vm.arm64_fabric())
    }

    fn contract(offered: Apf) -> Control {
        Control::new(features(offered), Some(Numbers::DEFAULT))
    }

    fn start(&mut self, _config: &VmConfig, index: usize, boot: Option<&Boot>) {
        let fabric = Arc::clone(self.fabric());
        if index > 0 {
            return fabric.power.set(index, PowerState::Off);
        }
        fabric.power.set(index, PowerState::On);
        let Some(boot) = boot else {
            return;
        };
        fabric.gic.reset_distributor();
        self.start(Start {
            entry: boot.entry,
            context: boot.device_tree.get(),
        });
    }

    fn power(entry: &mut Entry<Self>) -> Power {
        let power = &entry.cpu.fabric().power;
        if power.is_on(entry.index) {
            return Power::On;
        }
        let Some(start) = power.take_start(entry.index) else {
            return Power::Off;
        };
        entry.cpu.reset();
        entry.cpu.start(start);
        Power::Started
    }

    #[inline]
    fn enter(entry: &mut Entry<Self>, apf: &mut Queue<Control>) {
        apf.enter(entry);
    }

    fn syndrome(entry: &Entry<Self>, gfn: Gfn, access: Access) -> String {
        let abort = stage2_abort(entry, gfn, access);
        abort.map_or_else(String::new, |Stage2Abort { esr, hpfar }| {
            format!(" (ESR_EL2 {esr:#x}, HPFAR_EL2 {hpfar:#x})")
        })
    }

    fn note_registers(&self, note: impl FnMut(u64)) {
        let regs = self.regs();
        let head = [regs.pc, regs.pstate, regs.sp_el0, regs.sp_el1];
        head.into_iter().chain(regs.x).for_each(note);
    }

    fn finish(entry: &mut Entry<Self>, apf: &mut Queue<Control>, exit: Own) -> Step {
        match exit {
            Own::Hypercall(call) => hypercall(entry, apf, &call),
            Own::Exception(exception) => Step::Exit(Exit::Shutdown(format!(
                "vCPU {}: exception of class {:#x} (syndrome {:#x}, address {:#x}) at pc {:#x}, \
                 whose handler cannot be fetched",
                entry.index,
                exception.class,
                exception.iss,
                exception.far.unwrap_or(0),
                entry.cpu.regs().pc
            ))),
        }
    }
}

/// The abort that EL2 takes for `access` at `gfn`, where the vCPU has stopped. `None` if stage 2
/// now grants the access.
fn stage2_abort(entry: &Entry<Cpu>, gfn: Gfn, access: Access) -> Option<Stage2Abort> {
    let (violation, level) = entry.bus.mmu().violation(gfn, access)?;
    let of = match entry.cpu.stopped_walk() {
        None => AbortedAccess::Direct,
        Some(Access::Fetch) => AbortedAccess::WalkForFetch,
        Some(Access::Read | Access::Write) => AbortedAccess::WalkForData,
    };
    Some(Stage2Abort::new(violation, level, gfn, of))
}

impl VcpuOf<Cpu> {
    /// The stage-2 abort of its last exit on missing memory, as a hypervisor at EL2 would read it.
    /// `None` after another exit, or if the page has arrived.
    pub fn stage2_abort(&self) -> Option<Stage2Abort> {
        let faulted = self.faulted.as_ref()?;
        stage2_abort(&self.entry, faulted.gfn, faulted.access)
    }
}

/// The architecture's own calls, then PSCI, then the vendor services and the SDEI.
fn hypercall(entry: &mut Entry<Cpu>, apf: &mut Queue<Control>, call: &Call) -> Step {
    let outcome = match call.architecture() {
        Some(result) => Some(Outcome::Return(result)),
        None => entry.cpu.fabric().power.call(entry.index, call),
    };
    match outcome {
        None => return service(entry, apf, call),
        Some(Outcome::Return(result)) => entry.cpu.complete_hypercall_in_x0(result),
        Some(Outcome::Suspend) => entry.cpu.suspend(),
        // The next step finds the vCPU off.
        Some(Outcome::Off) => {}
        Some(Outcome::SystemOff) => return Step::Exit(Exit::PoweredOff),
        Some(Outcome::SystemReset) => return Step::Exit(Exit::Reset),
    }
    Step::Ran
}

/// A call that configures the events of asynchronous page faults, or a call that does not exist.
fn service(entry: &mut Entry<Cpu>, apf: &mut Queue<Control>, call: &Call) -> Step {
    let [a, b, c, d, e, ..] = call.args;
    let args = [a, b, c, d, e];
    // A kick ends a wait here, but would not end a wait inside the call.
    if let Some((gfn, access)) = apf.page_accessed_by(call.function, &args)
        && let Some(wait) = entry.wait_for(gfn, access)
    {
        entry.cpu.repeat_hypercall();
        return wait;
    }
    let now = entry.vm.clock.now();
    match apf.call(call.function, &args, now, entry) {
        Some(Answer::Values(values)) => entry.cpu.complete_hypercall(values),
        Some(Answer::Resumed) => {}
        None => entry.cpu.complete_hypercall_in_x0(NOT_SUPPORTED),
    }
    entry.meter().publish(apf.stats());
    Step::Ran
}

/// The features in the bitmap of the vendor services.
fn features(offered: Apf) -> Features {
    match offered {
        Apf::Off => Features::empty(),
        Apf::On => Features::ABORT | Features::SDEI,
    }
}
