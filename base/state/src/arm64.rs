//! The state of an AArch64 vCPU, and the state shared by the vCPUs of a VM.
//!
//! Registers that the architecture names have their architectural value: system registers by their
//! encoding ([`SysReg`]), general registers by name. Where the architecture leaves a choice, values
//! have the form of KVM's arm64 ioctls, except for KVM's register identifiers: some of them are
//! wrong by history (the identifiers of the timer's compare value and of the counter are
//! exchanged), and others depend on the layout of a C structure. Every number is plain: a backend
//! checks it when it restores.
//!
//! ```text
//! a vCPU     State    registers, timers, CPU interface and redistributor, async faults, power
//! the VM     Shared   the system counter, the distributor
//! ```

mod id;
mod sysreg;

pub use id::check_id;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
pub use sysreg::SysReg;

/// The whole state of a vCPU.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// General registers, stack pointers, PC and PSTATE.
    pub regs: Regs,
    /// The guest-writable system registers of EL1 and EL0, ELR_EL1 and SPSR_EL1 among them, except
    /// those with a field of their own here. A register that is left out has its reset value.
    pub system: BTreeMap<SysReg, u64>,
    /// The ID registers as the guest reads them at EL1: the features, and the vCPU's number
    /// (MPIDR_EL1). A vCPU that lacks one of the features refuses the state ([`check_id`]).
    pub id: BTreeMap<SysReg, u64>,
    /// The two timers. Their counter belongs to the VM ([`Shared`]).
    pub timers: Timers,
    /// The CPU interface and the redistributor.
    pub gic: Gic,
    /// The abort with which the next run begins.
    pub abort: Option<Abort>,
    /// Asynchronous page faults as the guest has configured them.
    pub apf: AsyncFaults,
    /// Whether the vCPU executes instructions.
    pub run: RunState,
}

/// General registers, stack pointers, PC and PSTATE.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Regs {
    /// X0 to X30.
    pub x: [u64; 31],
    /// SP_EL0.
    pub sp_el0: u64,
    /// SP_EL1.
    pub sp_el1: u64,
    /// Address of the next instruction.
    pub pc: u64,
    /// PSTATE in the format of SPSR_EL1.
    pub pstate: u64,
}

/// The timers of a vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timers {
    /// `CNTV_*_EL0`.
    pub virt: Timer,
    /// `CNTP_*_EL0`.
    pub phys: Timer,
}

/// One timer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timer {
    /// `CNTx_CTL_EL0`: ENABLE (bit 0) and IMASK (bit 1). ISTATUS follows from the counter, and is
    /// zero here.
    pub ctl: u64,
    /// `CNTx_CVAL_EL0`.
    pub cval: u64,
}

/// A vCPU's part of a GICv3: the CPU interface and the redistributor.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gic {
    /// The CPU interface.
    pub cpu: CpuInterface,
    /// `GICR_WAKER`.ProcessorSleep: no interrupt is forwarded.
    pub asleep: bool,
    /// INTIDs 0 to 31.
    pub private: Interrupts,
}

/// The CPU interface: its guest-writable registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuInterface {
    /// `ICC_PMR_EL1`.
    pub pmr: u8,
    /// `ICC_BPR0_EL1` and `ICC_BPR1_EL1`.
    pub bpr: [u8; 2],
    /// `ICC_CTLR_EL1`.CBPR.
    pub cbpr: bool,
    /// `ICC_CTLR_EL1`.EOImode.
    pub eoi_mode: bool,
    /// `ICC_IGRPEN0_EL1` and `ICC_IGRPEN1_EL1`.
    pub enabled: [bool; 2],
    /// `ICC_AP0R<n>_EL1` and `ICC_AP1R<n>_EL1`. A processor with 5 bits of priority has the first
    /// register of each.
    pub active: [[u32; 4]; 2],
}

/// 32 interrupts; bit `n` of each word belongs to interrupt `n`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interrupts {
    /// In group 1: `IGROUPR`.
    pub group: u32,
    /// `ISENABLER`.
    pub enabled: u32,
    /// Pending by an edge, a message or a write, until it is acknowledged. The guest reads
    /// `ISPENDR` as this field OR `level` of level-sensitive interrupts.
    pub pending: u32,
    /// The input is high.
    pub level: u32,
    /// Acknowledged and not deactivated: `ISACTIVER`.
    pub active: u32,
    /// Edge-triggered, otherwise level-sensitive: the upper bit of each field of `ICFGR`.
    pub edge: u32,
    /// `IPRIORITYR`. The lower the value, the more urgent.
    pub priority: [u8; 32],
}

