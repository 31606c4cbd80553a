//! The end of a migration, at its destination: the source hands the guest over, and the remaining
//! pages arrive. After a cut, the source may connect again.

use super::incoming::{Arrival, has_not_come};
use super::{Job, Refusal};
use crate::control::Decision;
use lacuna_machine::Vm;
use lacuna_migrate::MigrateError;
use lacuna_migrate::stream::{Arrived, Arriving, Prepared};
use std::ops::ControlFlow;
use std::thread;
use std::time::Duration;

/// The time between two attempts to take a connection.
const LOOK: Duration = Duration::from_millis(10);

/// Waits until the guest may run here: its source says so, or a client. The caller starts its vCPUs
/// afterwards, so all pages that arrive after the guest are missing now.
pub(super) fn start<V: Vm>(
    job: &Job<'_>,
    arrival: &Arrival<'_>,
    prepared: Prepared<V>,
) -> Result<Arrived<V>, Refusal> {
    let arrived = until_started(job, arrival, prepared)?;
    let arriving = &arrived.arriving;
    let (downtime, rounds) = (arriving.downtime(), arriving.rounds());
    let incoming_guest = arrival.incoming_guest();
    incoming_guest.set_running(arriving.awaited_now(), downtime, rounds);
    Ok(arrived)
}

fn until_started<V: Vm>(
    job: &Job<'_>,
    arrival: &Arrival<'_>,
    prepared: Prepared<V>,
) -> Result<Arrived<V>, Refusal> {
    let mut started = prepared.start();
    loop {
        let waiting = match started {
            Ok(arrived) => return Ok(arrived),
            Err(waiting) => waiting,
        };
        // A refusing source has not handed the guest over.
        if let MigrateError::Refused(_) = waiting.why() {
            return Err(has_not_come(job, waiting.why()));
        }
        match arrival
            .incoming_guest()
            .was_cut_while_prepared(waiting.why())
        {
            None => started = waiting.resume(arrival.connections()),
            Some(Decision::Keep) => return Ok(waiting.decide_to_run()),
            Some(Decision::Cancel | Decision::End) => {
                return Err(has_not_come(job, waiting.why()));
            }
        }
    }
}

/// Takes the remaining pages, as often as the source connects, until the run has ended.
pub(super) fn take_rest<V: Vm>(arrival: &Arrival<'_>, mut arriving: Arriving<V>) {
    let incoming_guest = arrival.incoming_guest();
    loop {
        match arriving.finish(&mut |_| ControlFlow::Continue(())) {
            Ok(()) => incoming_guest.set_whole(),
            Err(why) => incoming_guest.was_cut_while_running(&why),
        }
        let mut failed = false;
        loop {
            if let Some(decision) = incoming_guest.next(failed) {
                if decision == Decision::End {
                    say_that_it_has_ended(arrival, &mut arriving);
                }
                // Missing pages are lost from here on.
                drop(arriving);
                return incoming_guest.set_lost();
            }
            failed = arriving.resume(arrival.connections()).is_err();
            if !failed {
                break;
            }
        }
        incoming_guest.reconnected();
    }
}

/// Sends the source the reason why the guest has ended here, if the source waits for more.
fn say_that_it_has_ended<V: Vm>(arrival: &Arrival<'_>, arriving: &mut Arriving<V>) {
    let Some(why) = arrival.incoming_guest().has_ended() else {
        return;
    };
    let connections = arrival.connections();
    while connections.link().is_open() && arriving.end(connections, &why).is_err() {
        thread::sleep(LOOK);
    }
}
