//! The decisions about a migration, which both of its sides take.

use super::{Controlled, Phase};
use crate::refused::Refused;
use lacuna::Vm;
use lacuna::migrate::session::IncomingStage;

impl<V: Vm> Controlled<'_, V> {
    /// Resumes the guest here, although it is undecided which side runs it.
    pub(super) fn keep(&self) -> Result<(), Refused> {
        match self.incoming.as_ref().filter(|_| self.is_awaited()) {
            None => self.keep_at_source(),
            Some(incoming) => {
                incoming.keep().map_err(|stage| {
                    Refused::request(match stage {
                        IncomingStage::Unknown => "the run is over: the guest does not run here",
                        IncomingStage::Memory => "the guest has not arrived: it is with its source",
                        _ => "no migration waits for a decision: ask for the status",
                    })
                })?;
                self.check_runs()
            }
        }
    }

    /// Ends a migration, or the wait for its other side.
    pub(super) fn cancel(&self) -> Result<(), Refused> {
        let is_moving = matches!(&*self.phase(), Phase::Moves(_));
        match self.incoming.as_ref().filter(|_| !is_moving) {
            None => self.cancel_at_source(),
            Some(incoming) => incoming.cancel().map_err(nothing_to_cancel),
        }
    }
}

/// Why there is no wait for a source to cancel.
fn nothing_to_cancel(stage: IncomingStage) -> Refused {
    Refused::request(match stage {
        IncomingStage::Memory => {
            "the guest has not come: cancel its migration at its source, or stop this run"
        }
        IncomingStage::Unknown => {
            "it is not known whether the guest was handed over: keep it here, or stop this run"
        }
        IncomingStage::Rest => "the rest of the guest's memory is on its way: wait for its end",
        IncomingStage::Cut | IncomingStage::Lost | IncomingStage::Whole => {
            "no migration is in progress: ask for the status"
        }
    })
}
