//! `lacuna run`, and the run of `lacuna snapshot restore`: one guest, live.

mod attend;
mod disk;
mod incoming;
mod opened;
mod profile;
mod report;
mod restored;
mod screen;
mod summary;
mod threads;

pub use opened::Opened;
pub use report::{Asked, verdict};
pub use restored::{Lazy, Record};

use crate::args::{Backend, RunArgs};
use crate::exit::Exit;
use crate::image::{check_limits, load, unread_parameters};
use crate::metrics::MetricsSocket;
use crate::observe::{Observer, Watched};
use crate::output::{check_target, complain};
use crate::pages::{self, GuestPages, Here};
use crate::sample::{Before, Restored, RunReport};
use crate::sandbox;
use crate::signals::Signals;
use crate::source::SourceError;
use crate::view::{Caption, Live};
use lacuna::memory::{LatencySetting, LinuxBacking, Swap};
use lacuna::migrate::session::{Arrival, Migrated};
use lacuna::migrate::{MachineConfig, Snapshot};
use lacuna::source::PageSource;
use lacuna::{
    Arch, Builder, CpuModel, Ending, Image, Nanos, PageCount, PlatformDevices, VcpuError, Vm,
};
use lacuna_control::ControlSocket;
use lacuna_lab::host_info::HostInfo;
use lacuna_lab::result::{SCHEMA, command_line};
use report::{at_first, options};
use screen::Screen;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use threads::{Ended, Watch, refusal};

/// Why a command ends before its work begins: the exit code, and the text for the user.
pub type Refusal = (Exit, String);

/// How a guest begins.
#[derive(Clone, Copy)]
pub enum Start<'a> {
    /// With the first instruction of its kernel.
    Image(&'a Image<'a>),
    /// At the state of a saved guest, with all of its memory.
    Snapshot(&'a Snapshot),
    /// At the state of a saved guest; its pages arrive while it runs.
    Lazily(&'a Lazy<'a>),
    /// At the state of a guest that arrives from another process.
    Incoming(&'a Arrival<'a>),
}

impl Start<'_> {
    /// The given machine.
    fn machine(&self) -> Option<&MachineConfig> {
        match self {
            Self::Image(_) => None,
            Self::Snapshot(snapshot) => Some(snapshot.machine()),
            Self::Lazily(lazy) => Some(lazy.snapshot.machine()),
            Self::Incoming(arrival) => Some(arrival.machine()),
        }
    }

    /// Whether the guest has run elsewhere before.
    fn has_run(&self) -> bool {
        !matches!(self, Self::Image(_))
    }

    /// The incoming guest.
    fn arrival(&self) -> Option<&'_ Arrival<'_>> {
        match self {
            Self::Incoming(arrival) => Some(arrival),
            _ => None,
        }
    }
}

/// One run.
struct Job<'a> {
    args: &'a RunArgs,
    start: Start<'a>,
    /// The guest's pages, if they have a source.
    pages: Option<Arc<GuestPages>>,
    /// The snapshot's memory file, if the guest's pages stay there.
    backing: Option<LinuxBacking>,
    signals: &'a Signals,
    control: Option<&'a ControlSocket>,
    metrics: Option<&'a MetricsSocket>,
    swap: &'a Swap,
}

/// Runs a guest as `args` say; prints the result and returns the exit code.
pub fn run(args: &RunArgs) -> Exit {
    exit_of(begin(args))
}

/// The exit code; an error is printed.
pub fn exit_of(done: Result<Exit, Refusal>) -> Exit {
    done.unwrap_or_else(|(exit, text)| {
        complain(&text);
        exit
    })
}

fn begin(args: &RunArgs) -> Result<Exit, Refusal> {
    if let Some(at) = &args.incoming {
        return incoming::wait_and_run(args, at);
    }
    let signals = catch_signals(&Arc::default())?;
    let limits = check_limits(args);
    limits.map_err(|error| (Exit::Usage, error.to_string()))?;
    check_target(&args.on.output)?;
    let opened = Opened::open(&args.on, args.seed.is_some())?;
    sandbox::enter_run(args)?;
    with_image(args, |start| run_from(args, start, &signals, opened))
}

