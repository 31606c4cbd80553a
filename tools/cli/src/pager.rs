//! `lacuna pager`: fills the memory of other VMMs' guests.

use crate::args::{PagerArgs, Patience};
use crate::exit::{Exit, transport_refusal};
use crate::live::{columns, fit};
use crate::metrics::MetricsSocket;
use crate::output::{check_target, complain, write_result_until_signal};
use crate::progress;
use crate::run::{Refusal, catch_signals, exit_of};
use crate::signals::Signals;
use crate::size::Size;
use crate::source::{open_to_serve, whole_pages};
use lacuna::PageCount;
use lacuna::metrics::Metrics;
use lacuna::migrate::transport::PrivateSocket;
use lacuna::source::{
    Measured, PageSource, Policy, TouchedMemory, Touches, TouchesError, WhenGone,
};
use lacuna_lab::report::{short, time};
use lacuna_pager::{Config, Fill, FillRate, Image, Pager, Record};
use serde::Serialize;
use std::fs::{Permissions, set_permissions};
use std::num::NonZeroU64;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// How often the live line is renewed and signals are checked.
const LOOK: Duration = Duration::from_millis(200);
/// The most messages of the pager that wait to be printed.
const MESSAGES: usize = 256;

type Source = Measured<Box<dyn PageSource>>;

/// The result of `lacuna pager`, as JSON.
#[derive(Serialize)]
struct PagerReport {
    command: String,
    source: String,
    memory_bytes: u64,
    outcome: String,
    exit_code: u8,
    seconds: f64,
    vms: u64,
    refused: u64,
    faults: u64,
    placed: u64,
    shared: u64,
    filled: u64,
    working_set: u64,
    fill_late: u64,
    faults_after_fill: u64,
    zeros: u64,
    removals: u64,
    lost: u64,
    p50_ns: u128,
    p99_ns: u128,
}

/// Serves VMs as `args` say, until a signal arrives and the served VMs have ended; prints a summary
/// and returns the exit code.
pub fn pager(args: &PagerArgs) -> Exit {
    exit_of(pager_until_signal(args))
}

fn pager_until_signal(args: &PagerArgs) -> Result<Exit, Refusal> {
    let signals = catch_signals(&Arc::default())?;
    check_target(&args.output)?;
    let pages = args
        .memory
        .map(|memory| whole_pages(memory.0))
        .transpose()?;
    let policy = Patience::policy(args.patience);
    // The first signal must not end the reads of served VMs.
    let never = Arc::default();
    let (source, pages) = open_to_serve(&args.from, pages, policy, &never)?;
    let source = Arc::new(Measured::new(source));
    let record = record(args, pages)?;
    let fill = fill(args, pages)?;
    let metrics = args.metrics.map(MetricsSocket::open).transpose()?;
    let socket = PrivateSocket::bind(&args.socket).map_err(transport_refusal)?;
    // The pager reports under the lock of a VM, and stderr may block.
    let (sender, messages) = sync_channel(MESSAGES);
    let unsaid = Arc::new(AtomicU64::new(0));
    let counts = Arc::clone(&unsaid);
    let report = move |text: &str| {
        if sender.try_send(text.to_owned()).is_err() {
            counts.fetch_add(1, Ordering::Relaxed);
        }
    };
    let mut config = Config {
        when_lost: args.when_lost.into(),
        report: Arc::new(report),
        ..Config::default()
    };
    if !args.users.is_empty() {
        config.users.extend(&args.users);
        // Each user can connect, and the pager refuses all but these.
        let opened = set_permissions(&args.socket, Permissions::from_mode(0o666));
        opened.map_err(|error| host(format!("{}: {error}", args.socket.display())))?;
    }
    let listener = socket.listener().try_clone();
    let listener = listener.map_err(|error| host(format!("no descriptor is left: {error}")))?;
    let pager = Pager::new(config);
    let pager = pager.map_err(|error| host(format!("no descriptor is left: {error}")))?;
    let image = Image {
        source: Arc::clone(&source) as Arc<dyn PageSource>,
        pages,
        fill,
        record: record.clone(),
    };
    let serves = pager.serve(listener, image);
    serves.map_err(|error| host(format!("cannot start a thread: {error}")))?;
    let metrics_of = || {
        let mut to = Metrics::default();
        pager.stats().fill(&mut to);
        source.stats().fill(&mut to);
        to
    };
    let began = Instant::now();
    thread::scope(|scope| {
        let serving = metrics
            .as_ref()
            .map(|socket| socket.start(scope, &metrics_of));
        let serving = serving.transpose();
        let _serving = serving.map_err(|error| host(format!("--metrics: {error}")))?;
        let serves = Serves {
            args,
            memory: pages.bytes(),
            source: &source,
            pager: &pager,
            messages: &messages,
            unsaid: &unsaid,
            record: record.as_deref(),
            began,
        };
        serves.until_signal(&signals, socket)
    })
}

fn host(text: String) -> Refusal {
    (Exit::Host, text)
}

