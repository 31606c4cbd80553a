//! How the guest's writes are tracked while it is saved or moved.

use clap::{Args, ValueEnum};
use lacuna::dirty::{Backup, Detection, RingSize};

/// `--dirty` and `--delivery`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Args)]
pub struct DirtyArgs {
    /// How writes are detected while the guest is saved or moved: pml (each vCPU logs the pages
    /// that it writes) or wp (write protection); on kvm its own choice [default: pml]
    #[arg(long, value_enum, value_name = "pml|wp")]
    pub dirty: Option<Dirty>,
    /// Where writes are recorded then: bitmap (one for each memory slot) or ring (one for each
    /// vCPU) [default: bitmap]
    #[arg(long, value_enum, value_name = "bitmap|ring")]
    pub delivery: Option<Delivery>,
}

/// `--dirty`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Dirty {
    /// Page-modification logging
    Pml,
    /// Write protection
    Wp,
}

impl From<Dirty> for Detection {
    fn from(dirty: Dirty) -> Self {
        match dirty {
            Dirty::Pml => Self::Pml,
            Dirty::Wp => Self::WriteProtect,
        }
    }
}

/// `--delivery`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Delivery {
    /// One bit a page
    Bitmap,
    /// The largest ring for each vCPU
    Ring,
}

impl DirtyArgs {
    /// How soft detects writes.
    pub fn detection(self) -> Detection {
        self.dirty.map(Into::into).unwrap_or_default()
    }

    /// Where writes are recorded. The VMM's own writes beside rings go to bitmaps.
    pub fn delivery(self) -> lacuna::dirty::Delivery {
        match self.delivery {
            None | Some(Delivery::Bitmap) => lacuna::dirty::Delivery::Bitmap,
            Some(Delivery::Ring) => lacuna::dirty::Delivery::Ring {
                size: RingSize::from_bytes(RingSize::BYTES_MAX).expect("the largest"),
                backup: Backup::Bitmap,
            },
        }
    }
}
