//! The shared part of the interrupt controller: the distributor with its shared peripheral
//! interrupts (SPIs), and a redistributor for each vCPU with its private ones.

use super::bank::{BANK, Bank, Candidate, Group, Groups, Line, wrong_priority};
use lacuna_cpu::Wake;
use lacuna_state::StateError;
use lacuna_state::arm64::{self, Spis};
use lacuna_sync::shim::{AtomicU32, Ordering};
use lacuna_sync::{CachePadded, Mutex, MutexGuard, lock_order};
use std::fmt;
use std::sync::Arc;

/// Banks of shared peripheral interrupts: INTIDs 32 to 127.
pub(super) const SPI_BANKS: usize = 3;
/// The first INTID of shared peripheral interrupts.
pub(super) const FIRST_SPI: u32 = BANK;
/// Software-generated interrupts: INTIDs 0 to 15, always edge-triggered.
pub(super) const SGIS: u32 = 0xffff;

/// The affinity of vCPU `index`, as in bits 23 to 0 of `MPIDR_EL1`: 16 in each Aff1, because one
/// write to `ICC_SGI1R_EL1` names at most 16 targets.
pub const fn affinity(index: usize) -> u32 {
    let index = index as u32;
    (index & 0xf) | (index >> 4 & 0xff) << 8 | (index >> 12 & 0xff) << 16
}

/// The vCPU with affinity `Aff3.Aff2.Aff1.Aff0`, if a machine can have it.
pub(crate) const fn index_of(affinity: u32) -> Option<usize> {
    if affinity >> 24 != 0 || affinity & 0xf0 != 0 {
        return None;
    }
    Some(((affinity & 0xf) | (affinity >> 4 & 0xff0) | (affinity >> 4 & 0xf_f000)) as usize)
}

/// The interrupt controller of one machine, shared by its vCPUs and devices.
///
/// One lock protects all of it. A vCPU does not take the lock to see whether it has an interrupt:
/// each change puts the most urgent one into the vCPU's own word, which the vCPU loads.
pub struct Gic {
    shared: Mutex<GicState, lock_order::Gic>,
    /// For each vCPU: its most urgent pending interrupt, packed.
    signals: Box<[CachePadded<AtomicU32>]>,
    wake: Arc<dyn Wake>,
}

/// A distributor's state, which belongs to no vCPU.
pub(super) struct Distributor {
    /// `GICD_CTLR`.EnableGrp0 and EnableGrp1.
    pub(super) enabled: [bool; 2],
    /// INTIDs 32 and up.
    pub(super) spis: [Bank; SPI_BANKS],
    /// `GICD_IROUTER<n>` of the same interrupts.
    pub(super) routes: [[u64; BANK as usize]; SPI_BANKS],
}

/// A redistributor's state.
#[derive(Clone)]
pub(super) struct Redistributor {
    /// INTIDs 0 to 31.
    pub(super) private: Bank,
    /// `GICR_WAKER`.ProcessorSleep: no interrupt is forwarded. A redistributor starts awake. KVM's
    /// is always awake. QEMU's starts with this bit set, but forwards nevertheless. So some guests
    /// never clear the bit.
    pub(super) asleep: bool,
    /// The groups enabled by the processor's own interface.
    pub(super) interface: Groups,
}

pub(super) struct GicState {
    pub(super) distributor: Distributor,
    pub(super) redistributors: Box<[Redistributor]>,
}

/// The vCPUs that a change may concern.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Concerns {
    None,
    One(usize),
    Two(usize, usize),
    All,
}

impl Distributor {
    const fn new() -> Self {
        Self {
            enabled: [false; 2],
            spis: [const { Bank::new(0) }; SPI_BANKS],
            routes: [[0; BANK as usize]; SPI_BANKS],
        }
    }

    fn groups(&self) -> Groups {
        Groups {
            zero: self.enabled[0],
            one: self.enabled[1],
        }
    }

    /// An SPI's target vCPU.
    fn target(&self, bank: usize, bit: u32) -> Option<usize> {
        let route = self.routes[bank][bit as usize];
        index_of((route >> 8) as u32 & 0xff00_0000 | route as u32 & 0xff_ffff)
    }
}

