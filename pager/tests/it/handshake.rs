//! The VMM's message: what is accepted, and what is refused with which sentence.

use crate::vmm::{Bed, Memory, Vmm, Words, removals, word};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_pager::{Config, Image};
use lacuna_skip::test;
use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

const SOURCE: u64 = 1024;
const HAS: u64 = SOURCE * PAGE_SIZE as u64;

fn send(socket: &UnixStream, text: &str, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(rights.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let body = [IoSlice::new(text.as_bytes())];
    let sent = sendmsg(socket, &body, &mut rights, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, text.len());
}

/// Waits for the end of the connection, and returns the only new message.
fn refusal(bed: &Bed, socket: &mut UnixStream, before: usize) -> String {
    let read = socket.read(&mut [0]);
    // Unread bytes make the end of a connection a reset.
    assert!(
        read.as_ref().is_ok_and(|bytes| *bytes == 0) || read.is_err(),
        "{read:?}"
    );
    bed.wait("a message", |_| bed.said().len() > before);
    bed.said()[before].clone()
}

fn region(base: u64, size: u64, offset: u64, rest: &str) -> String {
    format!(r#"{{"base_host_virt_addr":{base},"size":{size},"offset":{offset}{rest}}}"#)
}

const SMALL: &str = r#","page_size":4096"#;
const HUGE: &str = r#","page_size":2097152"#;

/// A pager still serves VMs.
fn still_serves(bed: &Bed) {
    let vmm = Vmm::connect(bed, removals(), 3, 2);
    assert_eq!(vmm.memory.read_whole(1), word(4));
}

/// Lists of regions, each with a part of the sentence that refuses it.
fn wrong_lists() -> Vec<(String, &'static str)> {
    let many = vec![region(0, 4096, 0, SMALL); 1025].join(",");
    let base = 0x7000_0000_0000;
    let both = r#","page_size":4096,"page_size_kib":4"#;
    let one = |base, size, offset, rest| region(base, size, offset, rest);
    vec![
        (String::new(), "has no region"),
        (many, "has 1025 regions: announce at most 1024"),
        (
            one(base, 4096, 0, ""),
            "has neither page_size nor page_size_kib",
        ),
        (
            one(base, 4096, 0, both),
            "a page_size of 4096 and a page_size_kib of 4",
        ),
        (
            one(base, 4096, 0, r#","page_size":4"#),
            "pages of 4 bytes: give 4096",
        ),
        (one(base, 4096, 0, r#","page_size":0"#), "pages of 0 bytes"),
        (one(base, 0, 0, SMALL), "is not whole pages of 4096 bytes"),
        (one(base, 4097, 0, SMALL), "is not whole pages"),
        (one(base + 8, 4096, 0, SMALL), "is not whole pages"),
        (
            one(base + 4096, 2 << 20, 0, HUGE),
            "whole pages of 2097152 bytes",
        ),
        (one(base, 4096, 0, HUGE), "whole pages of 2097152 bytes"),
        ("7".into(), "is not Firecracker's array"),
    ]
}

/// The same, for regions that are wrong beside the source or beside each other.
fn wrong_places() -> Vec<(String, &'static str)> {
    let base = 0x7000_0000_0000;
    let one = |base, size, offset, rest| region(base, size, offset, rest);
    vec![
        (
            one(base, 4096, 8, SMALL),
            "has offset 8: give a multiple of 4096",
        ),
        (
            one(base, 4096, HAS, SMALL),
            "from offset 4194304 on, and the source has 4194304",
        ),
        (
            one(base, HAS + 4096, 0, SMALL),
            "start the pager with this VM's memory",
        ),
        (
            one(base, 4096, u64::MAX - 4095, SMALL),
            "start the pager with",
        ),
        (
            one(u64::MAX - 4095, 4096, 0, SMALL),
            "has no such addresses",
        ),
        (
            one(base, u64::MAX - 4095, 4096, SMALL),
            "start the pager with",
        ),
        (
            [one(base, 8192, 0, SMALL), one(base + 4096, 4096, 0, SMALL)].join(","),
            "two of its regions have the address",
        ),
        (
            [one(base + 8192, 4096, 0, SMALL), one(base, 12288, 0, SMALL)].join(","),
            "two of its regions have the address",
        ),
        (
            [one(base, HAS, 0, SMALL), one(base + HAS, 4096, 0, SMALL)].join(","),
            "announce each offset once",
        ),
        (
            one(base, 4096, 0, r#","page_size":-1"#),
            "is not Firecracker's array of regions",
        ),
        (
            r#"{"base_host_virt_addr":4096}"#.into(),
            "missing field `size`",
        ),
    ]
}

#[test]
fn wrong_regions_are_refused() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), SOURCE);
    let refused = format!("refused the VM of process {}: ", std::process::id());
    let table = [wrong_lists(), wrong_places()].concat();
    for (at, (list, reason)) in table.iter().enumerate() {
        let mut socket = UnixStream::connect(&bed.path).unwrap();
        send(&socket, &format!("[{list}]"), &[uffd.as_fd()]);
        let said = refusal(&bed, &mut socket, at);
        assert!(
            said.starts_with(&refused) && said.contains(reason),
            "{list}: {said}"
        );
    }
    still_serves(&bed);
    assert_eq!(bed.pager.stats().refused as usize, table.len());
}

#[test]
fn wrong_descriptors_and_messages_are_refused() {
    let uffd = removals();
    let config = Config {
        patience: Duration::from_millis(100),
        ..Config::default()
    };
    let bed = Bed::with(Arc::new(Words), SOURCE, config);
    let other = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    // SAFETY: 1. it acts on no memory, because none is registered.
    let blocking = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) }.unwrap();
    let (uffd, other) = (uffd.as_fd(), other.as_fd());
    let list = format!("[{}]", region(0x7000_0000_0000, 4096, 0, SMALL));
    let long = format!("[{}", " ".repeat(300 << 10));
    let quoted = format!("[\"{}\"]", "x".repeat(100 << 10));
    let table: [(&str, &[BorrowedFd<'_>], &str); 10] = [
        (&list, &[], "has no descriptor: send the userfaultfd"),
        (
            &list,
            &[uffd, uffd],
            "several descriptors: send the userfaultfd alone",
        ),
        (&list, &[uffd, uffd, uffd], "several descriptors"),
        (&list, &[other], "its descriptor is no userfaultfd"),
        (&list, &[blocking.as_fd()], "make it with O_NONBLOCK"),
        (&list[..20], &[uffd], "no whole message in 100ms"),
        ("x]", &[uffd], "is not Firecracker's array of regions"),
        ("{}", &[], "missing field `version`"),
        (&quoted, &[uffd], "expected struct RegionMessage at line 1"),
        (&long[..4000], &[uffd], "no whole message in 100ms"),
    ];
    for (at, (text, fds, reason)) in table.iter().enumerate() {
        let mut socket = UnixStream::connect(&bed.path).unwrap();
        send(&socket, text, fds);
        let said = refusal(&bed, &mut socket, at);
        assert!(said.contains(reason), "{text}: {said}");
        assert!(said.len() < 500, "{} bytes", said.len());
    }
    let mut socket = UnixStream::connect(&bed.path).unwrap();
    // The pager closes the connection before it has read all.
    let _ = socket.write_all(long.as_bytes());
    assert!(refusal(&bed, &mut socket, table.len()).contains("more than 262144 bytes"));
    still_serves(&bed);
}

/// The connection ends before the message, or in its middle.
#[test]
fn a_hang_up_is_refused() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), SOURCE);
    for (at, (text, reason)) in [("", "after 0 bytes"), ("[{\"si", "after 5 bytes")]
        .iter()
        .enumerate()
    {
        let socket = UnixStream::connect(&bed.path).unwrap();
        if !text.is_empty() {
            send(&socket, text, &[uffd.as_fd()]);
        }
        drop(socket);
        bed.wait("a message", |_| bed.said().len() > at);
        assert!(bed.said()[at].contains(reason), "{:?}", bed.said());
    }
    still_serves(&bed);
}

