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
use lacuna_control::ControlSocket;
use lacuna_lab::result::to_json;
use std::io;

/// The sockets of a command for other processes, and the view, which is a client too.
pub struct Sockets {
    /// Before the socket, so that it is dropped first.
    pub(super) live: Option<Live>,
    pub(super) control: Option<ControlSocket>,
    pub(super) metrics: Option<MetricsSocket>,
}

impl Sockets {
    /// Opens the sockets that `on` names, and the view if there is a terminal for it. No client
    /// reaches a guest in virtual time, so `is_seeded` excludes the view. This comes before the
    /// sandbox, which makes no socket.
    ///
    /// # Errors
    /// A socket or the terminal cannot be used.
    pub fn open(on: &RunOn, is_seeded: bool, signals: &Signals) -> Result<Self, Refusal> {
        let failed = |error: io::Error| (Exit::Host, format!("cannot show the run: {error}"));
        let is_shown = !on.output.quiet && !is_seeded && Live::is_possible();
        let control = match &on.control {
            Some(path) => {
                let socket = ControlSocket::open(path).map_err(exit::refusal)?;
                Some(match on.sandbox.no_sandbox {
                    true => socket,
                    false => socket.confined_to(sandbox::save_places(on)),
                })
            }
            None if is_shown => Some(ControlSocket::unnamed().map_err(failed)?),
            None => None,
        };
        let metrics = on.metrics.map(MetricsSocket::open).transpose()?;
        let view = |socket: &ControlSocket| Live::start(socket.client()?, signals);
        let live = control.as_ref().filter(|_| is_shown).map(view);
        Ok(Self {
            live: live.transpose().map_err(failed)?,
            control,
            metrics,
        })
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