impl Redistributor {
    pub(super) const fn new() -> Self {
        Self {
            private: Bank::new(SGIS),
            asleep: false,
            interface: Groups {
                zero: false,
                one: false,
            },
        }
    }
}

impl GicState {
    /// The most urgent interrupt for vCPU `index`.
    pub(super) fn candidate(&self, index: usize) -> Option<Candidate> {
        let redistributor = &self.redistributors[index];
        let groups = self.distributor.groups().and(redistributor.interface);
        if redistributor.asleep {
            return None;
        }
        let private = &redistributor.private;
        let mut best = private.more_urgent(private.forwarded(groups), 0, None);
        for (number, bank) in self.distributor.spis.iter().enumerate() {
            let mut bits = bank.forwarded(groups);
            let mut mine = 0;
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                if self.distributor.target(number, bit) == Some(index) {
                    mine |= 1 << bit;
                }
            }
            best = bank.more_urgent(mine, FIRST_SPI + number as u32 * BANK, best);
        }
        best
    }

    /// The bank of an interrupt as seen by vCPU `index`, its bit, and the concerned vCPUs.
    pub(super) fn find(&mut self, index: usize, intid: u32) -> Option<(&mut Bank, u32, Concerns)> {
        let bit = intid % BANK;
        if intid < FIRST_SPI {
            let private = &mut self.redistributors.get_mut(index)?.private;
            return Some((private, bit, Concerns::One(index)));
        }
        let number = (intid / BANK) as usize - 1;
        let target = (number < SPI_BANKS).then(|| self.distributor.target(number, bit))?;
        let bank = &mut self.distributor.spis[number];
        Some((bank, bit, Concerns::Two(index, target.unwrap_or(index))))
    }
}

impl Gic {
    /// The controller of a machine with vCPUs 0 to `vcpus` - 1.
    pub fn new(vcpus: usize, wake: Arc<dyn Wake>) -> Self {
        let shared = GicState {
            distributor: Distributor::new(),
            redistributors: vec![Redistributor::new(); vcpus].into(),
        };
        Self {
            shared: Mutex::new(shared),
            signals: (0..vcpus).map(|_| CachePadded::default()).collect(),
            wake,
        }
    }

    /// How many vCPUs there are.
    pub fn vcpus(&self) -> usize {
        self.signals.len()
    }

    /// Sets the level of a shared peripheral interrupt's input. `intid` is 32 or more. A missing
    /// interrupt is ignored, like an unconnected input. Any thread may call this.
    pub fn set_spi(&self, intid: u32, line: Line) {
        if intid >= FIRST_SPI {
            self.set_line(None, 0, intid, line);
        }
    }

    /// Sets the level of an input of vCPU `index`'s own interrupts, 16 to 31. Any thread may call
    /// this.
    pub fn set_ppi(&self, index: usize, intid: u32, line: Line) {
        if (16..FIRST_SPI).contains(&intid) {
            self.set_line(None, index, intid, line);
        }
    }

    /// As [`Gic::set_ppi`], from the vCPU's own thread, which needs no wake-up.
    pub(crate) fn set_own_ppi(&self, index: usize, intid: u32, line: Line) {
        self.set_line(Some(index), index, intid, line);
    }

    fn set_line(&self, by: Option<usize>, index: usize, intid: u32, line: Line) {
        self.change(by, |shared| match shared.find(index, intid) {
            Some((bank, bit, concerns)) => {
                bank.set_line(bit, line);
                concerns
            }
            None => Concerns::None,
        });
    }

    /// Makes an interrupt of vCPU `index`, or an SPI, pending until it is acknowledged, whatever
    /// its configuration: as a write to `GICD_ISPENDR<n>`. Any thread may call this.
    pub fn post(&self, index: usize, intid: u32) {
        self.change(None, |shared| match shared.find(index, intid) {
            Some((bank, bit, concerns)) => {
                bank.0.pending |= 1 << bit;
                concerns
            }
            None => Concerns::None,
        });
    }

    /// The distributor, for saving it. A machine saves it once, beside its vCPUs.
    pub fn distributor(&self) -> arm64::Distributor {
        let Distributor {
            enabled,
            spis,
            routes,
        } = &self.lock().distributor;
        let spis = spis.iter().zip(routes).map(|(bank, route)| Spis {
            interrupts: bank.0,
            route: *route,
        });
        arm64::Distributor {
            enabled: *enabled,
            spis: spis.collect(),
        }
    }

