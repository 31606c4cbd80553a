//! The AArch64 guest of the async-fault queue: its state, its context, the effects of events.
#![cfg(feature = "arm64")]

use crate::entry::Entry;
use lacuna_apf::arm64::{self, Effect, ExceptionLevel};
use lacuna_arm64::gic::Line;
use lacuna_cpu::{Privilege, Processor as _};
use lacuna_machine::arm64::Context;

impl arm64::Guest for Entry<lacuna_arm64::Cpu> {
    fn state(&self) -> arm64::CpuState {
        arm64::CpuState {
            level: match self.cpu.privilege() {
                Privilege::User => ExceptionLevel::El0,
                Privilege::Supervisor => ExceptionLevel::El1,
            },
            pc: self.cpu.pc(),
            vbar: self.cpu.system().vbar,
        }
    }

    fn context(&self) -> Context {
        let regs = self.cpu.regs();
        let mut context = Context {
            pc: regs.pc,
            pstate: regs.pstate,
            ..Context::default()
        };
        let number = context.x.len();
        context.x.copy_from_slice(&regs.x[..number]);
        context
    }

    fn apply(&mut self, effect: Effect) {
        let cpu = &mut self.cpu;
        match effect {
            // The processor sets the other fields of the syndrome: class, length of instruction.
            Effect::DataAbort { esr, far } => cpu.inject_abort((esr & 0x3f) as u32, far),
            Effect::Interrupt { number, line } => {
                let line = match line {
                    arm64::Line::Low => Line::Low,
                    arm64::Line::High => Line::High,
                };
                cpu.set_ppi(number, line);
            }
            Effect::Context(Context { x, pc, pstate }) => cpu.return_from_firmware(&x, pc, pstate),
            Effect::ExceptionReturn { elr, spsr } => cpu.set_exception_return(elr, spsr),
        }
    }
}