/// The record of `--record`. An unwritable file is refused before a VM is served.
fn record(args: &PagerArgs, pages: PageCount) -> Result<Option<Arc<Record>>, Refusal> {
    let record = |path: &PathBuf| {
        Touches::check_target(path)?;
        Ok(Arc::new(Record::new(path.clone(), pages)))
    };
    let record = args.record.as_ref().map(record).transpose();
    record.map_err(|error: TouchesError| (Exit::Usage, format!("--record: {error}")))
}

/// What `--working-set` and `--fill` bring.
fn fill(args: &PagerArgs, pages: PageCount) -> Result<Option<Fill>, Refusal> {
    if args.working_set.is_none() && !args.fill {
        return Ok(None);
    }
    let memory = TouchedMemory {
        checksum: None,
        pages: pages.get(),
    };
    let working_set = args.working_set.as_deref();
    let working_set = working_set.map(|path| Touches::load(path, memory));
    let refused = |error: TouchesError| (Exit::Usage, format!("--working-set: {error}"));
    let rate = args.fill_rate.map(|size| {
        let rate = NonZeroU64::new(size.0);
        rate.map(FillRate::new).ok_or((
            Exit::Usage,
            "--fill-rate 0 brings nothing: give more".into(),
        ))
    });
    // The faults' source decides about lost pages. This one waits.
    let policy = Policy {
        when_gone: WhenGone::Hold,
        ..Policy::default()
    };
    let (source, _) = open_to_serve(&args.from, Some(pages), policy, &Arc::default())?;
    Ok(Some(Fill {
        source: Arc::from(source),
        working_set: working_set.transpose().map_err(refused)?,
        is_whole: args.fill,
        rate: rate.transpose()?,
    }))
}

/// A pager at work.
struct Serves<'a> {
    args: &'a PagerArgs,
    memory: u64,
    source: &'a Source,
    pager: &'a Pager,
    /// What the pager reports.
    messages: &'a Receiver<String>,
    /// Messages that found no room.
    unsaid: &'a AtomicU64,
    /// What the first VM needs.
    record: Option<&'a Record>,
    began: Instant,
}

impl Serves<'_> {
    /// Serves until there is a signal, and then until no VM is left. `socket` accepts VMs until the
    /// signal.
    fn until_signal(&self, signals: &Signals, socket: PrivateSocket) -> Result<Exit, Refusal> {
        let live = progress::line(self.args.output.quiet);
        let mut socket = Some(socket);
        let signal = loop {
            live.suspend(|| self.print_messages());
            if let Some(signal) = signals.caught() {
                let is_first = socket.take().is_some();
                if is_first && let Some(record) = self.record {
                    // The second signal leaves no time for it.
                    let saved = record.save();
                    saved.unwrap_or_else(|error| complain(&error.to_string()));
                }
                // Before the count, which only falls afterwards.
                self.pager.stop_accepting();
                let vms = self.pager.connections();
                if vms == 0 {
                    break signal;
                }
                if is_first {
                    live.suspend(|| {
                        complain(&format!(
                            "{signal}: {vms} VMs need this pager, which ends when they have ended \
                             and accepts no other; another {signal} ends it now, and the VMs wait \
                             for ever"
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
        let (stats, pages) = (self.pager.stats(), self.source.stats());
        let report = PagerReport {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            source: self.args.from.to_string(),
            memory_bytes: self.memory,
            outcome: format!("ended by {signal}"),
            exit_code: exit.code(),
            seconds: self.began.elapsed().as_secs_f64(),
            vms: stats.accepted,
            refused: stats.refused,
            faults: stats.counts.faults,
            placed: stats.counts.placed,
            shared: stats.counts.shared,
            filled: stats.counts.filled,
            working_set: stats.counts.working_set,
            fill_late: stats.counts.fill_late,
            faults_after_fill: stats.counts.faults_after_fill,
            zeros: stats.counts.zeros,
            removals: stats.counts.removals,
            lost: stats.counts.lost,
            p50_ns: pages.p50.as_nanos(),
            p99_ns: pages.p99.as_nanos(),
        };
        let json = serde_json::to_string_pretty(&report).expect("every field has a JSON form");
        let text = self.line() + "\n";
        write_result_until_signal(&self.args.output, &text, &(json + "\n"), signals)?;
        Ok(exit)
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
        let (stats, pages) = (self.pager.stats(), self.source.stats());
        let seconds = self.began.elapsed().as_secs_f64().max(1e-3);
        let [p50, p99] = [pages.p50, pages.p99].map(|t| time(t.as_nanos() as u64));
        let lost = match stats.counts.lost {
            0 => String::new(),
            lost => format!(", {lost} lost"),
        };
        let outage = self.source.outage();
        let outage = outage.map_or_else(String::new, |why| format!("; it gives no page: {why}"));
        format!(
            "paging    {} from {} at {}: {} VMs, {} so far, {} refused; {} pages{lost}, {}/s, p50 \
             {p50}, p99 {p99}{outage}",
            Size(self.memory),
            self.args.from,
            self.args.socket.display(),
            stats.vms,
            stats.accepted,
            stats.refused,
            pages.provided,
            short(pages.provided as f64 / seconds),
        )
    }
}
