//! Pages from another process, over a UNIX socket.
//!
//! ```text
//! client                                        server
//! Hello { version, page size, pages needed } ─►
//!          ◄──────────────────────────────────── Hello { version, page size, pages, memory }
//! Request { page } ───────────────────────────► at most IN_FLIGHT without an answer,
//!          ◄──────────────────────────────────── each answered once, in any order, by one of
//!                                                Content { page, 4096 bytes }
//!                                                Zeros   { page }
//!                                                Failure { page, why, at most 512 bytes }
//! ```
//! All numbers are little-endian. A hello has 40 bytes: `LACPAGES`, version (4), page size (4),
//! pages (8), memory (16). The memory is the server's [`MemoryId`](crate::MemoryId), and 0 from a
//! client. It must be the same at all of a client's connections. Each side sends its hello at once,
//! and waits 2 s for the whole hello of the other side.
//!
//! Every other message has a head of 16 bytes: kind (2), zero (2), length of the rest (4), page
//! (8). Each kind has fixed bounds for its length, so a message is never longer than 4112 bytes.
//!
//! | file | job |
//! |---|---|
//! | `wire` | messages to bytes and back |
//! | `client` | [`Peer`]: the source |
//! | `server` | [`serve`]: the other side |

mod client;
mod error;
mod server;
mod wire;

use std::time::Duration;

pub use client::Peer;
pub use error::PeerError;
pub use server::{Server, serve};

pub use wire::{Decoder, HELLO, Hello, Message, encode};

/// The most unanswered requests on one connection.
pub(crate) const IN_FLIGHT: usize = 1024;

/// The longest wait of each side for the whole of a hello.
pub(crate) const HELLO_WAIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
