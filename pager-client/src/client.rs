//! The connection to a pager, and the memory that it fills.

use lacuna_addr::{HvaRange, Level, PageCount};
use lacuna_source::{Handler, HandlerError, HandlerRegion, SourcePage, send_text};
use lacuna_sys::{Accesses, Errno, MissingArea, Userfaultfd, VmmMemory};
use rustix::fs::fstat;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// The request for the image's memory file.
const REQUEST: &[u8] = br#"{"version":1,"memory":"shared"}"#;

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The pager does not answer, or cannot be watched.
    #[error(transparent)]
    Handler(#[from] HandlerError),
    /// The pager does not take the request.
    #[error("the pager does not take the request for its memory: {0}")]
    Request(io::Error),
    /// The pager has sent no file.
    #[error(
        "the pager has closed the connection without a file of shared pages: its own messages say \
         why; an old one has no shared pages"
    )]
    NoFile,
    /// The process may have no userfaultfd.
    #[error(
        "this process may not have a userfaultfd for KVM: give it CAP_SYS_PTRACE, or access to \
         /dev/userfaultfd"
    )]
    NotAllowed,
    /// Linux is too old.
    #[error(
        "this kernel reports no faults on pages of a memory file: use Linux 5.14 or later, or \
         anonymous memory"
    )]
    OldKernel,
    /// The system's error.
    #[error("the memory cannot be made: {0}")]
    System(#[from] Errno),
}

/// A connection to a pager.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    path: PathBuf,
}

/// Memory that a pager fills. Dropping it unmaps it, so the VMM's other users must end before.
#[derive(Debug)]
pub struct PagedMemory {
    // The pager sees the end of the connection when the memory is no longer used.
    area: MissingArea,
    _pager: Handler,
}

impl Client {
    /// Connects to the pager that listens at `path`. The connection serves one VM.
    ///
    /// # Errors
    /// No pager listens there.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let (socket, path) = (Handler::socket(path)?, path.to_owned());
        Ok(Self { socket, path })
    }

    /// All of the image's memory. Clones share each page until they write to it.
    ///
    /// If the pager closes the connection or dies, `on_end` is called once, on its own thread. No
    /// page arrives then, and threads that touch a missing page wait. Removals wait too. A pager
    /// with a state folder may have a successor, which serves this memory without the connection.
    ///
    /// # Errors
    /// The pager has no shared pages, or this process may not have such memory.
    pub fn memory(
        self,
        accesses: Accesses,
        on_end: impl FnOnce(&str) + Send + 'static,
    ) -> Result<PagedMemory, ClientError> {
        send_text(&self.socket, REQUEST, None).map_err(ClientError::Request)?;
        let file = receive_file(&self.socket)?;
        let bytes = fstat(&file)?.st_size as u64;
        let uffd = descriptor(accesses, VmmMemory::File)?;
        let area = MissingArea::of_file(file.as_fd(), PageCount::from_bytes(bytes).get(), uffd)?;
        self.hand_over(area, on_end)
    }

    /// The first `pages` pages of the image's memory, which this VM does not share. Any pager with
    /// Firecracker's handshake provides them. As [`Client::memory`] otherwise.
    ///
    /// # Errors
    /// This process may not have such memory.
    pub fn anonymous(
        self,
        pages: PageCount,
        accesses: Accesses,
        on_end: impl FnOnce(&str) + Send + 'static,
    ) -> Result<PagedMemory, ClientError> {
        let uffd = descriptor(accesses, VmmMemory::Anonymous)?;
        self.hand_over(MissingArea::anonymous(pages.get(), uffd)?, on_end)
    }

    fn hand_over(
        self,
        area: MissingArea,
        on_end: impl FnOnce(&str) + Send + 'static,
    ) -> Result<PagedMemory, ClientError> {
        let region = HandlerRegion {
            memory: area.range(),
            first: SourcePage(0),
            page: Level::L4K,
        };
        let (of, uffd) = ((self.socket, &*self.path), area.userfaultfd().as_fd());
        let _pager = Handler::hand_over(of, &[region], uffd, on_end)?;
        Ok(PagedMemory { area, _pager })
    }
}

impl PagedMemory {
    /// Its addresses in this process. They stay mapped as long as this value lives.
    pub fn range(&self) -> HvaRange {
        self.area.range()
    }

    /// Copies the bytes from offset `at` on. The calling thread waits for missing pages.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn read(&self, at: u64, to: &mut [u8]) {
        self.area.read(at, to);
    }

    /// Writes the bytes from offset `at` on. The calling thread waits for missing pages.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn write(&self, at: u64, from: &[u8]) {
        self.area.write(at, from);
    }

    /// Takes `pages` pages away, from page `first` on, as for a balloon: they have zeros then.
    /// Waits until the pager has read the removal.
    ///
    /// # Errors
    /// As `madvise(2)`.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn discard(&self, first: u64, pages: u64) -> Result<(), ClientError> {
        Ok(self.area.discard(first, pages)?)
    }
}

fn descriptor(accesses: Accesses, memory: VmmMemory) -> Result<Userfaultfd, ClientError> {
    Userfaultfd::open_for_pager(accesses, memory).map_err(|errno| match errno {
        Errno::PERM => ClientError::NotAllowed,
        Errno::INVAL => ClientError::OldKernel,
        errno => errno.into(),
    })
}

/// Takes the pager's answer. Its text only confirms the request's version.
fn receive_file(socket: &UnixStream) -> Result<OwnedFd, ClientError> {
    let mut text = [0; 64];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let text = &mut [IoSliceMut::new(&mut text)];
    match recvmsg(socket, text, &mut rights, RecvFlags::CMSG_CLOEXEC) {
        Ok(_) | Err(Errno::CONNRESET) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut messages = rights.drain();
    let file = messages.find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    file.ok_or(ClientError::NoFile)
}
