//! Whether this machine can run the backend, and if not, why.

use crate::arch;
use crate::error::{API_VERSION, Unavailable};
use kvm_ioctls::{Cap, Kvm};
use lacuna_sys::{Errno, Userfaultfd};

/// Whether this machine can run the backend.
///
/// # Errors
/// The first missing requirement, with a remedy for the host's administrator.
pub fn available() -> Result<(), Unavailable> {
    open().map(drop)
}

/// The frequency of the TSC of this host's guests in kHz, for
/// [`CpuModel::Common`](lacuna_machine::CpuModel::Common) of a guest that will move here. `None` if
/// no guest can run.
pub fn tsc_khz() -> Option<u32> {
    let vm = open().ok()?.create_vm().ok()?;
    arch::tsc_khz(&vm.create_vcpu(0).ok()?)
}

/// Opens `/dev/kvm`, if the other requirements are met too.
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
