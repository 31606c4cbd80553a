//! `--disk`: a virtio disk with the bytes of a file.

use super::{Job, Refusal};
use crate::args::RunArgs;
use crate::exit::Exit;
use lacuna::virtio::{Block, Mmio};
use lacuna::{Arch, Gpa, PlatformDevices, Vm};
use std::fmt::Display;
use std::fs::File;
use std::io::ErrorKind;
use std::sync::Arc;

/// Its name in a guest's state.
const NAME: &str = "disk0";

/// Its address, in a GiB without memory, and its interrupt line.
const fn place(arch: Arch) -> (Gpa, u32) {
    match arch {
        Arch::Arm64 => (Gpa::truncate(0x0a00_0000), 48),
        _ => (Gpa::truncate(0xd000_0000), 20),
    }
}

/// The command-line word that names the disk; empty without `--disk`.
pub(super) fn words(args: &RunArgs, arch: Arch) -> String {
    let (at, line) = place(arch);
    match args.on.disk {
        Some(_) => format!(" {}", Mmio::<Block>::kernel_parameter(at, line)),
        None => String::new(),
    }
}

/// Adds it to the devices of `vm`.
pub(super) fn add<V: Vm>(
    job: &Job<'_>,
    vm: &Arc<V>,
    devices: &PlatformDevices,
) -> Result<(), Refusal> {
    let Some(path) = &job.args.on.disk else {
        return Ok(());
    };
    let shown = path.display();
    let cannot = |why: &dyn Display| (Exit::Host, format!("--disk {shown}: {why}"));
    let file = File::options().read(true).write(true).open(path);
    let block = file.and_then(Block::new).map_err(|why| match why.kind() {
        ErrorKind::NotFound | ErrorKind::InvalidInput => {
            let text =
                format!("--disk {shown}: {why}: make the disk first: truncate -s SIZE {shown}");
            (Exit::Usage, text)
        }
        _ => cannot(&why),
    })?;
    let (at, line) = place(vm.config().arch);
    let line = vm.interrupts().line(line).map_err(|why| cannot(&why))?;
    let device = Mmio::new(vm, line, block).map_err(|why| cannot(&why))?;
    let added = devices.add_mmio(NAME, at, Mmio::<Block>::BYTES, Arc::new(device));
    added.map_err(|why| cannot(&why))
}
