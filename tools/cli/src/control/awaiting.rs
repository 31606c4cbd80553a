//! A process that waits for the guest of another process, before a guest is announced.

use super::message::{Answer, PROTOCOL, Refused, Request, State, Status};
use super::{Answers, ClientActions};
use lacuna_migrate::transport::Link;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Answers clients while no guest is announced.
pub struct Awaiting<'a> {
    at: String,
    actions: &'a ClientActions,
    /// Cutting it ends the wait.
    link: Arc<Link>,
}

impl<'a> Awaiting<'a> {
    /// The process waits for a guest at `at`. A request to end the wait is noted in `ends`, and
    /// cuts `link`.
    pub const fn new(at: String, actions: &'a ClientActions, link: Arc<Link>) -> Self {
        Self { at, actions, link }
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
            waiting: (!is_over).then(|| self.at.clone()),
            undecided: None,
            ending: is_over.then(|| ending.into()),
        }
    }
}

impl Answers for Awaiting<'_> {
    fn answer(&self, request: Request, _: &mut dyn FnMut(Answer) -> ControlFlow<()>) -> Answer {
        let at = &self.at;
        let text = match request {
            Request::Status {} => return Answer::Status(Box::new(self.status())),
            Request::Stop {} => {
                self.actions.stop();
                self.link.cut();
                return Answer::Status(Box::new(self.status()));
            }
            Request::Cancel {} | Request::Keep {} => format!(
                "no guest was announced at {at}: there is no migration to decide on; to end the \
                 wait, stop this run"
            ),
            _ => format!("no guest is here: this run waits for one at {at}"),
        };
        Answer::Error(Refused::request(text))
    }
}
