//! A service manager that keeps descriptors of the pager for its next start: systemd's descriptor
//! store (`sd_notify(3)`, `sd_listen_fds(3)`), or `lacuna pager --park`.

use lacuna_sync::{Mutex, lock, lock_order};
use lacuna_sys::{Errno, inherited_descriptors};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg_addr, socket_with,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// The name of all listening sockets in the manager's store.
const LISTENER: &str = "lacuna-socket";

/// The service manager of this process, or none.
pub struct Supervisor {
    /// `NOTIFY_SOCKET`, and a socket that sends to it.
    notify: Option<(OwnedFd, SocketAddrUnix)>,
    /// What it has kept, by name.
    kept: Mutex<Vec<(String, OwnedFd)>, lock_order::PagerKept>,
}

impl Supervisor {
    /// The service manager that has started this process, by its environment. Only the first call
    /// gets the kept descriptors.
    ///
    /// # Errors
    /// `NOTIFY_SOCKET` is no address, or no descriptor is left.
    pub fn from_environment() -> Result<Self, Errno> {
        let address = match std::env::var_os("NOTIFY_SOCKET") {
            None => None,
            Some(name) => Some(match name.as_bytes() {
                [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
                path => SocketAddrUnix::new(path)?,
            }),
        };
        let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
        let connect = |address| {
            let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
            Ok((socket, address))
        };
        Ok(Self {
            notify: address.map(connect).transpose()?,
            kept: Mutex::new(inherited_descriptors()),
        })
    }

    /// Takes the kept socket that listens at `path`.
    pub fn listener(&self, path: &Path) -> Option<UnixListener> {
        let all = self.take(LISTENER).into_iter().map(UnixListener::from);
        let is_it = |listener: &UnixListener| {
            let address = listener.local_addr();
            address.is_ok_and(|address| address.as_pathname() == Some(path))
        };
        let (mut found, others): (Vec<_>, Vec<_>) = all.partition(is_it);
        let others = others.into_iter();
        lock(&self.kept).extend(others.map(|other| (LISTENER.to_owned(), other.into())));
        found.pop()
    }

    /// The manager keeps a listening socket. While no pager runs, VMMs wait in its queue.
    pub fn keep_listener(&self, listener: BorrowedFd<'_>) {
        self.keep(LISTENER, &[listener]);
    }

    /// No pager will accept VMs.
    pub fn forget_listeners(&self) {
        self.forget(LISTENER);
    }

    /// The manager keeps copies of `fds` from now on: also if this process ends at once, because
    /// the message has them. `FDPOLL=0`: it keeps them although they have hung up. If the manager
    /// refuses the message, the VM is taken back from its VMM.
    pub fn keep(&self, name: &str, fds: &[BorrowedFd<'_>]) {
        self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), fds);
    }

    /// The manager closes its copies.
    pub fn forget(&self, name: &str) {
        drop(self.take(name));
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]);
    }

    /// The manager closes what it has kept for VMs that have no file any more.
    pub fn forget_all_but(&self, has_file: impl Fn(&str) -> bool) {
        let all: Vec<_> = lock(&self.kept)
            .iter()
            .map(|(name, _)| name.clone())
            .collect();
        let ended = all
            .iter()
            .filter(|name| *name != LISTENER && !has_file(name));
        ended.for_each(|name| self.forget(name));
    }

    /// The kept descriptors with this name.
    pub fn take(&self, name: &str) -> Vec<OwnedFd> {
        let mut all = lock(&self.kept);
        let found = all.extract_if(.., |(other, _)| other == name);
        found.map(|(_, fd)| fd).collect()
    }

    fn send(&self, text: &str, fds: &[BorrowedFd<'_>]) {
        let Some((socket, address)) = &self.notify else {
            return;
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = rights.push(SendAncillaryMessage::ScmRights(fds));
            debug_assert!(fits, "the space suffices for two descriptors");
        }
        let text = [IoSlice::new(text.as_bytes())];
        let sent = sendmsg_addr(socket, address, &text, &mut rights, SendFlags::NOSIGNAL);
        if let Err(errno) = sent {
            tracing::warn!(target: "lacuna::pager", "the manager takes no message: {errno}");
        }
    }
}
