//! The x86 platform: PVH images, KVM's paravirtual MSRs, port I/O.

use crate::entry::Entry;
use crate::platform::Platform;
use crate::step::{Step, width};
use crate::vm::Vm;
use lacuna_apf::Queue;
use lacuna_apf::x86::{Control, Features, Msr};
use lacuna_machine::x86::cpuid::Common;
use lacuna_machine::{Apf, Boot, BootError, CpuModel, Exit, Image, IoAddress, VmConfig};
use lacuna_stage2::Ept;
use lacuna_x86::{ApicBus, Cpu, Own, Regs, Shutdown, System, Table, TscRate};
use std::num::NonZeroU32;
use std::sync::Arc;

impl Platform for Cpu {
    type Format = Ept;
    type Boot = Boot;
    type Apf = Control;

    fn load(vm: &Vm, image: &Image<'_>, command_line: &str) -> Result<Boot, BootError> {
        Boot::load(image, &vm.layout, command_line, vm)
    }

    fn fabric_of(vm: &Vm) -> Arc<ApicBus> {
        Arc::clone(vm.apic_bus())
    }

    fn contract(offered: Apf) -> Control {
        Control::new(features(offered))
    }

    fn start(&mut self, config: &VmConfig, index: usize, boot: Option<&Boot>) {
        self.set_kvm_features(features(config.apf).bits());
        if let CpuModel::Common { tsc_khz } = config.cpu {
            let asked = tsc_khz.and_then(NonZeroU32::new).map(TscRate::new);
            let rate = asked.unwrap_or(TscRate::GIGAHERTZ);
            self.set_tsc_rate(rate);
            let common = Common {
                index: index as u32,
                vcpus: config.vcpus as u32,
                tsc_khz: rate.khz(),
                apf: config.apf,
            };
            self.set_cpuid(common.leaves());
        }
        if let Some(boot) = boot {
            if index == 0 {
                self.apic_bus().reset_io_apic();
            }
            self.set_system(boot_system(boot));
            self.set_regs(&boot_regs(boot));
        }
    }

    fn note_registers(&self, note: impl FnMut(u64)) {
        let regs = self.regs();
        let head = [regs.rip, regs.rflags];
        head.into_iter().chain(regs.gpr).for_each(note);
    }

    fn finish(entry: &mut Entry<Self>, apf: &mut Queue<Control>, exit: Own) -> Step {
        match exit {
            Own::IoOut { port, size, value } => {
                let (at, width) = (IoAddress::Port(port), width(size));
                match entry.vm.ioeventfds.signal(at, width, value.into()) {
                    true => Step::Ran,
                    false => Step::Exit(Exit::IoOut { port, width, value }),
                }
            }
            Own::IoIn { port, size } => Step::Exit(Exit::IoIn {
                port,
                width: width(size),
            }),
            Own::MsrRead { index } => read_msr(entry, apf, index),
            Own::MsrWrite { index, value } => write_msr(entry, apf, (index, value)),
            Own::Shutdown(Shutdown { rip, first }) => Step::Exit(Exit::Shutdown(format!(
                "vCPU {}: triple fault: vector {} at rip {rip:#x} could not be delivered",
                entry.index, first.vector
            ))),
        }
    }
}

fn read_msr(entry: &mut Entry<Cpu>, apf: &Queue<Control>, index: u32) -> Step {
    let value = Msr::of(index).and_then(|msr| apf.read_msr(msr));
    entry.cpu.complete_msr(value);
    Step::Ran
}

fn write_msr(entry: &mut Entry<Cpu>, apf: &mut Queue<Control>, (index, value): (u32, u64)) -> Step {
    let msr = Msr::of(index);
    // A kick ends a wait here, but would not end a wait inside the write.
    if let Some((gfn, access)) = msr.and_then(|msr| apf.page_accessed_by(msr, value))
        && let Some(wait) = entry.wait_for(gfn, access)
    {
        entry.again = Some(Own::MsrWrite { index, value });
        return wait;
    }
    let now = entry.vm.clock.now();
    let written = msr.is_some_and(|msr| apf.write_msr(msr, value, now, entry).is_ok());
    entry.cpu.complete_msr(written.then_some(0));
    entry.meter().publish(apf.stats());
    Step::Ran
}

/// The features that CPUID offers.
fn features(offered: Apf) -> Features {
    match offered {
        Apf::Off => Features::empty(),
        Apf::On => Features::ASYNC_PF | Features::ASYNC_PF_INT,
    }
}

fn boot_regs(boot: &Boot) -> Regs {
    let mut regs = Regs {
        rip: boot.entry.get(),
        rflags: 2,
        ..Regs::default()
    };
    const RBX: usize = 3;
    const RSI: usize = 6;
    regs.gpr[RBX] = boot.start_info.get();
    regs.gpr[RSI] = boot.start_info.get();
    regs
}

fn boot_system(boot: &Boot) -> System {
    let (code, data) = (boot.code_selector, boot.data_selector);
    let mut system = System::long_mode(boot.page_table.get());
    system.selectors = [data, code, data, data, data, data];
    system.gdtr = Table {
        base: boot.gdt.get(),
        limit: u32::from(boot.gdt_limit),
        ..Table::default()
    };
    system
}
