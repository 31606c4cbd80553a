//! The calls by which a guest configures its events, and the resulting contract.

use super::delivery::{Enabled, SdeiEvents, Send, abort, set_line};
use super::guest::{Guest, Line};
use super::numbers::{Call, Features, KVM_UID, Numbers, Refusal, SLOTS, Sub, VERSION};
use super::sdei::{Done, Interface};
use crate::abi::{Abi, Deliver, NotDelivered, Request};
use crate::token::{Token, TokenFormat};
use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_state::StateError;
use lacuna_state::arm64::{AsyncFaults, Form, Offered};

bitflags::bitflags! {
    /// The value with which a guest enables and disables, in both forms. Bits 55:6 are the block's
    /// address. As published, bits 5:2 have no meaning and are not checked.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct Flags: u64 {
        const ENABLED = 1 << 0;
        const SEND_ALWAYS = 1 << 1;
    }
}

/// Bits of the value outside the address.
const LOW: u64 = 0x3f;
/// RFCv2: bits 63:56 of the argument select its meaning.
const FUNCTION: u64 = 0xff << 56;
const SWITCH: u64 = 1 << 63;
const SET_RANGE: u64 = 1 << 62;
/// RFCv2: no event is delivered while PC is within this many bytes from VBAR_EL1 on: the vector
/// table. The guest can ask for more.
const RANGE: u64 = 0x800;

/// The answer to a call of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// X0 to X3.
    Values([u64; 4]),
    /// An SDEI handler has ended: [`Effect::Context`](super::Effect::Context) has replaced the
    /// registers, X0 to X3 among them.
    Resumed,
}

impl Answer {
    const fn value(x0: u64) -> Self {
        Self::Values([x0, 0, 0, 0])
    }

    /// A success with a value in X1.
    const fn found(x1: u64) -> Self {
        Self::Values([0, x1, 0, 0])
    }

    fn refused(why: Refusal) -> Self {
        Self::error(why as i64)
    }

    const fn error(number: i64) -> Self {
        Self::value(number as u64)
    }
}

/// One vCPU's contract: arm64's [`Abi`].
#[derive(Debug)]
pub struct Control {
    features: Features,
    numbers: Option<Numbers>,
    enabled: Option<Enabled>,
    range: u64,
    events: SdeiEvents,
}

impl Control {
    /// The contract at power-on: nothing is enabled. `features` are the offered forms. `numbers` is
    /// for [`Features::SDEI`]: without it, the guest can ask but not enable.
    pub fn new(features: Features, numbers: Option<Numbers>) -> Self {
        Self {
            features,
            numbers,
            enabled: None,
            range: RANGE,
            events: SdeiEvents::new(),
        }
    }

    /// The page that a call accesses: the block that it enables, or the enabled block, if the call
    /// makes the host deliver an event or take it back.
    pub(super) fn page_accessed_by(&self, function: u32, args: &[u64; 5]) -> Option<(Gfn, Access)> {
        let argument = halves(args[0], args[1]);
        let value = match Call::of(function)? {
            Call::Abort if argument & FUNCTION == SWITCH => argument,
            Call::Sdei => match Sub::of(args[0] as u32)? {
                Sub::Enable => halves(args[1], args[2]),
                Sub::Acknowledge => return self.block(),
                Sub::Version | Sub::Slots | Sub::Event | Sub::Interrupt => return None,
            },
            _ => return None,
        };
        if value & Flags::ENABLED.bits() == 0 {
            return self.block();
        }
        let block = Gpa::new(value & !FUNCTION & !LOW)?;
        Some((block.gfn(), Access::Read))
    }

    fn block(&self) -> Option<(Gfn, Access)> {
        self.shared_page().map(|block| (block, Access::Write))
    }

