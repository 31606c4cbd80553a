//! Interrupts of devices: by a [`Line`], a message or an eventfd.

pub use lacuna_machine::{
    EventFd, Input, InterruptController, InterruptError, InterruptLines, Line, Msi,
};
