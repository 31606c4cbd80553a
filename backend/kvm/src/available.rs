//! Whether this machine can run the backend, and if not, why.

use crate::arch;
use kvm_ioctls::{Cap, Kvm};
use lacuna_sys::{Errno, Userfaultfd};

const DEVICE: &str = "/dev/kvm";
/// `KVM_API_VERSION`, the same since Linux 2.6.22.
const API_VERSION: i32 = 12;

/// Why this machine cannot run the backend.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// The host's processor has another architecture.
    #[error("the kvm backend runs on x86-64 hosts only: use the soft backend (`--backend soft`)")]
    Architecture,
    /// There is no device.
    #[error("no {DEVICE}: this machine has no KVM, or its module is not loaded")]
    NoDevice,
    /// The device may not be opened.
    #[error("no permission to open {DEVICE}: become a member of its group, usually `kvm`")]
    NoPermission,
    /// It cannot be opened.
    #[error("cannot open {DEVICE}: {0}")]
    Open(Errno),
    /// An unknown API version.
    #[error("{DEVICE} has API version {0}; the kvm backend needs {API_VERSION}")]
    Version(i32),
    /// KVM lacks a capability that the backend needs.
    #[error("{DEVICE} lacks {0}")]
    Lacks(&'static str),
    /// The kernel has no userfaultfd.
    #[error("the kernel was built without userfaultfd")]
    NoUserfaultfd,
    /// userfaultfd is not permitted.
    #[error(
        "no permission for userfaultfd on the kernel's own faults: run as root, with \
         CAP_SYS_PTRACE, or with sysctl vm.unprivileged_userfaultfd=1"
    )]
    UserfaultfdPermission,
    /// The kernel is too old.
    #[error("userfaultfd cannot move pages: that needs Linux 6.8 ({0})")]
    OldUserfaultfd(Errno),
}

/// Whether this machine can run the backend.
///
/// # Errors
/// The first thing that is missing, in words for the person in charge of the host.
pub fn available() -> Result<(), Unavailable> {
    open().map(drop)
}

/// Opens `/dev/kvm`, if everything else is there too.
pub(crate) fn open() -> Result<Kvm, Unavailable> {
    arch::check()?;
    let kvm = Kvm::new().map_err(|e| match Errno::from_raw_os_error(e.errno()) {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => Unavailable::NoDevice,
        Errno::ACCESS | Errno::PERM => Unavailable::NoPermission,
        errno => Unavailable::Open(errno),
    })?;
    match kvm.get_api_version() {
        API_VERSION => {}
        version => return Err(Unavailable::Version(version)),
    }
    let needs = [
        (Cap::UserMemory, "memory slots"),
        (Cap::Irqchip, "in-kernel interrupt controllers"),
        (Cap::ImmediateExit, "immediate exits"),
    ];
    if let Some((_, what)) = needs.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        return Err(Unavailable::Lacks(what));
    }
    match Userfaultfd::open() {
        Ok(_) => Ok(kvm),
        Err(Errno::NOSYS) => Err(Unavailable::NoUserfaultfd),
        Err(Errno::PERM) => Err(Unavailable::UserfaultfdPermission),
        Err(errno) => Err(Unavailable::OldUserfaultfd(errno)),
    }
}
