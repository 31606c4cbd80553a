//! The message of the handshake: its forms, and wrong ones.

use super::vms::next_vm;
use crate::rule::{Check, Needs, Rule, Subject, event, expect};
use crate::verdict::{Stop, Verdict};
use crate::vm::{Connection, Vm, not_sent};
use lacuna_addr::PAGE_SIZE;
use lacuna_source::send_text;
use rustix::event::{EventfdFlags, eventfd};
use serde::Serialize;
use std::io::Write as _;
use std::os::fd::AsFd as _;

/// A rule with one VM, whose message is unusual.
const fn form(
    name: &'static str,
    requires: &'static str,
    origin: &'static str,
    check: fn(&Subject) -> Verdict,
) -> Rule {
    Rule {
        name,
        requires,
        origin,
        check: Check::Handler(Needs::OneVm, check),
    }
}

const WRONG: &str = "a wrong message must not end the service of other VMs";

pub(crate) const RULES: &[Rule] = &[
    form(
        "page-size-alone",
        "a list with page_size and without page_size_kib is understood, because the latter is \
         deprecated",
        "the handshake: page_size, in bytes",
        |subject| with_fields(subject, |region| region.page_size_kib = None),
    ),
    form(
        "page-size-kib-alone",
        "a list with page_size_kib alone is understood, in bytes despite its name, because older \
         versions of Firecracker send only that",
        "the handshake: page_size_kib, in bytes",
        |subject| with_fields(subject, |region| region.page_size = None),
    ),
    form(
        "message-in-pieces",
        "the message is read until it is whole, because a stream socket may deliver it in pieces",
        "unix(7): SOCK_STREAM",
        message_in_pieces,
    ),
    form(
        "garbage",
        "a message that is no list is refused: the handler closes the connection",
        WRONG,
        garbage,
    ),
    form(
        "no-descriptor",
        "a message without a descriptor is refused: the handler closes the connection",
        WRONG,
        no_descriptor,
    ),
    form(
        "wrong-descriptor",
        "a descriptor that is no userfaultfd is refused, because ioctls mean something else there: \
         the handler closes the connection",
        WRONG,
        wrong_descriptor,
    ),
    form(
        "region-beyond-file",
        "a list that goes beyond the memory file is refused, because a read there ends the handler \
         by SIGBUS",
        WRONG,
        region_beyond_file,
    ),
    form(
        "regions-overlap",
        "regions with common addresses are refused, because it is undecided which page is right",
        WRONG,
        regions_overlap,
    ),
    form(
        "region-unaligned",
        "a region that begins or ends within a page is refused: UFFDIO_COPY takes whole pages",
        WRONG,
        region_unaligned,
    ),
    form(
        "region-overflow",
        "a region whose end is no 64-bit number is refused, because its sum wraps",
        WRONG,
        region_overflow,
    ),
    form(
        "page-size-wrong",
        "a page size that is zero, no power of two, or larger than the region is refused",
        WRONG,
        page_size_wrong,
    ),
    Rule {
        name: "closed-early",
        requires: "a connection that closes without a message stops no other VM",
        origin: WRONG,
        check: Check::Handler(Needs::SeveralVms, closed_early),
    },
    Rule {
        name: "half-message",
        requires: "a connection that closes within the message stops no other VM",
        origin: WRONG,
        check: Check::Handler(Needs::SeveralVms, half_message),
    },
    Rule {
        name: "second-message",
        requires: "a second message on a connection stops no other VM",
        origin: "the handshake: no other message ever",
        check: Check::Handler(Needs::SeveralVms, second_message),
    },
];

/// A region in the message's list.
#[derive(Clone, Serialize)]
struct Listed {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    page_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page_size_kib: Option<u64>,
}

fn list(vm: &Vm<'_>) -> Vec<Listed> {
    let regions = vm.for_handler();
    let listed = regions.iter().map(|region| Listed {
        base_host_virt_addr: region.memory.start().get(),
        size: region.memory.pages() * PAGE_SIZE as u64,
        offset: region.first.0 * PAGE_SIZE as u64,
        page_size: Some(region.page.bytes()),
        page_size_kib: Some(region.page.bytes()),
    });
    listed.collect()
}

fn json(list: &[Listed]) -> String {
    serde_json::to_string(list).expect("a list has a JSON form")
}

fn with_fields(subject: &Subject, change: fn(&mut Listed)) -> Verdict {
    let vm = Vm::new(subject)?;
    let mut list = list(&vm);
    list.iter_mut().for_each(change);
    let text = json(&list);
    let connection = Connection::open(subject)?;
    let sent = send_text(&connection.socket, text.as_bytes(), Some(vm.uffd().as_fd()));
    sent.map_err(not_sent)?;
    event(format!("sent {text}"));
    connection.report_close();
    vm.check_contents([0, vm.pages() - 1])
}

fn message_in_pieces(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    let text = json(&list(&vm));
    let mut connection = Connection::open(subject)?;
    let pieces = text.as_bytes().chunks(text.len().div_ceil(3));
    for (number, piece) in (1..).zip(pieces) {
        let sent = match number {
            1 => send_text(&connection.socket, piece, Some(vm.uffd().as_fd())),
            _ => connection.socket.write_all(piece),
        };
        sent.map_err(not_sent)?;
        event(format!("sent piece {number} of 3"));
        expect(format!("the handler reads piece {number}"));
        connection.wait_until_read();
    }
    connection.report_close();
    vm.check_contents([0, vm.pages() - 1])
}

/// The descriptor beside a wrong list.
#[derive(Clone, Copy)]
enum Sent {
    Userfaultfd,
    Eventfd,
    None,
}

