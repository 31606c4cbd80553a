//! Free memory of this machine that the machine below it has backed.
//!
//! A Linux guest may report free memory to its hypervisor, which takes it back a few seconds later.
//! The next touch then waits for the hypervisor: here 512 MiB take up to 1.0 s, and 0.07 s
//! otherwise. That time would be part of every move, whatever moves the guest. So before each move
//! and each plain copy, this makes as much free memory backed as the destination touches.

use crate::experiment::LabError;
use lacuna_addr::PAGE_SIZE;
use memmap2::{Advice, MmapMut};

/// Touches that many bytes and a quarter more, and gives them back to the kernel.
///
/// # Errors
/// The kernel has less memory.
pub fn back(bytes: u64) -> Result<(), LabError> {
    let failed = |source| LabError::Io {
        what: "map memory".into(),
        source,
    };
    let mut memory = MmapMut::map_anon((bytes + bytes / 4) as usize).map_err(failed)?;
    // A kernel without transparent huge pages refuses the advice.
    let _ = memory.advise(Advice::HugePage);
    memory
        .iter_mut()
        .step_by(PAGE_SIZE)
        .for_each(|byte| *byte = 1);
    Ok(())
}
