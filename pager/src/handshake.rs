//! Firecracker's handshake: one message with the regions as JSON and a userfaultfd. A VMM that
//! shares the image's pages asks for their file before.

use crate::regions::{REGIONS_MAX, RegionMessage, Regions};
use crate::served::Served;
use crate::shared_pages::SharedPages;
use lacuna_addr::Hva;
use lacuna_source::send_text;
use lacuna_sys::{Errno, Userfaultfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use serde::Deserialize;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most bytes of a message: more than [`REGIONS_MAX`] regions need.
const MESSAGE_MAX: usize = 256 << 10;
/// How often a first read may be empty, and the pause after it.
const EMPTY_READS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(10);
/// How often an unfinished message is parsed. Each costs the time of the whole text.
const PARSES: u32 = 64;

/// Why a VMM is not served. Its connection is closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The process has another user.
    #[error("it runs as user {0}, whom this pager does not serve: allow this user id")]
    User(u32),
    /// The message is late.
    #[error("it sent no whole message in {0:?}: send the regions and the userfaultfd at once")]
    Late(Duration),
    /// The connection has ended.
    #[error("it closed the connection after {0} bytes of its message: keep it open")]
    Closed(usize),
    /// The message is too long.
    #[error("its message has more than {MESSAGE_MAX} bytes: announce fewer regions")]
    Long,
    /// The message is not the JSON of the handshake.
    #[error(
        "its message is not Firecracker's array of regions, and no request ({0}): correct the VMM"
    )]
    Json(String),
    /// The message has no descriptor.
    #[error("its message has no descriptor: send the userfaultfd with it, by SCM_RIGHTS")]
    NoDescriptor,
    /// The message has several descriptors.
    #[error("its message has several descriptors: send the userfaultfd alone")]
    Descriptors,
    /// This process has no room for the descriptor.
    #[error("the pager has no room for its descriptor: raise the pager's `ulimit -n`")]
    NoRoom,
    /// The descriptor is something else.
    #[error("its descriptor is no userfaultfd ({0}): send the one that its memory has")]
    NoUserfaultfd(Errno),
    /// The descriptor cannot be polled.
    #[error("its userfaultfd cannot be polled: make it with O_NONBLOCK, and call UFFDIO_API")]
    Blocking,
    /// There is no region.
    #[error("its message has no region: announce the guest's memory")]
    NoRegions,
    /// There are too many regions.
    #[error("its message has {0} regions: announce at most {REGIONS_MAX}")]
    ManyRegions(usize),
    /// A region has no page size.
    #[error("region {0} has neither page_size nor page_size_kib: give one, in bytes")]
    NoPageSize(usize),
    /// A region has two page sizes.
    #[error(
        "region {at} has a page_size of {bytes} and a page_size_kib of {other}: both are bytes"
    )]
    TwoPageSizes {
        /// The region's index.
        at: usize,
        /// Bytes.
        bytes: u64,
        /// Bytes.
        other: u64,
    },
    /// There are no such pages.
    #[error("region {at} has pages of {bytes} bytes: give 4096, 2097152 or 1073741824, in bytes")]
    PageSize {
        /// The region's index.
        at: usize,
        /// Bytes.
        bytes: u64,
    },
    /// A region is not whole pages of its size.
    #[error("region {at} at {base:#x} with {size} bytes is not whole pages of {bytes} bytes")]
    Unaligned {
        /// The region's index.
        at: usize,
        /// Its address.
        base: u64,
        /// Bytes.
        size: u64,
        /// Bytes of a page.
        bytes: u64,
    },
    /// An offset is not a page's.
    #[error("region {at} has offset {offset}: give a multiple of 4096")]
    UnalignedOffset {
        /// The region's index.
        at: usize,
        /// Bytes.
        offset: u64,
    },
    /// The addresses wrap.
    #[error("region {at} at {base:#x} with {size} bytes has no such addresses: correct the VMM")]
    Wraps {
        /// The region's index.
        at: usize,
        /// Its address.
        base: u64,
        /// Bytes.
        size: u64,
    },
    /// The source has no such bytes.
    #[error(
        "region {at} has {size} bytes from offset {offset} on, and the source has {has}: start the \
         pager with this VM's memory"
    )]
    BeyondSource {
        /// The region's index.
        at: usize,
        /// Bytes.
        offset: u64,
        /// Bytes.
        size: u64,
        /// Bytes of the source.
        has: u64,
    },
    /// The regions are larger than the source.
    #[error("its regions have {sum} bytes, and the source has {has}: announce each offset once")]
    MoreThanSource {
        /// Bytes.
        sum: u64,
        /// Bytes of the source.
        has: u64,
    },
    /// Two regions have common addresses.
    #[error("two of its regions have the address {0}: correct the VMM")]
    Overlap(Hva),
    /// The request for shared memory has another version.
    #[error("it speaks version {0} of the request for shared memory: use version {VERSION}")]
    Version(u32),
    /// There are no shared pages here.
    #[error("this host has no shared pages ({0}): connect without the request for them")]
    NoSharing(Errno),
    /// The file's descriptor has not been sent.
    #[error("it does not take the file of the shared pages: {0}")]
    NotTaken(io::Error),
    /// A region of shared memory has large pages.
    #[error("its shared memory has pages of more than 4096 bytes: announce page_size 4096")]
    LargeSharedPages,
    /// Removed pages would get the file's content.
    #[error("its userfaultfd does not report removals: enable UFFD_FEATURE_EVENT_REMOVE")]
    NoRemovals,
    /// The socket serves as many VMs as it may.
    #[error("its socket serves {0} VMs already, as many as vms-max says: end one, or raise it")]
    ManyVms(u64),
    /// The socket's VMs would have too much memory.
    #[error(
        "it has {bytes} bytes, and the other VMs of its socket {has}: that is more than the {most} \
         of memory-max; end one, or raise it"
    )]
    MuchMemory {
        /// Bytes of this VM.
        bytes: u64,
        /// Bytes of the other ones.
        has: u64,
        /// The limit.
        most: u64,
    },
    /// The system's error.
    #[error("its message cannot be read: {0}")]
    System(#[from] Errno),
    /// The state folder takes no file.
    #[error(
        "the next pager would not know it ({0}): give the state folder more room, and raise \
         `ulimit -l`"
    )]
    State(#[from] std::io::Error),
}