/// An injected data abort that the vCPU has not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Abort {
    /// For ESR_EL1.ISS, 25 bits.
    pub iss: u32,
    /// For FAR_EL1.
    pub address: u64,
}

/// Whether a vCPU executes instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum RunState {
    /// It executes instructions.
    #[default]
    Running,
    /// WFI waits for an interrupt.
    Halted,
    /// It is powered off (PSCI), and waits for `CPU_ON`.
    Off,
    /// `CPU_ON` has switched it on, and it has not executed an instruction since. The other
    /// registers of the state have no meaning: the vCPU is reset when it starts.
    OnPending {
        /// Guest-physical address of its first instruction.
        entry: u64,
        /// For X0.
        context: u64,
    },
}

/// Asynchronous page faults of a vCPU, in both published forms.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AsyncFaults {
    /// The service as it was offered to the guest.
    pub offered: Offered,
    /// The enabled form, and the value with which the guest has enabled it.
    pub enabled: Option<(Form, u64)>,
    /// RFCv2: the number of bytes from VBAR_EL1 on in which no event is delivered.
    pub range: u64,
    /// The software-delegated exception interface.
    pub sdei: Sdei,
    /// The token of a signalled page-not-present. The vCPU has not taken its SDEI event.
    pub untaken: Option<u32>,
    /// The guest has not acknowledged a page-ready interrupt: its line is high.
    pub unacknowledged: bool,
}

impl Default for AsyncFaults {
    /// The state after a reset, in a VM that does not offer them.
    fn default() -> Self {
        Self {
            offered: Offered::default(),
            enabled: None,
            range: 0x800,
            sdei: Sdei::default(),
            untaken: None,
            unacknowledged: false,
        }
    }
}

/// The service of asynchronous page faults offered to a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offered {
    /// The bits for asynchronous page faults in the vendor services' bitmap.
    pub features: u32,
    /// The number of the SDEI event; 0 if there is none.
    pub event: u32,
    /// The INTID of the page-ready interrupt; 0 if there is none.
    pub interrupt: u32,
}

/// The form of the events of asynchronous page faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Form {
    /// Both events are data aborts (RFCv2).
    Abort,
    /// Page-not-present is an SDEI event, page-ready an interrupt (v1 to v4).
    Sdei,
}

/// A vCPU's software-delegated exception interface (Arm DEN 0054), with one private event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sdei {
    /// The registered handler.
    pub handler: Option<Handler>,
    /// The vCPU takes no events (PE_MASK). Set after a reset.
    pub masked: bool,
    /// The registers that a handler at work has interrupted.
    pub interrupted: Option<Context>,
}

impl Default for Sdei {
    /// The state after a reset.
    fn default() -> Self {
        Self {
            handler: None,
            masked: true,
            interrupted: None,
        }
    }
}

/// A handler of the SDEI's event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handler {
    /// Its address.
    pub entry: u64,
    /// For X1.
    pub argument: u64,
    /// Whether the event is enabled.
    pub enabled: bool,
}

/// The registers that an SDEI event replaces, and that its handler may read (Arm DEN 0054).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    /// X0 to X17.
    pub x: [u64; 18],
    /// Address of the next instruction.
    pub pc: u64,
    /// PSTATE in the format of SPSR_EL1.
    pub pstate: u64,
}

/// The state shared by the vCPUs of a VM, which no [`State`] contains.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shared {
    /// The counter.
    pub counter: Counter,
    /// The distributor of the interrupt controller.
    pub distributor: Distributor,
}

/// The system counter. The virtual and the physical counter of every vCPU read it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counter {
    /// The value of CNTVCT_EL0 at the moment of the save.
    pub value: u64,
    /// Its frequency in Hz. A backend refuses a frequency at which it cannot run. (CNTFRQ_EL0,
    /// which only informs the guest, is in [`State::system`].)
    pub hz: u64,
}

/// The distributor of a GICv3 with one security state and affinity routing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distributor {
    /// `GICD_CTLR`.EnableGrp0 and EnableGrp1.
    pub enabled: [bool; 2],
    /// The shared peripheral interrupts, from INTID 32 on. The guest has read their number in
    /// `GICD_TYPER`.ITLinesNumber.
    pub spis: Vec<Spis>,
}

/// 32 shared peripheral interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spis {
    /// Their properties.
    pub interrupts: Interrupts,
    /// `GICD_IROUTER<n>`.
    pub route: [u64; 32],
}
