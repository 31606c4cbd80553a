//! The three MSRs (`msr.rst`): the values that a guest may write, and their read values.
//!
//! KVM also refuses a write if the local APIC is not in the kernel. Here every vCPU has a local
//! APIC, so that rule is left out.

use super::delivery::{Enabled, ReadyBy};
use super::{Features, Guest, Msr};
use crate::abi::{Abi, Deliver, NotDelivered, Request};
use crate::token::{Token, TokenFormat};
use lacuna_addr::{Access, Gfn, Gpa};

/// The access raises #GP(0) and changes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GeneralProtection;

bitflags::bitflags! {
    /// Bits 5:0 of EN.
    struct Flags: u64 {
        const ENABLED = 1 << 0;
        const SEND_ALWAYS = 1 << 1;
        /// For a nested hypervisor. There is none, so the bit is accepted and ignored.
        const DELIVERY_AS_PF_VMEXIT = 1 << 2;
        const DELIVERY_AS_INT = 1 << 3;
        const RESERVED = 3 << 4;
    }
}

/// The registers of one vCPU: x86's [`Abi`].
#[derive(Debug)]
pub struct Control {
    features: Features,
    enable: u64,
    vector: u8,
    enabled: Option<Enabled>,
}

impl Control {
    /// The registers at power-on, all zero. `features` are the ones in the vCPU's CPUID.
    pub const fn new(features: Features) -> Self {
        Self {
            features,
            enable: 0,
            vector: 0,
            enabled: None,
        }
    }

    /// The page that a write of `value` to `msr` accesses: the area that it enables, or the enabled
    /// area, if the write makes the host deliver events.
    pub(super) fn page_accessed_by(&self, msr: Msr, value: u64) -> Option<(Gfn, Access)> {
        match msr {
            Msr::Enable if value & Flags::ENABLED.bits() != 0 => {
                let area = Gpa::new(value & !Flags::all().bits())?;
                Some((area.gfn(), Access::Read))
            }
            Msr::Acknowledge => self.shared_page().map(|area| (area, Access::Write)),
            Msr::Enable | Msr::Vector => None,
        }
    }

    /// RDMSR. `None` raises #GP(0).
    pub(super) fn read(&self, msr: Msr) -> Option<u64> {
        self.has(msr).then(|| match msr {
            Msr::Enable => self.enable,
            Msr::Vector => u64::from(self.vector),
            Msr::Acknowledge => 0,
        })
    }

    /// WRMSR.
    pub(super) fn write(
        &mut self,
        msr: Msr,
        value: u64,
        guest: &mut impl Guest,
    ) -> Result<Request, GeneralProtection> {
        if !self.has(msr) {
            return Err(GeneralProtection);
        }
        match msr {
            Msr::Enable => {
                self.enabled = self.decode(value, guest)?;
                self.enable = value;
                Ok(match self.enabled {
                    Some(_) => Request::Enabled,
                    None => Request::Disabled,
                })
            }
            Msr::Vector => {
                self.vector = u8::try_from(value).map_err(|_| GeneralProtection)?;
                Ok(Request::None)
            }
            Msr::Acknowledge => Ok(match self.enabled {
                // Only a page-ready interrupt is acknowledged. After a #PF the guest only zeroes
                // the word.
                Some(enabled) if enabled.ready_by == ReadyBy::Interrupt && value & 1 != 0 => {
                    Request::Acknowledged
                }
                _ => Request::None,
            }),
        }
    }

    /// Whether WRMSR would take the value.
    pub(super) fn check(
        &self,
        msr: Msr,
        value: u64,
        guest: &mut impl Guest,
    ) -> Result<(), GeneralProtection> {
        let taken = match msr {
            _ if !self.has(msr) => false,
            Msr::Enable => self.decode(value, guest).is_ok(),
            Msr::Vector => u8::try_from(value).is_ok(),
            Msr::Acknowledge => true,
        };
        taken.then_some(()).ok_or(GeneralProtection)
    }

    fn has(&self, msr: Msr) -> bool {
        self.features.contains(match msr {
            Msr::Enable => Features::ASYNC_PF,
            Msr::Vector | Msr::Acknowledge => Features::ASYNC_PF_INT,
        })
    }

    /// Decodes a value for EN. The area is checked only if bit 0 enables it. As in KVM, it must be
    /// memory at this moment; it may be anything later.
    fn decode(
        &self,
        value: u64,
        guest: &mut impl Guest,
    ) -> Result<Option<Enabled>, GeneralProtection> {
        let flags = Flags::from_bits_truncate(value);
        let lacks = |flag, feature| flags.contains(flag) && !self.features.contains(feature);
        if flags.intersects(Flags::RESERVED)
            || lacks(Flags::DELIVERY_AS_PF_VMEXIT, Features::ASYNC_PF_VMEXIT)
            || lacks(Flags::DELIVERY_AS_INT, Features::ASYNC_PF_INT)
        {
            return Err(GeneralProtection);
        }
        if !flags.contains(Flags::ENABLED) {
            return Ok(None);
        }
        let enabled = Enabled {
            area: Gpa::new(value & !Flags::all().bits()).ok_or(GeneralProtection)?,
            ready_by: if flags.contains(Flags::DELIVERY_AS_INT) {
                ReadyBy::Interrupt
            } else {
                ReadyBy::Exception
            },
            send_always: flags.contains(Flags::SEND_ALWAYS),
        };
        if !enabled.is_memory(guest) {
            return Err(GeneralProtection);
        }
        Ok(Some(enabled))
    }
}

impl Abi for Control {
    /// KVM's format.
    #[inline]
    fn tokens(&self) -> TokenFormat {
        TokenFormat {
            vcpu_bits: 12,
            id_bits: 20,
        }
    }

    fn is_enabled(&self) -> bool {
        self.enabled.is_some()
    }

    fn shared_page(&self) -> Option<Gfn> {
        self.enabled.map(|enabled| enabled.area.gfn())
    }

    fn reset(&mut self) {
        *self = Self::new(self.features);
    }
}

impl<G: Guest> Deliver<G> for Control {
    fn takes_not_present(&mut self, guest: &mut G) -> bool {
        self.enabled
            .is_some_and(|enabled| enabled.takes_not_present(guest))
    }

    fn not_present(&mut self, token: Token, guest: &mut G) -> Result<(), NotDelivered> {
        self.enabled.ok_or(NotDelivered)?.not_present(token, guest)
    }

    fn takes_ready(&mut self, guest: &mut G) -> bool {
        self.enabled
            .is_some_and(|enabled| enabled.takes_ready(guest))
    }

    fn ready(&mut self, token: Token, guest: &mut G) -> Result<(), NotDelivered> {
        self.enabled
            .ok_or(NotDelivered)?
            .ready(token, self.vector, guest)
    }
}
