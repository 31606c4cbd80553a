//! The sockets of a run, and its view.

use super::Refusal;
use super::report::in_words;
use crate::args::{RunArgs, RunOn};
use crate::exit::{self, Exit};
use crate::metrics::MetricsSocket;
use crate::output::write_result_until_signal;
use crate::sample::RunReport;
use crate::sandbox;
use crate::signals::Signals;
use crate::view::Live;
use lacuna_control::{Client, ControlSocket};
use lacuna_lab::result::to_json;
use std::io;

/// The sockets of a command for other processes, and the view, which is a client too.
pub struct Sockets {
    /// Before the socket, so that it is dropped first.
    pub(super) live: Option<Live>,
    /// Of the view, until it is shown.
    client: Option<Client>,
    pub(super) control: Option<ControlSocket>,
    pub(super) metrics: Option<MetricsSocket>,
}

impl Sockets {
    /// Opens the sockets that `on` names, and one for the view if there is a terminal for it. No
    /// client reaches a guest in virtual time, so `is_seeded` excludes the view. This comes before
    /// the sandbox, which makes no socket.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub fn open(on: &RunOn, is_seeded: bool) -> Result<Self, Refusal> {
        let is_shown = !on.output.quiet && !is_seeded && Live::is_possible();
        let control = match &on.control {
            Some(path) => {
                let socket = ControlSocket::open(path).map_err(exit::refusal)?;
                Some(match on.sandbox.no_sandbox {
                    true => socket,
                    false => socket.confined_to(sandbox::save_places(on)),
                })
            }
            None if is_shown => Some(ControlSocket::unnamed().map_err(no_view)?),
            None => None,
        };
        let shown = control.as_ref().filter(|_| is_shown);
        let client = shown.map(ControlSocket::client).transpose();
        Ok(Self {
            live: None,
            client: client.map_err(no_view)?,
            control,
            metrics: on.metrics.map(MetricsSocket::open).transpose()?,
        })
    }

    /// Shows the view, if there is a terminal for it. Its threads begin inside of the sandbox.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub(super) fn show(&mut self, signals: &Signals) -> Result<(), Refusal> {
        let live = self
            .client
            .take()
            .map(|client| Live::start(client, signals));
        self.live = live.transpose().map_err(no_view)?;
        Ok(())
    }

    /// Ends the view, and prints the result of a run.
    ///
    /// # Errors
    /// The result cannot be written.
    pub fn finish(
        self,
        args: &RunArgs,
        (exit, report): (Exit, RunReport),
        signals: &Signals,
    ) -> Result<Exit, Refusal> {
        drop(self);
        let (text, json) = (in_words(&report), to_json(&report));
        write_result_until_signal(&args.on.output, &text, &json, signals)?;
        Ok(exit)
    }
}

fn no_view(error: io::Error) -> Refusal {
    (Exit::Host, format!("cannot show the run: {error}"))
}