/// A VMM's message, checked.
pub struct Handshake {
    /// The VM's memory.
    pub regions: Regions,
    /// As the VMM has announced it.
    pub announced: Vec<RegionMessage>,
    /// Where its faults are read.
    pub uffd: Userfaultfd,
    /// The file that it has mapped.
    pub shared: Option<Arc<SharedPages>>,
}

/// A whole message.
enum Message {
    Regions(Vec<RegionMessage>),
    Request(SharingRequest),
}

/// The request for the file of the shared pages.
#[derive(Deserialize)]
struct SharingRequest {
    version: u32,
    /// It has one value in this version.
    #[serde(rename = "memory")]
    _memory: SharedMemory,
}

#[derive(Deserialize)]
enum SharedMemory {
    #[serde(rename = "shared")]
    Shared,
}

/// The version of the request for shared memory.
const VERSION: u32 = 1;
/// The answer to it, which comes with the file's descriptor.
const ANSWER: &[u8] = br#"{"version":1}"#;

impl Handshake {
    /// Takes the message, for a VM of `image`.
    ///
    /// # Errors
    /// It is wrong, or late.
    pub fn receive(
        socket: &UnixStream,
        image: &Served,
        patience: Duration,
    ) -> Result<Self, HandshakeError> {
        let (mut message, mut fd) = receive(socket, patience)?;
        let mut shared = None;
        if let Message::Request(request) = message {
            shared = Some(request.answer(socket, image)?);
            (message, fd) = receive(socket, patience)?;
        }
        let Message::Regions(announced) = message else {
            return Err(HandshakeError::NoRegions);
        };
        let fd = fd.ok_or(HandshakeError::NoDescriptor)?;
        let uffd = Userfaultfd::try_from(fd).map_err(HandshakeError::NoUserfaultfd)?;
        let mut polled = [PollFd::new(&uffd, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default()))?;
        if polled[0].revents().contains(PollFlags::ERR) {
            return Err(HandshakeError::Blocking);
        }
        let regions = Regions::new(&announced, image.image.pages)?;
        if shared.is_some() {
            if regions.has_large_pages() {
                return Err(HandshakeError::LargeSharedPages);
            }
            if !uffd.reports_removals()? {
                return Err(HandshakeError::NoRemovals);
            }
        }
        Ok(Self {
            regions,
            announced,
            uffd,
            shared,
        })
    }
}

