//! A UNIX socket that a command listens at.

use crate::exit::Exit;
use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, listen, socket_with};
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// A socket that is removed when the value is dropped.
pub struct Socket<'a> {
    path: &'a Path,
    listener: UnixListener,
}

impl<'a> Socket<'a> {
    /// Listens at `path`, where there must be nothing yet. This user alone can connect: what comes
    /// over a socket is a guest, its memory, or power over it.
    ///
    /// # Errors
    /// The exit code and the text for the user.
    pub fn bind(path: &'a Path) -> Result<Self, (Exit, String)> {
        match bind_private(path) {
            Ok(listener) => Ok(Self { path, listener }),
            Err(errno) => {
                let advice = match errno {
                    Errno::ADDRINUSE => taken(path),
                    Errno::NAMETOOLONG => {
                        "a socket's path has at most 107 bytes: use a shorter one, or one that \
                         begins in the current folder"
                    }
                    _ => "name a socket in a folder that this user can write to",
                };
                let (path, error) = (path.display(), io::Error::from(errno));
                Err((
                    Exit::Usage,
                    format!("cannot listen at {path}: {error}; {advice}"),
                ))
            }
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

/// What to do about a name that is taken.
fn taken(path: &Path) -> &'static str {
    match UnixStream::connect(path) {
        Ok(_) => "another process serves there: choose another name",
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            "no process serves there any more: remove the file"
        }
        Err(_) => "choose another name, or remove the file if no process serves there",
    }
}

impl Drop for Socket<'_> {
    fn drop(&mut self) {
        // Another process may have removed it.
        let _ = std::fs::remove_file(self.path);
    }
}
