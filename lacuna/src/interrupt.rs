//! Interrupts of devices: by a [`Line`], a message or an eventfd. A guest's write signals an
//! eventfd by [`Vm::ioeventfd`](crate::Vm::ioeventfd).

pub use lacuna_machine::{
    EventFd, GuestWrite, Input, InterruptController, InterruptError, InterruptLines, IoAddress,
    IoBus, IoEventFd, IoEventFdError, Line, Msi, WriteMatch,
};
