//! `lacuna pager`: fills the memory of other VMMs' guests.

mod image;
mod settings;
mod top;

use crate::args::{Output, PagerArgs, PagerCommand};
use crate::exit::Exit;
use crate::metrics::MetricsSocket;
use crate::output::{check_target, columns, complain, fit, write_result_until_signal};
use crate::progress;
use crate::run::{Refusal, catch_signals, exit_of};
use crate::sandbox;
use crate::signals::Signals;
use image::{ImageReport, OpenImage};
use lacuna::metrics::Metrics;
use lacuna::migrate::transport::PrivateSocket;
use lacuna_lab::report::short;
use lacuna_pager::{Config, Pager, StateFolder, Supervisor};
use lacuna_sandbox::Sandbox;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

pub use settings::Settings;

/// How often the live line is renewed and signals are checked.
const LOOK: Duration = Duration::from_millis(200);
/// The most messages of the pager that wait to be printed.
const MESSAGES: usize = 256;

/// The most VMs with metrics of their own, the oldest first.
const VMS_MAX: usize = 256;

/// The result of `lacuna pager`, as JSON.
#[derive(Serialize)]
struct PagerReport {
    command: String,
    images: Vec<ImageReport>,
    outcome: String,
    exit_code: u8,
    seconds: f64,
    vms: u64,
    taken_back: u64,
    refused: u64,
    faults: u64,
    placed: u64,
    shared: u64,
    filled: u64,
    working_set: u64,
    fill_late: u64,
    faults_after_fill: u64,
    paged_out: u64,
    zeros: u64,
    removals: u64,
    lost: u64,
}

/// Shows a running pager, or serves VMs as `args` say, until a signal arrives and the served VMs
/// have ended; prints a summary and returns the exit code.
pub fn pager(args: &PagerArgs) -> Exit {
    match &args.what {
        Some(PagerCommand::Top(args)) => top::top(args),
        None => exit_of(pager_until_signal(args)),
    }
}

fn pager_until_signal(args: &PagerArgs) -> Result<Exit, Refusal> {
    let signals = catch_signals(&Arc::default())?;
    check_target(&args.output)?;
    let settings = Settings::of(args)?;
    let named = |socket: &Path, refusal| of_image(args, socket, refusal);
    let images = settings.images.into_iter().map(|image| {
        let socket = image.socket.clone();
        OpenImage::open(image).map_err(|refusal| named(&socket, refusal))
    });
    let images = &images.collect::<Result<Vec<_>, _>>()?;
    // First: it waits for the end of the last pager, which has the other resources.
    let state = args.state.as_deref().map(open_state).transpose()?;
    let metrics = settings.metrics.map(MetricsSocket::open).transpose()?;
    let sockets = images.iter().map(|image| {
        let listens = image.listen(state.as_deref());
        listens.map_err(|refusal| named(image.socket(), refusal))
    });
    let sockets = sockets.collect::<Result<Vec<_>, _>>()?;
    enter_sandbox(args, images, settings.cold_after)?;
    // The pager reports under the lock of a VM, and stderr may block.
    let (sender, messages) = sync_channel(MESSAGES);
    let unsaid = Arc::new(AtomicU64::new(0));
    let counts = Arc::clone(&unsaid);
    let report = move |text: &str| {
        if sender.try_send(text.to_owned()).is_err() {
            counts.fetch_add(1, Ordering::Relaxed);
        }
    };
    let pager = Pager::new(Config {
        cold_after: settings.cold_after,
        report: Arc::new(report),
        state: state.clone(),
        ..Config::default()
    });
    let pager = &pager.map_err(|error| host(format!("no descriptor is left: {error}")))?;
    for (image, socket) in images.iter().zip(&sockets) {
        let served = image.serve(pager, socket);
        served.map_err(|refusal| named(image.socket(), refusal))?;
    }
    let complaints = state.iter().flat_map(|state| state.complaints());
    complaints.for_each(|text| complain(&text));
    let fill = || {
        let mut to = Metrics::default();
        pager.stats().fill(&mut to);
        images.iter().for_each(|image| image.fill(&mut to));
        let vms = pager.vms();
        vms.iter().take(VMS_MAX).for_each(|vm| vm.fill(&mut to));
        to
    };
    let began = Instant::now();
    thread::scope(|scope| {
        let serving = metrics.as_ref().map(|socket| socket.start(scope, &fill));
        let serving = serving.transpose();
        let _serving = serving.map_err(|error| host(format!("--metrics: {error}")))?;
        let serves = Serves {
            output: &args.output,
            images,
            pager,
            state: state.as_deref(),
            messages: &messages,
            unsaid: &unsaid,
            began,
        };
        serves.until_signal(&signals, sockets)
    })
}

/// The options of one image need no name. Of a file, it may be any image.
fn of_image(args: &PagerArgs, socket: &Path, (exit, text): Refusal) -> Refusal {
    match &args.config {
        None => (exit, text),
        Some(file) => {
            let (file, socket) = (file.display(), socket.display());
            (exit, format!("{file}: the image of {socket}: {text}"))
        }
    }
}

