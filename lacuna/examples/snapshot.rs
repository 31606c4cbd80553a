//! Saves a guest while it runs, and resumes it in a second VM.
//!
//!     cargo run --release --example snapshot [FOLDER]
//!
//! FOLDER is where the snapshot is written; it must not exist.

use lacuna::migrate::{Budget, Guest, Snapshot, save};
use lacuna::{
    Arch, Builder, Ending, Image, PageCount, Pause, PlatformDevices, Vm, run_pausable, soft,
};
use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::thread;

/// The answer to each report of progress.
const CONTINUE: ControlFlow<()> = ControlFlow::Continue(());

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
    let vm = builder.build()?;
    let devices = PlatformDevices::of(Arch::X86_64, |line: &str| println!("first VM: {line}"));
    let vcpus = vm.boot(&image, &builder.full_command_line())?;
    let pause = Pause::default();

    // The run has the vCPUs. The snapshot is made beside it.
    let saved = thread::scope(|scope| {
        scope.spawn(|| drop(run_pausable(vcpus, &devices, &*vm, &pause)));
        while devices.status_page().is_none() && devices.ending().is_none() {
            thread::yield_now();
        }
        let guest = Guest {
            vm: &*vm,
            devices: &devices,
            pause: &pause,
        };
        save(&guest, &folder, &Budget::default(), &mut |_| CONTINUE)
    })?;
    println!(
        "{}: {} pages with content, in {} rounds; the guest's downtime was {:?}",
        folder.display(),
        saved.pages,
        saved.rounds.len(),
        saved.downtime
    );

    let snapshot = Snapshot::open(&folder)?;
    let vm = builder.build()?;
    let devices = PlatformDevices::of(Arch::X86_64, |line: &str| println!("second VM: {line}"));
    let vcpus = snapshot.restore(&vm, &devices, &mut |_| CONTINUE)?;
    drop(run_pausable(vcpus, &devices, &*vm, &Pause::default()));
    match devices.ending() {
        Some(Ending::Exited(0)) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}
