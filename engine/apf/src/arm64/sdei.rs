//! The software-delegated exception interface (Arm DEN 0054), with one private event.
//!
//! ```text
//! registered, enabled, not masked, no handler at work:
//!   save X0..X17, PC, PSTATE ─► X0 event, X1 argument, X2 PC, X3 PSTATE; PC handler; EL1h, masked
//! COMPLETE             ─► restores all saved registers
//! COMPLETE_AND_RESUME  ─► restores X0..X17; ELR_EL1, SPSR_EL1 get the saved PC and PSTATE; PC is
//!                         the argument: as if an interrupt had been taken there
//! ```
//! The interface belongs to one vCPU. Nothing here uses shared events, interrupts bound to events,
//! or event 0, which guests signal to each other. So they do not exist.

use super::guest::{Effect, Guest};
use lacuna_state::arm64::{Context, Handler, Sdei};

/// A vCPU's state of the interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Interface(pub Sdei);

/// The result of a failed call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Error {
    NotSupported = -1,
    InvalidParameters = -2,
    Denied = -3,
    Pending = -5,
}

/// The result of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Done {
    /// X0.
    Value(u64),
    /// The handler has ended: the registers were replaced.
    Resumed,
}

const SUCCESS: Result<Done, Error> = Ok(Done::Value(0));
/// Version 1.0 of the interface; the vendor's part is 0.
const VERSION: u64 = 1 << 48;
/// PSTATE of a handler: EL1 with its own stack pointer; D, A, I and F masked.
const EL1H_MASKED: u64 = 0x3c5;
/// GET_INFO: priority "critical".
const CRITICAL: u64 = 1;
/// The routing mode in the flags of REGISTER. Private events have none.
const ROUTING: u64 = 1;

impl Interface {
    /// Whether the vCPU would take the event now.
    pub(super) fn takes_event(&self) -> bool {
        let enabled = self.0.handler.is_some_and(|handler| handler.enabled);
        enabled && !self.0.masked && self.0.interrupted.is_none()
    }

    /// The vCPU takes `event`, if it would.
    pub(super) fn take(&mut self, event: u32, guest: &mut impl Guest) {
        if let Some(handler) = self.0.handler.filter(|_| self.takes_event()) {
            let interrupted = guest.context();
            let mut context = Context {
                pc: handler.entry,
                pstate: EL1H_MASKED,
                ..interrupted
            };
            context.x[..4].copy_from_slice(&[
                u64::from(event),
                handler.argument,
                interrupted.pc,
                interrupted.pstate,
            ]);
            self.0.interrupted = Some(interrupted);
            guest.apply(Effect::Context(context));
        }
    }

    /// The guest's call `number`, with X1 to X5. `event` is the number of the only event.
    pub(super) fn call(
        &mut self,
        number: u32,
        args: &[u64; 5],
        event: u32,
        guest: &mut impl Guest,
    ) -> Result<Done, Error> {
        let known = || match args[0] == u64::from(event) {
            true => Ok(()),
            false => Err(Error::InvalidParameters),
        };
        match number {
            0x0 => Ok(Done::Value(VERSION)),
            0x1 => known().and_then(|()| self.register(args)),
            0x2 => {
                known()?;
                self.registered()?.enabled = true;
                SUCCESS
            }
            0x3 => {
                known()?;
                self.registered()?.enabled = false;
                SUCCESS
            }
            0x4 => self.context(args[0]),
            0x5 => self.complete(None, guest),
            0x6 => self.complete(Some(args[0]), guest),
            0x7 => known().and_then(|()| self.unregister()),
            0x8 => known().map(|()| Done::Value(self.status())),
            0x9 => known().and_then(|()| info(args[1])),
            // Only shared events are routed.
            0xa => Err(Error::InvalidParameters),
            0xb => Ok(Done::Value(u64::from(!std::mem::replace(
                &mut self.0.masked,
                true,
            )))),
            0xc => {
                self.0.masked = false;
                SUCCESS
            }
            0x11 => match self.unregister() {
                Err(Error::Pending) => Err(Error::Denied),
                _ => SUCCESS,
            },
            0x12 => SUCCESS,
            _ => Err(Error::NotSupported),
        }
    }

    fn register(&mut self, args: &[u64; 5]) -> Result<Done, Error> {
        let &[_, entry, argument, flags, _] = args;
        if flags & !ROUTING != 0 || !entry.is_multiple_of(4) {
            return Err(Error::InvalidParameters);
        }
        if self.0.handler.is_some() || self.0.interrupted.is_some() {
            return Err(Error::Denied);
        }
        self.0.handler = Some(Handler {
            entry,
            argument,
            enabled: false,
        });
        SUCCESS
    }

    fn registered(&mut self) -> Result<&mut Handler, Error> {
        self.0.handler.as_mut().ok_or(Error::Denied)
    }

    /// Removes the registration at once. The context of a handler at work stays until the handler
    /// completes.
    fn unregister(&mut self) -> Result<Done, Error> {
        match (self.0.handler.take(), self.0.interrupted) {
            (_, Some(_)) => Err(Error::Pending),
            (Some(_), None) => SUCCESS,
            (None, None) => Err(Error::Denied),
        }
    }

    /// Bit 0 registered, bit 1 enabled, bit 2 running.
    fn status(&self) -> u64 {
        let enabled = self.0.handler.is_some_and(|handler| handler.enabled);
        u64::from(self.0.handler.is_some())
            | u64::from(enabled) << 1
            | u64::from(self.0.interrupted.is_some()) << 2
    }

    fn context(&self, register: u64) -> Result<Done, Error> {
        let interrupted = self.0.interrupted.ok_or(Error::Denied)?;
        let x = usize::try_from(register).ok();
        let value = x.and_then(|x| interrupted.x.get(x));
        value
            .map(|&value| Done::Value(value))
            .ok_or(Error::InvalidParameters)
    }

    fn complete(&mut self, resume: Option<u64>, guest: &mut impl Guest) -> Result<Done, Error> {
        let interrupted = self.0.interrupted.take().ok_or(Error::Denied)?;
        let context = match resume {
            None => interrupted,
            Some(pc) => {
                guest.apply(Effect::ExceptionReturn {
                    elr: interrupted.pc,
                    spsr: interrupted.pstate,
                });
                Context {
                    pc,
                    pstate: EL1H_MASKED,
                    ..interrupted
                }
            }
        };
        guest.apply(Effect::Context(context));
        Ok(Done::Resumed)
    }
}

/// The attributes of the event: it is private, signalled by the host, critical.
fn info(what: u64) -> Result<Done, Error> {
    match what {
        0 | 1 => SUCCESS,
        2 => Ok(Done::Value(CRITICAL)),
        // Routing mode and affinity of a private event, and numbers that do not exist.
        _ => Err(Error::InvalidParameters),
    }
}