/// Calls `run` with the guest's image.
fn with_image<T>(
    args: &RunArgs,
    run: impl FnOnce(Start<'_>) -> Result<T, Refusal>,
) -> Result<T, Refusal> {
    let usage = |error: &dyn ToString| (Exit::Usage, error.to_string());
    let file = load(args).map_err(|error| (error.kind().into(), error.to_string()))?;
    if let Some(text) = unread_parameters(args) {
        complain(&text);
    }
    let image = Image::parse(&file);
    let image = image.map_err(|error| usage(&format!("{}: {error}", args.image)))?;
    check_arch(args, image.arch).map_err(|text| usage(&text))?;
    run(Start::Image(&image))
}

/// Runs a guest without a summary, beside `script` on a thread of its own, which is a client of the
/// control socket and may write into the view. Returns the script's result.
///
/// # Errors
/// The run cannot start.
pub fn run_beside<T: Send + 'static>(
    args: &RunArgs,
    signals: &Signals,
    script: impl FnOnce(Option<Caption>) -> T + Send + 'static,
) -> Result<(Exit, T), Refusal> {
    with_image(args, |start| {
        let mut opened = Opened::open(&args.on, false)?;
        opened.show(signals)?;
        let caption = opened.live.as_ref().map(Live::caption);
        let named = thread::Builder::new().name("lacuna-script".into());
        let script = named
            .spawn(move || script(caption))
            .map_err(threads::failed)?;
        let (exit, _) = run_with(args, start, signals, &opened)?;
        // The script's requests have an answer, or its connection is closed.
        drop(opened);
        let done = script.join();
        Ok((exit, done.unwrap_or_else(|panic| resume_unwind(panic))))
    })
}

/// Catches SIGHUP, SIGINT and SIGTERM, as [`Signals::catch`].
///
/// # Errors
/// The kernel refuses it.
pub fn catch_signals(stop: &Arc<AtomicBool>) -> Result<Signals, Refusal> {
    let signals = Signals::catch(stop);
    signals.map_err(|error| (Exit::Host, format!("cannot catch signals: {error}")))
}

/// Runs a guest to its end, and prints the result.
///
/// # Errors
/// The run cannot start, or its result cannot be written.
pub fn run_from(
    args: &RunArgs,
    start: Start<'_>,
    signals: &Signals,
    mut opened: Opened,
) -> Result<Exit, Refusal> {
    opened.show(signals)?;
    let done = run_with(args, start, signals, &opened)?;
    opened.finish(args, done, signals)
}

/// As [`run_from`], with sockets that remain open.
fn run_with(
    args: &RunArgs,
    start: Start<'_>,
    signals: &Signals,
    opened: &Opened,
) -> Result<(Exit, RunReport), Refusal> {
    let (arch, cpu) = match (start, start.machine()) {
        (_, Some(machine)) => (machine.arch, machine.cpu),
        (Start::Image(image), _) => (image.arch, args.cpu.model(image.arch)),
        _ => unreachable!("a guest without an image has a machine"),
    };
    let backend = choose(args, arch)?;
    let checked = args.check_kind();
    checked.map_err(|wrong| (Exit::Usage, wrong.to_string()))?;
    let (source, here) = match start {
        Start::Lazily(lazy) => {
            let here = Here::Restored(Arc::clone(&lazy.counts));
            (Some(pages::of_snapshot(lazy)?), here)
        }
        Start::Incoming(arrival) => {
            let source = arrival.page_source().map(pages::of_migration);
            (source, Here::IncomingGuest(arrival.handle().clone()))
        }
        _ => {
            let interrupt = signals.flag();
            let interrupt = interrupt.map_err(|error| (Exit::Host, error.to_string()))?;
            let source = pages::open(args, backend, &interrupt);
            let failed = |error: SourceError| (error.exit(), format!("--pages-from: {error}"));
            (source.map_err(failed)?, Here::Provided)
        }
    };
    let total = PageCount::from_bytes(args.memory.0);
    let pages = source.map(|source| Arc::new(GuestPages::new(source, total, here)));
    let job = Job {
        args,
        start,
        pages,
        backing: restored::in_place(args, start, backend)?,
        signals,
        control: opened.control.as_ref(),
        metrics: opened.metrics.as_ref(),
        swap: &opened.swap,
    };
    match backend {
        Backend::Kvm => job.run_on(&job.kvm(cpu), |_, _, _, _| unreachable!("soft has seeds")),
        Backend::Soft | Backend::Auto => job.run_on(&job.soft(arch, cpu), run_seeded),
    }
}

/// Runs a guest in virtual time, if its backend can.
type Seeded<B> = fn(
    &B,
    &Image<'_>,
    Arc<PlatformDevices>,
    Watch<'_, <B as Builder>::Vm>,
) -> Result<Ended<<B as Builder>::Vm>, Refusal>;

