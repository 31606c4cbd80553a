//! A control socket for a VMM: other processes of the same user ask for the status of a running
//! guest, pause, save, move and stop it. `docs/control.md` has the protocol.
//!
//! # Serve clients
//! ```no_run
//! # use lacuna::{Running, Vm};
//! # fn of<V: Vm>(guest: Running<V>) -> Result<(), Box<dyn std::error::Error>> {
//! let socket = lacuna_control::ControlSocket::open("/run/vm.control")?;
//! socket.attend(&guest);
//! println!("{}", guest.wait().ending);
//! # Ok(())
//! # }
//! ```
//! [`ControlSocket::attend`] answers clients of a running guest until it has ended. A VMM whose
//! guest is under control before it runs makes a [`Controlled`], and an [`Awaiting`] before a guest
//! of another process is announced. The example `controlled` is a whole VMM.
//!
//! # Be a client
//! ```no_run
//! use lacuna_control::{Client, SaveRequest};
//!
//! let mut client = Client::connect("/run/vm.control")?;
//! println!("{:?}", client.pause()?.state);
//! let saved = client.save(SaveRequest::to("/var/saved"), &mut |_| {})?;
//! println!("{} pages", saved.pages);
//! # Ok::<(), lacuna_control::AskError>(())
//! ```
//! The command's `lacuna ctl`, `lacuna snapshot save` and `lacuna migrate` are such clients.
//!
//! # How it works
//! ```text
//! client ─ connection's thread ─ request ─► Controlled: pause, resume, stop, keep, cancel
//!                 ▲                             └ snapshot, migrate ─► a thread ─► lacuna::migrate
//!                 └─ progress, ten times a second ◄──────────────────────┘
//! ```
//! No thread that pauses a guest or copies its memory writes to a socket. So a client that does not
//! read delays its own connection alone, except that the monitor of writes empties dirty rings and
//! sends: a client that does not read may then stop vCPUs with full rings, for 1 s at most.
//!
//! | file | job |
//! |---|---|
//! | `message`, `settings`, `detection`, `refused` | requests and answers; errors |
//! | `client` | the other side |
//! | `socket`, `lines` | the socket, its connections, and their lines |
//! | `client_actions` | what clients have done to the run |
//! | `awaiting` | answers before a guest is announced |
//! | `controlled` | answers about a guest: the holder of its vCPUs, and a file for each request |
//! | `words` | where a migration stands, in words |
//! | `store` | a snapshot's object store |
//! | `threads` | a thread beside a client's, and locks |
//!
//! It imports the library [`lacuna`], and nothing else of the workspace.
#![forbid(unsafe_code)]

mod awaiting;
mod client;
mod client_actions;
mod controlled;
mod detection;
mod lines;
mod message;
mod refused;
mod settings;
mod socket;
pub mod store;
mod threads;
mod words;

pub use awaiting::Awaiting;
pub use client::{AskError, Client, Closer};
pub use controlled::{Controlled, PageCounts};
pub use message::{
    MoveRequest, PROTOCOL, Pages, SaveRequest, Saved, Saving, State, Status, WatchRequest, Writes,
};
pub use refused::Refused;
pub use settings::{SetRequest, Setting, Settings};
pub use socket::ControlSocket;
pub use words::{missing_in_words, undecided_at_destination};
