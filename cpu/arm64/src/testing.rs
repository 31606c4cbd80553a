//! Processors in plain memory, for the tests of system instructions.
//!
//! Stage 1 is off. A test's code is at [`CODE`] and ends with HVC. Each vector at [`VECTORS`] is an
//! HVC with its own immediate, so every run ends.

use crate::smccc::Call;
use crate::state::pstate;
use crate::{Cpu, Exit, Fabric, Own};
use lacuna_a64::HVC;
pub(crate) use lacuna_a64::sysreg as msr;
use lacuna_addr::{Gfn, PAGE_SIZE};
use lacuna_cpu::Processor;
use lacuna_cpu::testing::{Ram, Wakes};
use lacuna_state::arm64::Regs;
use lacuna_sync::{Qsbr, VirtualClock};
use std::sync::Arc;

/// The address of a test's code.
pub(crate) const CODE: u64 = 0x8000;
/// VBAR_EL1.
pub(crate) const VECTORS: u64 = 0x1_0000;
/// A page for data.
pub(crate) const DATA: u64 = 0x2_0000;
/// EL1 with its own stack pointer, nothing masked.
pub(crate) const EL1H: u64 = pstate::EL1 | pstate::SP;

/// How a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// At the HVC behind the code.
    Code,
    /// In the vector at this offset from VBAR_EL1.
    Vector(u64),
    Other(Exit),
}

/// A machine.
pub(crate) struct Machine {
    pub(crate) cpus: Vec<Cpu>,
    pub(crate) ram: Ram,
    pub(crate) clock: Arc<VirtualClock>,
    pub(crate) wakes: Arc<Wakes>,
    pub(crate) fabric: Arc<Fabric>,
    qsbr: Qsbr,
}

impl Machine {
    pub(crate) fn new(vcpus: usize) -> Self {
        let wakes = Arc::new(Wakes::default());
        let fabric = Arc::new(Fabric::new(vcpus, wakes.clone()));
        let clock = Arc::new(VirtualClock::default());
        let cpu = |index| Cpu::new(index, Arc::clone(&fabric), clock.clone());
        let mut machine = Self {
            cpus: (0..vcpus).map(cpu).collect(),
            ram: Ram::default(),
            clock: clock.clone(),
            wakes,
            fabric: Arc::clone(&fabric),
            qsbr: Qsbr::new(vcpus),
        };
        for vector in 0..16 {
            let hvc = HVC | (0x100 + vector as u32) << 5;
            machine.put(VECTORS + vector * 0x80, &[hvc]);
        }
        machine.put(DATA, &[0]);
        for cpu in &mut machine.cpus {
            cpu.core.sys.vbar = VECTORS;
        }
        machine
    }

    /// Writes instructions to memory.
    pub(crate) fn put(&mut self, at: u64, words: &[u32]) {
        for (at, word) in (at..).step_by(4).zip(words) {
            let gfn = Gfn::new(at / PAGE_SIZE as u64).unwrap();
            self.ram.add(gfn).store_u32(at as usize % PAGE_SIZE, *word);
        }
    }

    /// Runs processor `index` from its PC.
    pub(crate) fn go(&mut self, index: usize) -> End {
        for _ in 0..100 {
            let slot = self.qsbr.vcpu(index);
            match self.cpus[index].run(&mut self.ram, slot, 100) {
                Exit::Fuel => {}
                Exit::Own(Own::Hypercall(Call { immediate: 0, .. })) => return End::Code,
                Exit::Own(Own::Hypercall(Call { immediate, .. })) => {
                    return End::Vector(u64::from(immediate - 0x100) * 0x80);
                }
                exit => return End::Other(exit),
            }
        }
        panic!("endless")
    }

    /// Executes `code` on processor 0 with PSTATE `pstate`. X0 to X7 keep their values.
    pub(crate) fn exec(&mut self, pstate: u64, code: &[u32]) -> End {
        self.put(CODE, code);
        self.put(CODE + 4 * code.len() as u64, &[HVC]);
        let cpu = &mut self.cpus[0];
        cpu.drop_all_code();
        let regs = cpu.regs();
        cpu.set_regs(&Regs {
            pc: CODE,
            pstate,
            ..regs
        });
        self.go(0)
    }

    /// X0 of processor 0.
    pub(crate) fn x0(&self) -> u64 {
        self.cpus[0].core.r[0]
    }

    pub(crate) fn set_x0(&mut self, value: u64) {
        self.cpus[0].core.r[0] = value;
    }

    /// MRS X0 at EL1.
    pub(crate) fn mrs(&mut self, encoding: [u16; 5]) -> Result<u64, End> {
        match self.exec(EL1H | pstate::DAIF, &[mrs(encoding)]) {
            End::Code => Ok(self.x0()),
            end => Err(end),
        }
    }

    /// MSR from X0 at EL1.
    pub(crate) fn msr(&mut self, encoding: [u16; 5], value: u64) -> End {
        self.set_x0(value);
        self.exec(EL1H | pstate::DAIF, &[msr(encoding)])
    }

    /// ESR_EL1's class and the rest.
    pub(crate) fn syndrome(&self) -> (u64, u64) {
        let esr = self.cpus[0].core.sys.esr;
        assert_eq!(esr >> 25 & 1, 1, "IL");
        (esr >> 26, esr & 0x1ff_ffff)
    }
}

/// MRS X0.
pub(crate) const fn mrs(encoding: [u16; 5]) -> u32 {
    msr(encoding) | 1 << 21
}
