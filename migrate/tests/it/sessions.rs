//! Sessions, which make their own connections.

use crate::snapshots::common::wait_for_program;
use lacuna_addr::PageCount;
use lacuna_machine::{
    Arch, Builder as _, CpuModel, Ending, Image, Machine, PlatformDevices, Running,
};
use lacuna_migrate::MigrateError;
use lacuna_migrate::session::{Destination, IncomingStage, Outcome, Outgoing, Stayed};
use lacuna_migrate::stream::{Mode, Plan};
use lacuna_migrate::transport::{Address, Connector, Listener, TransportError};
use rustix::fs::{CWD, FileType, Mode as FileMode, mknodat};
use rustix::io::{FdFlags, fcntl_setfd};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

fn builder() -> lacuna_soft::VmBuilder {
    let memory = PageCount::from_bytes(6 << 20);
    lacuna_soft::VmBuilder {
        cpu: CpuModel::Common { tsc_khz: None },
        ..lacuna_soft::VmBuilder::new(memory, memory)
    }
}

fn devices() -> PlatformDevices {
    PlatformDevices::of(Arch::X86_64, |line: &str| println!("{line}"))
}

/// Takes the third guest: the first one is refused, and its run was ended; the second one is given
/// up while its memory arrives.
fn arrive(destination: &Destination) {
    let refused = destination.wait().unwrap().expect("a guest");
    refused.refuse("not today");
    refused.handle().end(Some("stopped"));
    drop(refused);

    let given_up = destination.wait().unwrap().expect("a guest again");
    let vm = builder().build().unwrap();
    let received = given_up.receive(&vm, &devices(), &mut || ControlFlow::Break(()));
    assert!(matches!(received.map(drop), Err(MigrateError::Cancelled)));
    drop(given_up);
    take(destination);
}

/// Takes a guest, and stops it when it is whole.
fn take(destination: &Destination) {
    let arrival = destination.wait().unwrap().expect("a guest again");
    let machine = Machine::new(builder().build().unwrap(), devices()).unwrap();
    let end = arrival.run(machine, &mut || ControlFlow::Continue(()), |guest| {
        while arrival.handle().stage() != IncomingStage::Whole {
            thread::yield_now();
        }
        guest.stop();
    });
    assert_eq!(end.unwrap().ending, Ending::Stopped);
}

/// Sends the guest until it has moved. Returns why it stayed before.
fn send(guest: &Running<lacuna_soft::Vm>, to: &Address) -> Vec<String> {
    let mut reasons = Vec::new();
    loop {
        let connector = Connector::new(to.clone(), None).unwrap();
        let outgoing = Outgoing::new(connector, Plan::default());
        match outgoing.send(guest, &|_| ()) {
            Outcome::Moved(moved) => {
                assert!(moved.report.pages > 0, "{:?}", moved.report);
                return reasons;
            }
            Outcome::Stayed(Stayed::Failed(why)) => reasons.push(why.to_string()),
            _ => panic!("{reasons:?}"),
        }
    }
}

/// Runs a guest that does not end, and ends it after `body`.
fn with_guest(body: impl FnOnce(&Running<lacuna_soft::Vm>)) {
    if let Some(why) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(why);
    }
    let image = lacuna_guest::image("verify").expect("a built-in guest");
    let image = Image::parse(image.file).unwrap();
    let mut builder = builder();
    builder.command_line = "rounds=100000".into();
    let guest = builder.start(&image, devices()).unwrap();
    wait_for_program(&guest);
    body(&guest);
}

fn destination(at: &str) -> Destination {
    let listener = Listener::open(&at.parse().unwrap(), None, Arc::default());
    Destination::new(listener.unwrap(), |_| ())
}

#[test]
fn a_destination_waits_again_after_a_failed_attempt() {
    let destination = destination("tcp:127.0.0.1:0");
    with_guest(|guest| {
        thread::scope(|scope| {
            scope.spawn(|| arrive(&destination));
            let reasons = send(guest, destination.address());
            let [refused, given_up] = &reasons[..] else {
                panic!("{reasons:?}");
            };
            assert!(refused.contains("not today"), "{refused}");
            assert!(given_up.contains("refused"), "{given_up}");
        });
    });
}

/// The number of a descriptor that a program started by this process would inherit.
fn inherit(socket: &UnixStream) -> i32 {
    fcntl_setfd(socket, FdFlags::empty()).unwrap();
    socket.as_raw_fd()
}

#[test]
fn a_guest_moves_over_an_inherited_socket() {
    let (here, there) = UnixStream::pair().unwrap();
    let to: Address = format!("fd:{}", inherit(&here)).parse().unwrap();
    let destination = destination(&format!("fd:{}", inherit(&there)));
    with_guest(|guest| {
        // Its pages would need connections of their own.
        for mode in [Mode::PostCopy, Mode::Hybrid] {
            let connector = Connector::new(to.clone(), None).unwrap();
            match Outgoing::new(connector, mode.into()).send(guest, &|_| ()) {
                Outcome::Stayed(Stayed::NotConnected(TransportError::Single(at))) => {
                    assert_eq!(at, to);
                }
                _ => panic!("{mode:?}"),
            }
        }
        thread::scope(|scope| {
            scope.spawn(|| take(&destination));
            assert_eq!(send(guest, &to), [""; 0]);
        });
    });
    let again = destination.wait().map(drop);
    assert!(matches!(again, Err(TransportError::Single(_))), "{again:?}");
}

/// Each side's command passes the bytes on through two pipes.
#[test]
fn a_guest_moves_through_commands() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = |name: &str| {
        let path = folder.path().join(name);
        mknodat(
            CWD,
            &path,
            FileType::Fifo,
            FileMode::RUSR | FileMode::WUSR,
            0,
        )
        .unwrap();
        path.display().to_string()
    };
    let (up, down) = (pipe("up"), pipe("down"));
    let command = |from: &str, to: &str| format!("exec:cat <{from} & exec cat >{to}");
    let destination = destination(&command(&up, &down));
    with_guest(|guest| {
        thread::scope(|scope| {
            scope.spawn(|| take(&destination));
            let to = command(&down, &up).parse().unwrap();
            assert_eq!(send(guest, &to), [""; 0]);
        });
    });
}

/// The exit status of a command is in the errors of both sides.
#[test]
fn a_command_that_fails_is_named_with_its_status() {
    let failed = destination("exec:exit 7").wait().map(drop);
    let error = failed.expect_err("no guest").to_string();
    assert!(error.contains("ended with exit status: 7"), "{error}");
    with_guest(|guest| {
        let connector = Connector::new("exec:cat >/dev/null; exit 8".parse().unwrap(), None);
        let outgoing = Outgoing::new(connector.unwrap(), Plan::default());
        let handle = outgoing.handle().clone();
        thread::scope(|scope| {
            // Its command reads until the connection ends, and never answers.
            scope.spawn(move || {
                while handle.progress().bytes == 0 {
                    thread::yield_now();
                }
                handle.cancel().unwrap();
            });
            let outcome = outgoing.send(guest, &|_| ());
            assert!(matches!(outcome, Outcome::Stayed(Stayed::Cancelled)));
        });
        let connector = Connector::new("exec:exit 9".parse().unwrap(), None);
        let outgoing = Outgoing::new(connector.unwrap(), Plan::default());
        match outgoing.send(guest, &|_| ()) {
            Outcome::Stayed(Stayed::Failed(why)) => {
                assert!(why.to_string().contains("exit status: 9"), "{why}");
            }
            _ => panic!("it has moved"),
        }
    });
}
