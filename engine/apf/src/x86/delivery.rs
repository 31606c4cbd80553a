//! Delivers events to a guest. Page-ready has two forms; only this file knows both.
//!
//! | | [`ReadyBy::Exception`] (2010) | [`ReadyBy::Interrupt`] (today) |
//! |---|---|---|
//! | enabled by | EN bit 0 | EN bits 0 and 3 |
//! | not present | word 0 := 1, #PF with the token in CR2 | the same |
//! | ready | word 0 := 2, #PF with the token in CR2 | word 1 := token, interrupt |
//! | ready is possible if | vCPU interruptible, word 0 is 0 | local APIC enabled, word 1 is 0 |
//! | having read it | the guest zeroes word 0 | the guest zeroes word 1 and writes ACK |
//!
//! The words are at offsets 0 and 4 of the guest's 64-byte area. Since Linux 5.9, KVM accepts bit 0
//! alone and delivers nothing. Here bit 0 alone has its original meaning, for old guests and for
//! comparison.
//!
//! A nonzero word is an unread event. The host never overwrites it. So at most one page-ready is
//! unread. While word 0 is in use, no page-not-present can be delivered.

use super::{CpuState, Guest};
use crate::abi::NotDelivered;
use crate::token::Token;
use lacuna_addr::Gpa;

/// How page-ready is delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadyBy {
    /// As a #PF, the original form.
    Exception,
    /// As an interrupt.
    Interrupt,
}

/// The guest's settings in EN, while bit 0 is set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Enabled {
    /// 64 bytes, aligned to 64.
    pub area: Gpa,
    pub ready_by: ReadyBy,
    /// Page-not-present may be delivered at CPL 0 too.
    pub send_always: bool,
}

const NOT_PRESENT: u32 = 1;
const READY: u32 = 2;

impl Enabled {
    /// Whether the area can be read. One word is enough, because the area lies within one page.
    pub fn is_memory(self, guest: &mut impl Guest) -> bool {
        guest.read_u32(self.reason()).is_some()
    }

    /// Whether page-not-present can be delivered now. The caller has checked that the vCPU is
    /// interruptible.
    pub fn takes_not_present(self, guest: &mut impl Guest) -> bool {
        let CpuState { user, paging, .. } = guest.state();
        paging && (user || self.send_always) && guest.read_u32(self.reason()) == Some(0)
    }

    /// Delivers page-not-present. The caller has checked that the vCPU is interruptible.
    pub fn not_present(self, token: Token, guest: &mut impl Guest) -> Result<(), NotDelivered> {
        if !self.takes_not_present(guest) {
            return Err(NotDelivered);
        }
        guest.write_u32(self.reason(), NOT_PRESENT)?;
        guest.inject_page_fault(token.address());
        Ok(())
    }

    /// Whether page-ready can be delivered now.
    pub fn takes_ready(self, guest: &mut impl Guest) -> bool {
        match self.ready_by {
            ReadyBy::Exception => {
                guest.is_interruptible() && guest.read_u32(self.reason()) == Some(0)
            }
            ReadyBy::Interrupt => guest.state().lapic && guest.read_u32(self.token()) == Some(0),
        }
    }

    /// Delivers page-ready for `token`. The caller has asked [`Enabled::takes_ready`].
    pub fn ready(
        self,
        token: Token,
        vector: u8,
        guest: &mut impl Guest,
    ) -> Result<(), NotDelivered> {
        match self.ready_by {
            ReadyBy::Exception => {
                guest.write_u32(self.reason(), READY)?;
                guest.inject_page_fault(token.address());
            }
            ReadyBy::Interrupt => {
                guest.write_u32(self.token(), token.get())?;
                guest.interrupt(vector);
            }
        }
        Ok(())
    }

    /// Word 0: the reason (Linux calls it `flags`).
    const fn reason(self) -> Gpa {
        self.area
    }

    /// Word 1. The area is aligned, so the sum does not overflow.
    const fn token(self) -> Gpa {
        Gpa::truncate(self.area.get() + 4)
    }
}
