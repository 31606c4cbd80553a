//! What a run opens before the sandbox.

use super::Refusal;
use super::report::in_words;
use crate::args::{RunArgs, RunOn, SwapMedium};
use crate::exit::{self, Exit};
use crate::metrics::MetricsSocket;
use crate::output::write_result_until_signal;
use crate::sample::RunReport;
use crate::sandbox;
use crate::signals::Signals;
use crate::view::Live;
use lacuna::memory::{Swap, SwapFile};
use lacuna_control::{Client, ControlSocket};
use lacuna_lab::result::to_json;
use std::io;

/// The sockets of a command for other processes; the view, which is a client too; the swap device.
pub struct Opened {
    /// Before the socket, so that it is dropped first.
    pub(super) live: Option<Live>,
    /// Of the view, until it is shown.
    client: Option<Client>,
    pub(super) control: Option<ControlSocket>,
    pub(super) metrics: Option<MetricsSocket>,
    pub(super) swap: Swap,
}

impl Opened {
    /// Opens the sockets that `on` names, one for the view if there is a terminal for it, and the
    /// swap file. No client reaches a guest in virtual time, so `is_seeded` excludes the view.
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
            swap: swap(on),
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

/// The swap device. Its file is made here, because the sandbox opens no file of that folder. If it
/// cannot be made, a VM that swaps reports the error; on kvm a VM may do without.
fn swap(on: &RunOn) -> Swap {
    match on.swap.clone().unwrap_or_default().medium {
        SwapMedium::Memory => Swap::Memory,
        SwapMedium::File { dir } => SwapFile::create(&dir).map_or(Swap::File(dir), Swap::Made),
    }
}

fn no_view(error: io::Error) -> Refusal {
    (Exit::Host, format!("cannot show the run: {error}"))
}
