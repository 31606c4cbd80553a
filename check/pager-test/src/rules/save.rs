//! A daemon saves a VM: the answers to a right session, and what it has then.

use crate::frame::{COMPLETE, Peer, name};
use crate::restore::Restore;
use crate::rule::{Check, Rule};
use crate::saved::{SLOTS, SavedVm};
use crate::trial::Trial;
use crate::verdict::{Stop, Target, Verdict};

const fn rule(
    name: &'static str,
    requires: &'static str,
    origin: &'static str,
    check: fn(&Trial<'_>) -> Verdict,
) -> Rule {
    let check = Check::Daemon(Target::SaveDaemon, check);
    Rule {
        name,
        requires,
        origin,
        check,
    }
}

pub(crate) const RULES: &[Rule] = &[
    rule(
        "save-answers",
        "each request of a session is acknowledged before the VMM sends the next one: Start, a \
         MemoryFd for each slot, Config, State, CompletePaused",
        "protocol.rs: local migration",
        |trial| trial.save(&SavedVm::new(0)?),
    ),
    rule(
        "save-running-vm",
        "Complete ends a session as CompletePaused does: the VMM sends it if the VM has run",
        "protocol.rs: Command::Complete",
        running_vm,
    ),
    rule(
        "save-slots-in-any-order",
        "the VMM sends the slots in any order, because Cloud Hypervisor keeps them in a hash map",
        "vm.rs: send_memory_fds",
        slots_in_any_order,
    ),
    rule(
        "save-in-pieces",
        "a request is read until it is whole, because a stream socket may deliver it in pieces",
        "unix(7): SOCK_STREAM",
        in_pieces,
    ),
    rule(
        "save-reserved-bytes",
        "the header bytes of Start behind the version are ignored",
        "protocol.rs: sender_protocol_version",
        reserved_bytes,
    ),
    rule(
        "save-content",
        "a restore has the memory that was saved, with holes and with each slot's offset in its \
         file, the same configuration, and the same state",
        "snapshot_restore.md: offload; guest_ram_mappings has file_offset",
        |trial| compare(trial, &saved(trial, 0)?),
    ),
    rule(
        "save-last-answer",
        "the daemon has read all memory before its last answer, because the VMM then ends or \
         resumes the VM",
        "snapshot_restore.md: critical invariant",
        last_answer,
    ),
    rule(
        "save-next-vm",
        "a second VM is saved after the first one, and no page of the first is left",
        "snapshot_restore.md: offload",
        next_vm,
    ),
];

fn saved(trial: &Trial<'_>, number: u64) -> Result<SavedVm, Stop> {
    let vm = SavedVm::new(number)?;
    trial.save(&vm)?;
    Ok(vm)
}

/// Restores the VM that was saved last, and compares it.
fn compare(trial: &Trial<'_>, vm: &SavedVm) -> Verdict {
    let mut restore = Restore::of_saved(trial, Target::RestoreDaemon)?;
    restore.receive()?;
    restore.check_memory(vm.number)?;
    restore.check_config(vm)?;
    restore.check_state(vm)
}

/// As [`compare`], if there is a restore daemon.
fn compare_if_possible(trial: &Trial<'_>, vm: &SavedVm) -> Verdict {
    match trial.command(Target::RestoreDaemon) {
        Some(_) => compare(trial, vm),
        None => Ok(()),
    }
}

fn running_vm(trial: &Trial<'_>) -> Verdict {
    let vm = SavedVm::new(0)?;
    let mut steps = vm.steps()?;
    steps.last_mut().expect("the last request").kind = COMPLETE;
    trial.save_with(&vm, steps)?;
    compare_if_possible(trial, &vm)
}

fn slots_in_any_order(trial: &Trial<'_>) -> Verdict {
    let vm = SavedVm::new(0)?;
    let mut steps = vm.steps()?;
    steps[1..=SLOTS.len()].reverse();
    trial.save_with(&vm, steps)?;
    compare_if_possible(trial, &vm)
}

fn in_pieces(trial: &Trial<'_>) -> Verdict {
    let vm = SavedVm::new(0)?;
    trial.find_out()?;
    let peer = trial.connect()?;
    for step in vm.steps()? {
        let is_sent = trial.send(&peer, &step, Peer::send_in_pieces)?;
        let what = name(step.kind);
        if !is_sent || !trial.is_acknowledged(&peer, &what)? {
            return Err(Stop::failed(
                format!("{what} in pieces is acknowledged"),
                "it is refused",
            ));
        }
    }
    compare_if_possible(trial, &vm)
}

fn reserved_bytes(trial: &Trial<'_>) -> Verdict {
    let vm = SavedVm::new(0)?;
    let mut steps = vm.steps()?;
    steps[0].middle = [0, 0, 0xaa, 0xbb, 0xcc, 0xdd];
    trial.save_with(&vm, steps)
}

fn last_answer(trial: &Trial<'_>) -> Verdict {
    trial.required(Target::RestoreDaemon)?;
    trial.find_out()?;
    let vm = SavedVm::new(0)?;
    let peer = trial.connect()?;
    let end = trial.play(&peer, vm.steps()?)?;
    trial.expect_accepted(end)?;
    vm.overwrite().map_err(Stop::host("write to a memfd"))?;
    trial.event("the VMM overwrites all memory");
    drop(peer);
    // Another session follows, so a daemon that still reads has read the new bytes before.
    compare(trial, &vm)
}

fn next_vm(trial: &Trial<'_>) -> Verdict {
    trial.required(Target::RestoreDaemon)?;
    compare(trial, &saved(trial, 1)?)?;
    compare(trial, &saved(trial, 0)?)
}
