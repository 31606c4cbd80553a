//! Writes of a guest that signal an eventfd, without a return to the VMM.
//!
//! ```text
//! a vCPU's write -> kvm: KVM_IOEVENTFD, in the kernel                -> eventfd + 1 -> a device's
//!                   soft: the vCPU's thread, in place of an `Exit`                     own thread
//! ```
//! A handle refers to its VM weakly, as an interrupt line does.

use crate::devices::{PICS, is_of_controller};
use crate::{Arch, ErrorKind, MemorySlots, Width};
use lacuna_addr::Gpa;
use lacuna_slots::SlotFlags;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

/// The address of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoAddress {
    /// A port of an x86-64 guest.
    Port(u16),
    /// The first guest-physical address.
    Memory(Gpa),
}

/// Which writes to an address match.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteMatch {
    /// Writes of every width: KVM does not decode the instruction. So on kvm a read of the address
    /// may match too, and then leaves its register as it was: use it where drivers only write.
    AnyWidth,
    /// Writes of this width.
    Width(Width),
    /// Writes of this width with this value.
    Value(Width, u64),
}

/// Writes of a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestWrite {
    /// Where they begin.
    pub address: IoAddress,
    /// Which of them.
    pub matches: WriteMatch,
}

const CONTROLLER: &str = "an interrupt controller has the address";

impl GuestWrite {
    /// Whether a write of `value` to `address` is one of these. Bits of `value` above `width` have
    /// no effect.
    pub fn contains(&self, address: IoAddress, width: Width, value: u64) -> bool {
        self.address == address
            && match self.matches {
                WriteMatch::AnyWidth => true,
                WriteMatch::Width(own) => own == width,
                WriteMatch::Value(own, needed) => own == width && needed == value & width.ones(),
            }
    }

    /// Whether a write may be one of both.
    pub fn overlaps(&self, other: &Self) -> bool {
        use WriteMatch::{AnyWidth, Value, Width};
        self.address == other.address
            && match (self.matches, other.matches) {
                (AnyWidth, _) | (_, AnyWidth) => true,
                (Value(one, a), Value(two, b)) => one == two && a == b,
                (Width(one) | Value(one, _), Width(two) | Value(two, _)) => one == two,
            }
    }

    /// Why no such write of a guest leaves its vCPU.
    fn why_impossible(&self, arch: Arch, vm: &impl MemorySlots) -> Option<&'static str> {
        let (width, value) = match self.matches {
            WriteMatch::AnyWidth => (None, 0),
            WriteMatch::Width(width) => (Some(width), 0),
            WriteMatch::Value(width, value) => (Some(width), value),
        };
        if width.is_some_and(|width| value > width.ones()) {
            return Some("the value has more bits than the write");
        }
        let is_writable = |gpa: Gpa| {
            let mut slots = vm.memory_slots().into_iter();
            slots.any(|slot| {
                slot.gfns.contains(gpa.gfn()) && !slot.flags.contains(SlotFlags::READONLY)
            })
        };
        match self.address {
            IoAddress::Port(_) if arch != Arch::X86_64 => Some("the guest has no ports"),
            IoAddress::Port(_) if width == Some(Width::Quad) => {
                Some("a port has no writes of 8 bytes")
            }
            IoAddress::Port(port) => {
                let is_of_pic = PICS.iter().any(|pic| pic.contains(&port));
                is_of_pic.then_some(CONTROLLER)
            }
            IoAddress::Memory(gpa) if is_of_controller(arch, gpa) => Some(CONTROLLER),
            IoAddress::Memory(gpa) => is_writable(gpa).then_some("there is memory at the address"),
        }
    }
}

impl fmt::Display for GuestWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.matches {
            WriteMatch::AnyWidth => write!(f, "writes")?,
            WriteMatch::Width(width) => write!(f, "{}-byte writes", width as u8)?,
            WriteMatch::Value(width, value) => {
                write!(f, "{}-byte writes of {value:#x}", width as u8)?;
            }
        }
        match self.address {
            IoAddress::Port(port) => write!(f, " to port {port:#x}"),
            IoAddress::Memory(gpa) => write!(f, " to {gpa}"),
        }
    }
}

/// Why an eventfd gets no signals of a guest's writes.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoEventFdError {
    /// Another eventfd gets them, or some of them.
    #[error("an eventfd has {0} already: drop its handle first, or match other writes")]
    InUse(GuestWrite),
    /// They reach no device.
    #[error("{write} never leave the guest: {why}")]
    Impossible {
        /// The requested writes.
        write: GuestWrite,
        /// The reason.
        why: &'static str,
    },
    /// The descriptor is of another kind.
    #[error("the descriptor is no eventfd: make one by eventfd(2)")]
    NotEventFd,
    /// The hypervisor below refused.
    #[error("cannot connect {write} to an eventfd: {cause}")]
    Host {
        /// The requested writes.
        write: GuestWrite,
        /// The message of the hypervisor.
        cause: String,
    },
}

impl IoEventFdError {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::InUse(_) | Self::Impossible { .. } | Self::NotEventFd => ErrorKind::Request,
            Self::Host { .. } => ErrorKind::Host,
        }
    }
}

/// A backend's part of [`IoEventFd`]: its dispatch of writes to devices. Any thread may call it.
pub trait IoBus: Send + Sync {
    /// From the return on, each of these writes signals the eventfd instead of reaching the VMM.
    ///
    /// # Errors
    /// [`IoEventFdError::InUse`], or the host refuses.
    fn assign(&self, write: GuestWrite, eventfd: &Arc<OwnedFd>) -> Result<(), IoEventFdError>;

    /// Ends the effect of [`IoBus::assign`] with these arguments. After the return, no vCPU signals
    /// the eventfd.
    fn deassign(&self, write: GuestWrite, eventfd: &Arc<OwnedFd>);
}

/// An eventfd that a guest's writes signal: [`Vm::ioeventfd`](crate::Vm::ioeventfd). After its drop
/// the writes reach the VMM again.
pub struct IoEventFd {
    vm: Weak<dyn IoBus>,
    write: GuestWrite,
    fd: Arc<OwnedFd>,
}

impl IoEventFd {
    pub(crate) fn new<V: IoBus + MemorySlots + 'static>(
        vm: &Arc<V>,
        arch: Arch,
        write: GuestWrite,
        fd: OwnedFd,
    ) -> Result<Self, IoEventFdError> {
        if let Some(why) = write.why_impossible(arch, &**vm) {
            return Err(IoEventFdError::Impossible { write, why });
        }
        if !is_eventfd(&fd) {
            return Err(IoEventFdError::NotEventFd);
        }
        let fd = Arc::new(fd);
        vm.assign(write, &fd)?;
        let vm = Arc::downgrade(vm) as Weak<dyn IoBus>;
        Ok(Self { vm, write, fd })
    }
}

/// A write to another descriptor would change its file. No system call asks for the kind.
fn is_eventfd(fd: &OwnedFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]")
}

impl AsFd for IoEventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for IoEventFd {
    fn drop(&mut self) {
        if let Some(vm) = self.vm.upgrade() {
            vm.deassign(self.write, &self.fd);
        }
    }
}

impl fmt::Debug for IoEventFd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoEventFd")
            .field("write", &self.write)
            .field("fd", &self.fd)
            .finish_non_exhaustive()
    }
}