fn run_seeded(
    builder: &lacuna::soft::VmBuilder,
    image: &Image<'_>,
    devices: Arc<PlatformDevices>,
    watch: Watch<'_, lacuna::soft::Vm>,
) -> Result<Ended<lacuna::soft::Vm>, Refusal> {
    let mut look = |vm: &lacuna::soft::Vm, now| watch(vm, &devices, now);
    let run = builder.run_seeded(image, Arc::clone(&devices), &mut look);
    let (end, trace) = run.map_err(|error| refusal(&error))?;
    Ok(Ended {
        trace_hash: Some(trace.hash),
        ..Ended::of(end)
    })
}

/// Refuses a file for another processor than `--arch` names.
fn check_arch(args: &RunArgs, image: Arch) -> Result<(), String> {
    match args.arch {
        Some(asked) if asked != image => Err(format!(
            "--arch: {} is for {image}, not for {asked}; leave --arch out",
            args.image
        )),
        _ => Ok(()),
    }
}

/// The backend of a run. `auto` never fails: soft runs everywhere, and it runs every image.
fn choose(args: &RunArgs, arch: Arch) -> Result<Backend, Refusal> {
    let option = args.needs_soft();
    match (args.on.backend, option) {
        (Backend::Kvm, Some(option)) => {
            let text = format!(
                "{option} needs the soft backend: leave it out, or give --backend soft or auto"
            );
            Err((Exit::Usage, text))
        }
        (Backend::Kvm, None) if arch != Arch::X86_64 => {
            let text = format!("--backend kvm runs x86-64 guests, not {arch}: give --backend soft");
            Err((Exit::Usage, text))
        }
        (Backend::Kvm, None) => match lacuna::kvm::available() {
            Ok(()) => Ok(Backend::Kvm),
            Err(why) => {
                let text = format!("--backend kvm: {why}; --backend soft needs no KVM");
                Err((Exit::Host, text))
            }
        },
        (Backend::Auto, None) if arch == Arch::X86_64 && lacuna::kvm::available().is_ok() => {
            Ok(Backend::Kvm)
        }
        (Backend::Soft | Backend::Auto, _) => Ok(Backend::Soft),
    }
}

