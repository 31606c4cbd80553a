//! Boots a guest on software processors, in a quarter of the memory that the guest believes it has.
//!
//!     cargo run --release --example boot [IMAGE [COMMAND LINE]]
//!
//! IMAGE is an ELF64 kernel with the PVH note; without it, a small built-in guest writes a pattern
//! to all of its memory and reads it again.

use lacuna::{Builder, Ending, Image, PageCount, PlatformDevices, Vm, soft};
use std::error::Error;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = match arguments.next() {
        Some(path) => std::fs::read(path)?,
        None => built_in("verify")?,
    };
    let image = Image::parse(&file)?;

    let mut builder = soft::VmBuilder::new(
        PageCount::from_bytes(24 << 20),
        PageCount::from_bytes(6 << 20),
    );
    builder.vcpus = 2;
    builder.command_line = arguments.collect::<Vec<_>>().join(" ");

    // A console is any function that takes a line.
    let devices = PlatformDevices::new(|line: &str| println!("guest: {line}"));
    let running = builder.start(&image, devices)?;
    while !running.wait_timeout(Duration::from_millis(100)) {
        let stats = running.stats();
        eprintln!(
            "{} ms, {} pages resident, {} swapped in",
            running.now().0 / 1_000_000,
            stats.resident.get(),
            stats.pages_in
        );
    }
    let end = running.wait();

    let stats = end.vm.stats();
    println!(
        "{} pages went to swap and {} came back",
        stats.pages_out, stats.pages_in
    );
    match end.ending {
        Ending::Exited(0) => Ok(()),
        other => Err(other.to_string().into()),
    }
}

fn built_in(name: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let image = lacuna_guest::image(name);
    let image = image.ok_or("no guests are built in: name an image")?;
    Ok(image.file.to_vec())
}
