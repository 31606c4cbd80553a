//! A connection to a VMM: whole frames, descriptors, and limits on its silence.

use crate::error::OffloadError;
use crate::frame::{Command, FRAME_BYTES, FrameError, Request, Response};
use lacuna_sys::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use rustix::process::geteuid;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a waiting thread looks at the caller's wish to end.
pub const LOOK: Duration = Duration::from_millis(200);

/// A stream socket, whose other end belongs to this user.
pub struct Connection {
    socket: UnixStream,
    patience: Option<Duration>,
    stop: Arc<AtomicBool>,
}

impl Connection {
    /// Takes `socket` if its other process has this process's user. Memory files and guest memory
    /// are for no other user, whatever the permissions of the socket's file. `patience`: how long
    /// the VMM may be silent, or for ever.
    ///
    /// # Errors
    /// Another user, or the socket has no peer.
    pub fn new(
        socket: UnixStream,
        patience: Option<Duration>,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self, OffloadError> {
        let failed = OffloadError::system("examine the VMM's process");
        let user = PeerCredentials::of(socket.as_fd()).map_err(failed)?.user;
        if user != geteuid().as_raw() {
            return Err(OffloadError::User(user));
        }
        // A zero timeout is refused.
        let timeout = patience.map(|patience| patience.max(Duration::from_millis(1)));
        let stop = Arc::clone(stop);
        let new = Self {
            socket,
            patience,
            stop,
        };
        let set = new.socket.set_write_timeout(timeout);
        set.map_err(|error| new.end(&error))?;
        Ok(new)
    }

    /// The next frame; `None` if the VMM has closed the connection before it.
    ///
    /// # Errors
    /// The frame is not whole or late.
    pub fn frame(&self) -> Result<Option<[u8; FRAME_BYTES]>, OffloadError> {
        let mut bytes = [0; FRAME_BYTES];
        match self.some(&mut bytes)? {
            0 => return Ok(None),
            got => self.exact(&mut bytes[got..], "in the middle of a message")?,
        }
        Ok(Some(bytes))
    }

    /// Fills `bytes`.
    ///
    /// # Errors
    /// The VMM is silent, or has closed the connection.
    pub fn exact(&self, mut bytes: &mut [u8], when: &'static str) -> Result<(), OffloadError> {
        while !bytes.is_empty() {
            match self.some(bytes)? {
                0 => return Err(OffloadError::Closed(when)),
                got => bytes = &mut bytes[got..],
            }
        }
        Ok(())
    }

    /// A slot's number, and the one descriptor with it.
    ///
    /// # Errors
    /// There is no descriptor, or more than one.
    pub fn descriptor(&self) -> Result<(u32, File), OffloadError> {
        const CLOSED: &str = "in the middle of MemoryFd";
        self.readable()?;
        let mut bytes = [0; 4];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(
            &self.socket,
            &mut into,
            &mut rights,
            RecvFlags::CMSG_CLOEXEC,
        );
        let received = received.map_err(OffloadError::system("receive a descriptor"))?;
        let messages = rights.drain();
        let mut fds: Vec<_> = messages
            .flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
                _ => Vec::new(),
            })
            .collect();
        // The kernel drops a descriptor that finds no room.
        let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
        let fd = match (received.bytes, fds.pop()) {
            (0, _) => return Err(OffloadError::Closed(CLOSED)),
            (_, Some(fd)) if !is_cut && fds.is_empty() => fd,
            (_, found) => {
                let what = match found {
                    Some(_) => "several descriptors: send one for each slot",
                    None if is_cut => "a descriptor without room for it: raise `ulimit -n`",
                    None => "no descriptor: send the slot's memory file, by SCM_RIGHTS",
                };
                return Err(OffloadError::Unusable(format!("MemoryFd has {what}")));
            }
        };
        self.exact(&mut bytes[received.bytes..], CLOSED)?;
        Ok((u32::from_le_bytes(bytes), File::from(fd)))
    }

    /// Sends `bytes`.
    ///
    /// # Errors
    /// The VMM does not read, or has closed the connection.
    pub fn send(&self, bytes: &[u8]) -> Result<(), OffloadError> {
        let sent = (&self.socket).write_all(bytes);
        sent.map_err(|error| self.end(&error))
    }

    /// Sends a response.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn respond(&self, is_ok: bool, length: u64) -> Result<(), OffloadError> {
        self.send(&Response { is_ok, length }.bytes())
    }

    /// Sends a request with the payload that `payload` sends, and waits for success.
    ///
    /// # Errors
    /// The VMM refuses it, or has ended.
    pub fn request(
        &self,
        command: Command,
        length: u64,
        payload: impl FnOnce(&Self) -> Result<(), OffloadError>,
    ) -> Result<(), OffloadError> {
        self.send(&Request { command, length }.bytes())?;
        payload(self)?;
        let frame = self.frame()?;
        let frame = frame.ok_or(OffloadError::Closed("instead of a response"))?;
        match Response::parse(&frame)? {
            Response { is_ok: false, .. } => Err(OffloadError::Refused(command)),
            Response { length: 0, .. } => Ok(()),
            Response { length, .. } => Err(FrameError::ResponseLength(length).into()),
        }
    }

    /// Sends a slot's number with its memory file.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn send_descriptor(&self, slot: u32, file: BorrowedFd<'_>) -> Result<(), OffloadError> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        assert!(rights.push(SendAncillaryMessage::ScmRights(&files)), "room");
        let bytes = slot.to_le_bytes();
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut rights, flags);
        match sent {
            Ok(sent) => self.send(&bytes[sent..]),
            Err(errno) => Err(self.end(&errno.into())),
        }
    }

    /// The same connection, for a message after which the caller's wish to end must wait.
    pub fn unstoppable(self) -> Self {
        let stop = Arc::default();
        Self { stop, ..self }
    }

    /// Ends it: the VMM waits for no further response.
    pub fn close(&self) {
        // It fails if the VMM has closed it.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Whether the VMM has neither closed the connection nor sent something.
    pub fn is_quiet(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::RDHUP)];
        matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
    }

    /// Reads at least one byte, or 0 at the end of the stream.
    fn some(&self, bytes: &mut [u8]) -> Result<usize, OffloadError> {
        self.readable()?;
        match (&self.socket).read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(0),
            read => read.map_err(|error| self.end(&error)),
        }
    }

    fn readable(&self) -> Result<(), OffloadError> {
        let began = Instant::now();
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(OffloadError::Interrupted);
            }
            let left = self
                .patience
                .map(|patience| patience.saturating_sub(began.elapsed()));
            if is_readable(&self.socket, left.unwrap_or(LOOK).min(LOOK))? {
                return Ok(());
            }
            if let (Some(patience), Some(Duration::ZERO)) = (self.patience, left) {
                return Err(OffloadError::Silent(patience));
            }
        }
    }

    /// The failure of the socket.
    fn end(&self, error: &io::Error) -> OffloadError {
        match (Errno::from_io_error(error), self.patience) {
            (Some(Errno::AGAIN), Some(patience)) => OffloadError::Silent(patience),
            (Some(Errno::PIPE | Errno::CONNRESET), _) => {
                OffloadError::Closed("in the middle of a message")
            }
            (errno, _) => OffloadError::System {
                what: "use the connection to the VMM",
                errno: errno.unwrap_or(Errno::IO),
            },
        }
    }
}

/// Whether `fd` is readable within `time`.
///
/// # Errors
/// The system refuses to wait.
pub fn is_readable(fd: impl std::os::fd::AsFd, time: Duration) -> Result<bool, OffloadError> {
    let time = Timespec::try_from(time).expect("a short time");
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&time)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(OffloadError::system("wait for the VMM")(errno)),
    }
}
