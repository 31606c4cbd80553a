//! The shared part of each local APIC: its IRR, its TMR and its address; and interrupt messages.

use super::ioapic::Pins;
use super::message::{Delivery, Destination, Message, Trigger};
use lacuna_cpu::Wake;
use lacuna_state::x86::IoApic;
use lacuna_sync::shim::{AtomicBool, AtomicU64, Ordering};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::fmt;
use std::sync::Arc;

/// The interrupt bus of one machine, shared by its vCPUs and devices.
pub struct ApicBus {
    inboxes: Box<[Inbox]>,
    io_apic: Mutex<Pins, lock_order::IoApic>,
    wake: Arc<dyn Wake>,
}

/// One APIC's part: 256 requested vectors, which of them are level-triggered, whether an NMI waits,
/// and an [`Address`].
struct Inbox {
    irr: [AtomicU64; 4],
    tmr: [AtomicU64; 4],
    nmi: AtomicBool,
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
    /// Enabled by `APIC_BASE`: takes NMIs.
    pub(super) enabled: bool,
    /// Enabled by `APIC_BASE` and SVR: takes interrupts.
    pub(super) accepting: bool,
}

impl Address {
    fn pack(self) -> u64 {
        let flag = |set, bit| u64::from(set) << bit;
        u64::from(self.ldr)
            | flag(self.x2, 32)
            | flag(self.flat, 33)
            | flag(self.accepting, 34)
            | flag(self.enabled, 35)
    }

