//! Virtio devices for the guests of any backend: entropy, block, console, network and balloon.
//!
//! A device is an [`Mmio`]: the registers of virtio-mmio (virtio 1.2, 4.2) before one of [`Rng`],
//! [`Block`], [`Console`], [`Net`] and [`Balloon`], or before a [`VirtioDevice`] of the VMM's own.
//! The module `virtio` of the crate `lacuna` has an example.
//!
//! # Threads
//! ```text
//! vCPU's thread: Device::write(QueueNotify)      worker thread of the device
//!   notes the queue, wakes the worker     ──►    pops a chain, VirtioDevice::handle, pushes it
//!                                                raises the line
//! ```
//! A vCPU's thread waits only for the request in progress, when it resets the device or a queue.
//! The worker may wait for missing pages of the guest: another thread must provide them. A device
//! refers to its VM weakly, and strongly during a request. After the VM's end, requests stay in
//! their rings.
//!
//! # Hostile drivers
//! A driver that breaks a rule of the rings gets DEVICE_NEEDS_RESET, and [`Mmio::fault`] has the
//! reason. The device accesses only the memory that the driver named.
//!
//! | file | what |
//! |---|---|
//! | `guest.rs` | what a device uses of its VM, and the faults of drivers |
//! | `queue.rs` | the split virtqueue |
//! | `device.rs` | the interface between transport and device |
//! | `registers.rs` | the registers that are saved |
//! | `shared.rs` | the worker thread |
//! | `mmio.rs`, `life.rs` | the register map, pause, resume and reset; the state |
//! | `rng.rs`, `block.rs`, `console.rs`, `net.rs`, `balloon.rs` | the devices |
#![forbid(unsafe_code)]

mod balloon;
mod block;
mod console;
mod device;
mod guest;
mod life;
mod mmio;
mod net;
mod queue;
mod registers;
mod rng;
mod shared;

pub use balloon::Balloon;
pub use block::Block;
pub use console::Console;
pub use device::{Answer, VirtioDevice};
pub use guest::{Fault, Guest};
pub use life::MmioState;
pub use mmio::Mmio;
pub use net::{Listening, Net};
pub use queue::{Buffers, Chain, QueueState};
pub use registers::Registers;
pub use rng::Rng;
