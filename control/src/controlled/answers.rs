//! Each request and its method; the service of clients.

use super::Controlled;
use crate::message::{Answer, Request};
use crate::refused::Refused;
use crate::socket::{ControlSocket, Send};
use lacuna::{Running, Vm};
use std::os::fd::OwnedFd;
use std::time::Duration;

impl ControlSocket {
    /// Answers clients until `guest` has ended here, and closes their connections. A guest that has
    /// [`moved`](ControlSocket::moved) has ended here. The socket serves one guest: open another
    /// socket for another guest.
    pub fn attend<V: Vm>(&self, guest: &Running<V>) {
        let controlled = Controlled::new(self, &**guest.vm(), guest.devices());
        controlled.runs(guest);
        controlled.serve_until(&|| guest.wait_timeout(Duration::ZERO));
    }
}

impl<V: Vm> Controlled<'_, V> {
    /// Answers clients until [`ControlSocket::end`] or [`ControlSocket::hand_over`].
    pub fn serve(&self) {
        self.serve_until(&|| false);
    }

    fn serve_until(&self, is_over: &dyn Fn() -> bool) {
        let answer = |request, descriptors, send: Send<'_>| {
            let answer = self.answer(request, descriptors, send);
            answer.unwrap_or_else(Answer::Error)
        };
        self.socket.serve(&answer, &|| {
            self.release_at_the_end();
            is_over()
        });
    }

    /// A client that disconnects cancels its snapshot or its migration.
    fn answer(
        &self,
        request: Request,
        descriptors: Vec<OwnedFd>,
        send: Send<'_>,
    ) -> Result<Answer, Refused> {
        match request {
            Request::Status {} => {}
            Request::Pause {} => self.pause()?,
            Request::Resume {} => self.resume()?,
            Request::Stop {} => self.stop()?,
            Request::Cancel {} => self.cancel()?,
            Request::Keep {} => self.keep()?,
            Request::PostCopy {} => self.post_copy()?,
            Request::Snapshot(request) => {
                let saved = self.save(&request, descriptors, send);
                return saved.map(Answer::Snapshot);
            }
            Request::Migrate(request) => {
                let migrated = self.migrate(request, descriptors, send);
                return migrated.map(Answer::Migrated);
            }
            Request::Settings {} => return Ok(Answer::Settings(self.settings())),
            Request::Set(request) => return self.set(&request).map(Answer::Settings),
            Request::Map(request) => return self.map(request).map(Answer::Map),
            Request::Stat {} => return Ok(Answer::Stat(self.stat())),
            Request::Dirty(request) => {
                if let Some(last) = self.watch_writes(&request, send)? {
                    return Ok(Answer::Dirty(last));
                }
            }
        }
        Ok(Answer::Status(Box::new(self.status())))
    }
}
