//! The control socket of a running guest: `lacuna run --control SOCKET`, docs/control.md.
//!
//! ```text
//! client ─ connection's thread ─ request ─► Controlled: pause, resume, stop, keep, cancel
//!                 ▲                             └ snapshot, migrate ─► a thread ─► lacuna-migrate
//!                 └─ progress, ten times a second ◄──────────────────────┘
//! ```
//! No thread that pauses a guest or copies its memory writes to a socket, so a client that does
//! not read delays nothing but its own connection.
//!
//! | file | job |
//! |---|---|
//! | `message` | requests and answers |
//! | `controlled` | what a request does to the guest |
//! | `saving` | a snapshot |
//! | `writes`, `watching` | the monitor of the guest's writes |
//! | `moving` | a migration |
//! | `words` | where a migration stands, in words |
//! | `awaiting` | answers before a guest is announced |
//! | `client_actions` | what clients have done to the run |
//! | `server` | the socket, and its connections |
//! | `lines` | the lines of a connection |
//! | `client` | the other side |

mod awaiting;
pub mod client;
mod client_actions;
mod controlled;
mod lines;
pub mod message;
mod moving;
mod saving;
mod server;
mod watching;
pub mod words;
mod writes;

pub use awaiting::Awaiting;
pub use client_actions::ClientActions;
pub use controlled::{Controlled, Guest, counters};
pub use server::{Answers, ControlSocket};
