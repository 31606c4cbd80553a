//! A VMM with a control socket: it runs a built-in guest until a client stops it, or moves it.
//!
//!     cargo run --release -p lacuna-control --example controlled /run/vm.control &
//!     lacuna ctl /run/vm.control status

use lacuna::{Builder, Image, PageCount, PlatformDevices, soft};
use lacuna_control::ControlSocket;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: controlled SOCKET")?;
    let image = lacuna_guest::image("paced").ok_or("no guests are built in")?;
    let memory = PageCount::from_bytes(16 << 20);
    let mut builder = soft::VmBuilder::new(memory, memory);
    builder.command_line = "seconds=1000000".into();
    let devices = PlatformDevices::new(|line: &str| println!("guest: {line}"));
    let guest = builder.start(&Image::parse(image.file)?, devices)?;

    let socket = ControlSocket::open(path)?;
    socket.attend(&guest);
    match socket.moved() {
        Some(moved) => println!("{}", moved.outcome()),
        None => println!("{}", guest.wait().ending),
    }
    Ok(())
}
