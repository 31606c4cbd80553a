//! PSCI: how a guest starts and stops its vCPUs, and itself (Arm DEN 0022, version 1.1).
//!
//! ```text
//!        CPU_ON of another vCPU            the vCPU's own thread: Power::take_start
//! Off ------------> Claimed -> OnPending -----------------------------------------> On
//!  ^                                                                                 |
//!  +------------------------- CPU_OFF of the vCPU itself ----------------------------+
//! ```
//! The hypervisor gives each call to [`Power::call`] and acts on the [`Outcome`]. After
//! [`Power::take_start`], it starts the vCPU at the entry point, at EL1 with stage 1 off,
//! interrupts masked, and the context in X0.

use crate::gic::affinity_index;
use crate::smccc::{Call, NOT_SUPPORTED, SUCCESS};
use lacuna_addr::Gpa;
use lacuna_cpu::Wake;
use lacuna_sync::shim::{AtomicU32, AtomicU64, Ordering};
use std::fmt;
use std::sync::Arc;

/// The number of each function in its 32-bit form. Functions with addresses or affinities have a
/// 64-bit form too.
mod function {
    pub(super) const VERSION: u32 = 0x8400_0000;
    pub(super) const CPU_SUSPEND: u32 = 0x8400_0001;
    pub(super) const CPU_OFF: u32 = 0x8400_0002;
    pub(super) const CPU_ON: u32 = 0x8400_0003;
    pub(super) const AFFINITY_INFO: u32 = 0x8400_0004;
    pub(super) const MIGRATE_INFO_TYPE: u32 = 0x8400_0006;
    pub(super) const SYSTEM_OFF: u32 = 0x8400_0008;
    pub(super) const SYSTEM_RESET: u32 = 0x8400_0009;
    pub(super) const FEATURES: u32 = 0x8400_000a;
    /// Not a PSCI function, but `FEATURES` answers for it.
    pub(super) const SMCCC_VERSION: u32 = 0x8000_0000;
    pub(super) const WIDE: u32 = 1 << 30;
}

/// Standard services own the numbers of PSCI.
const OWNER: u8 = 4;
/// PSCI 1.1.
const VERSION: u64 = 0x1_0001;
/// `MIGRATE_INFO_TYPE`: there is no trusted system to move.
const NOTHING_TO_MIGRATE: u64 = 2;

const INVALID_PARAMETERS: u64 = -2_i64 as u64;
const ALREADY_ON: u64 = -4_i64 as u64;
const ON_PENDING: u64 = -5_i64 as u64;
const INVALID_ADDRESS: u64 = -9_i64 as u64;

/// The hypervisor's action after a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Outcome {
    /// Puts this value into X0 and enters the vCPU again.
    Return(u64),
    /// Lets the vCPU wait for an interrupt, as WFI does, with [`SUCCESS`]
    /// in X0.
    Suspend,
    /// Does not enter the vCPU until [`Power::take_start`] returns a start.
    Off,
    /// Ends the machine.
    SystemOff,
    /// Resets the machine.
    SystemReset,
}

/// A vCPU's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Start {
    /// The first instruction's guest-physical address.
    pub entry: Gpa,
    /// The value for X0.
    pub context: u64,
}

/// Which vCPUs of a machine run. All threads share this.
pub struct Power {
    vcpus: Box<[Vcpu]>,
    wake: Arc<dyn Wake>,
}

struct Vcpu {
    state: AtomicU32,
    entry: AtomicU64,
    context: AtomicU64,
}

impl Vcpu {
    /// The start, if the state is [`PENDING`].
    fn start(&self) -> Start {
        Start {
            entry: Gpa::truncate(self.entry.load(Ordering::Relaxed)),
            context: self.context.load(Ordering::Relaxed),
        }
    }
}

const OFF: u32 = 0;
/// A thread that calls `CPU_ON` writes the entry point.
const CLAIMED: u32 = 1;
const PENDING: u32 = 2;
const ON: u32 = 3;

