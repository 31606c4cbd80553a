//! A process that waits for the guest of another process, before a guest is announced.

use super::message::{Answer, PROTOCOL, Refused, Request, State, Status};
use super::{Answers, ClientActions};
use lacuna::migrate::session::Destination;
use std::ops::ControlFlow;

/// Answers clients while no guest is announced.
pub struct Awaiting<'a> {
    destination: &'a Destination,
    actions: &'a ClientActions,
}

impl<'a> Awaiting<'a> {
    /// The process waits for a guest at `destination`. A request to end the wait is noted in
    /// `actions`.
    pub const fn new(destination: &'a Destination, actions: &'a ClientActions) -> Self {
        Self {
            destination,
            actions,
        }
    }

    fn status(&self) -> Status {
        let is_over = self.actions.has_stopped();
        let ending = "stopped before a guest came";
        Status {
            protocol: PROTOCOL,
            state: if is_over {
                State::Ended
            } else {
                State::Waiting
            },
            backend: String::new(),
            arch: String::new(),
            vcpus: 0,
            memory_bytes: 0,
            seconds: 0.0,
            pages: None,
            outage: None,
            saving: None,
            migrating: None,
            arriving: None,
            waiting: (!is_over).then(|| self.destination.address().to_string()),
            undecided: None,
            ending: is_over.then(|| ending.into()),
        }
    }
}

impl Answers for Awaiting<'_> {
    fn answer(&self, request: Request, _: &mut dyn FnMut(Answer) -> ControlFlow<()>) -> Answer {
        let at = self.destination.address();
        let text = match request {
            Request::Status {} => return Answer::Status(Box::new(self.status())),
            Request::Stop {} => {
                self.actions.stop();
                self.destination.end_wait();
                return Answer::Status(Box::new(self.status()));
            }
            Request::Cancel {} | Request::Keep {} | Request::PostCopy {} => format!(
                "no guest was announced at {at}: there is no migration to decide on; to end the \
                 wait, stop this run"
            ),
            _ => format!("no guest is here: this run waits for one at {at}"),
        };
        Answer::Error(Refused::request(text))
    }
}
