//! Firecracker's handshake, as a handler sees it, and the death of a handler.

use lacuna_addr::{Hva, HvaRange, Level};
use lacuna_skip::test;
use lacuna_source::{External, Handler, HandlerError, HandlerRegion, Policy, SourcePage};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use tempfile::TempDir;

fn regions() -> Vec<HandlerRegion> {
    let region = |start, pages, first, page| HandlerRegion {
        memory: HvaRange::new(Hva::new(start), pages).unwrap(),
        first: SourcePage(first),
        page,
    };
    vec![
        region(0x7f00_0000_0000, 256, 0, Level::L4K),
        region(0x7f10_0000_0000, 1024, 256, Level::L2M),
    ]
}

const MESSAGE: &str = concat!(
    r#"[{"base_host_virt_addr":139637976727552,"size":1048576,"offset":0,"#,
    r#""page_size":4096,"page_size_kib":4096},"#,
    r#"{"base_host_virt_addr":139706696204288,"size":4194304,"offset":1048576,"#,
    r#""page_size":2097152,"page_size_kib":2097152}]"#,
);

struct Fixture {
    _folder: TempDir,
    path: PathBuf,
    listener: UnixListener,
}

impl Fixture {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("handler");
        let listener = UnixListener::bind(&path).unwrap();
        Self {
            _folder: folder,
            path,
            listener,
        }
    }

    /// Connects with a file in place of a userfaultfd.
    fn connect(&self, file: &File) -> (Handler, Receiver<String>, UnixStream) {
        let (sender, deaths) = channel();
        let on_death = move |reason: &str| sender.send(reason.to_owned()).unwrap();
        let handler = Handler::connect(&self.path, &regions(), file.as_fd(), on_death).unwrap();
        let (socket, _) = self.listener.accept().unwrap();
        (handler, deaths, socket)
    }
}

/// Receives the message, as a handler does.
fn receive(socket: &UnixStream) -> (String, Vec<OwnedFd>) {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut body = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let length = recvmsg(socket, &mut body, &mut rights, flags)
        .unwrap()
        .bytes;
    let mut fds = Vec::new();
    for message in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            fds.extend(sent);
        }
    }
    (String::from_utf8(bytes[..length].to_vec()).unwrap(), fds)
}

#[test]
fn one_message_has_the_regions_and_the_descriptor() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"the same file").unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    let fixture = Fixture::new();
    let (handler, deaths, socket) = fixture.connect(&file);
    let (text, fds) = receive(&socket);
    assert_eq!(text, MESSAGE);
    let [fd]: [OwnedFd; 1] = fds.try_into().unwrap();
    let mut content = String::new();
    File::from(fd).read_to_string(&mut content).unwrap();
    assert_eq!(content, "the same file");
    // This side closes first: that is not a death.
    drop(handler);
    assert!(deaths.try_recv().is_err());
    assert_eq!(
        socket.take_error().unwrap().map(|error| error.to_string()),
        None
    );
}

#[test]
fn the_death_of_a_handler_is_noticed_once() {
    let file = tempfile::tempfile().unwrap();
    let fixture = Fixture::new();
    let (handler, deaths, mut socket) = fixture.connect(&file);
    // Bytes are not part of the protocol, and not a death.
    socket.write_all(b"hello").unwrap();
    assert!(deaths.try_recv().is_err());
    drop(socket);
    let reason = deaths.recv().unwrap();
    assert!(
        reason.contains("has closed its connection or died"),
        "{reason}"
    );
    drop(handler);
    assert!(deaths.recv().is_err(), "once");
}

#[test]
fn a_handler_that_does_not_listen_is_refused() {
    let file = tempfile::tempfile().unwrap();
    let path = PathBuf::from("/nonexistent/handler");
    let error = Handler::connect(&path, &regions(), file.as_fd(), |_| {}).unwrap_err();
    assert!(matches!(error, HandlerError::Connect { .. }));
    let expected = "the page-fault handler at /nonexistent/handler does not answer: No such file";
    assert!(error.to_string().starts_with(expected), "{error}");
}

#[test]
fn a_handler_fills_the_memory_of_one_vm_at_a_time() {
    let fixture = Fixture::new();
    let external = match External::process(&fixture.path, Policy::default()) {
        Ok(external) => external,
        Err(errno) => lacuna_skip::skip_test(format!("no userfaultfd: {errno}")),
    };
    external.begin(&regions()).unwrap();
    let error = external.begin(&regions()).unwrap_err();
    assert!(matches!(error, HandlerError::InUse(_)), "{error}");
    let (mut first, _) = fixture.listener.accept().unwrap();
    receive(&first);
    external.finish();
    assert_eq!(first.read(&mut [0]).unwrap(), 0, "the connection ends");
    drop(first);
    while external.is_connected() {
        std::thread::yield_now();
    }
    external.begin(&regions()).unwrap();
}