/// The message of an older Firecracker, in three pieces, with a region behind another.
#[test]
fn a_message_in_pieces() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), SOURCE);
    let memory = Memory::anonymous(8, PAGE_SIZE as u64);
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { uffd.register(memory.range()) }.unwrap();
    let old = r#","page_size_kib":4096,"a_later_field":[1]"#;
    let half = 4 * PAGE_SIZE as u64;
    let (second, first) = (
        region(memory.start + half, half, 0, old),
        region(memory.start, half, half, old),
    );
    let text = format!("[{second},{first}]\n");
    let socket = UnixStream::connect(&bed.path).unwrap();
    let (mut rest, mut fds) = (&*text, vec![uffd.as_fd()]);
    for piece in [1, 30, text.len() - 31] {
        send(&socket, &rest[..piece], &fds);
        (rest, fds) = (&rest[piece..], Vec::new());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(
        [0, 3, 4, 7].map(|page| memory.read_whole(page)),
        [4, 7, 0, 3].map(word)
    );
}

#[test]
fn another_user_is_refused() {
    let image = Image {
        users: vec![12345],
        ..Image::new(Arc::new(Words), PageCount::new(SOURCE))
    };
    let bed = Bed::of(image, Config::default());
    let mut socket = UnixStream::connect(&bed.path).unwrap();
    let said = refusal(&bed, &mut socket, 0);
    let user = rustix::process::getuid().as_raw();
    assert!(
        said.contains(&format!("runs as user {user}, whom")),
        "{said}"
    );
}