    /// A call of the guest. `None`: the call does not belong to this module.
    pub(super) fn call(
        &mut self,
        function: u32,
        args: &[u64; 5],
        guest: &mut impl Guest,
    ) -> Option<(Answer, Request)> {
        let call = Call::of(function)?;
        let answered = match call {
            Call::Uid => Ok((Answer::Values(KVM_UID), Request::None)),
            Call::Services => {
                let services = u64::from(1 | self.features.bits());
                Ok((Answer::value(services), Request::None))
            }
            Call::Abort if self.features.contains(Features::ABORT) => {
                self.call_abort(halves(args[0], args[1]), guest)
            }
            Call::Sdei if self.features.contains(Features::SDEI) => self.call_sdei(args, guest),
            Call::Abort | Call::Sdei | Call::Unknown => Err(Refusal::NotSupported),
            Call::Event(number) => {
                return Some((self.call_event(number, args, guest), Request::None));
            }
        };
        Some(answered.unwrap_or_else(|why| (Answer::refused(why), Request::None)))
    }

    /// RFCv2: one argument.
    fn call_abort(
        &mut self,
        argument: u64,
        guest: &mut impl Guest,
    ) -> Result<(Answer, Request), Refusal> {
        let value = argument & !FUNCTION;
        match argument & FUNCTION {
            SWITCH => self.switch(Form::Abort, value, guest),
            SET_RANGE if self.enabled.is_none() => {
                self.range = self.range.max(value);
                Ok((Answer::value(0), Request::None))
            }
            _ => Err(Refusal::NotSupported),
        }
    }

    /// v1 to v4: a function, and an argument in two halves.
    fn call_sdei(
        &mut self,
        args: &[u64; 5],
        guest: &mut impl Guest,
    ) -> Result<(Answer, Request), Refusal> {
        let numbers = self.numbers;
        let answer = match Sub::of(args[0] as u32).ok_or(Refusal::NotSupported)? {
            Sub::Version => Answer::found(VERSION),
            Sub::Slots => Answer::found(SLOTS),
            Sub::Event => Answer::found(numbers.map_or(0, |it| u64::from(it.event))),
            Sub::Interrupt => Answer::found(numbers.map_or(0, |it| u64::from(it.interrupt))),
            Sub::Enable => return self.switch(Form::Sdei, halves(args[1], args[2]), guest),
            Sub::Acknowledge => {
                let was = numbers.is_some_and(|it| self.events.acknowledge(it, guest));
                let request = if was {
                    Request::Acknowledged
                } else {
                    Request::None
                };
                return Ok((Answer::value(0), request));
            }
        };
        Ok((answer, Request::None))
    }

    /// A call of the SDEI. A guest has the SDEI if its form is offered.
    fn call_event(&mut self, number: u32, args: &[u64; 5], guest: &mut impl Guest) -> Answer {
        let Some(numbers) = self
            .numbers
            .filter(|_| self.features.contains(Features::SDEI))
        else {
            return Answer::refused(Refusal::NotSupported);
        };
        match self.events.sdei.call(number, args, numbers.event, guest) {
            Ok(Done::Value(value)) => Answer::value(value),
            Ok(Done::Resumed) => Answer::Resumed,
            Err(error) => Answer::error(error as i64),
        }
    }

    /// Enables or disables `form`.
    fn switch(
        &mut self,
        form: Form,
        value: u64,
        guest: &mut impl Guest,
    ) -> Result<(Answer, Request), Refusal> {
        let enables = value & Flags::ENABLED.bits() != 0;
        let is_on = self.enabled.is_some_and(|enabled| enabled.form == form);
        if enables == is_on {
            return Err(Refusal::NotRequired);
        }
        if !enables {
            self.disable(guest);
            return Ok((Answer::value(0), Request::Disabled));
        }
        if form == Form::Sdei && self.numbers.is_none() {
            return Err(Refusal::InvalidParameter);
        }
        // A vCPU has one form at a time: both would use one queue of tokens.
        if self.enabled.is_some() {
            return Err(Refusal::NotSupported);
        }
        self.enabled = Some(decode(form, value, guest).ok_or(Refusal::NotSupported)?);
        Ok((Answer::value(0), Request::Enabled))
    }

