//! Eventfds as inputs of a VM's interrupt controllers: `KVM_IRQFD`.
//!
//! KVM connects an eventfd to a number of its routing table. Lines have the first numbers; a
//! message gets the first free one after them.
//!
//! UNSAFETY: the VM's descriptor is borrowed from `kvm-ioctls` as a raw number, because its type
//! does not implement `AsFd`.

use crate::arch;
use kvm_ioctls::VmFd;
use lacuna_machine::{Input, InterruptError, Msi, StateError};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lacuna_sys::irqfd;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::io;
use std::fmt;
use std::sync::Arc;

/// The eventfds of one VM.
#[derive(Default)]
pub(crate) struct EventFds(Mutex<Vec<Connected>, lock_order::EventFds>);

struct Connected {
    fd: Arc<OwnedFd>,
    gsi: u32,
    message: Option<Msi>,
}

impl Connected {
    fn set(&self, vm: &VmFd, connected: bool) -> io::Result<()> {
        // SAFETY: 1. the descriptor is open as long as `vm` is borrowed.
        let vm = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
        // SAFETY: 1. it is the VM's descriptor.
        unsafe { irqfd(vm, self.fd.as_fd(), self.gsi, connected) }
    }
}

fn host<E: fmt::Display>(step: &'static str) -> impl Fn(E) -> InterruptError {
    move |error| InterruptError::Host {
        step,
        cause: error.to_string(),
    }
}

impl EventFds {
    /// Makes an eventfd for `input`.
    pub(crate) fn connect(&self, vm: &VmFd, input: Input) -> Result<Arc<OwnedFd>, InterruptError> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let fd = Arc::new(fd.map_err(host("make an eventfd"))?);
        let mut all = self.lock();
        let is_free = |gsi: &u32| all.iter().all(|one| one.gsi != *gsi);
        let connected = Connected {
            fd: Arc::clone(&fd),
            gsi: match input {
                Input::Line(number) => number,
                Input::Msi(_) => (arch::interrupts::PINS..).find(is_free).unwrap_or(u32::MAX),
            },
            message: match input {
                Input::Line(_) => None,
                Input::Msi(msi) => Some(msi),
            },
        };
        if connected.message.is_some() {
            let messages = all.iter().chain([&connected]);
            let messages = messages.filter_map(|one| Some((one.gsi, one.message?)));
            arch::interrupts::connect(vm, messages).map_err(host("route interrupts"))?;
        }
        let set = connected.set(vm, true);
        set.map_err(host("connect an eventfd to interrupts"))?;
        all.push(connected);
        Ok(fd)
    }

    /// Ends the effect of an eventfd. Its route stays until another message gets the number.
    pub(crate) fn disconnect(&self, vm: &VmFd, gone: &Arc<OwnedFd>) {
        let mut all = self.lock();
        if let Some(at) = all.iter().position(|one| Arc::ptr_eq(&one.fd, gone)) {
            let ended = all.swap_remove(at).set(vm, false);
            debug_assert!(ended.is_ok(), "it was connected: {ended:?}");
        }
    }

    /// Waits until all writes before the call have interrupted.
    pub(crate) fn settle(&self, vm: &VmFd) -> Result<(), StateError> {
        let refused = |errno: io::Errno| StateError::Host {
            step: "wait for interrupts of eventfds",
            cause: errno.to_string(),
        };
        self.lock().iter().try_for_each(|one| {
            one.set(vm, false)
                .and_then(|()| one.set(vm, true))
                .map_err(refused)
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Connected>> {
        self.0.lock().expect("no panic under this lock")
    }
}
