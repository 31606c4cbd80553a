//! Boots a guest on `/dev/kvm`. Its memory comes from Lacuna's page source. An evicted page takes
//! one millisecond to read back, and KVM can notify the guest meanwhile.
//!
//!     cargo run --release --example boot_kvm [IMAGE [COMMAND LINE]]

use lacuna::{Builder, Ending, Image, PageCount, PlatformDevices, kvm};
use std::error::Error;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    if let Err(reason) = kvm::available() {
        println!("skipped: {reason}");
        return Ok(());
    }
    let mut arguments = std::env::args().skip(1);
    let file = match arguments.next() {
        Some(path) => std::fs::read(path)?,
        None => {
            let image = lacuna_guest::image("hello");
            image
                .ok_or("no guests are built in: name an image")?
                .file
                .to_vec()
        }
    };
    let image = Image::parse(&file)?;

    let mut builder = kvm::VmBuilder::new(
        PageCount::from_bytes(64 << 20),
        PageCount::from_bytes(32 << 20),
    );
    builder.latency.set(Duration::from_millis(1));
    builder.command_line = arguments.collect::<Vec<_>>().join(" ");
    let devices = PlatformDevices::new(|line: &str| println!("guest: {line}"));
    match builder.start(&image, devices)?.wait().ending {
        Ending::Exited(0) => Ok(()),
        other => Err(other.to_string().into()),
    }
}
