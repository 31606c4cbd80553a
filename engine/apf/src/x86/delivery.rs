//! How a guest is told. Only this file knows that there are two ways.
//!
//! | | [`Delivery::Exceptions`] (2010) | [`Delivery::Interrupt`] (today) |
//! |---|---|---|
//! | enabled by | EN bit 0 | EN bits 0 and 3 |
//! | not present | word 0 := 1, #PF with the token in CR2 | the same |
//! | ready | word 0 := 2, #PF with the token in CR2 | word 1 := token, interrupt |
//! | ready is possible | vCPU interruptible, word 0 is 0 | local APIC enabled, word 1 is 0 |
//! | ready was read | the guest zeroes word 0 | the guest zeroes word 1, writes ACK |
//!
//! The words are at offsets 0 and 4 of the guest's 64-byte area. Linux since 5.9 takes bit 0 alone
//! as "off". What it meant then is still offered here, for guests of that time and for comparison.
//!
//! A word that the guest has not zeroed is an event that the guest has not read. The host never
//! overwrites it. So one page-ready is in flight at a time, and the guest is not told of a
//! page-not-present that finds its word in use.

use super::{CpuState, Guest, Unwritable};
use crate::abi::Untold;
use crate::token::Token;
use lacuna_addr::Gpa;

impl From<Unwritable> for Untold {
    fn from(_: Unwritable) -> Self {
        Self
    }
}

/// How page-ready comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Delivery {
    /// As a #PF: the original delivery.
    Exceptions,
    /// As an interrupt.
    Interrupt,
}

/// What the guest has asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Enabled {
    /// 64 bytes, aligned to 64.
    pub area: Gpa,
    pub delivery: Delivery,
    /// Page-not-present may come at CPL 0 too.
    pub send_always: bool,
}

const NOT_PRESENT: u32 = 1;
const READY: u32 = 2;

impl Enabled {
    /// Whether the area can be read: one word of it tells, as it lies within one page.
    pub fn is_memory(self, guest: &mut impl Guest) -> bool {
        guest.read_u32(self.reason()).is_some()
    }

    /// Tells that a page is not present; the caller knows that the vCPU is interruptible.
    pub fn not_present(self, token: Token, guest: &mut impl Guest) -> Result<(), Untold> {
        let CpuState { user, paging, .. } = guest.state();
        if !paging || !(user || self.send_always) || guest.read_u32(self.reason()) != Some(0) {
            return Err(Untold);
        }
        guest.write_u32(self.reason(), NOT_PRESENT)?;
        guest.inject_page_fault(token.address());
        Ok(())
    }

    /// Whether the guest can be told of a ready page now.
    pub fn takes_ready(self, guest: &mut impl Guest) -> bool {
        match self.delivery {
            Delivery::Exceptions => {
                guest.is_interruptible() && guest.read_u32(self.reason()) == Some(0)
            }
            Delivery::Interrupt => guest.state().lapic && guest.read_u32(self.token()) == Some(0),
        }
    }

    /// Tells that the page of `token` is ready; the caller has asked [`Enabled::takes_ready`].
    pub fn ready(self, token: Token, vector: u8, guest: &mut impl Guest) -> Result<(), Untold> {
        match self.delivery {
            Delivery::Exceptions => {
                guest.write_u32(self.reason(), READY)?;
                guest.inject_page_fault(token.address());
            }
            Delivery::Interrupt => {
                guest.write_u32(self.token(), token.get())?;
                guest.interrupt(vector);
            }
        }
        Ok(())
    }

    /// Word 0: the reason, today called flags.
    const fn reason(self) -> Gpa {
        self.area
    }

    /// Word 1. The area is aligned, so the sum does not overflow.
    const fn token(self) -> Gpa {
        Gpa::truncate(self.area.get() + 4)
    }
}