    /// Nothing of the old configuration is delivered any more.
    fn disable(&mut self, guest: &mut impl Guest) {
        if let (Some(enabled), Some(token)) = (self.enabled, self.events.untaken) {
            let _ = self.events.withdraw(enabled, token, guest);
        }
        if let Some(numbers) = self.numbers {
            let _ = self.events.acknowledge(numbers, guest);
        }
        self.enabled = None;
    }

    /// The vCPU is about to execute its next instruction.
    #[inline]
    pub(super) fn enter(&mut self, guest: &mut impl Guest) {
        if self.events.untaken.is_some()
            && let Some(numbers) = self.numbers
        {
            self.events.take(numbers, guest);
        }
    }

    pub(super) fn save(&self) -> AsyncFaults {
        let value = |enabled: Enabled| {
            let always = match enabled.send {
                Send::Always => Flags::SEND_ALWAYS.bits(),
                Send::ToEl0 => 0,
            };
            enabled.block.get() | Flags::ENABLED.bits() | always
        };
        AsyncFaults {
            offered: self.offered(),
            enabled: self.enabled.map(|it| (it.form, value(it))),
            range: self.range,
            sdei: self.events.sdei.0,
            untaken: self.events.untaken.map(Token::get),
            unacknowledged: self.events.unacknowledged,
        }
    }

    /// Whether `saved` can be restored.
    pub(super) fn check(
        &self,
        saved: &AsyncFaults,
        guest: &mut impl Guest,
    ) -> Result<Option<Enabled>, StateError> {
        self.check_offer(&saved.offered)?;
        if saved.range < RANGE {
            return StateError::unsupported("apf.range", saved.range);
        }
        let entry = saved.sdei.handler.map_or(0, |handler| handler.entry);
        if !entry.is_multiple_of(4) {
            return StateError::unsupported("apf.sdei.handler.entry", entry);
        }
        let by_sdei = matches!(saved.enabled, Some((Form::Sdei, _)));
        if let Some(token) = saved.untaken
            && !(by_sdei && token != 0)
        {
            return StateError::unsupported("apf.untaken", token);
        }
        if saved.unacknowledged && !by_sdei {
            return StateError::unsupported("apf.unacknowledged", true);
        }
        let Some((form, value)) = saved.enabled else {
            return Ok(None);
        };
        let offered = match form {
            Form::Abort => self.features.contains(Features::ABORT),
            Form::Sdei => self.features.contains(Features::SDEI) && self.numbers.is_some(),
        };
        match decode(form, value, guest).filter(|_| offered) {
            Some(enabled) => Ok(Some(enabled)),
            None => StateError::unsupported("apf.enabled", value),
        }
    }

    /// The service as it is offered to the guest.
    fn offered(&self) -> Offered {
        let numbers = self
            .numbers
            .filter(|_| self.features.contains(Features::SDEI));
        Offered {
            features: self.features.bits(),
            event: numbers.map_or(0, |numbers| numbers.event),
            interrupt: numbers.map_or(0, |numbers| numbers.interrupt),
        }
    }

    /// Checks that the offer here includes the offer `saved` of a guest.
    fn check_offer(&self, saved: &Offered) -> Result<(), StateError> {
        let here = self.offered();
        let missing = saved.features & !here.features;
        let fields = [
            ("apf.offered.features", missing, 0),
            ("apf.offered.event", saved.event, here.event),
            ("apf.offered.interrupt", saved.interrupt, here.interrupt),
        ];
        let differs = |(_, value, expected): &(_, u32, u32)| *value != 0 && value != expected;
        match fields.into_iter().find(differs) {
            Some((field, value, _)) => StateError::unsupported(field, value),
            None => Ok(()),
        }
    }