    /// Takes over a saved distributor.
    ///
    /// # Errors
    /// The first impossible field; nothing has changed.
    pub fn set_distributor(&self, saved: &arm64::Distributor) -> Result<(), StateError> {
        let Ok(spis) = <&[Spis; SPI_BANKS]>::try_from(&*saved.spis) else {
            return StateError::unsupported("distributor.spis", saved.spis.len() as u64);
        };
        if let Some(value) = (spis.iter()).find_map(|spis| wrong_priority(&spis.interrupts)) {
            return StateError::invalid("distributor.spis.priority", value);
        }
        let mut routes = spis.iter().flat_map(|spis| spis.route);
        if let Some(route) = routes.find(|route| route & !ROUTE_MASK != 0) {
            return StateError::invalid("distributor.spis.route", route);
        }
        self.change(None, |shared| {
            shared.distributor = Distributor {
                enabled: saved.enabled,
                spis: spis.map(|spis| Bank(spis.interrupts)),
                routes: spis.map(|spis| spis.route),
            };
            Concerns::All
        });
        Ok(())
    }

    /// Resets the distributor: every SPI is disabled and forgotten, its input included.
    pub fn reset_distributor(&self) {
        self.change(None, |shared| {
            shared.distributor = Distributor::new();
            Concerns::All
        });
    }

    /// The most urgent interrupt of vCPU `index` after the last change.
    pub(super) fn signal(&self, index: usize) -> Option<Candidate> {
        let signal = self.signals.get(index)?;
        unpack(signal.load(Ordering::Acquire))
    }

    /// Makes a change, and wakes the vCPUs with a new interrupt from it. The thread of vCPU `by`
    /// makes the change, so this vCPU needs no wake-up.
    pub(super) fn change(&self, by: Option<usize>, make: impl FnOnce(&mut GicState) -> Concerns) {
        let mut shared = self.lock();
        let concerns = make(&mut shared);
        let mut wake = Vec::new();
        match concerns {
            Concerns::None => {}
            Concerns::One(index) => self.publish(&shared, index, &mut wake),
            Concerns::Two(one, other) => {
                self.publish(&shared, one, &mut wake);
                if other != one {
                    self.publish(&shared, other, &mut wake);
                }
            }
            Concerns::All => {
                (0..self.vcpus()).for_each(|index| self.publish(&shared, index, &mut wake));
            }
        }
        drop(shared);
        for index in wake {
            if by != Some(index) {
                self.wake.wake(index);
            }
        }
    }

    /// Stores the signalled interrupt of vCPU `index`. A vCPU with a new one is added to `wake`.
    fn publish(&self, shared: &GicState, index: usize, wake: &mut Vec<usize>) {
        let Some(signal) = self.signals.get(index) else {
            return;
        };
        let new = pack(shared.candidate(index));
        // The lock orders all stores; the vCPU's own loads need no more than the value.
        if new != signal.load(Ordering::Relaxed) {
            signal.store(new, Ordering::Release);
            if new != NOTHING {
                wake.push(index);
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, GicState> {
        self.shared.lock().expect("no panic under this lock")
    }
}

impl fmt::Debug for Gic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gic")
            .field("vcpus", &self.vcpus())
            .finish_non_exhaustive()
    }
}

/// The implemented bits of `GICD_IROUTER<n>`: Aff3, and Aff2 to Aff0. There is no 1-of-N routing,
/// so its bit is reserved.
pub(super) const ROUTE_MASK: u64 = 0xff_00ff_ffff;

const NOTHING: u32 = 0;
const PRESENT: u32 = 1 << 31;

fn pack(candidate: Option<Candidate>) -> u32 {
    candidate.map_or(
        NOTHING,
        |Candidate {
             intid,
             priority,
             group,
         }| {
            PRESENT | u32::from(group == Group::One) << 24 | u32::from(priority) << 16 | intid
        },
    )
}

fn unpack(word: u32) -> Option<Candidate> {
    (word & PRESENT != 0).then_some(Candidate {
        intid: word & 0xffff,
        priority: (word >> 16) as u8,
        group: if word >> 24 & 1 == 0 {
            Group::Zero
        } else {
            Group::One
        },
    })
}
