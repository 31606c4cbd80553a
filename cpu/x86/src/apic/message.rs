//! Interrupt messages: from the ICR of a local APIC, from the I/O APIC, from devices.

/// The destination of an interrupt. Broadcast has its own case: its number differs between the two
/// modes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Destination {
    Physical(u32),
    Logical(u32),
    All,
    AllBut(usize),
    /// 0xff of a device: a broadcast. If the machine has vCPU 255, an APIC in x2APIC mode takes it
    /// as any other destination, as KVM's APICs do without the broadcast quirk.
    Ones {
        logical: bool,
    },
}

/// Which of the addressed APICs get the interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Delivery {
    /// All of them.
    Fixed,
    /// One: the lowest-numbered.
    LowestPriority,
    /// All of them get a non-maskable interrupt, which has no vector.
    Nmi,
}

impl Delivery {
    /// The delivery mode in bits 10:8 of `low`. `None` for modes without effect here.
    pub(super) const fn of(low: u32) -> Option<Self> {
        match low >> 8 & 7 {
            0 => Some(Self::Fixed),
            1 => Some(Self::LowestPriority),
            4 => Some(Self::Nmi),
            _ => None,
        }
    }
}

/// How an interrupt is triggered: TMR's bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Trigger {
    Edge,
    /// Its EOI is passed on to the I/O APIC.
    Level,
}

/// An interrupt on its way to local APICs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Message {
    pub(super) to: Destination,
    pub(super) delivery: Delivery,
    pub(super) vector: u8,
    pub(super) trigger: Trigger,
}

impl Message {
    /// A message of the I/O APIC or of a device. `data` has the vector in bits 7:0 and the delivery
    /// mode in bits 10:8. `None` for modes without effect here.
    pub(super) fn from_device(
        destination: u8,
        logical: bool,
        data: u32,
        is_level: bool,
    ) -> Option<Self> {
        let to = match destination {
            0xff => Destination::Ones { logical },
            id if logical => Destination::Logical(id.into()),
            id => Destination::Physical(id.into()),
        };
        let trigger = match is_level {
            false => Trigger::Edge,
            true => Trigger::Level,
        };
        Some(Self {
            to,
            delivery: Delivery::of(data)?,
            vector: data as u8,
            trigger,
        })
    }
}