impl SharingRequest {
    fn answer(
        &self,
        socket: &UnixStream,
        image: &Served,
    ) -> Result<Arc<SharedPages>, HandshakeError> {
        if self.version != VERSION {
            return Err(HandshakeError::Version(self.version));
        }
        let shared = image.shared().map_err(HandshakeError::NoSharing)?;
        let file = shared.reader()?;
        send_text(socket, ANSWER, Some(file.as_fd())).map_err(HandshakeError::NotTaken)?;
        Ok(shared)
    }
}

fn parse(text: &[u8]) -> serde_json::Result<Message> {
    match text.trim_ascii() {
        [b'{', ..] => serde_json::from_slice(text).map(Message::Request),
        _ => serde_json::from_slice(text).map(Message::Regions),
    }
}

/// The whole message, which may come in pieces, and its descriptor.
fn receive(
    socket: &UnixStream,
    patience: Duration,
) -> Result<(Message, Option<OwnedFd>), HandshakeError> {
    let until = Instant::now() + patience;
    let (mut text, mut fd, mut empty, mut parses) = (Vec::new(), None, 0, 0);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let wait = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&wait)) {
            Ok(ready) if ready == 0 || left.is_zero() => {
                return Err(HandshakeError::Late(patience));
            }
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        match piece(socket, &mut text, &mut fd)? {
            None => std::thread::sleep(PAUSE),
            Some(0) if text.is_empty() && empty < EMPTY_READS => {
                empty += 1;
                std::thread::sleep(PAUSE);
            }
            Some(0) => return Err(HandshakeError::Closed(text.len())),
            Some(_) if text.len() > MESSAGE_MAX => return Err(HandshakeError::Long),
            Some(_) if !may_be_whole(&text) => {}
            Some(_) => match parse(&text) {
                Err(error) if error.is_eof() && parses < PARSES => parses += 1,
                Err(error) => return Err(HandshakeError::json(&error)),
                Ok(message) => return Ok((message, fd)),
            },
        }
    }
}

impl HandshakeError {
    /// The parser quotes a text of the message, which may be as long as the message. The kind of
    /// the error is at the begin, and its place at the end.
    pub(crate) fn json(error: &serde_json::Error) -> Self {
        const QUOTED: usize = 100;
        let text = error.to_string();
        let all = text.chars().count();
        Self::Json(match all > 2 * QUOTED {
            true => {
                let begin = text.chars().take(QUOTED);
                begin
                    .chain(" ... ".chars())
                    .chain(text.chars().skip(all - QUOTED))
                    .collect()
            }
            false => text,
        })
    }
}

/// Whether the text is no array and no object, or ends as one ends. Other texts are not parsed.
fn may_be_whole(text: &[u8]) -> bool {
    match text.trim_ascii() {
        [] => false,
        [b'[', .., last] => *last == b']',
        [b'{', .., last] => *last == b'}',
        [first, ..] => !b"[{".contains(first),
    }
}

/// Appends what one read returns; the number of its bytes. `None`: there is nothing at present, or
/// no memory.
fn piece(
    socket: &UnixStream,
    text: &mut Vec<u8>,
    fd: &mut Option<OwnedFd>,
) -> Result<Option<usize>, HandshakeError> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut rights,
        flags,
    );
    let received = match received {
        Err(Errno::CONNRESET) => return Ok(Some(0)),
        Err(Errno::AGAIN | Errno::INTR | Errno::NOMEM | Errno::NOBUFS) => return Ok(None),
        Err(errno) => return Err(errno.into()),
        Ok(received) => received,
    };
    let messages = rights.drain();
    let fds: Vec<_> = messages
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
            _ => Vec::new(),
        })
        .collect();
    let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
    for new in fds {
        if fd.replace(new).is_some() {
            return Err(HandshakeError::Descriptors);
        }
    }
    // The kernel drops a descriptor that finds no room.
    if is_cut {
        return Err(HandshakeError::NoRoom);
    }
    text.extend_from_slice(&bytes[..received.bytes]);
    Ok(Some(received.bytes))
}