impl Power {
    /// The power states of a machine: only vCPU 0 runs. `wake` makes a vCPU call
    /// [`Power::take_start`] soon.
    pub fn new(vcpus: usize, wake: Arc<dyn Wake>) -> Self {
        let vcpu = |index| Vcpu {
            state: AtomicU32::new(if index == 0 { ON } else { OFF }),
            entry: AtomicU64::new(0),
            context: AtomicU64::new(0),
        };
        Self {
            vcpus: (0..vcpus).map(vcpu).collect(),
            wake,
        }
    }

    /// Whether vCPU `index` may run.
    pub fn is_on(&self, index: usize) -> bool {
        let vcpu = self.vcpus.get(index);
        vcpu.is_some_and(|vcpu| vcpu.state.load(Ordering::Acquire) == ON)
    }

    /// Switches vCPU `index` on or off without a call: for a machine that starts all vCPUs at once,
    /// a reset, and a restored state. The vCPU does not run meanwhile.
    pub fn set(&self, index: usize, power: PowerState) {
        if let Some(vcpu) = self.vcpus.get(index) {
            let state = match power {
                PowerState::Off => OFF,
                PowerState::On => ON,
                PowerState::OnPending(start) => {
                    vcpu.entry.store(start.entry.get(), Ordering::Relaxed);
                    vcpu.context.store(start.context, Ordering::Relaxed);
                    PENDING
                }
            };
            vcpu.state.store(state, Ordering::Release);
        }
    }

    /// The power state of vCPU `index`, for saving it. No vCPU runs meanwhile.
    pub fn state(&self, index: usize) -> PowerState {
        let vcpu = &self.vcpus[index];
        match vcpu.state.load(Ordering::Acquire) {
            ON => PowerState::On,
            PENDING => PowerState::OnPending(vcpu.start()),
            _ => PowerState::Off,
        }
    }

    /// The start of vCPU `index`, if another vCPU has switched it on. From now on it counts as
    /// running. Its own thread calls this.
    pub fn take_start(&self, index: usize) -> Option<Start> {
        let vcpu = self.vcpus.get(index)?;
        if vcpu.state.load(Ordering::Acquire) != PENDING {
            return None;
        }
        let start = vcpu.start();
        vcpu.state.store(ON, Ordering::Release);
        Some(start)
    }

    /// Handles a call of vCPU `by`. `None` if PSCI has no such function: another service may.
    pub fn call(&self, by: usize, call: &Call) -> Option<Outcome> {
        if !call.is_fast() || call.owner() != OWNER {
            return None;
        }
        if !exists(call.function) {
            // Numbers up to 0x1f belong to PSCI (DEN 0022, 5.1).
            let psci = call.function & 0xffff < 0x20;
            return psci.then_some(Outcome::Return(NOT_SUPPORTED));
        }
        Some(match call.function & !function::WIDE {
            function::VERSION => Outcome::Return(VERSION),
            function::CPU_SUSPEND => Outcome::Suspend,
            function::CPU_OFF => {
                self.set(by, PowerState::Off);
                Outcome::Off
            }
            function::CPU_ON => Outcome::Return(self.cpu_on(call)),
            function::AFFINITY_INFO => Outcome::Return(self.affinity_info(call)),
            function::MIGRATE_INFO_TYPE => Outcome::Return(NOTHING_TO_MIGRATE),
            function::SYSTEM_OFF => Outcome::SystemOff,
            function::SYSTEM_RESET => Outcome::SystemReset,
            function::FEATURES => {
                let asked = call.arg(1) as u32;
                let known = exists(asked) || asked == function::SMCCC_VERSION;
                Outcome::Return(if known { SUCCESS } else { NOT_SUPPORTED })
            }
            _ => Outcome::Return(NOT_SUPPORTED),
        })
    }

