//! Delivers events at RIP: enters their handlers. Keeps the event if its delivery is stopped
//! half-way.
//!
//! ```text
//! exception of an instruction --+
//! NMI, interrupt of the APIC ---+-> event -> deliver.rs -> in the handler
//! injected, refused MSR, #DB ---+              | a page of the IDT, GDT, TSS or stack is missing
//!                                              v
//!                         Exit::Stop, and Pending says what the next run starts with
//! ```
//! Most events need not be kept: the instruction is executed again and faults again, or the NMI or
//! interrupt is still requested. One-time events are kept as [`Pending::Exception`].

use super::{Cpu, Progress};
use crate::deliver::{self, Event, Outcome};
use crate::exit::{Exit, Own, Shutdown};
use crate::mem::View;
use crate::state::{Exception, Trap};
use lacuna_cpu::Bus;

/// The vector of a non-maskable interrupt.
const NMI: u8 = 2;

/// The event that the next run must deliver first. The last run has left it, or the machine has
/// injected it since. During a run it is always [`Pending::Nothing`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Pending {
    #[default]
    Nothing,
    /// The delivery of a repeating event was stopped.
    Again,
    /// An exception at RIP, before the next instruction and before any interrupt.
    Exception(Exception),
}

impl Pending {
    /// The exception, if it does not repeat by itself.
    pub(crate) fn exception(&self) -> Option<Exception> {
        match self {
            Self::Exception(exception) => Some(*exception),
            Self::Nothing | Self::Again => None,
        }
    }
}

impl From<Option<Exception>> for Pending {
    fn from(exception: Option<Exception>) -> Self {
        exception.map_or(Self::Nothing, Self::Exception)
    }
}

impl Cpu {
    /// Starts a run with the pending event.
    #[cold]
    pub(super) fn settle<B: Bus>(&mut self, bus: &mut B) -> Option<Exit> {
        match std::mem::take(&mut self.pending) {
            Pending::Exception(exception) => self.raise_once(bus, exception),
            Pending::Nothing | Pending::Again => None,
        }
    }

    /// Delivers a one-time exception at RIP. It stays pending until its handler is entered.
    pub(super) fn raise_once<B: Bus>(&mut self, bus: &mut B, exception: Exception) -> Option<Exit> {
        let exit = self.raise(bus, exception);
        if self.pending == Pending::Again {
            self.pending = Pending::Exception(exception);
        }
        exit
    }

    /// Delivers an exception at RIP.
    pub(super) fn raise<B: Bus>(&mut self, bus: &mut B, exception: Exception) -> Option<Exit> {
        self.event(bus, Event::Exception(exception)).err()
    }

    /// Delivers an interrupt of the APIC at RIP.
    pub(super) fn interrupt<B: Bus>(&mut self, bus: &mut B, vector: u8) -> Option<Exit> {
        let delivered = self.event(bus, Event::Interrupt(vector));
        if delivered == Ok(vector) {
            self.core.apic.accept(vector);
        }
        delivered.err()
    }

    /// Delivers an NMI at RIP. A fault of its delivery ends it too, because it would come again
    /// before the first instruction of the fault's handler.
    #[cold]
    pub(super) fn nmi<B: Bus>(&mut self, bus: &mut B) -> Option<Exit> {
        let delivered = self.event(bus, Event::Interrupt(NMI));
        if delivered.is_ok() {
            self.core.apic.set_nmi(false);
            self.core.sys.nmi_blocked = true;
        }
        delivered.err()
    }

    /// Delivers an event at RIP; returns the vector of the handler entered.
    pub(super) fn event<B: Bus>(&mut self, bus: &mut B, event: Event) -> Result<u8, Exit> {
        let mut flow = self.core.flow(self.core.rip);
        let outcome = deliver::deliver(&mut View::new(&mut self.core, bus), &mut flow, event);
        self.drop_written(bus);
        match outcome {
            Ok(Outcome::Entered(vector)) => {
                self.progress = Progress::None;
                self.core.replay.clear();
                self.core.follow(flow);
                // A handler that faults at once must not occupy the run loop for ever.
                self.core.budget -= 1;
                Ok(vector)
            }
            Ok(Outcome::Shutdown) => {
                let first = match event {
                    Event::Exception(exception) => exception,
                    Event::Software { vector, .. } | Event::Interrupt(vector) => {
                        Exception::plain(vector)
                    }
                };
                Err(Exit::Own(Own::Shutdown(Shutdown {
                    rip: self.core.rip,
                    first,
                })))
            }
            Err(Trap::Stop(stop)) => {
                self.pending = Pending::Again;
                Err(Exit::Stop(stop))
            }
            Err(Trap::Exclusive) => {
                self.pending = Pending::Again;
                Err(Exit::Exclusive)
            }
            Err(Trap::Exception(_)) => unreachable!("deliver handles exceptions itself"),
        }
    }
}
