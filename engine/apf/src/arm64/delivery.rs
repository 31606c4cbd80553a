//! Delivers events to a guest. There are two forms; only this file knows both.
//!
//! | | [`Form::Abort`] (RFCv2) | [`Form::Sdei`] (v1 to v4) |
//! |---|---|---|
//! | not present | word 0 := 1, data abort, FAR = token | words := 1, token; SDEI event |
//! | if | word 0 is 0, PC is not near the vectors | both words are 0, SDEI events are taken |
//! | and | EL0, or SEND_ALWAYS | EL0, or SEND_ALWAYS |
//! | ready | word 0 := 2, data abort, FAR = token | words := 2, token; interrupt line high |
//! | if | word 0 is 0, PC is not near the vectors | both words are 0, the line is low |
//! | having read it | the guest zeroes word 0, later | it zeroes both, and acknowledges: line low |
//!
//! The words are at offsets 0 (reason) and 4 (token) of the guest's block. The guest's own word, at
//! offset 64, means nothing to the host. A nonzero reason is an unread event, or the guest's own
//! mark that it wants no event now. The host never overwrites it.

use super::guest::{CpuState, Effect, ExceptionLevel, Guest, Line};
use super::numbers::Numbers;
use super::sdei::Interface;
use crate::abi::NotDelivered;
use crate::token::Token;
use lacuna_addr::Gpa;
use lacuna_state::arm64::Form;

/// Whether page-not-present may interrupt the guest's kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Send {
    /// SEND_ALWAYS.
    Always,
    /// Programs alone.
    ToEl0,
}

/// The guest's settings, while its events are enabled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Enabled {
    pub form: Form,
    /// The guest's block, aligned to 64 bytes.
    pub block: Gpa,
    pub send: Send,
}

const NOT_PRESENT: u32 = 1;
const READY: u32 = 2;

/// ESR_EL1 of a synchronous external abort (Arm ARM, D24.2.37): class, 32-bit instruction, status.
const ABORT_FROM_EL0: u64 = 0x24 << 26 | 1 << 25 | 0x10;
const ABORT_FROM_EL1: u64 = 0x25 << 26 | 1 << 25 | 0x10;

impl Enabled {
    /// Whether the words that this form uses can be read. They lie within one page.
    pub fn is_memory(self, guest: &mut impl Guest) -> bool {
        self.words(guest).is_some()
    }

    /// Reason and token. Only one form uses the token's word.
    fn words(self, guest: &mut impl Guest) -> Option<(u32, u32)> {
        let reason = guest.read_u32(self.block)?;
        Some(match self.form {
            Form::Abort => (reason, 0),
            Form::Sdei => (reason, guest.read_u32(self.token_word())?),
        })
    }

    /// Whether the guest has read the last event, and wants another.
    pub fn are_words_free(self, guest: &mut impl Guest) -> bool {
        self.words(guest) == Some((0, 0))
    }

    /// Whether page-not-present may interrupt the running code.
    pub fn may_interrupt(self, guest: &impl Guest) -> bool {
        self.send == Send::Always || guest.state().level == ExceptionLevel::El0
    }

    /// Writes the words of an event. If one cannot be written, none is.
    pub fn write(
        self,
        reason: u32,
        token: Token,
        guest: &mut impl Guest,
    ) -> Result<(), NotDelivered> {
        if self.form == Form::Sdei {
            guest.write_u32(self.token_word(), token.get())?;
        }
        let written = guest.write_u32(self.block, reason);
        if written.is_err() && self.form == Form::Sdei {
            let _ = guest.write_u32(self.token_word(), 0);
        }
        Ok(written?)
    }

    /// The block is aligned, so the sum does not overflow.
    const fn token_word(self) -> Gpa {
        Gpa::truncate(self.block.get() + 4)
    }
}

/// The events of [`Form::Abort`]. `range` is the number of bytes from VBAR_EL1 on in which the
/// guest may not be interrupted.
pub(super) mod abort {
    use super::*;

