//! A conformance suite for page-fault handlers that speak Firecracker's userfaultfd handshake, and
//! for daemons that save and restore VMs by Cloud Hypervisor's migration protocol ([`Daemons`]).
//!
//! It plays the VMM's side without `/dev/kvm`, and provokes each race of userfaultfd. A caller
//! makes a memory file, starts the handler with it, and checks [`rules`](all):
//!
//! ```no_run
//! use lacuna_pager_test::{Image, Suite, all, check_one};
//! use std::{path::Path, process::Command, time::Duration};
//!
//! // The suite starts this program again for each rule, with a text for `check_one`.
//! if let Some(order) = std::env::args().nth(1) {
//!     check_one(&order).expect("the suite's own text");
//!     return Ok(());
//! }
//! Image::make(Path::new("memory"), 8 << 20)?;
//! // ... the handler is started, and listens at `socket` ...
//! let suite = Suite {
//!     socket: "socket".into(),
//!     memory: "memory".into(),
//!     timeout: Duration::from_secs(10),
//!     restart: None,
//!     again: Box::new(|order| {
//!         let mut command = Command::new("/proc/self/exe");
//!         command.arg(order);
//!         command
//!     }),
//! };
//! suite.check_host()?;
//! for rule in all() {
//!     print!("{}", suite.run(rule)?);
//! }
//! # Ok::<(), lacuna_pager_test::SuiteError>(())
//! ```
//! A rule has a process of its own, which the suite kills at its end, because threads of a VM wait
//! in the kernel for a handler that does not answer. Many races are in the descriptor's queue
//! *before* the handler gets it: so no luck is needed to provoke them.
//!
//! | file | job |
//! |---|---|
//! | `suite`, `report` | the process of a whole run for a handler; results |
//! | `rule`, `rules` | a rule and its lines to the suite; the table of rules |
//! | `verdict` | how a rule ends, and the events before |
//! | `vm`, `worker` | a VM without vCPUs, its threads |
//! | `memory`, `image` | mapped memory; the memory file |
//! | `queue` | whether the other side has read all bytes |
//! | `daemon`, `process` | a whole run for daemons; a process of one |
//! | `trial`, `restore` | the VMM that sends a VM to a daemon, or receives it |
//! | `frame`, `saved` | the protocol; the VM that is saved |
//!
//! An *unsafe room*: a VM's memory is mapped, and threads access pages while the handler fills
//! them.

mod daemon;
mod frame;
mod image;
mod memory;
mod process;
mod queue;
mod report;
mod restore;
mod rule;
mod rules;
mod saved;
mod suite;
mod trial;
mod verdict;
mod vm;
mod worker;

pub use daemon::Daemons;
pub use image::{Image, ImageError};
pub use report::{Outcome, Report, Reports};
pub use rule::Rule;
pub use rules::all;
pub use suite::{Suite, SuiteError, check_one, chosen};
pub use verdict::Target;
