//! An external handler that fills memory itself: Firecracker's userfaultfd handshake.
//!
//! ```text
//! handler: bind, listen                      this side
//!          ◄───────────────── connect
//!          ◄───────────────── one message: a JSON array of regions, the userfaultfd as SCM_RIGHTS
//! reads the userfaultfd's events, copies pages to base_host_virt_addr + n from offset + n
//!          both sides keep the socket open; no other message follows
//! ```
//! If the handler dies, the guest hangs, because this side has a descriptor of the userfaultfd too.
//! So a thread watches the socket: a handler keeps it open as long as it serves, and the kernel
//! closes it when the handler dies.

use crate::SourcePage;
use lacuna_addr::{HvaRange, Level, PAGE_SIZE};
use lacuna_sync::join;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use std::fmt::Write;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// A range of the guest's memory, as in the message to the handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandlerRegion {
    /// Its mapping in this process. The userfaultfd reports addresses in it.
    pub memory: HvaRange,
    /// Its first page in the handler's memory file.
    pub first: SourcePage,
    /// The size of its pages: the handler fills whole pages.
    pub page: Level,
}

/// Why there is no handler.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandlerError {
    /// No process listens there, or the process does not take the message.
    #[error(
        "the page-fault handler at {} does not answer: {source}; start it first",
        path.display()
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The socket's path does not fit in a socket address.
    #[error(
        "the path of the page-fault handler's socket has {0} bytes and may have 107: use a shorter \
         one, or one that begins in the current folder"
    )]
    Path(usize),
    /// The handler fills the memory of another VM.
    #[error(
        "the page-fault handler at {} fills the memory of another VM: make a source for each VM",
        .0.display()
    )]
    InUse(PathBuf),
    /// No descriptor or thread is left.
    #[error("cannot watch the page-fault handler: {0}; raise the limits (ulimit -n, -u)")]
    Watch(io::Error),
}

impl HandlerError {
    /// The error of a call on the socket at `path`.
    fn at(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::InvalidInput => Self::Path(path.as_os_str().len()),
            _ => Self::Connect {
                path: path.to_owned(),
                source,
            },
        }
    }
}

/// A handler that has the userfaultfd. Dropping it closes the connection; the handler keeps its
/// descriptor.
#[derive(Debug)]
pub struct Handler {
    socket: Arc<UnixStream>,
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Handler {
    /// Connects to the handler that listens at `path`, and hands the memory over.
    ///
    /// # Errors
    /// As [`Handler::socket`] and [`Handler::hand_over`].
    pub fn connect(
        path: &Path,
        regions: &[HandlerRegion],
        uffd: BorrowedFd<'_>,
        on_death: impl FnOnce(&str) + Send + 'static,
    ) -> Result<Self, HandlerError> {
        let socket = Self::socket(path)?;
        Self::hand_over((socket, path), regions, uffd, on_death)
    }

    /// Connects to the handler that listens at `path`, for [`Handler::hand_over`].
    ///
    /// # Errors
    /// No handler listens there.
    pub fn socket(path: &Path) -> Result<UnixStream, HandlerError> {
        UnixStream::connect(path).map_err(|source| HandlerError::at(path, source))
    }

    /// Sends `uffd` and its `regions` to the handler behind `socket`, which listens at `path`. If
    /// the handler closes the connection or dies, `on_death` is called once, on its own thread. No
    /// page arrives then, so the VM's policy decides.
    ///
    /// # Errors
    /// No handler takes the message, or the handler cannot be watched.
    pub fn hand_over(
        (socket, path): (UnixStream, &Path),
        regions: &[HandlerRegion],
        uffd: BorrowedFd<'_>,
        on_death: impl FnOnce(&str) + Send + 'static,
    ) -> Result<Self, HandlerError> {
        let socket = Arc::new(socket);
        send_regions(&socket, regions, uffd).map_err(|source| HandlerError::at(path, source))?;
        let bell =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| HandlerError::Watch(errno.into()))?;
        let bell = Arc::new(bell);
        let (watched, ends) = (Arc::clone(&socket), Arc::clone(&bell));
        let named = std::thread::Builder::new().name("lacuna-handler".into());
        let path = path.to_owned();
        let watch = move || {
            if hangs_up(&watched, &ends) {
                let path = path.display();
                on_death(&format!(
                    "the page-fault handler at {path} has closed its connection or died"
                ));
            }
        };
        let thread = Some(named.spawn(watch).map_err(HandlerError::Watch)?);
        Ok(Self {
            socket,
            bell,
            thread,
        })
    }

    /// Reports that the memory is no longer used: the handler sees the connection end.
    pub fn finish(&self) {
        // It fails if the handler has closed the socket first.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        // It fails only if the counter is full: then the thread wakes up anyway.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        self.thread.take().into_iter().for_each(join);
    }
}

/// Waits for the end of the connection; false if `bell` was first. It does not read the handler's
/// bytes: the protocol has none.
fn hangs_up(socket: &UnixStream, bell: &OwnedFd) -> bool {
    loop {
        let mut fds = [
            PollFd::new(socket, PollFlags::RDHUP),
            PollFd::new(bell, PollFlags::IN),
        ];
        // Interrupted: neither has an event.
        if poll(&mut fds, None).is_err() {
            continue;
        }
        if !fds[1].revents().is_empty() {
            return false;
        }
        if !fds[0].revents().is_empty() {
            return true;
        }
    }
}

/// The handshake's message.
///
/// # Errors
/// The socket does not take it.
pub fn send_regions(
    socket: &impl AsFd,
    regions: &[HandlerRegion],
    uffd: BorrowedFd<'_>,
) -> io::Result<()> {
    send_text(socket, json(regions).as_bytes(), Some(uffd))
}

/// Sends `text` with a descriptor, as [`send_regions`] does: for tests of handlers, whose text and
/// descriptor may be wrong.
///
/// # Errors
/// The socket does not take it.
pub fn send_text(socket: &impl AsFd, text: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let fits =
        fd.as_slice().is_empty() || rights.push(SendAncillaryMessage::ScmRights(fd.as_slice()));
    debug_assert!(fits, "the space suffices for one descriptor");
    let mut sent = sendmsg(
        socket,
        &[IoSlice::new(text)],
        &mut rights,
        SendFlags::NOSIGNAL,
    )?;
    while sent < text.len() {
        sent += send(socket, &text[sent..], SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// The regions in Firecracker's format. `page_size_kib` is in bytes too, despite its name: older
/// handlers read only that field.
fn json(regions: &[HandlerRegion]) -> String {
    let mut text = String::from("[");
    for (index, region) in regions.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let base = region.memory.start().get();
        let size = region.memory.pages() * PAGE_SIZE as u64;
        let offset = region.first.0 * PAGE_SIZE as u64;
        let page = region.page.bytes();
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "{comma}{{\"base_host_virt_addr\":{base},\"size\":{size},\"offset\":{offset},\
             \"page_size\":{page},\"page_size_kib\":{page}}}"
        );
    }
    text.push(']');
    text
}