    fn unpack(word: u64) -> Self {
        let flag = |bit: u32| word >> bit & 1 != 0;
        Self {
            ldr: word as u32,
            x2: flag(32),
            flat: flag(33),
            accepting: flag(34),
            enabled: flag(35),
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

/// A bit for each vCPU.
type Vcpus = [u64; ApicBus::VCPUS_MAX / 64];

/// The outcome of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
struct Delivered {
    /// An APIC has taken it.
    accepted: bool,
    /// A bit for each vCPU that [`ApicBus::wake`] wakes, after all locks are released.
    wake: Vcpus,
}

impl ApicBus {
    /// The most vCPUs: the messages of devices have 8 bits for an APIC ID.
    pub const VCPUS_MAX: usize = 256;

    /// A bus for vCPUs 0 to `vcpus` - 1. The APIC ID of a vCPU is its number.
    ///
    /// # Panics
    /// If there are more than [`ApicBus::VCPUS_MAX`].
    pub fn new(vcpus: usize, wake: Arc<dyn Wake>) -> Self {
        assert!(vcpus <= Self::VCPUS_MAX, "{vcpus} vCPUs");
        let closed = Address {
            ldr: 0,
            x2: false,
            flat: true,
            enabled: false,
            accepting: false,
        };
        let inbox = |_| Inbox {
            irr: std::array::from_fn(|_| AtomicU64::new(0)),
            tmr: std::array::from_fn(|_| AtomicU64::new(0)),
            nmi: AtomicBool::new(false),
            address: AtomicU64::new(closed.pack()),
        };
        Self {
            inboxes: (0..vcpus).map(inbox).collect(),
            io_apic: Mutex::new(Pins::new()),
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
        // No vCPU has so high a number.
        let id = u32::try_from(index).unwrap_or(u32::MAX);
        self.send(Message {
            to: Destination::Physical(id),
            delivery: Delivery::Fixed,
            vector,
            trigger: Trigger::Edge,
        });
    }

    /// Sends the message of a device's write of `data` to `address`, which lies in
    /// 0xfee0_0000..=0xfeef_ffff (SDM vol 3 11.11). Any thread may call this.
    pub fn signal_msi(&self, address: u32, data: u32) {
        let (hint, logical) = (address & 1 << 3 != 0, address & 1 << 2 != 0);
        let (destination, is_level) = ((address >> 12) as u8, data & 1 << 15 != 0);
        let message = Message::from_device(destination, logical, data, is_level);
        if let Some(mut message) = message {
            if hint && message.delivery == Delivery::Fixed {
                message.delivery = Delivery::LowestPriority;
            }
            self.send(message);
        }
    }

    pub(super) fn send(&self, message: Message) {
        self.wake(self.request(message).wake);
    }

    /// Sets the IRR bits of the addressed APICs or makes NMIs wait there, and wakes no vCPU.
    fn request(&self, message: Message) -> Delivered {
        let Message {
            to,
            delivery,
            vector,
            trigger,
        } = message;
        let mut delivered = Delivered::default();
        let (skip, take) = match to {
            Destination::Physical(id) => (id as usize, 1),
            _ => (0, usize::MAX),
        };
        for (index, inbox) in self.inboxes.iter().enumerate().skip(skip).take(take) {
            let address = inbox.address();
            let addressed = match to {
                Destination::Physical(_) | Destination::All => true,
                Destination::Logical(id) => address.answers(id),
                Destination::AllBut(sender) => sender != index,
                Destination::Ones { .. } if !address.x2 || self.vcpus() <= 0xff => true,
                Destination::Ones { logical: true } => address.answers(0xff),
                Destination::Ones { logical: false } => index == 0xff,
            };
            // A local APIC that SVR has turned off takes NMIs (SDM vol 3, 11.4.7.2).
            let takes = match delivery {
                Delivery::Nmi => address.enabled,
                _ => address.accepting && vector >= 16,
            };
            if takes && addressed {
                delivered.accepted = true;
                // If the bit was set already, the thread that has set it wakes the vCPU.
                let is_new = match delivery {
                    Delivery::Nmi => !self.set_nmi(index, true),
                    _ => self.raise(index, vector, trigger),
                };
                delivered.wake[index / 64] |= u64::from(is_new) << (index % 64);
                if delivery == Delivery::LowestPriority {
                    break;
                }
            }
        }
        delivered
    }

    /// Wakes the vCPUs of [`Delivered::wake`].
    fn wake(&self, vcpus: Vcpus) {
        for (word, mut bits) in vcpus.into_iter().enumerate() {
            while bits != 0 {
                self.wake.wake(64 * word + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// Sets an IRR bit and wakes no vCPU. Returns whether the bit was clear.
    pub(super) fn raise(&self, index: usize, vector: u8, trigger: Trigger) -> bool {
        let (word, bit) = split(vector);
        let inbox = &self.inboxes[index];
        // TMR is first: the vCPU reads it after it has taken the vector from IRR.
        let tmr = &inbox.tmr[word];
        let is_level = tmr.load(Ordering::Relaxed) & bit != 0;
        match trigger {
            Trigger::Level if !is_level => _ = tmr.fetch_or(bit, Ordering::Relaxed),
            Trigger::Edge if is_level => _ = tmr.fetch_and(!bit, Ordering::Relaxed),
            _ => {}
        }
        inbox.irr[word].fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Clears an IRR bit. Returns whether it was set.
    pub(super) fn take(&self, index: usize, vector: u8) -> bool {
        let (word, bit) = split(vector);
        self.inboxes[index].irr[word].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Sets whether an NMI waits. Returns whether one has waited.
    pub(super) fn set_nmi(&self, index: usize, waits: bool) -> bool {
        self.inboxes[index].nmi.swap(waits, Ordering::AcqRel)
    }

    /// Whether an NMI waits.
    pub(super) fn has_nmi(&self, index: usize) -> bool {
        self.inboxes[index].nmi.load(Ordering::Acquire)
    }

    pub(super) fn clear(&self, index: usize) {
        self.set_requests(index, [0; 4], [0; 4]);
    }

    /// Replaces IRR and TMR.
    pub(super) fn set_requests(&self, index: usize, irr: [u64; 4], tmr: [u64; 4]) {
        let inbox = &self.inboxes[index];
        let words = inbox.tmr.iter().chain(&inbox.irr);
        for (word, bits) in words.zip(tmr.into_iter().chain(irr)) {
            word.store(bits, Ordering::Release);
        }
    }

    pub(super) fn irr(&self, index: usize) -> [u64; 4] {
        let irr = &self.inboxes[index].irr;
        std::array::from_fn(|i| irr[i].load(Ordering::Acquire))
    }

    pub(super) fn tmr(&self, index: usize) -> [u64; 4] {
        let tmr = &self.inboxes[index].tmr;
        std::array::from_fn(|i| tmr[i].load(Ordering::Acquire))
    }

    pub(super) fn set_address(&self, index: usize, address: Address) {
        self.inboxes[index]
            .address
            .store(address.pack(), Ordering::Release);
    }
}

impl ApicBus {
    /// Sets the level of an input of the I/O APIC. Any thread may call this. A pin that does not
    /// exist is ignored.
    pub fn set_pin(&self, pin: usize, high: bool) {
        self.change_io_apic(|io, send| io.set_pin(pin, high, send));
    }

    /// A read of the I/O APIC's memory.
    pub(crate) fn io_apic_read(&self, offset: u64) -> u32 {
        self.lock_io_apic().read(offset)
    }

    /// A write to the I/O APIC's memory.
    pub(crate) fn io_apic_write(&self, offset: u64, value: u32) {
        self.change_io_apic(|io, send| io.write(offset, value, send));
    }

    /// A local APIC has ended the level-triggered interrupt `vector`.
    pub(super) fn end_level(&self, vector: u8) {
        self.change_io_apic(|io, send| io.end(vector, send));
    }

    /// The I/O APIC, for saving it. A machine saves it before its local APICs: an interrupt that a
    /// device raises between the two is then in a local APIC, or comes again.
    pub fn io_apic(&self) -> IoApic {
        self.lock_io_apic().saved()
    }

    /// Takes over a saved I/O APIC. Bits that do not exist are dropped. Nothing is delivered: the
    /// requests are in the states of the local APICs.
    pub fn set_io_apic(&self, saved: &IoApic) {
        *self.lock_io_apic() = Pins::restored(saved);
    }

    /// Resets the I/O APIC: every pin is low and masked.
    pub fn reset_io_apic(&self) {
        *self.lock_io_apic() = Pins::new();
    }

    /// Makes a change of the I/O APIC, which may send messages. The requests are made under the
    /// lock, so a saved remote IRR always has its request, or its interrupt in service, in a local
    /// APIC. The vCPUs are woken after it.
    fn change_io_apic(&self, change: impl FnOnce(&mut Pins, &mut dyn FnMut(Message) -> bool)) {
        let mut wake = Vcpus::default();
        change(&mut self.lock_io_apic(), &mut |message| {
            let delivered = self.request(message);
            wake.iter_mut()
                .zip(delivered.wake)
                .for_each(|(all, new)| *all |= new);
            delivered.accepted
        });
        self.wake(wake);
    }

    fn lock_io_apic(&self) -> MutexGuard<'_, Pins> {
        self.io_apic.lock().expect("no panic under this lock")
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
