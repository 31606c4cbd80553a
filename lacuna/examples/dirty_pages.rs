//! Prints once a second how many pages a running guest has written, by page-modification logging.
//!
//!     cargo run --release --example dirty_pages [SECONDS]
//!
//! A monitor that migrates the guest does the same: it copies all memory once, then the pages of
//! each harvest.

use lacuna::dirty::{Logging, harvest, set_logging_everywhere};
use lacuna::{
    Builder, GuestMemory, Image, Machine, MemorySlots, PAGE_SIZE, PageCount, PlatformDevices,
    Vm as _, soft,
};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let seconds: u64 = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 5,
    };
    let guest = lacuna_guest::image("churn").ok_or("no guests are built in")?;
    let image = Image::parse(guest.file)?;

    let mut builder = soft::VmBuilder::new(
        PageCount::from_bytes(128 << 20),
        PageCount::from_bytes(160 << 20),
    );
    builder.command_line = "seconds=600".into();
    let vm = builder.build()?;
    let vcpus = vm.boot(&image, &builder.full_command_line())?;
    let devices = PlatformDevices::new(|line: &str| println!("guest: {line}"));

    // Each write from here on is in one of the harvests.
    set_logging_everywhere(&*vm, Logging::LAZY)?;
    let running = Machine::new(Arc::clone(&vm), devices)?.start(vcpus);
    let mut page = vec![0; PAGE_SIZE];
    for _ in 0..seconds {
        if running.wait_timeout(Duration::from_secs(1)) {
            return Err(running.wait().ending.to_string().into());
        }
        let mut dirty = Vec::new();
        let harvested = harvest(&*vm, |slot, page| dirty.push((slot, page)));
        if let Err(error) = harvested {
            eprintln!("{error}");
        }
        // Copied after the harvest, so a later write is in the next one.
        let slots = vm.memory_slots();
        for &(id, index) in &dirty {
            let slot = slots.iter().find(|slot| slot.id == id);
            let gfn = slot.and_then(|slot| slot.gfn(index));
            let copied = gfn.map(|gfn| vm.read(gfn.gpa(), &mut page));
            assert!(matches!(copied, Some(Ok(()))), "a dirty page is in a slot");
        }
        println!("{} pages written", dirty.len());
    }
    // When `running` is dropped, the guest ends.
    Ok(())
}
