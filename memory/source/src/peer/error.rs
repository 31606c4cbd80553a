//! The errors of the other side of a connection, one for each.

use crate::{MemoryId, SourcePage};
use std::io;
use std::time::Duration;

/// Why a connection is of no use. The client closes it, connects again, and repeats its unanswered
/// requests.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// No process accepts connections, or the connection broke.
    #[error("{0}: start the peer again, at the same socket")]
    Io(#[from] io::Error),
    /// The peer has closed the connection.
    #[error("the peer has closed the connection: start it again, at the same socket")]
    Closed,
    /// The socket's path does not fit in a socket address.
    #[error(
        "the socket's path has {0} bytes and may have 107: use a shorter one, or one that begins \
         in the current folder"
    )]
    Path(usize),
    /// The hello's first bytes are wrong.
    #[error("the other side does not speak this protocol: is it the right socket?")]
    NotAPeer,
    /// The peer speaks another version.
    #[error("the peer speaks version {theirs} of the protocol, this side {ours}: use one release")]
    Version {
        /// The peer's.
        theirs: u32,
        /// This side's.
        ours: u32,
    },
    /// The peer's pages have another size.
    #[error("the peer has pages of {0} bytes, not of 4096")]
    PageSize(u32),
    /// The guest has more pages than the peer.
    #[error("the peer has {has} pages and the guest needs {needs}: give the guest less memory")]
    TooFewPages {
        /// The peer's pages.
        has: u64,
        /// The guest's pages.
        needs: u64,
    },
    /// The memory differs from the first connection's: servers have swapped sockets, for example.
    #[error(
        "the peer has another guest's memory ({theirs}) than before ({ours}): start the peer with \
         this guest's memory again, at the same socket"
    )]
    OtherMemory {
        /// The memory of this connection's peer.
        theirs: MemoryId,
        /// The identity of the first connection.
        ours: MemoryId,
    },
    /// A message of no known kind, or of a kind that only the other side sends.
    #[error("the peer sent a message of kind {0}, which is none that it may send")]
    Kind(u16),
    /// A message whose length is wrong for its kind: the page is too short, or too long.
    #[error("the peer sent {length} bytes for {page}, which a message of kind {kind} cannot have")]
    Length {
        /// The message's kind.
        kind: u16,
        /// Its page.
        page: SourcePage,
        /// Its length.
        length: u32,
    },
    /// An answer without a request: the wrong page, or a page for the second time.
    #[error("the peer sent {0}, which it was not asked for, or has sent before")]
    NotAsked(SourcePage),
    /// No answer in time.
    #[error("the peer has not sent {page} for {} s", waited.as_secs_f64())]
    Silent {
        /// The page of the first request.
        page: SourcePage,
        /// The time since then.
        waited: Duration,
    },
    /// A client makes too many requests at a time. Servers have this error.
    #[error("the client asked for {0} while 1024 others had no answer")]
    Greedy(SourcePage),
}

impl PeerError {
    /// Whether the next connection would have the same error.
    pub(crate) const fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Path(_)
                | Self::NotAPeer
                | Self::Version { .. }
                | Self::PageSize(_)
                | Self::TooFewPages { .. }
        )
    }
}