    pub(super) fn restore(
        &mut self,
        saved: &AsyncFaults,
        guest: &mut impl Guest,
    ) -> Result<Request, StateError> {
        self.enabled = self.check(saved, guest)?;
        self.range = saved.range;
        self.events = SdeiEvents {
            sdei: Interface(saved.sdei),
            untaken: saved.untaken.and_then(Token::from_guest),
            unacknowledged: saved.unacknowledged,
        };
        if let Some(numbers) = self.numbers {
            let line = match self.events.unacknowledged {
                true => Line::High,
                false => Line::Low,
            };
            set_line(numbers, line, guest);
        }
        Ok(match self.enabled {
            Some(_) => Request::Enabled,
            None => Request::Disabled,
        })
    }
}

/// A 64-bit argument of a 32-bit call, in two registers; their low halves count.
const fn halves(low: u64, high: u64) -> u64 {
    low & 0xffff_ffff | high << 32
}

/// The settings in a value that enables. The block must be memory at this moment; it may be
/// anything later.
fn decode(form: Form, value: u64, guest: &mut impl Guest) -> Option<Enabled> {
    let enabled = Enabled {
        form,
        block: Gpa::new(value & !LOW)?,
        send: match Flags::from_bits_truncate(value).contains(Flags::SEND_ALWAYS) {
            true => Send::Always,
            false => Send::ToEl0,
        },
    };
    enabled.is_memory(guest).then_some(enabled)
}

impl Abi for Control {
    /// 16 bits of counter above 16 bits (RFCv2) or 12 bits (v1 to v4) of vCPU. Before the guest has
    /// chosen, the format with room for fewer vCPUs applies.
    #[inline]
    fn tokens(&self) -> TokenFormat {
        let vcpu_bits = match self.enabled.map(|enabled| enabled.form) {
            Some(Form::Abort) => 16,
            Some(Form::Sdei) | None => 12,
        };
        TokenFormat {
            vcpu_bits,
            id_bits: 16,
        }
    }

    fn is_enabled(&self) -> bool {
        self.enabled.is_some()
    }

    fn shared_page(&self) -> Option<Gfn> {
        self.enabled.map(|enabled| enabled.block.gfn())
    }

    fn untaken(&self) -> Option<Token> {
        self.events.untaken
    }

    /// The backend resets the interrupt controller too: the line is low.
    fn reset(&mut self) {
        *self = Self::new(self.features, self.numbers);
    }
}

impl<G: Guest> Deliver<G> for Control {
    fn takes_not_present(&mut self, guest: &mut G) -> bool {
        let Some(enabled) = self.enabled.filter(|it| it.may_interrupt(guest)) else {
            return false;
        };
        match enabled.form {
            Form::Abort => abort::is_possible(enabled, self.range, guest),
            Form::Sdei => self.events.takes_not_present(enabled, guest),
        }
    }

    fn not_present(&mut self, token: Token, guest: &mut G) -> Result<(), NotDelivered> {
        if !self.takes_not_present(guest) {
            return Err(NotDelivered);
        }
        let enabled = self.enabled.ok_or(NotDelivered)?;
        match enabled.form {
            Form::Abort => abort::not_present(enabled, token, guest),
            Form::Sdei => self.events.not_present(enabled, token, guest),
        }
    }

    fn withdraw(&mut self, token: Token, guest: &mut G) -> bool {
        let enabled = self.enabled;
        enabled.is_some_and(|enabled| self.events.withdraw(enabled, token, guest))
    }

    fn takes_ready(&mut self, guest: &mut G) -> bool {
        let Some(enabled) = self.enabled else {
            return false;
        };
        match enabled.form {
            Form::Abort => abort::is_possible(enabled, self.range, guest),
            Form::Sdei => !self.events.unacknowledged && enabled.are_words_free(guest),
        }
    }

    fn ready(&mut self, token: Token, guest: &mut G) -> Result<(), NotDelivered> {
        let enabled = self.enabled.ok_or(NotDelivered)?;
        match (enabled.form, self.numbers) {
            (Form::Abort, _) => abort::ready(enabled, token, guest),
            (Form::Sdei, Some(numbers)) => self.events.ready(enabled, numbers, token, guest),
            (Form::Sdei, None) => Err(NotDelivered),
        }
    }
}
