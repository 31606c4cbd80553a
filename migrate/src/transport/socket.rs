//! A listening UNIX socket with a name.

use super::TransportError;
use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, listen, socket_with};
use std::fs::{Metadata, symlink_metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A socket whose file is removed when the value is dropped.
pub struct PrivateSocket {
    path: PathBuf,
    /// The file, if it could be found after it was made.
    file: Option<FileId>,
    listener: UnixListener,
}

/// The device and the number of an inode.
type FileId = (u64, u64);

impl PrivateSocket {
    /// Listens at `path`, where there must be nothing yet. This user alone can connect: a socket
    /// carries a guest, its memory, or control of it.
    ///
    /// # Errors
    /// [`TransportError::Listen`].
    pub fn bind(path: &Path) -> Result<Self, TransportError> {
        match bind_private(path) {
            Ok(listener) => Ok(Self {
                path: path.to_owned(),
                file: id(path),
                listener,
            }),
            Err(errno) => {
                let advice = match errno {
                    Errno::ADDRINUSE => taken(path),
                    Errno::NAMETOOLONG => {
                        "a socket's path has at most 107 bytes: use a shorter one, or one that \
                         begins in the current folder"
                    }
                    _ => "name a socket in a folder that this user can write to",
                };
                Err(TransportError::Listen {
                    at: path.display().to_string(),
                    error: errno.into(),
                    advice,
                })
            }
        }
    }

    /// As [`PrivateSocket::bind`]. Replaces a socket that no process serves any more, as a killed
    /// process leaves it. No other process may do the same at the same time.
    ///
    /// # Errors
    /// [`TransportError::Listen`].
    pub fn bind_again(path: &Path) -> Result<Self, TransportError> {
        if is_socket(path) && UnixStream::connect(path).is_err_and(|error| is_refused(&error)) {
            // If it stays, `bind` says so.
            let _ = std::fs::remove_file(path);
        }
        Self::bind(path)
    }

    /// The socket `listener`, which has been bound at `path`.
    pub fn inherited(path: &Path, listener: UnixListener) -> Self {
        Self {
            path: path.to_owned(),
            file: id(path),
            listener,
        }
    }

    /// The socket itself.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

/// Connections that may wait to be accepted.
const WAITING: i32 = 128;

/// The socket gets its mode before its name, so no other user can connect in between.
fn bind_private(path: &Path) -> Result<UnixListener, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &address)?;
    listen(&socket, WAITING)?;
    Ok(socket.into())
}

/// The file with the name `path`.
fn id(path: &Path) -> Option<FileId> {
    let id = |found: Metadata| (found.dev(), found.ino());
    symlink_metadata(path).ok().map(id)
}

/// Whether the file at `path` is a socket.
pub fn is_socket(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|found| found.file_type().is_socket())
}

fn is_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

/// The advice about a taken name.
fn taken(path: &Path) -> &'static str {
    if !is_socket(path) {
        return "it is not a socket: choose another name";
    }
    match UnixStream::connect(path) {
        Ok(_) => "another process serves there: choose another name",
        Err(error) if is_refused(&error) => "no process serves there any more: remove the file",
        Err(_) => "choose another name, or remove the file if no process serves there",
    }
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        // Another process may have removed the file, and a third one may have made its own under
        // this name. The kernel keeps the inode of our file until the listener is closed, so no
        // other file has its number.
        if self.file.is_some() && self.file == id(&self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{read, remove_file, rename, write};

    #[test]
    fn only_the_own_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let [path, other] = ["socket", "other"].map(|name| dir.path().join(name));
        let own = PrivateSocket::bind(&path).unwrap();
        drop(own);
        assert!(!path.exists());

        let first = PrivateSocket::bind(&path).unwrap();
        remove_file(&path).unwrap();
        let second = PrivateSocket::bind(&path).unwrap();
        drop(first);
        UnixStream::connect(&path).unwrap();
        rename(&path, &other).unwrap();
        write(&path, "notes").unwrap();
        drop(second);
        assert_eq!(read(&path).unwrap(), b"notes");
    }

    #[test]
    fn a_taken_name_has_advice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("name");
        let refused = |path| {
            PrivateSocket::bind(path)
                .err()
                .expect("refused")
                .to_string()
        };
        let socket = UnixListener::bind(&path).unwrap();
        assert!(refused(&path).ends_with("another process serves there: choose another name"));
        drop(socket);
        // A process that another test has just forked keeps the socket open until it executes its
        // program.
        while refused(&path).ends_with("another process serves there: choose another name") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(refused(&path).ends_with("no process serves there any more: remove the file"));
        drop(PrivateSocket::bind_again(&path).unwrap());
        let _socket = UnixListener::bind(&path).unwrap();
        assert!(PrivateSocket::bind_again(&path).is_err());
        remove_file(&path).unwrap();
        write(&path, "notes").unwrap();
        assert!(refused(&path).ends_with("it is not a socket: choose another name"));
        assert!(refused(dir.path()).ends_with("it is not a socket: choose another name"));
    }
}