impl Job<'_> {
    /// Runs the guest on any backend.
    fn run_on<B: Builder>(
        &self,
        builder: &B,
        seeded: Seeded<B>,
    ) -> Result<(Exit, RunReport), Refusal>
    where
        B::Vm: Watched,
    {
        let (args, signals) = (self.args, self.signals);
        // On kvm nothing in this process sees the pages that a handler fills.
        let is_seen = B::Vm::BACKEND == lacuna::Backend::Soft || !args.has_handler();
        let pages = self.pages.clone().filter(|_| is_seen);
        let first = at_first::<B>(args, pages.as_ref());
        let mut observer = Observer::new(first, pages, self.start.has_run());
        let mut set_exits = args.exit_on_missing;
        let screen = Screen::new();
        let console = screen.console();
        let mut has_told = false;
        let mut watch = |vm: &B::Vm, devices: &PlatformDevices, now: Nanos| {
            if std::mem::take(&mut set_exits)
                && let Err(error) = pages::exit_on_missing(vm)
            {
                let cause = format!("--exit-on-missing: {error}");
                let failed = VcpuError::Host { vcpu: 0, cause };
                devices.end(Ending::Failed(failed), vm);
            }
            observer.look(vm, devices, now);
            screen.show();
            if signals.caught().is_some()
                && !self.unless_needed(|| self.stop(devices, vm))
                && !std::mem::replace(&mut has_told, true)
            {
                complain(
                    "the guest runs elsewhere, or may, and needs pages of this process: it ends \
                     when it has sent them; a second signal ends it at once, and they are lost",
                );
            }
        };
        let done = match (self.start, args.seed) {
            (Start::Image(image), Some(_)) => {
                let devices = Arc::new(PlatformDevices::of(image.arch, console));
                let run = seeded(builder, image, devices, &mut watch);
                run.map(|end| (end, Before::default()))
            }
            _ => threads::run(self, builder, console, &mut watch),
        };
        screen.finish();
        let (end, mut before) = done?;
        restored::count_demands(self, &mut before.restored);
        if let Some(arrival) = self.start.arrival() {
            before.received = Some(incoming::received(arrival.handle()));
        }
        let migrated = self.control.and_then(|socket| socket.moved().cloned());
        let (exit, outcome) = self.outcome(&end.end.ending, &before, migrated.as_ref());
        let report = RunReport {
            schema: SCHEMA,
            host: HostInfo::detect(),
            command: command_line(),
            options: options(args, builder, self.start),
            outcome,
            exit_code: exit.code(),
            trace_hash: end.trace_hash.map(|hash| format!("{hash:016x}")),
            restored: before.restored,
            received: before.received,
            migrated,
            profile: end.profile.map(|samples| samples.rows(args)),
            last: observer.last(&end.end, end.status.as_deref()),
        };
        Ok((exit, report))
    }

    /// The exit code, and the outcome in words.
    fn outcome(
        &self,
        ending: &Ending,
        before: &Before,
        moved: Option<&Migrated>,
    ) -> (Exit, String) {
        let asked = Asked {
            signal: self.signals.caught(),
            stopped: self.control.is_some_and(ControlSocket::has_stopped),
            moved: moved.map(Migrated::outcome),
        };
        let record_failed = before.restored.as_ref().and_then(Restored::record_error);
        match (verdict(ending, &asked), record_failed) {
            ((Exit::Done, _), Some(error)) => (Exit::Host, error.to_owned()),
            (verdict, _) => verdict,
        }
    }

    /// Calls `end`, unless a guest that was handed over needs pages of this process. Returns
    /// whether `end` was called.
    fn unless_needed(&self, end: impl FnOnce()) -> bool {
        match self.control {
            Some(socket) => socket.unless_needed(end),
            None => {
                end();
                true
            }
        }
    }

    /// Ends the guest, and the waits of its vCPUs for pages of an incoming guest's source.
    fn stop<V: Vm>(&self, devices: &PlatformDevices, vm: &V) {
        devices.end(Ending::Stopped, vm);
        if let Some(arrival) = self.start.arrival() {
            arrival.handle().end(Some(&self.why_stopped()));
        }
    }

    /// Why the guest was stopped, for its source.
    fn why_stopped(&self) -> String {
        match self.signals.caught() {
            Some(signal) => format!("interrupted by {signal}"),
            None => "stopped through its control socket".into(),
        }
    }

    /// The source as a builder takes it.
    fn source(&self) -> Option<Arc<dyn PageSource>> {
        let source = Arc::clone(self.pages.as_ref()?.source());
        Some(source as Arc<dyn PageSource>)
    }

    fn command_line(&self, arch: Arch) -> String {
        format!("{}{}", self.args.append, disk::words(self.args, arch))
    }

    fn soft(&self, arch: Arch, cpu: CpuModel) -> lacuna::soft::VmBuilder {
        let args = self.args;
        let swap = args.on.swap.clone().unwrap_or_default();
        lacuna::soft::VmBuilder {
            arch,
            memory: PageCount::from_bytes(args.memory.0),
            resident: PageCount::from_bytes(args.budget().0),
            vcpus: args.vcpus as usize,
            memory_kind: args.kind(),
            linux_limit: args.linux_limit().map(|size| PageCount::from_bytes(size.0)),
            backing: self.backing.clone(),
            // `threads::run` does the prefault, so that a signal can end it.
            prefault: false,
            huge: args.on.thp.unwrap_or_default(),
            swap: self.swap.clone(),
            latency: LatencySetting::new(swap.latency),
            apf: args.apf,
            cpu,
            detection: args.on.dirty.detection(),
            delivery: args.on.dirty.delivery(),
            source: self.source(),
            seed: args.seed,
            command_line: self.command_line(arch),
        }
    }

    /// The builder for the kvm backend.
    fn kvm(&self, cpu: CpuModel) -> lacuna::kvm::VmBuilder {
        let args = self.args;
        let swap = args.on.swap.clone().unwrap_or_default();
        lacuna::kvm::VmBuilder {
            memory: PageCount::from_bytes(args.memory.0),
            resident: PageCount::from_bytes(args.budget().0),
            memory_kind: args.kind(),
            backing: self.backing.clone(),
            huge: args.on.thp.unwrap_or_default(),
            vcpus: args.vcpus as usize,
            swap: self.swap.clone(),
            latency: LatencySetting::new(swap.latency),
            apf: args.apf,
            delivery: args.on.dirty.delivery(),
            tracker: lacuna::kvm::Tracker::default(),
            cpu,
            source: self.source(),
            command_line: self.command_line(Arch::X86_64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_for_another_processor_is_refused() {
        use crate::args::{Cli, Command};
        use clap::Parser;
        for (line, image, good) in [
            ("lacuna run file", Arch::Arm64, true),
            ("lacuna run file --arch arm64", Arch::Arm64, true),
            ("lacuna run file --arch arm64", Arch::X86_64, false),
            ("lacuna run file --arch x86_64", Arch::Arm64, false),
        ] {
            let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
            let Some(Command::Run(args)) = cli.command else {
                panic!("{line}");
            };
            let checked = check_arch(&args, image);
            assert_eq!(checked.is_ok(), good, "{line} {checked:?}");
        }
    }
}
