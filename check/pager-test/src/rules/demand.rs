//! A daemon restores a VM, and sends its memory on demand.

use super::restore::order;
use crate::frame::{COMPLETE, HEADER, OK, PAGE_FAULT, Peer, STATE, header, name};
use crate::restore::{Restore, check_status, fault};
use crate::rule::{Check, Rule};
use crate::saved::{SLOTS, Slot};
use crate::trial::Trial;
use crate::verdict::{Stop, Target, Verdict};
use fastrand::Rng;
use lacuna_addr::{Level, PAGE_SIZE};

const PAGE: u64 = PAGE_SIZE as u64;
/// What the guest writes.
const WRITTEN: [u8; PAGE_SIZE] = [0xbb; PAGE_SIZE];

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
        check: Check::Daemon(Target::OnDemandDaemon, check),
    }
}

const OFFLOAD: &str = "offload_daemon: serve_page_faults";

pub(crate) const RULES: &[Rule] = &[
    rule(
        "demand-order",
        "the daemon sends the requests of a session as one that restores all memory at once",
        "protocol.rs: local migration",
        |trial| order(trial, Target::OnDemandDaemon),
    ),
    rule(
        "demand-connection",
        "before State, the daemon makes a second connection, and announces its role in 2 bytes: 2",
        "protocol.rs: ConnectionRole::Fault",
        |trial| {
            let mut restore = start(trial)?;
            restore.until(STATE)?;
            restore.fault_connection().map(drop)
        },
    ),
    rule(
        "demand-before-answer",
        "a page is served while the VMM has not answered State or Complete, because the restore of \
         devices accesses memory",
        "lib.rs: vm_receive_state_command",
        before_answer,
    ),
    rule(
        "demand-any-order",
        "each page has its content after the answer, which has no payload, in any order of the \
         requests",
        "uffd.rs: shared backing",
        any_order,
    ),
    rule(
        "demand-last-page",
        "the first and the last page of each slot are served",
        OFFLOAD,
        last_page,
    ),
    rule(
        "demand-in-flight",
        "several requests in flight are answered in their order, because an answer has no address",
        "protocol.rs: Command::PageFault",
        in_flight,
    ),
    rule(
        "demand-huge-page",
        "a request may be for a huge page, and for a whole slot",
        "protocol.rs: MemoryRange",
        huge_page,
    ),
    rule(
        "demand-in-pieces",
        "a request is read until it is whole, because a stream socket may deliver it in pieces",
        "unix(7): SOCK_STREAM",
        in_pieces,
    ),
    rule(
        "demand-twice",
        "a second request for a page does not undo what the guest has written, because two vCPUs \
         may fault on one page",
        "userfaultfd(2): each thread has its own event",
        twice,
    ),
    rule(
        "demand-keeps-writes",
        "a page that was served is not filled again, while other pages are requested and at the \
         end",
        "a fill that runs beside the guest",
        keeps_writes,
    ),
    rule(
        "demand-beyond",
        "a range that is not in one slot is refused: an error, or a closed connection",
        OFFLOAD,
        beyond,
    ),
    rule(
        "demand-wrong-request",
        "a request that is no PageFault, or has a wrong length, is refused",
        OFFLOAD,
        wrong_request,
    ),
    rule(
        "demand-ends",
        "the daemon serves pages until the VMM closes the connection, then ends with exit status 0",
        "offload_daemon: run_restore",
        ends,
    ),
    rule(
        "demand-dead-vmm",
        "if the VMM dies before the last answer, also within a PageFault, the daemon ends with an \
         error",
        "the VM does not run, so its snapshot is still needed",
        dead_vmm,
    ),
];

fn start<'a>(trial: &'a Trial<'a>) -> Result<Restore<'a>, Stop> {
    Restore::start(trial, Target::OnDemandDaemon)
}

fn started<'a>(trial: &'a Trial<'a>) -> Result<(Restore<'a>, Peer), Stop> {
    let mut restore = start(trial)?;
    let faults = restore.receive_on_demand()?;
    Ok((restore, faults))
}

fn before_answer(trial: &Trial<'_>) -> Verdict {
    let mut restore = start(trial)?;
    restore.until(STATE)?;
    let faults = restore.fault_connection()?;
    trial.event("the VMM does not answer State yet");
    restore.fault(&faults, SLOTS[0].gpa, PAGE)?;
    restore.answer(OK)?;
    restore.until(COMPLETE)?;
    trial.event("the VMM does not answer the last request yet");
    restore.fault(&faults, SLOTS[1].gpa, PAGE)?;
    restore.answer(OK)
}

/// Backward, forward, and the rest shuffled. The memory is right at the end, too.
fn any_order(trial: &Trial<'_>) -> Verdict {
    let (restore, faults) = started(trial)?;
    let mut addresses: Vec<u64> = SLOTS[1].addresses().rev().collect();
    addresses.extend(SLOTS[2].addresses());
    let mut rest: Vec<u64> = SLOTS[0].addresses().chain(SLOTS[3].addresses()).collect();
    Rng::with_seed(1).shuffle(&mut rest);
    addresses.append(&mut rest);
    addresses
        .iter()
        .try_for_each(|gpa| restore.fault(&faults, *gpa, PAGE))?;
    restore.check_memory(0)
}

fn last_page(trial: &Trial<'_>) -> Verdict {
    let (restore, faults) = started(trial)?;
    SLOTS.iter().try_for_each(|slot| {
        restore.fault(&faults, slot.gpa + slot.bytes() - PAGE, PAGE)?;
        restore.fault(&faults, slot.gpa, PAGE)
    })
}

