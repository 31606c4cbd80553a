//! A daemon restores a VM with all of its memory in place.

use crate::frame::{
    ABANDON, COMPLETE, CONFIG, ERROR, MEMORY_FD, OK, START, STATE, completes, header, name,
};
use crate::restore::{Restore, check_status};
use crate::rule::{Check, Rule};
use crate::saved::{SLOTS, SavedVm};
use crate::trial::Trial;
use crate::verdict::{Stop, Target, Verdict};
use lacuna_addr::PAGE_SIZE;
use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

const fn rule(
    name: &'static str,
    requires: &'static str,
    origin: &'static str,
    check: fn(&Trial<'_>) -> Verdict,
) -> Rule {
    Rule {
        name,
        requires,
        origin,
        check: Check::Daemon(Target::RestoreDaemon, check),
    }
}

pub(crate) const RULES: &[Rule] = &[
    rule(
        "restore-order",
        "the daemon sends Start, a MemoryFd for each slot of the configuration, Config, State, and \
         Complete or CompletePaused",
        "protocol.rs: local migration",
        |trial| order(trial, Target::RestoreDaemon),
    ),
    rule(
        "restore-version",
        "Start carries version 0 in its first two header bytes, and no payload",
        "protocol.rs: CURRENT_PROTOCOL_VERSION",
        version,
    ),
    rule(
        "restore-descriptors",
        "each MemoryFd carries the slot's number in 4 bytes, and with these bytes one descriptor",
        "lib.rs: vm_receive_memory_fd",
        descriptors,
    ),
    rule(
        "restore-waits",
        "the daemon waits for each answer before it sends the next request, also for a slow VMM",
        "protocol.rs: local migration",
        waits,
    ),
    rule(
        "restore-answer-in-pieces",
        "an answer is read until it is whole, because a stream socket may deliver it in pieces",
        "unix(7): SOCK_STREAM",
        answer_in_pieces,
    ),
    rule(
        "restore-memory",
        "the memory has the saved content before State is sent, because devices access it then",
        "snapshot_restore.md: memfds populated from its storage",
        |trial| {
            let mut restore = eager(trial)?;
            restore.until(STATE)?;
            restore.check_memory(0)
        },
    ),
    rule(
        "restore-config",
        "Config carries the saved configuration; only its memory_mode may differ",
        "snapshot_restore.md: offload",
        |trial| {
            let mut restore = eager(trial)?;
            restore.receive()?;
            restore.check_config(&SavedVm::new(0)?)
        },
    ),
    rule(
        "restore-state",
        "State carries the saved bytes",
        "snapshot_restore.md: offload",
        |trial| {
            let mut restore = eager(trial)?;
            restore.receive()?;
            restore.check_state(&SavedVm::new(0)?)
        },
    ),
    rule(
        "restore-own-memory",
        "the guest can write its memory, and that changes no snapshot: the next VM has the saved \
         content",
        "snapshot_restore.md: one memfd for each slot",
        own_memory,
    ),
    rule(
        "restore-ends",
        "after the last answer the daemon ends with exit status 0",
        "offload_daemon: run_restore",
        |trial| {
            let mut restore = eager(trial)?;
            restore.receive()?;
            check_status(restore.wait_until_ended()?, true)
        },
    ),
    rule(
        "restore-refused",
        "if the VMM refuses a request, the daemon sends no other one, and ends with an error",
        "protocol.rs: ok_or_fatal_error",
        |trial| {
            POINTS
                .into_iter()
                .try_for_each(|point| refused(trial, (point, ERROR)))
        },
    ),
    rule(
        "restore-unknown-status",
        "a status that is not 1 is an error, also one that the protocol does not define",
        "protocol.rs: received response with unknown status",
        |trial| {
            [(START, 0), (STATE, 3)]
                .into_iter()
                .try_for_each(|at| refused(trial, at))
        },
    ),
    rule(
        "restore-dead-vmm",
        "if the VMM dies at any request, the daemon ends with an error",
        "the VM does not run, so its snapshot is still needed",
        dead_vmm,
    ),
];

fn eager<'a>(trial: &'a Trial<'a>) -> Result<Restore<'a>, Stop> {
    Restore::start(trial, Target::RestoreDaemon)
}

/// The daemon may send the slots in any order.
pub(super) fn order(trial: &Trial<'_>, target: Target) -> Verdict {
    let mut restore = Restore::start(trial, target)?;
    let mut slots: BTreeSet<u32> = SLOTS.iter().map(|slot| slot.number).collect();
    let mut expected = vec![COMPLETE, STATE, CONFIG, START];
    while let Some(next) = expected.pop() {
        let frame = restore.next()?;
        let found = frame.kind;
        if next == CONFIG && found == MEMORY_FD {
            let bytes = frame.payload.first_chunk().copied().unwrap_or([0xff; 4]);
            let slot = u32::from_le_bytes(bytes);
            if !slots.remove(&slot) {
                return Err(Stop::failed(
                    "a MemoryFd of a slot that has none",
                    slot.to_string(),
                ));
            }
            expected.push(CONFIG);
        } else if found != next && !(next == COMPLETE && completes(found)) {
            return Err(Stop::failed(name(next), name(found)));
        } else if next == CONFIG && !slots.is_empty() {
            let expected = format!("MemoryFds of slots {slots:?} before Config");
            return Err(Stop::failed(expected, name(found)));
        }
        restore.answer(OK)?;
    }
    Ok(())
}

fn version(trial: &Trial<'_>) -> Verdict {
    let frame = eager(trial)?.next()?;
    match (frame.middle, frame.length) {
        ([0, 0, ..], 0) => Ok(()),
        found => Err(Stop::failed("version 0, no payload", format!("{found:?}"))),
    }
}

fn descriptors(trial: &Trial<'_>) -> Verdict {
    let mut restore = eager(trial)?;
    loop {
        let frame = restore.next()?;
        match (frame.kind, frame.length, frame.fds.len()) {
            (MEMORY_FD, 4, 1) => {}
            (MEMORY_FD, length, fds) => {
                let seen = format!("{length} bytes, with {fds} descriptors");
                return Err(Stop::failed("4 bytes, with one descriptor", seen));
            }
            (_, _, 0) => {}
            (kind, ..) => {
                let seen = format!("{} with a descriptor", name(kind));
                return Err(Stop::failed("descriptors in MemoryFd alone", seen));
            }
        }
        restore.answer(OK)?;
        if completes(frame.kind) {
            return Ok(());
        }
    }
}

/// The time lets a hasty daemon send its next request. A right one is never refused.
fn waits(trial: &Trial<'_>) -> Verdict {
    const SLOW: Duration = Duration::from_millis(20);
    let mut restore = eager(trial)?;
    loop {
        let kind = restore.next()?.kind;
        thread::sleep(SLOW);
        if restore.main.has_bytes() {
            let expected = format!("no request before the answer to {}", name(kind));
            return Err(Stop::failed(expected, "more bytes"));
        }
        restore.answer(OK)?;
        if completes(kind) {
            return Ok(());
        }
    }
}

fn answer_in_pieces(trial: &Trial<'_>) -> Verdict {
    let mut restore = eager(trial)?;
    loop {
        let kind = restore.next()?.kind;
        let sent = restore.main.send_in_pieces(&header(OK, [0; 6], 0));
        sent.map_err(trial.failed("the daemon reads the whole answer"))?;
        if completes(kind) {
            return check_status(restore.wait_until_ended()?, true);
        }
    }
}

fn own_memory(trial: &Trial<'_>) -> Verdict {
    let mut first = eager(trial)?;
    first.receive()?;
    for slot in &SLOTS {
        slot.addresses()
            .try_for_each(|gpa| first.store(gpa, &[0xaa; PAGE_SIZE]))?;
    }
    trial.event("the guest writes all of its memory");
    for slot in &SLOTS {
        let mut addresses = slot.addresses();
        addresses.try_for_each(|gpa| {
            first.check_bytes(gpa, &[0xaa; PAGE_SIZE], "has what the guest has written")
        })?;
    }
    drop(first);
    let mut second = Restore::of_saved(trial, Target::RestoreDaemon)?;
    second.receive()?;
    second.check_memory(0)
}

/// The requests of a session, which differ in their kinds.
const POINTS: [u16; 5] = [START, MEMORY_FD, CONFIG, STATE, COMPLETE];

fn refused(trial: &Trial<'_>, (point, status): (u16, u16)) -> Verdict {
    let mut restore = eager(trial)?;
    restore.until(point)?;
    trial.event(format!(
        "the VMM answers {} with status {status}",
        name(point)
    ));
    restore.answer(status)?;
    // The daemon closes the connection. Up to v52, a sender abandons the session before.
    if let Ok(next) = restore.main.read_frame()
        && next.kind != ABANDON
    {
        return Err(Stop::failed(
            "no other request, or Abandon",
            name(next.kind),
        ));
    }
    check_status(restore.die(None)?, false)
}

fn dead_vmm(trial: &Trial<'_>) -> Verdict {
    POINTS.into_iter().try_for_each(|point| {
        let mut restore = eager(trial)?;
        restore.until(point)?;
        check_status(restore.die(None)?, false)
    })
}