    /// `CPU_ON` (DEN 0022, 5.6): X1 target, X2 entry point, X3 context.
    fn cpu_on(&self, call: &Call) -> u64 {
        let Some((index, vcpu)) = self.target(call.arg(1)) else {
            return INVALID_PARAMETERS;
        };
        let entry = match Gpa::new(call.arg(2)) {
            Some(entry) if entry.get().is_multiple_of(4) => entry,
            _ => return INVALID_ADDRESS,
        };
        let claimed =
            vcpu.state
                .compare_exchange(OFF, CLAIMED, Ordering::Acquire, Ordering::Acquire);
        match claimed {
            Ok(_) => {}
            Err(ON) => return ALREADY_ON,
            Err(_) => return ON_PENDING,
        }
        vcpu.entry.store(entry.get(), Ordering::Relaxed);
        vcpu.context.store(call.arg(3), Ordering::Relaxed);
        vcpu.state.store(PENDING, Ordering::Release);
        self.wake.wake(index);
        SUCCESS
    }

    /// `AFFINITY_INFO` (DEN 0022, 5.7): 0 if a vCPU of the affinity is on, 1 if all are off, 2 if
    /// one is about to be on. X1 is the affinity, X2 the lowest level that counts.
    fn affinity_info(&self, call: &Call) -> u64 {
        let level = call.arg(2);
        if level > 3 {
            return INVALID_PARAMETERS;
        }
        let ignored = (1_u64 << (8 * level)) - 1;
        let mpidr = |affinity: u64| (affinity >> 8 & 0xff00_0000 | affinity & 0xff_ffff) & !ignored;
        let wanted = mpidr(call.arg(1));
        let mut answer = None;
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            if u64::from(crate::gic::affinity(index)) & !ignored != wanted {
                continue;
            }
            let state = match vcpu.state.load(Ordering::Acquire) {
                ON => 0,
                OFF => 1,
                _ => 2,
            };
            answer = Some(match answer {
                None => state,
                Some(0) => 0,
                Some(_) if state == 0 => 0,
                Some(old) => state.max(old),
            });
        }
        answer.unwrap_or(INVALID_PARAMETERS)
    }

    /// The vCPU with this MPIDR value: the affinity fields, and zeros.
    fn target(&self, mpidr: u64) -> Option<(usize, &Vcpu)> {
        if mpidr & !0xff_00ff_ffff != 0 {
            return None;
        }
        let index = affinity_index((mpidr >> 8 & 0xff00_0000 | mpidr & 0xff_ffff) as u32)?;
        Some((index, self.vcpus.get(index)?))
    }
}

/// Whether a vCPU may run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PowerState {
    /// It waits for `CPU_ON`.
    Off,
    /// `CPU_ON` has switched it on, but it has not started.
    OnPending(Start),
    /// It runs.
    On,
}

/// Whether PSCI has this function here, in this width.
fn exists(function: u32) -> bool {
    use function::*;
    match function & !WIDE {
        CPU_SUSPEND | CPU_ON | AFFINITY_INFO => true,
        VERSION | CPU_OFF | MIGRATE_INFO_TYPE | SYSTEM_OFF | SYSTEM_RESET | FEATURES => {
            function & WIDE == 0
        }
        _ => false,
    }
}