/// Enters the sandbox, before the first thread that reads from a VMM. With `--state` the pager
/// takes VMs back from their VMMs, and with `--cold-after` it moves their pages.
fn enter_sandbox(
    args: &PagerArgs,
    images: &[OpenImage],
    cold_after: Option<Duration>,
) -> Result<(), Refusal> {
    let mut sandbox = Sandbox::new();
    images.iter().for_each(|image| image.allow(&mut sandbox));
    if args.state.is_some() || cold_after.is_some() {
        sandbox.allow_processes();
    }
    sandbox::allow_output(&mut sandbox, &args.output);
    sandbox::enter(&sandbox, &args.sandbox)
}

/// Opens the folder of `--state`.
fn open_state(path: &Path) -> Result<Arc<StateFolder>, Refusal> {
    let supervisor = Supervisor::from_environment();
    let supervisor = supervisor.map_err(|error| host(format!("the service manager: {error}")))?;
    let opened = StateFolder::open(path, supervisor);
    opened
        .map(Arc::new)
        .map_err(|error| host(format!("--state: {error}")))
}

fn host(text: String) -> Refusal {
    (Exit::Host, text)
}

/// A pager at work.
struct Serves<'a> {
    output: &'a Output,
    images: &'a [OpenImage],
    pager: &'a Pager,
    state: Option<&'a StateFolder>,
    /// What the pager reports.
    messages: &'a Receiver<String>,
    /// Messages that found no room.
    unsaid: &'a AtomicU64,
    began: Instant,
}

impl Serves<'_> {
    /// Serves until there is a signal, and then until no VM is left. `sockets` accept VMs until the
    /// signal.
    fn until_signal(
        &self,
        signals: &Signals,
        sockets: Vec<PrivateSocket>,
    ) -> Result<Exit, Refusal> {
        let live = progress::line(self.output.quiet);
        let mut sockets = Some(sockets);
        let signal = loop {
            live.suspend(|| self.print_messages());
            if let Some(signal) = signals.caught() {
                let is_first = sockets.take().is_some();
                if is_first {
                    self.accept_no_more();
                }
                // It only falls.
                let vms = self.pager.connections();
                if vms == 0 {
                    break signal;
                }
                if is_first {
                    let wait = match self.state {
                        None => "for ever",
                        Some(_) => "for the next one with the same --state",
                    };
                    live.suspend(|| {
                        complain(&format!(
                            "{signal}: {vms} VMs need this pager, which ends when they have ended \
                             and accepts no other; another {signal} ends it now, and the VMs wait \
                             {wait}"
                        ));
                    });
                }
            }
            live.set_message(fit(&self.line(), columns()));
            live.tick();
            thread::sleep(LOOK);
        };
        live.finish_and_clear();
        self.print_messages();
        let exit = Exit::Interrupted(signal);
        let report = self.report(format!("ended by {signal}"), exit);
        let json = serde_json::to_string_pretty(&report).expect("every field has a JSON form");
        let each = self.images.iter();
        let each = each.map(|image| format!("image     {}: {}\n", image.name(), image.times()));
        let text = match self.images {
            [_] => self.line() + "\n",
            _ => self.line() + "\n" + &each.collect::<String>(),
        };
        write_result_until_signal(self.output, &text, &(json + "\n"), signals)?;
        Ok(exit)
    }

    fn report(&self, outcome: String, exit: Exit) -> PagerReport {
        let stats = self.pager.stats();
        PagerReport {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            images: self.images.iter().map(OpenImage::report).collect(),
            outcome,
            exit_code: exit.code(),
            seconds: self.began.elapsed().as_secs_f64(),
            vms: stats.accepted,
            taken_back: stats.taken_back,
            refused: stats.refused,
            faults: stats.counts.faults,
            placed: stats.counts.placed,
            shared: stats.counts.shared,
            filled: stats.counts.filled,
            working_set: stats.counts.working_set,
            fill_late: stats.counts.fill_late,
            faults_after_fill: stats.counts.faults_after_fill,
            paged_out: stats.counts.paged_out,
            zeros: stats.counts.zeros,
            removals: stats.counts.removals,
            lost: stats.counts.lost,
        }
    }

    fn accept_no_more(&self) {
        // Now: a second signal leaves no time for it.
        self.images.iter().for_each(OpenImage::save_record);
        if let Some(state) = self.state {
            state.supervisor().forget_listeners();
        }
        self.pager.stop_accepting();
    }

    fn print_messages(&self) {
        self.messages.try_iter().for_each(|text| complain(&text));
        let unsaid = self.unsaid.swap(0, Ordering::Relaxed);
        if unsaid > 0 {
            complain(&format!(
                "{unsaid} more messages of the pager are not shown"
            ));
        }
    }

    fn line(&self) -> String {
        let stats = self.pager.stats();
        let seconds = self.began.elapsed().as_secs_f64().max(1e-3);
        let (what, times) = match self.images {
            [one] => (one.name(), format!(", {}", one.times())),
            many => (format!("{} images", many.len()), String::new()),
        };
        let lost = match stats.counts.lost {
            0 => String::new(),
            lost => format!(", {lost} lost"),
        };
        let provided = self.images.iter().map(|image| image.provided());
        let provided = provided.sum::<u64>();
        format!(
            "paging    {what}: {} VMs, {} so far, {} refused; {provided} pages{lost}, {}/s{times}",
            stats.vms,
            stats.accepted,
            stats.refused,
            short(provided as f64 / seconds),
        )
    }
}
