//! How the guest's writes are tracked while it is saved or moved.

use super::group::MIGRATION;
use clap::Args;
use lacuna::dirty::{Backup, Delivery, Detection};
use lacuna_lab::options::{Recorder, Value, named};

/// `--dirty` and `--delivery`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Args)]
pub struct DirtyArgs {
    /// How writes are detected while the guest is saved or moved: pml (each vCPU logs the pages
    /// that it writes) or wp (write protection); on kvm its own choice [default: pml]
    #[arg(long, value_name = "pml|wp", value_parser = named(DIRTY), help_heading = MIGRATION)]
    pub dirty: Option<Detection>,
    /// Where writes are recorded then: bitmap (one for each memory slot) or ring (one for each
    /// vCPU) [default: bitmap]
    #[arg(long, value_enum, value_name = "bitmap|ring", help_heading = MIGRATION)]
    pub delivery: Option<Recorder>,
}

/// `--dirty`.
pub const DIRTY: [Value<Detection>; 2] = [
    ("pml", Detection::Pml, "Page-modification logging"),
    ("wp", Detection::WriteProtect, "Write protection"),
];

impl DirtyArgs {
    /// How soft detects writes.
    pub fn detection(self) -> Detection {
        self.dirty.unwrap_or_default()
    }

    /// Where writes are recorded. The VMM's own writes beside rings go to bitmaps.
    pub fn delivery(self) -> Delivery {
        let recorder = self.delivery.unwrap_or(Recorder::Bitmap);
        recorder.delivery(Backup::Bitmap)
    }
}