/// A second descriptor is refused as it arrives: the message may never end.
#[test]
fn a_second_descriptor_is_refused_at_once() {
    let uffd = removals();
    let config = Config {
        patience: Duration::from_secs(3600),
        ..Config::default()
    };
    let bed = Bed::with(Arc::new(Words), SOURCE, config);
    let mut socket = UnixStream::connect(&bed.path).unwrap();
    send(&socket, "[", &[uffd.as_fd()]);
    send(&socket, " ", &[uffd.as_fd()]);
    assert!(refusal(&bed, &mut socket, 0).contains("several descriptors"));
    // A text that is no array, too.
    let mut socket = UnixStream::connect(&bed.path).unwrap();
    send(&socket, " GET / HTTP/1.1", &[uffd.as_fd()]);
    assert!(refusal(&bed, &mut socket, 1).contains("is not Firecracker's array"));
    still_serves(&bed);
}

/// A message whose every piece may be its end is parsed only a few times.
#[test]
fn a_message_with_many_ends_is_refused() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), SOURCE);
    let mut socket = UnixStream::connect(&bed.path).unwrap();
    send(&socket, r#"[{"size":1,"other":[[]"#, &[uffd.as_fd()]);
    while socket.write_all(b",[]").is_ok() {
        std::thread::sleep(Duration::from_micros(50));
    }
    assert!(refusal(&bed, &mut socket, 0).contains("is not Firecracker's array"));
}

/// Silent connections take no more than their share of threads. Other VMMs wait until one is over.
#[test]
fn few_handshakes_at_a_time() {
    let uffd = removals();
    let config = Config {
        patience: Duration::from_secs(3600),
        ..Config::default()
    };
    let bed = Bed::with(Arc::new(Words), SOURCE, config);
    let silent = [(); 64].map(|()| UnixStream::connect(&bed.path).unwrap());
    bed.wait("64 connections", |pager| pager.connections() == 64);
    let vmm = Vmm::connect(&bed, uffd, 3, 2);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(bed.pager.connections(), 64);
    drop(silent);
    assert_eq!(vmm.memory.read_whole(1), word(4));
}
