//! Saves a guest while it runs, and resumes it in a second VM.
//!
//!     cargo run --release --example snapshot [FOLDER]
//!
//! FOLDER is where the snapshot is written; it must not exist.

use lacuna::migrate::{Budget, Snapshot, save};
use lacuna::{Builder, Ending, Image, Machine, PageCount, PlatformDevices, soft};
use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| std::env::temp_dir().join("lacuna-snapshot"));
    let file = lacuna_guest::image("verify")
        .ok_or("no guests are built in")?
        .file;
    let image = Image::parse(file)?;

    let (memory, resident) = (
        PageCount::from_bytes(64 << 20),
        PageCount::from_bytes(32 << 20),
    );
    let builder = soft::VmBuilder::new(memory, resident);
    let devices = PlatformDevices::new(|line: &str| println!("first VM: {line}"));
    let guest = builder.start(&image, devices)?;
    while guest.devices().status_page().is_none() && !guest.wait_timeout(Duration::ZERO) {
        thread::yield_now();
    }
    let saved = save(&guest, &folder, &Budget::default(), &mut |_| {
        ControlFlow::Continue(())
    })?;
    // The guest ends here.
    drop(guest);
    println!(
        "{}: {} pages with content, in {} rounds; the guest's downtime was {:?}",
        folder.display(),
        saved.pages,
        saved.rounds.len(),
        saved.downtime
    );

    let snapshot = Snapshot::open(&folder)?;
    let vm = builder.build()?;
    let devices = PlatformDevices::new(|line: &str| println!("second VM: {line}"));
    let machine = Machine::new(vm, devices)?;
    let vcpus = snapshot.restore(machine.vm(), machine.devices(), &mut |_| {
        ControlFlow::Continue(())
    })?;
    match machine.start(vcpus).wait().ending {
        Ending::Exited(0) => Ok(()),
        other => Err(other.to_string().into()),
    }
}
