//! The rules of Landlock.

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, NetPort, PathBeneath, PathFd, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetError, RulesetStatus, Scope, make_bitflags,
};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The newest rights that the tests of this crate have met in a kernel. An older kernel confines
/// what it can.
const RIGHTS: ABI = ABI::V7;

/// What is allowed with a file, or with the files below a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// To read it.
    Read,
    /// To read and write it.
    Write,
    /// To read, write, make and remove files in a folder.
    Fill,
    /// To remove files in a folder.
    Remove,
}

impl Access {
    fn rights(self) -> BitFlags<AccessFs> {
        let read = make_bitflags!(AccessFs::{ReadFile | ReadDir});
        let write = make_bitflags!(AccessFs::{WriteFile | Truncate | IoctlDev});
        let make = make_bitflags!(AccessFs::{MakeReg | MakeDir | RemoveFile | RemoveDir});
        match self {
            Self::Read => read,
            Self::Write => read | write,
            Self::Fill => read | write | make,
            Self::Remove => AccessFs::RemoveFile.into(),
        }
    }
}

/// What every command needs.
const COMMON: [(&str, Access); 14] = [
    ("/proc/self", Access::Read),
    ("/proc/cpuinfo", Access::Read),
    ("/proc/meminfo", Access::Read),
    ("/proc/swaps", Access::Read),
    ("/proc/sys/kernel", Access::Read),
    ("/proc/sys/vm", Access::Read),
    ("/sys/devices/system", Access::Read),
    ("/sys/fs/cgroup", Access::Read),
    ("/sys/kernel/mm", Access::Read),
    ("/sys/module", Access::Read),
    ("/dev/kvm", Access::Write),
    ("/dev/null", Access::Write),
    ("/dev/tty", Access::Write),
    ("/dev/userfaultfd", Access::Write),
];

/// What the C library reads when it looks for a host, and the certificates of authorities.
const NETWORK: [&str; 7] = [
    "/etc",
    "/lib",
    "/lib64",
    "/run/systemd/resolve",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/ca-certificates",
];

/// Whether this kernel has Landlock.
pub fn has_landlock() -> bool {
    let made = Ruleset::default().handle_access(AccessFs::Execute);
    let made = made.and_then(Ruleset::create);
    made.is_ok_and(|rules| Option::<OwnedFd>::from(rules).is_some())
}

/// Restricts this thread, and the threads that it starts, to `files` and to connections to `ports`.
/// Returns whether the kernel has Landlock.
pub fn confine(files: &[(PathBuf, Access)], ports: &[u16]) -> Result<bool, RulesetError> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(RIGHTS))?
        .handle_access(AccessNet::from_all(RIGHTS))?
        .scope(Scope::from_all(RIGHTS))?
        .create()?;
    let common = COMMON.map(|(path, access)| (PathBuf::from(path), access));
    let network = NETWORK.map(|path| (PathBuf::from(path), Access::Read));
    let network = network.iter().filter(|_| !ports.is_empty());
    for (path, access) in common.iter().chain(files).chain(network) {
        // A missing file is missing for the open too, which reports it.
        let Ok(fd) = PathFd::new(path) else { continue };
        let rights = match path.is_dir() {
            true => access.rights() & !AccessFs::IoctlDev,
            false => access.rights() & AccessFs::from_file(RIGHTS),
        };
        rules = rules.add_rule(PathBeneath::new(fd, rights))?;
    }
    for port in ports {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
    }
    let status = rules.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}