/// One write sends all requests, so the daemon reads several at once.
fn in_flight(trial: &Trial<'_>) -> Verdict {
    let (restore, faults) = started(trial)?;
    let pairs = SLOTS[1].addresses().zip(SLOTS[2].addresses());
    let addresses: Vec<u64> = pairs.flat_map(|(one, other)| [one, other]).collect();
    let requests: Vec<u8> = addresses.iter().flat_map(|gpa| fault(*gpa, PAGE)).collect();
    restore.ask(&faults, &requests)?;
    trial.event(format!("{} requests in flight", addresses.len()));
    addresses
        .iter()
        .try_for_each(|gpa| restore.check_answer(&faults, *gpa, PAGE))
}

fn huge_page(trial: &Trial<'_>) -> Verdict {
    let (restore, faults) = started(trial)?;
    for (gpa, length) in [
        (SLOTS[0].gpa, Level::L2M.bytes()),
        (SLOTS[1].gpa, SLOTS[1].bytes()),
    ] {
        restore.fault(&faults, gpa, length)?;
    }
    Ok(())
}

fn in_pieces(trial: &Trial<'_>) -> Verdict {
    let (restore, faults) = started(trial)?;
    SLOTS.iter().try_for_each(|slot| {
        let sent = faults.send_in_pieces(&fault(slot.gpa, PAGE));
        sent.map_err(trial.failed("the daemon reads the whole request"))?;
        restore.check_answer(&faults, slot.gpa, PAGE)
    })
}

fn check_written(restore: &Restore<'_>, gpa: u64) -> Verdict {
    restore.check_bytes(gpa, &WRITTEN, "has what the guest has written")
}

fn twice(trial: &Trial<'_>) -> Verdict {
    let (restore, faults) = started(trial)?;
    for gpa in [SLOTS[0].gpa, SLOTS[1].gpa + PAGE] {
        restore.fault(&faults, gpa, PAGE)?;
        trial.event(format!("the guest writes address {gpa:#x}"));
        restore.store(gpa, &WRITTEN)?;
        restore.ask(&faults, &fault(gpa, PAGE))?;
        if !trial.is_acknowledged(&faults, "the second request")? {
            let expected = "status 1 for a page that was served";
            return Err(Stop::failed(expected, "it is refused"));
        }
        check_written(&restore, gpa)?;
    }
    Ok(())
}

fn keeps_writes(trial: &Trial<'_>) -> Verdict {
    let (mut restore, faults) = started(trial)?;
    let addresses: Vec<u64> = SLOTS.iter().flat_map(Slot::addresses).collect();
    let is_written = |gpa: u64| (gpa / PAGE).is_multiple_of(2);
    for gpa in &addresses {
        restore.fault(&faults, *gpa, PAGE)?;
        if is_written(*gpa) {
            restore.store(*gpa, &WRITTEN)?;
        }
    }
    trial.event("the guest has written each second page after its answer");
    drop(faults);
    check_status(restore.wait_until_ended()?, true)?;
    addresses.iter().try_for_each(|gpa| match is_written(*gpa) {
        true => check_written(&restore, *gpa),
        false => restore.check_page(0, *gpa),
    })
}

/// Sends a wrong request. The daemon refuses it. After the VMM's end, the daemon ends without a
/// signal.
fn refused(trial: &Trial<'_>, request: &[u8], what: &str) -> Verdict {
    let (restore, faults) = started(trial)?;
    restore.ask(&faults, request)?;
    if trial.is_acknowledged(&faults, what)? {
        return Err(Stop::failed("the wrong request is refused", "status 1"));
    }
    let status = restore.die(Some(faults))?;
    match status.code() {
        Some(_) => Ok(()),
        None => Err(Stop::failed("no signal ends it", status.to_string())),
    }
}

fn beyond(trial: &Trial<'_>) -> Verdict {
    let (first, last) = (&SLOTS[0], &SLOTS[3]);
    let end = first.gpa + first.bytes();
    let ranges = [
        (end, PAGE),
        (end - PAGE, 2 * PAGE),
        (last.gpa + last.bytes(), PAGE),
        (u64::MAX - PAGE + 1, PAGE),
        (u64::MAX - PAGE + 1, 2 * PAGE),
        (first.gpa, u64::MAX),
    ];
    ranges.into_iter().try_for_each(|(gpa, length)| {
        let what = format!("PageFault at {gpa:#x}, {length:#x} bytes");
        refused(trial, &fault(gpa, length), &what)
    })
}

fn wrong_request(trial: &Trial<'_>) -> Verdict {
    let range = &fault(0, PAGE)[HEADER..];
    let headers = [
        (77, 16),
        (0, 16),
        (STATE, 16),
        (PAGE_FAULT, 8),
        (PAGE_FAULT, 1 << 62),
    ];
    headers.into_iter().try_for_each(|(kind, length)| {
        let request = [&header(kind, [0; 6], length)[..], range].concat();
        refused(trial, &request, &format!("{}, {length} bytes", name(kind)))
    })
}

fn ends(trial: &Trial<'_>) -> Verdict {
    let (mut restore, faults) = started(trial)?;
    restore.fault(&faults, SLOTS[2].gpa, PAGE)?;
    trial.event("the VMM closes the connection for page faults");
    drop(faults);
    check_status(restore.wait_until_ended()?, true)
}

fn dead_vmm(trial: &Trial<'_>) -> Verdict {
    for bytes in [0, HEADER / 2, HEADER + 8] {
        let mut restore = start(trial)?;
        restore.until(STATE)?;
        let faults = restore.fault_connection()?;
        restore.ask(&faults, &fault(SLOTS[0].gpa, PAGE)[..bytes])?;
        trial.event(format!("the VMM dies after {bytes} bytes of a PageFault"));
        check_status(restore.die(Some(faults))?, false)?;
    }
    Ok(())
}
