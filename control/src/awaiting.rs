//! A process that waits for the guest of another process, before a guest is announced.

use crate::message::{Answer, PROTOCOL, Request, State, Status};
use crate::refused::Refused;
use crate::socket::ControlSocket;
use lacuna::migrate::session::Destination;

/// Answers clients while no guest is announced.
pub struct Awaiting<'a> {
    destination: &'a Destination,
    socket: &'a ControlSocket,
}

impl<'a> Awaiting<'a> {
    /// The process waits for a guest at `destination`. A client of `socket` may end the wait.
    pub const fn new(destination: &'a Destination, socket: &'a ControlSocket) -> Self {
        Self {
            destination,
            socket,
        }
    }

    /// Serves clients until [`ControlSocket::end`] or [`ControlSocket::hand_over`].
    pub fn serve(&self) {
        let answer = |request, _, _: &mut dyn FnMut(_) -> _| match self.answer(&request) {
            Ok(status) => Answer::Status(Box::new(status)),
            Err(refused) => Answer::Error(refused),
        };
        self.socket.serve(&answer, &|| false);
    }

    fn status(&self) -> Status {
        let address = self.destination.address().to_string();
        let now = match self.socket.has_stopped() {
            true => Status {
                state: State::Ended,
                ending: Some("stopped before a guest came".into()),
                ..Status::default()
            },
            false => Status {
                state: State::Waiting,
                waiting: Some(address),
                ..Status::default()
            },
        };
        Status {
            protocol: PROTOCOL,
            ..now
        }
    }

    fn answer(&self, request: &Request) -> Result<Status, Refused> {
        let at = self.destination.address();
        match request {
            Request::Status {} => {}
            Request::Stop {} => {
                self.socket.actions().stop();
                self.destination.end_wait();
            }
            Request::Cancel {} | Request::Keep {} | Request::PostCopy {} => {
                return Err(Refused::request(format!(
                    "no guest was announced at {at}: there is no migration to decide on; to end \
                     the wait, stop this run"
                )));
            }
            _ => {
                let text = format!("no guest is here: this run waits for one at {at}");
                return Err(Refused::request(text));
            }
        }
        Ok(self.status())
    }
}
