//! What a device uses of its VM.

use lacuna_addr::{GfnRange, Gpa};
use lacuna_machine::{ErrorKind, GuestMemory, MemoryError, Vm};

/// Why a device cannot serve its driver any more: it needs a reset.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The driver broke a rule of the specification.
    #[error("the guest's driver broke a rule of virtio: {0}")]
    Driver(&'static str),
    /// No guest memory can have this address.
    #[error("the guest's driver named the address {0:#x}, which needs more than 48 bits")]
    Address(u64),
    /// Guest memory refused an access.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The device's own code panicked.
    #[error("the device panicked at a request")]
    Panicked,
}

impl Fault {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Driver(_) | Self::Address(_) | Self::Memory(MemoryError::NoSlot(_)) => {
                ErrorKind::Guest
            }
            Self::Memory(error) => error.kind(),
            Self::Panicked => ErrorKind::Host,
        }
    }
}

/// A VM as its devices see it.
pub(crate) trait Host: GuestMemory + Send + Sync {
    /// Discards pages, as [`Balloon::discard`](lacuna_machine::Balloon::discard). `None` if the
    /// VM cannot.
    fn discard(&self, gfns: GfnRange) -> Option<Result<(), MemoryError>>;
}

impl<V: Vm> Host for V {
    fn discard(&self, gfns: GfnRange) -> Option<Result<(), MemoryError>> {
        self.balloon().map(|balloon| balloon.discard(gfns))
    }
}

/// The guest during one request.
pub struct Guest<'a> {
    vm: &'a dyn Host,
    features: u64,
}

impl<'a> Guest<'a> {
    pub(crate) fn new(vm: &'a dyn Host, features: u64) -> Self {
        Self { vm, features }
    }

    /// Whether the driver has accepted the feature `bit`.
    pub fn has(&self, bit: u32) -> bool {
        self.features >> bit & 1 == 1
    }

    /// Reads at an address that the driver named. Waits for missing pages.
    ///
    /// # Errors
    /// Not all of the bytes lie in memory, or the host has lost a page.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Fault> {
        let gpa = Gpa::new(at).ok_or(Fault::Address(at))?;
        Ok(self.vm.read(gpa, into)?)
    }

    /// Writes at an address that the driver named, as [`Guest::read`]. Dirty tracking reports the
    /// pages.
    ///
    /// # Errors
    /// As [`Guest::read`]; or dirty tracking cannot record a host's write.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        let gpa = Gpa::new(at).ok_or(Fault::Address(at))?;
        Ok(self.vm.write(gpa, bytes)?)
    }

    /// Discards pages, as [`Balloon::discard`](lacuna_machine::Balloon::discard). Pages that the
    /// VM cannot discard keep their bytes. Returns whether all are discarded.
    pub fn discard(&self, gfns: GfnRange) -> bool {
        matches!(self.vm.discard(gfns), Some(Ok(())))
    }
}

impl std::fmt::Debug for Guest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest")
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}
