//! Pages from another process, over a UNIX socket.
//!
//! ```text
//! client                                        server
//! Hello { version, page size, pages } ────────►
//!          ◄──────────────────────────────────── Hello { version, page size, pages }
//! Request { page } ───────────────────────────► at most IN_FLIGHT without an answer,
//!          ◄──────────────────────────────────── each answered once, in any order, by one of
//!                                                Content { page, 4096 bytes }
//!                                                Zeros   { page }
//!                                                Failure { page, why, at most 512 bytes }
//! ```
//! All numbers are little-endian. A hello has 24 bytes: `LACPAGES`, version (4), page size (4),
//! pages (8). Every other message has a head of 16 bytes: kind (2), zero (2), length of what
//! follows (4), page (8). Each kind has its lengths, so a message is never longer than 4112 bytes.
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

pub use client::Peer;
pub use error::PeerError;
pub use server::{Server, serve};

pub use wire::{Decoder, HELLO, Hello, Message, encode};

/// Most requests without an answer on one connection.
pub(crate) const IN_FLIGHT: usize = 1024;

#[cfg(test)]
mod tests;