/// Sends a list with `change`, and checks that the handler refuses it.
fn refuses(subject: &Subject, what: &str, change: &dyn Fn(&mut Vec<Listed>), fd: Sent) -> Verdict {
    let vm = Vm::new(subject)?;
    let mut list = list(&vm);
    change(&mut list);
    let other = eventfd(0, EventfdFlags::CLOEXEC).map_err(Stop::host("make an eventfd"))?;
    let fd = match fd {
        Sent::Userfaultfd => Some(vm.uffd().as_fd()),
        Sent::Eventfd => Some(other.as_fd()),
        Sent::None => None,
    };
    let connection = Connection::open(subject)?;
    send_text(&connection.socket, json(&list).as_bytes(), fd).map_err(not_sent)?;
    event(format!("sent {what}: {}", json(&list)));
    refused(&connection)
}

/// A change of the list of regions, and what it is.
type Change<'a> = (&'a str, &'a dyn Fn(&mut Vec<Listed>));

/// Checks that each of these lists is refused. A handler that is started for the rule may end at
/// the first one, so it gets only that.
fn refuses_each(subject: &Subject, changes: &[Change<'_>]) -> Verdict {
    let sent = match subject.order.is_started {
        true => 1,
        false => changes.len(),
    };
    for (what, change) in &changes[..sent] {
        refuses(subject, what, change, Sent::Userfaultfd)?;
    }
    still_serves(subject)
}

fn refused(connection: &Connection) -> Verdict {
    expect("the handler refuses the message: it closes the connection");
    connection.wait_for_close();
    event("the handler has closed the connection");
    Ok(())
}

/// Checks that a handler of several VMs serves the next one.
fn still_serves(subject: &Subject) -> Verdict {
    match subject.order.is_started {
        true => Ok(()),
        false => next_vm(subject),
    }
}

fn no_descriptor(subject: &Subject) -> Verdict {
    refuses(subject, "no descriptor", &|_| {}, Sent::None)?;
    still_serves(subject)
}

fn wrong_descriptor(subject: &Subject) -> Verdict {
    refuses(
        subject,
        "an eventfd as the userfaultfd",
        &|_| {},
        Sent::Eventfd,
    )?;
    still_serves(subject)
}

fn garbage(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    let connection = Connection::open(subject)?;
    let text = b"]}\xff\x00 no list of regions";
    send_text(&connection.socket, text, Some(vm.uffd().as_fd())).map_err(not_sent)?;
    event("sent bytes that are no JSON, with the userfaultfd");
    refused(&connection)?;
    still_serves(subject)
}

fn region_beyond_file(subject: &Subject) -> Verdict {
    let more = |list: &mut Vec<Listed>| list[0].size += 2 << 20;
    refuses(
        subject,
        "2 MiB more than the file has",
        &more,
        Sent::Userfaultfd,
    )?;
    still_serves(subject)
}

fn regions_overlap(subject: &Subject) -> Verdict {
    let overlap = |list: &mut Vec<Listed>| {
        let (whole, common) = (list[0].clone(), 16 * PAGE_SIZE as u64);
        let half = whole.size / 2;
        list[0].size = half + common;
        list[0].offset = half - common;
        list.push(Listed {
            base_host_virt_addr: whole.base_host_virt_addr + half,
            size: half,
            ..whole
        });
    };
    refuses(
        subject,
        "two regions with 16 common pages",
        &overlap,
        Sent::Userfaultfd,
    )?;
    still_serves(subject)
}

fn region_unaligned(subject: &Subject) -> Verdict {
    refuses_each(
        subject,
        &[
            ("an address within a page", &|list| {
                list[0].base_host_virt_addr += 0x200;
                list[0].size -= PAGE_SIZE as u64;
            }),
            ("a size of no whole pages", &|list| list[0].size -= 0x200),
            ("an offset within a page", &|list| {
                list[0].offset = 0x200;
                list[0].size -= PAGE_SIZE as u64;
            }),
        ],
    )
}

fn region_overflow(subject: &Subject) -> Verdict {
    const LAST: u64 = u64::MAX - PAGE_SIZE as u64 + 1;
    refuses_each(
        subject,
        &[
            ("addresses beyond 64 bits", &|list| {
                list[0].base_host_virt_addr = LAST;
            }),
            ("offsets beyond 64 bits", &|list| list[0].offset = LAST),
        ],
    )
}

fn page_size_wrong(subject: &Subject) -> Verdict {
    let set = |list: &mut Vec<Listed>, bytes| {
        list[0].page_size = Some(bytes);
        list[0].page_size_kib = Some(bytes);
    };
    refuses_each(
        subject,
        &[
            ("a page size of 6144 bytes", &|list| set(list, 6144)),
            ("a page size of 0", &|list| set(list, 0)),
            ("a page size of 2^63 bytes", &|list| set(list, 1 << 63)),
        ],
    )
}

fn closed_early(subject: &Subject) -> Verdict {
    drop(Connection::open(subject)?);
    event("closed the connection without a message");
    next_vm(subject)
}

fn half_message(subject: &Subject) -> Verdict {
    let vm = Vm::new(subject)?;
    let text = json(&list(&vm));
    let connection = Connection::open(subject)?;
    let half = &text.as_bytes()[..text.len() / 2];
    send_text(&connection.socket, half, Some(vm.uffd().as_fd())).map_err(not_sent)?;
    drop(connection);
    event("sent half of the message, and closed the connection");
    next_vm(subject)
}

fn second_message(subject: &Subject) -> Verdict {
    let (first, second) = (Vm::new(subject)?, Vm::new(subject)?);
    let connection = Connection::open(subject)?;
    first.send(&connection)?;
    first.check_contents([0])?;
    second.send(&connection)?;
    // A handler may leave it unread.
    connection.give_time_to_read();
    drop(connection);
    next_vm(subject)
}
