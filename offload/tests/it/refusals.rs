//! Peers that break the protocol, or end.

use crate::vmm::{
    Guest, PAGE, Peer, SaveDaemon, config, content, impatient, memfd, memory, saved,
    skip_with_huge_pages,
};
use lacuna_offload::wire::{Command, Request, Response};
use lacuna_offload::{Settings, Snapshot, Sources, When, restore, save};
use lacuna_skip::test;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// What a hostile VMM does after `Start`.
type Act = fn(&Guest, &mut Peer);

fn configured(guest: &Guest, peer: &mut Peer) {
    for slot in &guest.slots {
        peer.descriptors(slot.number, &[slot.file.as_fd()]);
        assert_eq!(peer.response(), Some(true));
    }
    peer.ok(Command::Config, &guest.config());
}

const ACTS: &[(&str, Act)] = &[
    ("Start after Start", |_, peer| {
        peer.send(Command::Start, 0, &[])
    }),
    ("a response has the same bytes", |_, peer| peer.answer(true)),
    ("unknown command 77", |_, peer| {
        let mut frame = [0; 16];
        frame[0] = 77;
        peer.raw(&frame);
    }),
    ("has no descriptor", |_, peer| peer.descriptors(3, &[])),
    ("several descriptors", |guest, peer| {
        let file = guest.slots[0].file.as_fd();
        peer.descriptors(3, &[file, file]);
    }),
    ("several descriptors", |guest, peer| {
        let file = guest.slots[0].file.as_fd();
        peer.descriptors(3, &[file, file, file]);
    }),
    ("a descriptor of no memory file", |_, peer| {
        let (pipe, _other) = std::io::pipe().unwrap();
        peer.descriptors(3, &[pipe.as_fd()]);
    }),
    ("slot 3 has two descriptors", |guest, peer| {
        for _ in 0..2 {
            peer.descriptors(3, &[guest.slots[0].file.as_fd()]);
        }
        peer.response();
    }),
    ("slot 3 is larger than its memory file", |guest, peer| {
        for slot in &guest.slots {
            peer.descriptors(slot.number, &[memfd(47 * PAGE).as_fd()]);
            peer.response();
        }
        peer.send(
            Command::Config,
            guest.config().len() as u64,
            &guest.config(),
        );
    }),
    ("slot 5 has no descriptor", |guest, peer| {
        peer.descriptors(3, &[guest.slots[0].file.as_fd()]);
        peer.response();
        peer.send(
            Command::Config,
            guest.config().len() as u64,
            &guest.config(),
        );
    }),
    ("slot 3 is not in the configuration", |guest, peer| {
        for slot in &guest.slots {
            peer.descriptors(slot.number, &[slot.file.as_fd()]);
            peer.response();
        }
        let one = config(r#"{"slot": 5, "gpa": 0, "size": 4096, "file_offset": 0}"#);
        peer.send(Command::Config, one.len() as u64, &one);
    }),
    ("no JSON", |_, peer| peer.send(Command::Config, 3, b"{}x")),
    ("State after Start", |_, peer| {
        peer.send(Command::State, 1, b"s")
    }),
    ("Complete after MemoryFd and Config", |guest, peer| {
        configured(guest, peer);
        peer.send(Command::Complete, 0, &[]);
    }),
    ("Memory after MemoryFd and Config", |guest, peer| {
        configured(guest, peer);
        peer.send(Command::Memory, 16, &memory(&[(0, PAGE)], content));
    }),
    ("in no memory slot", |guest, peer| {
        peer.ok(Command::Config, &guest.config());
        peer.send(
            Command::Memory,
            16,
            &memory(&[(31 * PAGE, 2 * PAGE)], content),
        );
    }),
    ("131072 bytes of the guest's 196608", |guest, peer| {
        peer.ok(Command::Config, &guest.config());
        peer.send(Command::Memory, 16, &memory(&[(0, 32 * PAGE)], content));
        peer.response();
        peer.ok(Command::State, &guest.state);
        peer.send(Command::Complete, 0, &[]);
    }),
    ("made shorter", |guest, peer| {
        configured(guest, peer);
        peer.ok(Command::State, &guest.state);
        guest.slots[0].file.set_len(40 * PAGE).unwrap();
        peer.send(Command::Complete, 0, &[]);
    }),
    ("sent more while its memory was copied", |guest, peer| {
        configured(guest, peer);
        peer.ok(Command::State, &guest.state);
        let end = Request {
            command: Command::Complete,
            length: 0,
        };
        peer.raw(&[&end.bytes()[..], &[1]].concat());
    }),
    ("sent nothing for 100ms", |guest, peer| {
        configured(guest, peer)
    }),
    ("sent nothing for 100ms", |_, peer| {
        peer.raw(
            &Request {
                command: Command::State,
                length: 9,
            }
            .bytes()[..9],
        );
    }),
];

/// Each is refused with the reason and a response, and leaves no folder.
#[test]
fn senders_that_break_the_protocol() {
    for (reason, act) in ACTS {
        let (daemon, mut peer) = SaveDaemon::start(impatient());
        peer.ok(Command::Start, &[]);
        act(&Guest::new(), &mut peer);
        assert_eq!(peer.response(), Some(false), "{reason}");
        assert_eq!(peer.response(), None, "{reason}");
        let error = daemon.fails();
        assert!(error.contains(reason), "{error}, not {reason}");
    }
    let (daemon, mut peer) = SaveDaemon::start(impatient());
    let mut frame = Request {
        command: Command::Start,
        length: 0,
    }
    .bytes();
    frame[2] = 1;
    peer.raw(&frame);
    assert_eq!(peer.response(), Some(false));
    assert!(daemon.fails().contains("version 1"));
}

/// Wherever a sender ends, there is no folder, also if it ends properly.
#[test]
fn senders_that_end() {
    let steps: [Act; 5] = [
        |_, peer| peer.raw(&[7, 0]),
        |guest, peer| {
            peer.descriptors(3, &[guest.slots[0].file.as_fd()]);
            peer.response();
        },
        configured,
        |guest, peer| {
            configured(guest, peer);
            peer.ok(Command::State, &guest.state);
        },
        |guest, peer| {
            configured(guest, peer);
            peer.send(Command::State, 1000, b"some of it");
        },
    ];
    for step in steps {
        let (daemon, mut peer) = SaveDaemon::start(Settings::default());
        peer.ok(Command::Start, &[]);
        step(&Guest::new(), &mut peer);
        drop(peer);
        let error = daemon.fails();
        assert!(error.contains("closed the connection"), "{error}");
    }
    let (daemon, mut peer) = SaveDaemon::start(Settings::default());
    Guest::new().send_by_descriptors(&mut peer);
    peer.ok(Command::Abandon, &[]);
    assert!(daemon.fails().contains("abandoned"));
}

/// The daemon also ends at its caller's wish, whatever it waits for.
#[test]
fn interrupted_and_existing() {
    let settings = Settings::default();
    let stop = Arc::clone(&settings.stop);
    let (daemon, mut peer) = SaveDaemon::start(settings);
    peer.ok(Command::Start, &[]);
    stop.store(true, Ordering::Relaxed);
    assert!(daemon.fails().contains("interrupted"));
    let folder = TempDir::new().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let error = save(&listener, folder.path(), &Settings::default()).unwrap_err();
    assert!(error.to_string().contains("something already"), "{error}");
}

/// Neither a look at the socket, nor a part of a message, nor another user's process ends the wait
/// for a VM.
#[test]
fn strangers() {
    let folder = TempDir::new().unwrap();
    let name = folder.path().as_os_str().as_encoded_bytes();
    let at = SocketAddr::from_abstract_name(name).unwrap();
    let listener = UnixListener::bind_addr(&at).unwrap();
    drop(UnixStream::connect_addr(&at).unwrap());
    Peer(UnixStream::connect_addr(&at).unwrap()).raw(&[1, 0, 0]);
    let said = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&said);
    let settings = Settings {
        report: Arc::new(move |text: &str| kept.lock().unwrap().push(text.to_owned())),
        ..Settings::default()
    };
    let progress = Arc::clone(&settings.progress);
    let to = folder.path().join("saved");
    let daemon = std::thread::spawn(move || save(&listener, &to, &settings));
    let place = at.clone();
    // The user of this thread alone changes.
    let stranger = std::thread::spawn(move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).ok()?;
        let mut peer = Peer(UnixStream::connect_addr(&place).unwrap());
        peer.send(Command::Start, 0, &[]);
        Some(peer.response())
    });
    let stranger = stranger.join().unwrap();
    let mut peer = Peer(UnixStream::connect_addr(&at).unwrap());
    Guest::new().send_by_descriptors(&mut peer);
    peer.ok(Command::Complete, &[]);
    let saved = daemon.join().unwrap().unwrap();
    let bytes = [&progress.done, &progress.all].map(|bytes| bytes.load(Ordering::Relaxed));
    assert_eq!(bytes, [saved.bytes; 2]);
    let Some(response) = stranger else {
        return lacuna_skip::skip("only root can become another user");
    };
    assert_eq!(response, None);
    let said = said.lock().unwrap().concat();
    assert!(said.contains("runs as user 65534"), "{said}");
    assert!(said.contains("in the middle of a message"), "{said}");
}

