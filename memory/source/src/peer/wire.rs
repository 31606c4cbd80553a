//! Messages to bytes and back. The decoder keeps at most one message, whatever length the other
//! side sends.

use super::PeerError;
use crate::{MemoryId, SourcePage};
use lacuna_addr::PAGE_SIZE;

const MAGIC: [u8; 8] = *b"LACPAGES";
/// The version of the protocol.
pub const VERSION: u32 = 2;
/// Bytes of a hello.
pub const HELLO: usize = 40;
/// Bytes of the head of every other message.
const HEAD: usize = 16;
/// The most bytes of a failure's reason.
pub const REASON: usize = 512;

const REQUEST: u16 = 1;
const CONTENT: u16 = 2;
const ZEROS: u16 = 3;
const FAILURE: u16 = 4;

/// The first message of each side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The server's pages, or the pages that the client needs.
    pub pages: u64,
    /// The server's memory; 0 from a client.
    pub memory: MemoryId,
}

impl Hello {
    /// Its bytes.
    pub fn bytes(self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(PAGE_SIZE as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.pages.to_le_bytes());
        bytes[24..].copy_from_slice(&self.memory.0.to_le_bytes());
        bytes
    }

    /// Refuses the beginning of a wrong hello as early as possible: another version's hello may be
    /// shorter.
    ///
    /// # Errors
    /// It is not of this protocol, version and page size.
    pub fn check(begin: &[u8]) -> Result<(), PeerError> {
        let magic = begin.len().min(MAGIC.len());
        if begin[..magic] != MAGIC[..magic] {
            return Err(PeerError::NotAPeer);
        }
        if begin.len() < 16 {
            return Ok(());
        }
        let [theirs, page_size] = [8, 12].map(|at| u32_at(begin, at));
        if theirs != VERSION {
            let ours = VERSION;
            return Err(PeerError::Version { theirs, ours });
        }
        if page_size != PAGE_SIZE as u32 {
            return Err(PeerError::PageSize(page_size));
        }
        Ok(())
    }

    /// Reads a hello.
    ///
    /// # Errors
    /// As [`Hello::check`].
    pub fn parse(bytes: &[u8; HELLO]) -> Result<Self, PeerError> {
        Self::check(bytes)?;
        let memory = bytes[24..].try_into().expect("sixteen bytes");
        Ok(Self {
            pages: u64_at(bytes, 16),
            memory: MemoryId(u128::from_le_bytes(memory)),
        })
    }
}

/// A message after the hellos.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message<'a> {
    /// The client asks for a page.
    Request(SourcePage),
    /// A page's content.
    Content(SourcePage, &'a [u8; PAGE_SIZE]),
    /// A page of zeros.
    Zeros(SourcePage),
    /// The server cannot provide a page, and why.
    Failure(SourcePage, &'a [u8]),
}

/// Appends the bytes of `message`. A reason is cut to the longest that a message may have.
pub fn encode(message: &Message<'_>, to: &mut Vec<u8>) {
    let (kind, page, body): (_, _, &[u8]) = match message {
        Message::Request(page) => (REQUEST, page, &[]),
        Message::Content(page, content) => (CONTENT, page, *content),
        Message::Zeros(page) => (ZEROS, page, &[]),
        Message::Failure(page, reason) => (FAILURE, page, &reason[..reason.len().min(REASON)]),
    };
    to.extend(kind.to_le_bytes());
    to.extend([0; 2]);
    to.extend((body.len() as u32).to_le_bytes());
    to.extend(page.0.to_le_bytes());
    to.extend(body);
}

/// Finds the messages in a stream of bytes.
#[derive(Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// Bytes of messages already returned.
    taken: usize,
}

impl Decoder {
    /// Appends received bytes.
    pub fn push(&mut self, received: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend(received);
    }

    /// The next whole message.
    ///
    /// # Errors
    /// No message has this kind or length. The stream is of no use after that.
    pub fn decode(&mut self) -> Result<Option<Message<'_>>, PeerError> {
        let rest = &self.bytes[self.taken..];
        if rest.len() < HEAD {
            return Ok(None);
        }
        let kind = u16::from_le_bytes([rest[0], rest[1]]);
        let length = u32_at(rest, 4);
        let page = SourcePage(u64_at(rest, 8));
        let fits = match kind {
            REQUEST | ZEROS => length == 0,
            CONTENT => length == PAGE_SIZE as u32,
            FAILURE => length <= REASON as u32,
            _ => return Err(PeerError::Kind(kind)),
        };
        if !fits {
            return Err(PeerError::Length { kind, page, length });
        }
        let end = HEAD + length as usize;
        let Some(body) = rest.get(HEAD..end) else {
            return Ok(None);
        };
        self.taken += end;
        Ok(Some(match kind {
            REQUEST => Message::Request(page),
            ZEROS => Message::Zeros(page),
            FAILURE => Message::Failure(page, body),
            _ => Message::Content(page, body.try_into().expect("its length was compared")),
        }))
    }

    /// The number of kept bytes.
    pub fn kept(&self) -> usize {
        self.bytes.len() - self.taken
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Message<'_> {
    /// Its kind, for the error of a side that must not receive it.
    pub fn kind(&self) -> u16 {
        match self {
            Self::Request(_) => REQUEST,
            Self::Content(..) => CONTENT,
            Self::Zeros(_) => ZEROS,
            Self::Failure(..) => FAILURE,
        }
    }
}