impl fmt::Debug for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = (0..self.vcpus.len()).filter(|index| self.is_on(*index));
        f.debug_struct("Power")
            .field("on", &on.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_cpu::testing::Wakes;

    fn machine(vcpus: usize) -> (Power, Arc<Wakes>) {
        let wakes = Arc::new(Wakes::default());
        (Power::new(vcpus, wakes.clone()), wakes)
    }

    fn call(power: &Power, function: u32, args: [u64; 3]) -> Option<Outcome> {
        let [a, b, c] = args;
        let args = [a, b, c, 0, 0, 0, 0];
        let call = Call {
            function,
            args,
            immediate: 0,
        };
        power.call(0, &call)
    }

    fn returns(power: &Power, function: u32, args: [u64; 3]) -> i64 {
        match call(power, function, args) {
            Some(Outcome::Return(value)) => value as i64,
            other => panic!("{function:#x}: {other:?}"),
        }
    }

    /// DEN 0022, 5.2: the steps of Linux's drivers/firmware/psci.
    #[test]
    fn a_kernel_probes_and_starts_a_processor() {
        let (power, wakes) = machine(2);
        assert_eq!(returns(&power, 0x8400_0000, [0; 3]), 0x1_0001);
        assert_eq!(returns(&power, 0x8400_0006, [0; 3]), 2);
        for (function, result) in [
            (0x8400_0003, 0),
            (0xc400_0003, 0),
            (0xc400_0001, 0),
            (0x8400_0009, 0),
            (0x8000_0000, 0),
            (0xc400_0009, -1),
            (0xc400_0012, -1),
            (0x8400_000e, -1),
        ] {
            assert_eq!(
                returns(&power, 0x8400_000a, [function, 0, 0]),
                result,
                "{function:#x}"
            );
        }
        assert_eq!(returns(&power, 0xc400_0004, [1, 0, 0]), 1, "off");
        assert_eq!(power.take_start(1), None);
        assert_eq!(returns(&power, 0xc400_0003, [1, 0x4000_1000, 77]), 0);
        assert_eq!(wakes.take(), [1]);
        assert_eq!(returns(&power, 0xc400_0004, [1, 0, 0]), 2, "on its way");
        assert_eq!(returns(&power, 0xc400_0003, [1, 0x4000_1000, 78]), -5);
        assert!(!power.is_on(1));
        let start = power.take_start(1).expect("switched on");
        assert_eq!((start.entry.get(), start.context), (0x4000_1000, 77));
        assert!(power.is_on(1) && power.take_start(1).is_none());
        assert_eq!(returns(&power, 0xc400_0003, [1, 0x4000_1000, 78]), -4);
        assert_eq!(returns(&power, 0xc400_0004, [1, 0, 0]), 0, "on");
        assert_eq!(call(&power, 0x8400_0002, [0; 3]), Some(Outcome::Off));
        assert!(!power.is_on(0));
        assert_eq!(
            returns(&power, 0xc400_0004, [0, 1, 0]),
            0,
            "one of the cluster is on"
        );
    }

    /// DEN 0022, 5.6.2: refused calls change nothing.
    #[test]
    fn wrong_arguments_are_refused() {
        let (power, wakes) = machine(20);
        for (mpidr, entry, result) in [
            (20, 0, -2),
            (0x10, 0, -2),
            (2 << 8, 0, -2),
            (1 << 24, 0, -2),
            (1 << 31 | 1, 0, -2),
            (1 << 32, 0, -2),
            (u64::MAX, 0, -2),
            (1, 2, -9),
            (1, !3, -9),
            (0, 0, -4),
            (1 << 8 | 3, 0, 0),
        ] {
            assert_eq!(
                returns(&power, 0xc400_0003, [mpidr, entry, 0]),
                result,
                "{mpidr:#x}"
            );
        }
        assert_eq!(wakes.take(), [19]);
        assert_eq!(returns(&power, 0xc400_0004, [0, 4, 0]), -2);
        assert_eq!(returns(&power, 0xc400_0004, [0, u64::MAX, 0]), -2);
        assert_eq!(returns(&power, 0xc400_0004, [3 << 8, 0, 0]), -2);
        assert_eq!(
            returns(&power, 0x8400_0003, [1 << 40 | 2, 8, 9]),
            0,
            "32 bits count"
        );
    }

    #[test]
    fn other_calls() {
        let (power, _) = machine(1);
        assert_eq!(call(&power, 0x8400_0008, [0; 3]), Some(Outcome::SystemOff));
        assert_eq!(
            call(&power, 0x8400_0009, [0; 3]),
            Some(Outcome::SystemReset)
        );
        assert_eq!(call(&power, 0xc400_0001, [0; 3]), Some(Outcome::Suspend));
        assert_eq!(returns(&power, 0x8400_0005, [0; 3]), -1);
        assert_eq!(call(&power, 0xc400_0020, [0; 3]), None, "SDEI's numbers");
        assert_eq!(call(&power, 0x8600_0000, [0; 3]), None, "a vendor's");
        assert_eq!(call(&power, 0x0400_0000, [0; 3]), None, "not a fast call");
    }
}
