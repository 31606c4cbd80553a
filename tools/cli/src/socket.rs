//! A UNIX socket that a command listens at.

use crate::exit::Exit;
use std::fs::{Permissions, set_permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// A socket that is removed when the value is dropped.
pub struct Socket<'a> {
    path: &'a Path,
    listener: UnixListener,
}

impl<'a> Socket<'a> {
    /// Listens at `path`, where there must be nothing yet.
    ///
    /// # Errors
    /// The exit code and the text for the user.
    pub fn bind(path: &'a Path) -> Result<Self, (Exit, String)> {
        match UnixListener::bind(path) {
            Ok(listener) => Ok(Self { path, listener }),
            Err(error) => {
                let advice = match error.kind() {
                    io::ErrorKind::AddrInUse => taken(path),
                    io::ErrorKind::InvalidInput => {
                        "a socket's path has at most 107 bytes: use a shorter one, or one that \
                         begins in the current folder"
                    }
                    _ => "name a socket in a folder that this user can write to",
                };
                let text = format!("cannot listen at {}: {error}; {advice}", path.display());
                Err((Exit::Usage, text))
            }
        }
    }

    /// As [`Socket::bind`], and this user alone can connect.
    ///
    /// # Errors
    /// The exit code and the text for the user.
    pub fn bind_private(path: &'a Path) -> Result<Self, (Exit, String)> {
        let socket = Self::bind(path)?;
        let own = set_permissions(path, Permissions::from_mode(0o600));
        own.map_err(|error| {
            let text = format!("cannot keep other users from {}: {error}", path.display());
            (Exit::Host, text)
        })?;
        Ok(socket)
    }

    /// The socket itself.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
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
