//! Random bytes as guest code, at both privileges, on a bus that fails now and then: the processor
//! never panics and never hangs.

use crate::support;

use lacuna_cpu::{Processor, Stop};
use lacuna_x86::{Exit, Own};
use proptest::prelude::*;
use support::{CODE, DATA, Machine};

fn survive(code: &[u8], regs: [u64; 16], cpl: u8, absent: &[usize]) {
    let mut m = Machine::new(16 << 20);
    m.memory.write(CODE, code);
    for page in absent {
        m.memory.absent[*page] = true;
    }
    let mut system = m.cpu.system().clone();
    system.cpl = cpl;
    system.idtr.base = DATA;
    system.idtr.limit = 0xfff;
    system.gdtr.base = DATA + 0x1000;
    system.gdtr.limit = 0xff;
    m.cpu.set_system(system);
    m.set_regs(|r| r.gpr = regs);
    for _ in 0..64 {
        match m.run(2000) {
            Exit::Own(Own::IoIn { .. }) | Exit::MmioRead { .. } => m.cpu.complete_read(u64::MAX),
            Exit::Own(Own::MsrRead { index }) | Exit::Own(Own::MsrWrite { index, .. }) => {
                m.cpu.complete_msr((index % 2 == 0).then_some(u64::MAX));
            }
            Exit::Exclusive => drop(m.run_exclusive()),
            Exit::Fuel | Exit::Own(Own::IoOut { .. }) | Exit::MmioWrite { .. } => {}
            Exit::Stop(Stop::Wait | Stop::Again) | Exit::Requested => {
                if m.cpu.is_interruptible() {
                    m.cpu.inject_page_fault(regs[0]);
                }
            }
            Exit::Halt | Exit::Own(Own::Shutdown(_)) | Exit::Stop(_) => break,
        }
    }
}

fn register() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..0x10000_u64).prop_map(|n| DATA + n),
        0..64_u64
    ]
}

/// Prefixes, 0F, string, branch and system opcodes.
const LIKELY: [u8; 24] = [
    0x0f, 0x48, 0x66, 0x67, 0xf0, 0xf2, 0xf3, 0x64, 0x01, 0xa4, 0xab, 0xcf, 0xc8, 0x9d, 0xfb, 0xf4,
    0x20, 0x22, 0x30, 0x32, 0xc7, 0xff, 0xe8, 0x74,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn random_bytes(
        code in prop::collection::vec(any::<u8>(), 64..512),
        regs in prop::array::uniform16(register()),
        cpl in prop_oneof![Just(0_u8), Just(3)],
        absent in prop::collection::vec(0..4096_usize, 0..8),
    ) {
        survive(&code, regs, cpl, &absent);
    }

    /// Valid opcodes are denser here: prefixes, 0F, string and system instructions.
    #[test]
    fn likely_bytes(
        code in prop::collection::vec(prop_oneof![
            any::<u8>(),
            prop::sample::select(LIKELY.to_vec()),
        ], 64..512),
        regs in prop::array::uniform16(register()),
        cpl in prop_oneof![Just(0_u8), Just(3)],
    ) {
        survive(&code, regs, cpl, &[]);
    }
}
