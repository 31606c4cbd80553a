//! A daemon that saves VMs refuses a wrong session, and serves the next VM.

use crate::frame::{
    ABANDON, COMPLETE_PAUSED, CONFIG, HEADER, MEMORY_FD, PAGE_FAULT, Peer, START, STATE, header,
    name,
};
use crate::rule::{Check, Rule};
use crate::saved::{SLOTS, SavedVm, Step};
use crate::trial::{End, Trial};
use crate::verdict::{Stop, Target, Verdict};
use std::io;
use std::os::fd::OwnedFd;

const fn rule(
    name: &'static str,
    requires: &'static str,
    check: fn(&Trial<'_>) -> Verdict,
) -> Rule {
    Rule {
        name,
        requires,
        origin: "a wrong session must not end the service of other VMs",
        check: Check::Daemon(Target::SaveDaemon, check),
    }
}

pub(crate) const RULES: &[Rule] = &[
    rule(
        "save-wrong-version",
        "Start with another version is refused: an error, or a closed connection",
        |trial| {
            each(trial, [[1, 0], [0, 1]], |[low, high], steps, _| {
                steps[0].middle = [low, high, 0, 0, 0, 0];
            })
        },
    ),
    rule(
        "save-unknown-command",
        "an unknown command is refused",
        |trial| {
            each(trial, [0, 10, 0xffff], |kind, steps, _| {
                steps.insert(CONFIG_AT, Step::new(kind, []));
            })
        },
    ),
    rule(
        "save-out-of-order",
        "a request is refused if it is not the next one of a session",
        out_of_order,
    ),
    rule(
        "save-no-descriptor",
        "a MemoryFd without a descriptor is refused",
        |trial| wrong(trial, |steps, _| steps[1].files.clear()),
    ),
    rule(
        "save-two-descriptors",
        "a MemoryFd with two descriptors is refused, because it is undecided which is the memory",
        |trial| {
            try_wrong(trial, |steps, vm| {
                steps[1].files.append(&mut vm.memory_fd(1)?.files);
                Ok(())
            })
        },
    ),
    rule(
        "save-wrong-descriptor",
        "a descriptor that is no file is refused, because a read of a pipe waits for ever",
        wrong_descriptor,
    ),
    rule(
        "save-slot-twice",
        "a second MemoryFd for a slot is refused, because it is undecided which is the memory",
        |trial| {
            try_wrong(trial, |steps, vm| {
                steps.insert(2, vm.memory_fd(0)?);
                Ok(())
            })
        },
    ),
    rule(
        "save-slot-missing",
        "a slot of the configuration without a MemoryFd is refused, because its memory is lost",
        |trial| wrong(trial, |steps, _| drop(steps.remove(2))),
    ),
    rule(
        "save-slot-unknown",
        "a MemoryFd for a slot that the configuration lacks is refused: its address is unknown",
        |trial| {
            try_wrong(trial, |steps, vm| {
                let payload = 99_u32.to_le_bytes().into();
                steps.insert(
                    2,
                    Step {
                        payload,
                        ..vm.memory_fd(0)?
                    },
                );
                Ok(())
            })
        },
    ),
    rule(
        "save-short-memory",
        "a memfd that is shorter than its slot is refused: an access behind its end is SIGBUS",
        short_memory,
    ),
    rule(
        "save-giant-length",
        "a payload that no memory can hold is refused before it is read",
        giant_length,
    ),
    rule(
        "save-wrong-length",
        "a MemoryFd is refused if its payload is not 4 bytes, a slot's number",
        |trial| wrong(trial, |steps, _| steps[1].payload.extend([0; 4])),
    ),
    rule(
        "save-wrong-config",
        "a configuration without guest_ram_mappings is refused, because no slot has a size",
        |trial| {
            each(trial, ["not JSON", "{}"], |text, steps, _| {
                steps[CONFIG_AT].payload = text.into();
            })
        },
    ),
    rule(
        "save-half-request",
        "a VMM that dies within a request stops no other VM",
        half_request,
    ),
    rule(
        "save-dead-vmm",
        "a VMM that dies after any request stops no other VM",
        dead_vmm,
    ),
    rule(
        "save-abandon",
        "Abandon is answered or ends the connection after any request, and the next VM is saved",
        |trial| {
            after_each_request(trial, |trial, peer| {
                let abandon = Step::new(ABANDON, []);
                trial.play(peer, vec![abandon]).map(drop)
            })
        },
    ),
];

/// The place of Config in a session.
const CONFIG_AT: usize = SLOTS.len() + 1;

/// Plays a session that a change has made wrong. One of its requests must be refused, and the next
/// VM must be saved.
fn try_wrong(
    trial: &Trial<'_>,
    change: impl FnOnce(&mut Vec<Step>, &SavedVm) -> Verdict,
) -> Verdict {
    trial.find_out()?;
    let vm = SavedVm::new(1)?;
    let mut steps = vm.steps()?;
    change(&mut steps, &vm)?;
    let kinds: Vec<String> = steps.iter().map(|step| name(step.kind)).collect();
    trial.event(format!("a wrong session: {}", kinds.join(", ")));
    let end = trial.play(&trial.connect()?, steps)?;
    if end == End::Accepted {
        let expected = "one of the requests is refused";
        return Err(Stop::failed(expected, "each of them is acknowledged"));
    }
    trial.save(&SavedVm::new(0)?)
}

fn wrong(trial: &Trial<'_>, change: impl FnOnce(&mut Vec<Step>, &SavedVm)) -> Verdict {
    try_wrong(trial, |steps, vm| {
        change(steps, vm);
        Ok(())
    })
}

/// As [`wrong`], for each of these values.
fn each<T>(
    trial: &Trial<'_>,
    values: impl IntoIterator<Item = T>,
    change: impl Fn(T, &mut Vec<Step>, &SavedVm),
) -> Verdict {
    let mut values = values.into_iter();
    values.try_for_each(|value| wrong(trial, |steps, vm| change(value, steps, vm)))
}

fn out_of_order(trial: &Trial<'_>) -> Verdict {
    let changes: [fn(&mut Vec<Step>); 7] = [
        |steps| drop(steps.remove(0)),
        |steps| steps.insert(1, Step::new(START, [])),
        |steps| steps.swap(CONFIG_AT, CONFIG_AT + 1),
        |steps| steps.swap(1, CONFIG_AT),
        |steps| drop(steps.remove(CONFIG_AT + 1)),
        |steps| drop(steps.drain(1..CONFIG_AT + 2)),
        |steps| steps[CONFIG_AT + 1] = Step::new(PAGE_FAULT, [0; 16]),
    ];
    changes
        .into_iter()
        .try_for_each(|change| wrong(trial, |steps, _| change(steps)))
}

/// The other end of the pipe stays open, so a read of it waits.
fn wrong_descriptor(trial: &Trial<'_>) -> Verdict {
    let (reader, _writer) = io::pipe().map_err(Stop::host("make a pipe"))?;
    wrong(trial, |steps, _| {
        steps[1].files = vec![OwnedFd::from(reader).into()]
    })
}

fn short_memory(trial: &Trial<'_>) -> Verdict {
    try_wrong(trial, |_, vm| {
        let shorter = vm.memory_fd(0)?.files[0].set_len(SLOTS[0].bytes() / 2);
        shorter.map_err(Stop::host("set the length of a memfd"))
    })
}

/// The VMM sends no byte of such a payload, and waits for the answer.
fn giant_length(trial: &Trial<'_>) -> Verdict {
    for (at, length) in [(CONFIG_AT, 1 << 62), (CONFIG_AT + 1, u64::MAX)] {
        wrong(trial, |steps, _| {
            steps[at] = Step {
                length: Some(length),
                ..Step::new(steps[at].kind, [])
            };
        })?;
    }
    Ok(())
}

fn half_request(trial: &Trial<'_>) -> Verdict {
    trial.find_out()?;
    let vm = SavedVm::new(1)?;
    for (at, kind) in [(1, MEMORY_FD), (CONFIG_AT, CONFIG), (CONFIG_AT + 1, STATE)] {
        for half in [HEADER / 2, HEADER, HEADER + 2] {
            let peer = begin(trial, &vm, at)?;
            let bytes = [&header(kind, [0; 6], 4)[..], &[0; 2]].concat();
            let sent = peer.send(&bytes[..half]);
            sent.map_err(trial.failed("the daemon reads a request"))?;
            trial.event(format!("the VMM dies after {half} bytes of {}", name(kind)));
        }
    }
    trial.save(&SavedVm::new(0)?)
}

/// Plays the first requests of a session, which the daemon acknowledges.
fn begin(trial: &Trial<'_>, vm: &SavedVm, requests: usize) -> Result<Peer, Stop> {
    let peer = trial.connect()?;
    let mut steps = vm.steps()?;
    steps.truncate(requests);
    let end = trial.play(&peer, steps)?;
    trial.expect_accepted(end)?;
    Ok(peer)
}

/// Plays the begin of a session, of each length, and then `last`.
fn after_each_request(trial: &Trial<'_>, last: fn(&Trial<'_>, &Peer) -> Verdict) -> Verdict {
    trial.find_out()?;
    let vm = SavedVm::new(1)?;
    for requests in 0..CONFIG_AT + 3 {
        let peer = begin(trial, &vm, requests)?;
        last(trial, &peer)?;
        trial.event("the VMM dies");
    }
    trial.save(&SavedVm::new(0)?)
}

/// At last, it dies before it has read the last answer.
fn dead_vmm(trial: &Trial<'_>) -> Verdict {
    after_each_request(trial, |_, _| Ok(()))?;
    let vm = SavedVm::new(1)?;
    let peer = begin(trial, &vm, CONFIG_AT + 2)?;
    let complete = Step::new(COMPLETE_PAUSED, []);
    trial.send(&peer, &complete, Peer::send)?;
    trial.event("the VMM dies without the last answer");
    drop(peer);
    trial.save(&SavedVm::new(0)?)
}
