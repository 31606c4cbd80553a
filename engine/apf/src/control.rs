//! The three MSRs (`msr.rst`): what a guest may write, what it reads back.
//!
//! One rule of KVM is missing, "no local APIC in the kernel": every vCPU of ours has one.

use crate::Guest;
use crate::abi::{Features, Msr};
use crate::delivery::{Delivery, Enabled};
use lacuna_addr::Gpa;

/// The access raises #GP(0), and has changed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GeneralProtection;

/// What a write asks of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    /// Asynchronous page faults are on, perhaps again or elsewhere.
    Enabled,
    /// They are off.
    Disabled,
    /// Nothing.
    None,
    /// The guest has read a token.
    Acknowledged,
}

bitflags::bitflags! {
    /// Bits 5:0 of EN.
    struct Flags: u64 {
        const ENABLED = 1 << 0;
        const SEND_ALWAYS = 1 << 1;
        /// For a nested hypervisor; we have none, so that it is accepted and means nothing.
        const DELIVERY_AS_PF_VMEXIT = 1 << 2;
        const DELIVERY_AS_INT = 1 << 3;
        const RESERVED = 3 << 4;
    }
}

/// The registers of one vCPU.
pub(crate) struct Control {
    features: Features,
    enable: u64,
    vector: u8,
    enabled: Option<Enabled>,
}

impl Control {
    pub const fn new(features: Features) -> Self {
        Self {
            features,
            enable: 0,
            vector: 0,
            enabled: None,
        }
    }

    /// As at power-on: all zero.
    pub fn reset(&mut self) {
        *self = Self::new(self.features);
    }

    /// What the guest wants delivered, and how; `None` while it wants nothing.
    pub const fn enabled(&self) -> Option<Enabled> {
        self.enabled
    }

    pub const fn vector(&self) -> u8 {
        self.vector
    }

    /// RDMSR. `None` raises #GP(0).
    pub fn read(&self, msr: Msr) -> Option<u64> {
        self.has(msr).then(|| match msr {
            Msr::Enable => self.enable,
            Msr::Vector => u64::from(self.vector),
            Msr::Acknowledge => 0,
        })
    }

    /// WRMSR.
    pub fn write(
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
                // A page-ready that came as a #PF is not acknowledged, only read.
                Some(enabled) if enabled.delivery == Delivery::Interrupt && value & 1 != 0 => {
                    Request::Acknowledged
                }
                _ => Request::None,
            }),
        }
    }

    fn has(&self, msr: Msr) -> bool {
        self.features.contains(match msr {
            Msr::Enable => Features::ASYNC_PF,
            Msr::Vector | Msr::Acknowledge => Features::ASYNC_PF_INT,
        })
    }

    /// A value for EN. The area is only looked at when it is going to be used; it must be memory
    /// *now*, as in KVM, and may be anything later.
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
            delivery: if flags.contains(Flags::DELIVERY_AS_INT) {
                Delivery::Interrupt
            } else {
                Delivery::Exceptions
            },
            send_always: flags.contains(Flags::SEND_ALWAYS),
        };
        if !enabled.is_memory(guest) {
            return Err(GeneralProtection);
        }
        Ok(Some(enabled))
    }
}