    /// Whether the vCPU may get a data abort now. Its exception entry may not have saved ELR_EL1
    /// yet.
    pub fn is_possible(enabled: Enabled, range: u64, guest: &mut impl Guest) -> bool {
        let CpuState { pc, vbar, .. } = guest.state();
        pc.wrapping_sub(vbar) >= range && guest.is_interruptible() && enabled.are_words_free(guest)
    }

    pub fn not_present(
        enabled: Enabled,
        token: Token,
        guest: &mut impl Guest,
    ) -> Result<(), NotDelivered> {
        enabled.write(NOT_PRESENT, token, guest)?;
        inject(token, guest);
        Ok(())
    }

    pub fn ready(
        enabled: Enabled,
        token: Token,
        guest: &mut impl Guest,
    ) -> Result<(), NotDelivered> {
        enabled.write(READY, token, guest)?;
        inject(token, guest);
        Ok(())
    }

    fn inject(token: Token, guest: &mut impl Guest) {
        let esr = match guest.state().level {
            ExceptionLevel::El0 => ABORT_FROM_EL0,
            ExceptionLevel::El1 => ABORT_FROM_EL1,
        };
        guest.apply(Effect::DataAbort {
            esr,
            far: token.address(),
        });
    }
}

/// The events of [`Form::Sdei`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SdeiEvents {
    pub sdei: Interface,
    /// A signalled page-not-present. The vCPU takes the event before its next instruction.
    pub untaken: Option<Token>,
    /// Whether a page-ready is unacknowledged: the interrupt's line is high.
    pub unacknowledged: bool,
}

impl SdeiEvents {
    pub fn new() -> Self {
        Self {
            sdei: Interface::default(),
            untaken: None,
            unacknowledged: false,
        }
    }

    pub fn takes_not_present(&self, enabled: Enabled, guest: &mut impl Guest) -> bool {
        self.untaken.is_none() && self.sdei.takes_event() && enabled.are_words_free(guest)
    }

    pub fn not_present(
        &mut self,
        enabled: Enabled,
        token: Token,
        guest: &mut impl Guest,
    ) -> Result<(), NotDelivered> {
        enabled.write(NOT_PRESENT, token, guest)?;
        self.untaken = Some(token);
        Ok(())
    }

    /// The vCPU is about to execute its next instruction: it takes the event, if there is one.
    pub fn take(&mut self, numbers: Numbers, guest: &mut impl Guest) {
        if self.untaken.is_some() && self.sdei.takes_event() && guest.is_interruptible() {
            self.untaken = None;
            self.sdei.take(numbers.event, guest);
        }
    }

    /// Takes back the page-not-present of `token`, if the vCPU has not taken it.
    pub fn withdraw(&mut self, enabled: Enabled, token: Token, guest: &mut impl Guest) -> bool {
        if self.untaken != Some(token) {
            return false;
        }
        self.untaken = None;
        // If the guest has changed the words since, they stay.
        if enabled.words(guest) == Some((NOT_PRESENT, token.get())) {
            let _ = guest.write_u32(enabled.token_word(), 0);
            let _ = guest.write_u32(enabled.block, 0);
        }
        true
    }

    pub fn ready(
        &mut self,
        enabled: Enabled,
        numbers: Numbers,
        token: Token,
        guest: &mut impl Guest,
    ) -> Result<(), NotDelivered> {
        enabled.write(READY, token, guest)?;
        self.unacknowledged = true;
        set_line(numbers, Line::High, guest);
        Ok(())
    }

    /// The guest has handled the interrupt. Returns whether there was one.
    pub fn acknowledge(&mut self, numbers: Numbers, guest: &mut impl Guest) -> bool {
        let was = std::mem::replace(&mut self.unacknowledged, false);
        if was {
            set_line(numbers, Line::Low, guest);
        }
        was
    }
}

pub(super) fn set_line(numbers: Numbers, line: Line, guest: &mut impl Guest) {
    guest.apply(Effect::Interrupt {
        number: numbers.interrupt,
        line,
    });
}
