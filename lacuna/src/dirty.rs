//! Dirty logging: which pages the guest has written.

pub use lacuna_machine::{
    Backup, ClearError, Delivery, DetectedBy, Detection, DetectionChoice, DirtyError, DirtyRings,
    DirtyStats, HugeLeaves, Initially, LogReaders, Logging, RingSize, RingSizeError, TwoStepLog,
    harvest, set_logging_everywhere,
};
