//! The shared part of each local APIC: its IRR and its address.

use lacuna_cpu::Wake;
use lacuna_sync::shim::{AtomicU64, Ordering};
use std::fmt;
use std::sync::Arc;

/// The interrupt bus of one machine, shared by its vCPUs and devices.
pub struct ApicBus {
    inboxes: Box<[Inbox]>,
    wake: Arc<dyn Wake>,
}

/// One APIC's part: 256 requested vectors, and an [`Address`].
struct Inbox {
    irr: [AtomicU64; 4],
    address: AtomicU64,
}

/// An APIC's address. It is stored as one word, so that a sender never sees half of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Address {
    /// LDR; in xAPIC mode bits 31 to 24 count.
    pub(super) ldr: u32,
    /// x2APIC mode: 32-bit clusters of 16.
    pub(super) x2: bool,
    /// DFR's flat model (xAPIC mode only).
    pub(super) flat: bool,
    /// Enabled by `APIC_BASE` and SVR: takes interrupts.
    pub(super) accepting: bool,
}

impl Address {
    fn pack(self) -> u64 {
        let flag = |set, bit| u64::from(set) << bit;
        u64::from(self.ldr) | flag(self.x2, 32) | flag(self.flat, 33) | flag(self.accepting, 34)
    }

    fn unpack(word: u64) -> Self {
        let flag = |bit: u32| word >> bit & 1 != 0;
        Self {
            ldr: word as u32,
            x2: flag(32),
            flat: flag(33),
            accepting: flag(34),
        }
    }

    /// Whether the logical destination `to` names this APIC (SDM vol 3 11.6.2.2, 11.12.9).
    fn answers(self, to: u32) -> bool {
        if self.x2 {
            return self.ldr >> 16 == to >> 16 && self.ldr & to & 0xffff != 0;
        }
        let (mine, to) = (self.ldr >> 24, to & 0xff);
        if self.flat {
            mine & to != 0
        } else {
            (to >> 4 == 0xf || mine >> 4 == to >> 4) && mine & to & 0xf != 0
        }
    }
}

/// The destination of an interrupt. Broadcast has its own case: its number differs between the two
/// modes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Destination {
    Physical(u32),
    Logical(u32),
    All,
    AllBut(usize),
}

/// Which of the addressed APICs get the interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Delivery {
    /// All of them.
    Fixed,
    /// One: the lowest-numbered.
    LowestPriority,
}

impl ApicBus {
    /// A bus for vCPUs 0 to `vcpus` - 1. The APIC ID of a vCPU is its number.
    pub fn new(vcpus: usize, wake: Arc<dyn Wake>) -> Self {
        let closed = Address {
            ldr: 0,
            x2: false,
            flat: true,
            accepting: false,
        };
        let inbox = |_| Inbox {
            irr: std::array::from_fn(|_| AtomicU64::new(0)),
            address: AtomicU64::new(closed.pack()),
        };
        Self {
            inboxes: (0..vcpus).map(inbox).collect(),
            wake,
        }
    }

    /// How many vCPUs there are.
    pub fn vcpus(&self) -> usize {
        self.inboxes.len()
    }

    /// Requests `vector` on vCPU `index`, as an edge-triggered message does. Any thread may call
    /// this. As on hardware, this ignores a vector below 16, and a disabled or absent APIC.
    pub fn post(&self, index: usize, vector: u8) {
        if self
            .inboxes
            .get(index)
            .is_some_and(|inbox| inbox.address().accepting)
        {
            self.request(index, vector);
        }
    }

    pub(super) fn send(&self, to: Destination, delivery: Delivery, vector: u8) {
        if let Destination::Physical(id) = to {
            return self.post(id as usize, vector);
        }
        for (index, inbox) in self.inboxes.iter().enumerate() {
            let address = inbox.address();
            let addressed = match to {
                Destination::Physical(id) => id as usize == index,
                Destination::Logical(id) => address.answers(id),
                Destination::All => true,
                Destination::AllBut(sender) => sender != index,
            };
            if address.accepting && addressed {
                self.request(index, vector);
                if delivery == Delivery::LowestPriority {
                    return;
                }
            }
        }
    }

    /// Sets an IRR bit. Wakes the vCPU if the bit was clear; otherwise the thread that has set it
    /// does.
    fn request(&self, index: usize, vector: u8) {
        if vector >= 16 && self.raise(index, vector) {
            self.wake.wake(index);
        }
    }

    /// Sets an IRR bit and wakes no vCPU. Returns whether the bit was clear.
    pub(super) fn raise(&self, index: usize, vector: u8) -> bool {
        let (word, bit) = split(vector);
        self.inboxes[index].irr[word].fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Clears an IRR bit. Returns whether it was set.
    pub(super) fn take(&self, index: usize, vector: u8) -> bool {
        let (word, bit) = split(vector);
        self.inboxes[index].irr[word].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    pub(super) fn clear(&self, index: usize) {
        self.set_irr(index, [0; 4]);
    }

    pub(super) fn set_irr(&self, index: usize, irr: [u64; 4]) {
        for (word, bits) in self.inboxes[index].irr.iter().zip(irr) {
            word.store(bits, Ordering::Release);
        }
    }

    pub(super) fn irr(&self, index: usize) -> [u64; 4] {
        let irr = &self.inboxes[index].irr;
        std::array::from_fn(|i| irr[i].load(Ordering::Acquire))
    }

    pub(super) fn set_address(&self, index: usize, address: Address) {
        self.inboxes[index]
            .address
            .store(address.pack(), Ordering::Release);
    }
}

impl Inbox {
    fn address(&self) -> Address {
        Address::unpack(self.address.load(Ordering::Acquire))
    }
}

impl fmt::Debug for ApicBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApicBus")
            .field("vcpus", &self.vcpus())
            .finish_non_exhaustive()
    }
}

/// Word and bit of a vector in IRR and ISR.
pub(super) const fn split(vector: u8) -> (usize, u64) {
    (vector as usize / 64, 1 << (vector % 64))
}

/// The highest vector in a 256-bit register.
pub(super) fn highest(bits: &[u64; 4]) -> Option<u8> {
    let word = bits.iter().rposition(|&w| w != 0)?;
    Some((word as u32 * 64 + bits[word].ilog2()) as u8)
}
