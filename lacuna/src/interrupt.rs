//! Interrupts of devices: by a [`Line`] or a message.

pub use lacuna_machine::{InterruptController, InterruptError, InterruptLines, Line, Msi};
