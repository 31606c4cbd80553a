//! Virtio devices for guests of either backend.

pub use lacuna_virtio::*;
