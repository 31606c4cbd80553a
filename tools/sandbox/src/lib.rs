//! What a process of the command `lacuna` may do after its start. A guest, a peer or a file that
//! takes over the process gets no more than this: docs/sandbox.md.
//!
//! ```text
//! Landlock      the files, and the TCP ports, that the command line names
//! seccomp       the system calls of a list; another one ends the process with a message
//! ```
//!
//! ```no_run
//! use lacuna_sandbox::{Access, Sandbox};
//!
//! let mut sandbox = Sandbox::new();
//! sandbox.allow("/srv/vm/memory", Access::Read);
//! let confined = sandbox.enter(3)?;
//! assert!(confined.files, "this kernel has no Landlock");
//! # Ok::<_, lacuna_sandbox::EnterError>(())
//! ```
//!
//! | file | what |
//! |---|---|
//! | `sandbox.rs` | what is allowed, and the entry |
//! | `files.rs` | the rules of Landlock |
//! | `calls.rs` | the list of system calls |
//! | `trap.rs` | the message about a forbidden call |
//!
//! UNSAFETY: no crate installs a handler of SIGSYS in safe code (`trap.rs`): its unsafe blocks pass
//! the handler to the C library, and read what the kernel passes to it.

mod calls;
mod files;
mod sandbox;
mod trap;

pub use calls::has_seccomp;
pub use files::{Access, has_landlock};
pub use sandbox::{Confined, EnterError, Sandbox};