/// What a VMM does instead of receiving a VM.
type Answers = fn(UnixStream);

#[test]
fn receivers_that_break_the_protocol() {
    fn read(socket: &mut UnixStream, bytes: usize) {
        socket.read_exact(&mut vec![0; bytes]).unwrap();
    }
    let (folder, _) = saved(&Guest::new(), Command::Complete);
    let snapshot = Snapshot::open(&folder.path().join("saved")).unwrap();
    let acts: &[(&str, Answers)] = &[
        ("refused Start", |mut socket| {
            read(&mut socket, 16);
            Peer(socket).answer(false);
        }),
        (
            "closed the connection instead of a response",
            |mut socket| {
                read(&mut socket, 16);
            },
        ),
        ("sent nothing for 100ms", |mut socket| {
            read(&mut socket, 16);
            let _ = socket.read(&mut [0]);
        }),
        ("unknown status 9", |mut socket| {
            read(&mut socket, 16);
            Peer(socket).raw(&[9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        }),
        ("a payload of 4 bytes", |mut socket| {
            read(&mut socket, 16);
            let response = Response {
                is_ok: true,
                length: 4,
            };
            Peer(socket).raw(&response.bytes());
        }),
        ("refused MemoryFd", |mut socket| {
            read(&mut socket, 16);
            let mut peer = Peer(socket);
            peer.answer(true);
            read(&mut peer.0, 20);
            peer.answer(false);
        }),
    ];
    for (reason, act) in acts {
        let socket = folder.path().join("restore");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let sources = Sources {
            faults: &lacuna_source::Zeros,
            fill: &lacuna_source::Zeros,
        };
        std::thread::scope(|scope| {
            scope.spawn(|| act(listener.accept().unwrap().0));
            let error = restore(&snapshot, &socket, sources, When::Before, &impatient());
            let error = error.unwrap_err().to_string();
            assert!(error.contains(reason), "{error}, not {reason}");
        });
    }
}

/// A fault connection that breaks the protocol gets a refusal and its end; the caller the reason.
#[test]
fn faults_that_break_the_protocol() {
    skip_with_huge_pages();
    let (folder, _) = saved(&Guest::new(), Command::Complete);
    let snapshot = Snapshot::open(&folder.path().join("saved")).unwrap();
    let acts: [(&str, bool, Act); 4] = [
        ("unknown command 0", true, |_, peer| peer.raw(&[0; 16])),
        ("Complete after the migration", true, |_, peer| {
            peer.send(Command::Complete, 0, &[]);
        }),
        ("PageFault with 8 bytes", true, |_, peer| {
            peer.send(Command::PageFault, 8, &[0; 8]);
        }),
        ("in the middle of PageFault", false, |_, peer| {
            peer.send(Command::PageFault, 16, &[0; 8]);
        }),
    ];
    for (reason, is_answered, act) in acts {
        let socket = folder.path().join("restore");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let sources = Sources {
            faults: &lacuna_source::Zeros,
            fill: &lacuna_source::Zeros,
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut received = crate::vmm::Received::receive(&listener, true);
                received.main.answer(true);
                let mut faults = received.faults.take().unwrap();
                act(&Guest::new(), &mut faults);
                if is_answered {
                    assert_eq!(faults.response(), Some(false));
                    assert_eq!(faults.response(), None);
                }
            });
            let when = When::OnDemand { fill: None };
            let error = restore(&snapshot, &socket, sources, when, &Settings::default());
            let error = error.unwrap_err().to_string();
            assert!(error.contains(reason), "{error}, not {reason}");
        });
    }
}

#[test]
fn damaged_snapshots() {
    let (folder, _) = saved(&Guest::new(), Command::Complete);
    let at = folder.path().join("saved");
    let fails = || Snapshot::open(&at).unwrap_err().to_string();
    let cut = |name: &str, by: u64| {
        let file = File::options().write(true).open(at.join(name)).unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(length - by).unwrap();
    };
    cut("state.json", 1);
    assert!(fails().contains("state.json has 299999 bytes instead of 300000"));
    cut("manifest.json", 1);
    assert!(fails().contains("is damaged"));
    std::fs::write(at.join("manifest.json"), b"{}").unwrap();
    assert!(fails().contains("missing field"));
    std::fs::remove_file(at.join("manifest.json")).unwrap();
    assert!(fails().contains("give a folder of offload save"));
}
