//! Connections that another process makes, for a process in a sandbox.
//!
//! ```text
//! source                        the other process
//! one byte             ──────►  connects to the destination
//!                      ◄──────  the connection's descriptor, or an error: errno as i32, and text
//! ```
//! They have the two ends of a pair of sockets that keep messages apart. Each byte has one answer,
//! and all connections have the same destination: so any thread takes any answer.

use super::Address;
use super::command::CommandEnd;
use super::dial::dial;
use super::inherited::connected;
use super::stream::Socket;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// The longest text of an error.
const TEXT_MAX: usize = 4096;

/// Makes connections to one destination for another process, until that closes its end.
pub struct Dialer {
    /// The commands that were started for connections. They may run as long as they are here.
    commands: Receiver<CommandEnd>,
}

impl Dialer {
    /// Starts the thread that connects to `to`. Returns the other process's end too, for
    /// [`Connector::dialled_by`](super::Connector::dialled_by).
    ///
    /// # Errors
    /// The host has no descriptor or no thread.
    pub fn start(to: Address) -> io::Result<(Self, OwnedFd)> {
        let kind = SocketType::SEQPACKET;
        let (here, there) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        let (started, commands) = channel();
        let named = thread::Builder::new().name("lacuna-dial".into());
        named.spawn(move || while serve(&to, &here, &started).is_ok() {})?;
        Ok((Self { commands }, there))
    }

    /// How the last command of an address `exec:COMMAND` has ended, if one was started.
    pub fn command_end(self) -> Option<String> {
        self.commands.try_iter().last().map(|end| end.in_words())
    }
}

/// Answers one request. An error: the other process has closed its end.
fn serve(to: &Address, here: &OwnedFd, started: &Sender<CommandEnd>) -> io::Result<()> {
    if recv(here, &mut [0; 1], RecvFlags::empty())?.0 == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let dialled = dial(to);
    let (mut bytes, socket) = match &dialled {
        Ok(socket) => (vec![0; 4], Some(socket)),
        Err(error) => (
            error.raw_os_error().unwrap_or(0).to_le_bytes().to_vec(),
            None,
        ),
    };
    match &dialled {
        Ok(Socket::Command(_, end)) => _ = started.send(end.clone()),
        Ok(_) => {}
        Err(error) => bytes.extend(error.to_string().bytes().take(TEXT_MAX)),
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let descriptor = socket.map(|socket| [socket.as_fd()]);
    if let Some(descriptor) = &descriptor {
        let fits = rights.push(SendAncillaryMessage::ScmRights(descriptor));
        debug_assert!(fits, "there is room for one");
    }
    sendmsg(
        here,
        &[IoSlice::new(&bytes)],
        &mut rights,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Asks the other process for a connection.
pub(super) fn ask(dialer: &OwnedFd) -> io::Result<Socket> {
    let gone = || {
        io::Error::other(
            "the process that makes the connections has ended; ask again, as by lacuna migrate",
        )
    };
    rustix::net::send(dialer, &[1], SendFlags::NOSIGNAL).map_err(|_| gone())?;
    let mut bytes = [0; 4 + TEXT_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(&mut bytes)];
    let len = recvmsg(dialer, slices, &mut rights, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let socket = rights.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut all) => all.next(),
        _ => None,
    });
    match (socket, bytes[..len].split_first_chunk()) {
        (Some(socket), _) => connected(socket),
        (None, None) => Err(gone()),
        (None, Some((errno, text))) => Err(match i32::from_le_bytes(*errno) {
            0 => io::Error::other(String::from_utf8_lossy(text).into_owned()),
            errno => io::Error::from_raw_os_error(errno),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_connection_and_an_error_arrive() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (dialer, asks) = Dialer::start(Address::Unix(path.clone())).unwrap();
        let error = ask(&asks).err().expect("no listener");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let listener = UnixListener::bind(&path).unwrap();
        for _ in 0..2 {
            assert!(matches!(ask(&asks), Ok(Socket::Unix(_))));
            listener.accept().unwrap();
        }
        assert_eq!(dialer.command_end(), None);
    }

    #[test]
    fn an_ended_process_is_an_error() {
        let kind = SocketType::SEQPACKET;
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (asks, other) = pair.unwrap();
        drop(other);
        let error = ask(&asks).err().expect("no process").to_string();
        assert!(error.contains("has ended; ask again"), "{error}");
    }
}
