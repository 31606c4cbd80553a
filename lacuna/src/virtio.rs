//! Virtio devices for guests of either backend.
//!
//! A device is an [`Mmio`], the registers of virtio-mmio, before one of [`Block`], [`Console`],
//! [`Net`], [`Balloon`] and [`Rng`], or before a [`VirtioDevice`] of the VMM's own. The VMM makes
//! the VM first ([`Builder::build`](crate::Builder::build)), because the device uses its memory and
//! one of its interrupt lines. [`Layout`](crate::Layout) names the addresses without memory.
//!
//! ```
//! use lacuna::virtio::{Block, Console, Mmio};
//! use lacuna::{Builder, Gpa, Machine, PageCount, PlatformDevices, Vm, soft};
//! use std::sync::Arc;
//!
//! # let path = std::env::temp_dir().join(format!("lacuna-doc-disk-{}", std::process::id()));
//! # std::fs::write(&path, [0; 512])?;
//! let size = PageCount::from_bytes(16 << 20);
//! let vm = soft::VmBuilder::new(size, size).build()?;
//! let disk = std::fs::File::options().read(true).write(true).open(&path)?;
//! let disk = Mmio::new(&vm, vm.interrupts().line(5)?, Block::new(disk)?)?;
//! let console = Mmio::new(&vm, vm.interrupts().line(6)?, Console::new(std::io::stdout()))?;
//! let console = Arc::new(console);
//! let devices = PlatformDevices::new(|line: &str| println!("{line}"));
//! devices.add_mmio("disk", Gpa::truncate(0xd000_0000), Mmio::<Block>::BYTES, Arc::new(disk))?;
//! let at = Gpa::truncate(0xd000_1000);
//! devices.add_mmio("console", at, Mmio::<Console>::BYTES, console.clone())?;
//! console.input(b"for the guest\n");
//! let machine = Machine::new(vm, devices)?;
//! // `Vm::boot` or a restore, then `Machine::start`.
//! # drop(machine);
//! # std::fs::remove_file(path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! A Linux guest finds the disk with `virtio_mmio.device=0x200@0xd0000000:5` on its command line
//! ([`Mmio::kernel_parameter`]).

#![cfg(feature = "virtio")]

pub use lacuna_virtio::*;
