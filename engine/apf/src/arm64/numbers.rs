//! Numbers that guest and host agree on.

bitflags::bitflags! {
    /// The forms that a guest may use: bits of the vendor services' bitmap.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Features: u32 {
        /// Both events are data aborts (RFCv2).
        const ABORT = 1 << ABORT_CALL;
        /// Page-not-present is an SDEI event, and page-ready an interrupt (v1 to v4).
        const SDEI = 1 << SDEI_CALL;
    }
}

/// The event and the interrupt of [`Features::SDEI`]. The machine chooses both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Numbers {
    /// The private SDEI event that delivers page-not-present.
    pub event: u32,
    /// The private peripheral interrupt (INTID 16 to 31) that delivers page-ready.
    pub interrupt: u32,
}

impl Numbers {
    /// The event of v2 to v4, and a PPI that no architected device of a guest uses.
    pub const DEFAULT: Self = Self {
        event: 0x4040_0001,
        interrupt: 17,
    };
}

/// The vendor services' own numbers: bits of their bitmap, and function numbers of the calls. Linux
/// has given both to other services since (1: PTP, 2: memory information for protected guests), so
/// a guest must compare the version, or probe with a call that changes nothing.
const ABORT_CALL: u32 = 1;
const SDEI_CALL: u32 = 2;

/// The largest number of outstanding page-not-present events: the answer to [`Sub::Slots`].
pub(super) const SLOTS: u64 = crate::QUEUED_MAX as u64;
/// Version 1.0.0 of the form v1 to v4.
pub(super) const VERSION: u64 = 0x01_0000;

/// A call that this module answers (SMCCC, Arm DEN 0028: the function identifier in W0).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    /// Which hypervisor this is.
    Uid,
    /// The bitmap of the vendor's services.
    Services,
    /// RFCv2's one call.
    Abort,
    /// The call of v1 to v4: its first argument is a [`Sub`].
    Sdei,
    /// A vendor service that does not exist.
    Unknown,
    /// A call of the SDEI, by its number (Arm DEN 0054).
    Event(u32),
}

/// Fast call, 32 bits, owner 6: vendor-specific hypervisor services.
const VENDOR: u32 = 0x8600_0000;
const OWNER: u32 = 0xbf00_0000;
const UID: u32 = VENDOR | 0xff01;
/// Fast call, 64 bits, owner 4: standard secure services, from the SDEI's first number on.
const SDEI: u32 = 0xc400_0020;
const SDEI_NUMBERS: u32 = 32;

impl Call {
    /// The call with the function identifier `function`, if this module answers it.
    pub fn of(function: u32) -> Option<Self> {
        const ABORT: u32 = VENDOR | ABORT_CALL;
        const SDEI_FORM: u32 = VENDOR | SDEI_CALL;
        Some(match function {
            UID => Self::Uid,
            VENDOR => Self::Services,
            ABORT => Self::Abort,
            SDEI_FORM => Self::Sdei,
            // The 64-bit forms of vendor calls do not exist either.
            _ if function & OWNER == VENDOR => Self::Unknown,
            _ => match function.checked_sub(SDEI) {
                Some(number) if number < SDEI_NUMBERS => Self::Event(number),
                _ => return None,
            },
        })
    }
}

/// The UID of KVM, 28b46fb6-2ec5-11e9-a9ca-4b564d003a74, as the call returns it in W0 to W3.
pub(super) const KVM_UID: [u64; 4] = [0xb66f_b428, 0xe911_c52e, 0x564b_caa9, 0x743a_004d];

/// The functions of the form v1 to v4.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sub {
    /// Which version of the form this is.
    Version,
    /// How many tokens may be outstanding.
    Slots,
    /// The number of the SDEI event.
    Event,
    /// The number of the interrupt.
    Interrupt,
    /// Turns the events on or off.
    Enable,
    /// The guest has handled a page-ready interrupt.
    Acknowledge,
}

impl Sub {
    pub fn of(number: u32) -> Option<Self> {
        const ALL: [Sub; 6] = [
            Sub::Version,
            Sub::Slots,
            Sub::Event,
            Sub::Interrupt,
            Sub::Enable,
            Sub::Acknowledge,
        ];
        ALL.get(number as usize).copied()
    }
}

/// The result of a failed vendor call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// The service or the function does not exist, or the area is not memory.
    NotSupported = -1,
    /// The contract is in that state already.
    NotRequired = -2,
    /// The machine has chosen no event and interrupt.
    InvalidParameter = -3,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_known_by_its_identifier() {
        for (function, call) in [
            (0x8600_ff01, Some(Call::Uid)),
            (0x8600_0000, Some(Call::Services)),
            (0x8600_0001, Some(Call::Abort)),
            (0x8600_0002, Some(Call::Sdei)),
            (0x8600_0003, Some(Call::Unknown)),
            (0x8600_007f, Some(Call::Unknown)),
            (0xc600_0001, Some(Call::Unknown)),
            (0xc400_0020, Some(Call::Event(0))),
            (0xc400_0032, Some(Call::Event(0x12))),
            (0xc400_001f, None),
            (0xc400_0040, None),
            (0x8400_0020, None),
            (0x8400_0000, None),
            (0x8000_0001, None),
            (0x0600_0001, None),
            (0, None),
            (u32::MAX, None),
        ] {
            assert_eq!(Call::of(function), call, "{function:#x}");
        }
    }

    #[test]
    fn the_bitmap_has_the_numbers_of_the_calls() {
        assert_eq!(Features::ABORT.bits() | Features::SDEI.bits(), 0b110);
    }
}
