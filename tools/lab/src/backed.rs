//! Makes the hypervisor below this machine back the machine's free memory.
//!
//! A Linux guest may report free memory to its hypervisor, which takes it back. The next touch then
//! waits for the hypervisor: here 512 MiB take up to 1.0 s, and 0.07 s otherwise. That time would
//! be part of every move and every restore, in all arms. So before each of them, and before each
//! plain copy, this makes as much free memory backed as the guest touches.

use crate::experiment::{LabError, LabResult};
use lacuna::PAGE_SIZE;
use memmap2::{Advice, MmapMut};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Longer than Linux takes to report freed memory: `PAGE_REPORTING_DELAY`, 2 s, and some time for
/// the work. So memory freed in one slice is reported before the next slice begins, and not in the
/// middle of it.
const REPORTED: Duration = Duration::from_millis(2500);

/// Touching less memory than this takes so little time that the lab does not wait for a report.
const LITTLE: u64 = 256 << 20;

/// Touches `bytes` bytes and a quarter more, and gives them back to the kernel. If the kernel
/// reports free memory, waits first for the report of earlier freed memory.
pub fn back(bytes: u64) -> LabResult {
    if bytes >= LITTLE && Path::new("/sys/module/page_reporting").exists() {
        thread::sleep(REPORTED);
    }
    let mut memory =
        MmapMut::map_anon((bytes + bytes / 4) as usize).map_err(LabError::io("map memory"))?;
    // A kernel without transparent huge pages refuses the advice.
    let _ = memory.advise(Advice::HugePage);
    memory
        .iter_mut()
        .step_by(PAGE_SIZE)
        .for_each(|byte| *byte = 1);
    Ok(())
}
