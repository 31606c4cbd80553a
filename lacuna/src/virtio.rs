//! Virtio devices for guests of either backend.
#![cfg(feature = "virtio")]

pub use lacuna_virtio::*;
