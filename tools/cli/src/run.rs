//! `lacuna run`: one guest, live.

use crate::args::{self, Backend, RunArgs, SwapMedium};
use crate::exit::Exit;
use crate::image::{check_limits, load};
use crate::live::{Live, summary};
use crate::observe::{Observer, Watched};
use crate::output::{check_target, complain, print_guest_line, tell, visible};
use crate::pages::{self, Source};
use crate::sample::{Pages, RunOptions, RunReport, RunSample};
use crate::signals::{Signal, Signals};
use lacuna_addr::PageCount;
use lacuna_machine::{
    Apf, BackendError as _, Builder, CpuModel, Delivery, Ending, Image, Observed, PageSource,
    RunEnd, VcpuError, Vm as _,
};
use lacuna_soft::{HugePages, LatencySetting, Swap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

/// Lines of the guest that may wait to be shown.
const LINES: usize = 10_000;

/// Runs a guest as `args` say; prints the result and returns the exit code.
pub fn run(args: &RunArgs) -> Exit {
    let signals = match Signals::catch(&Arc::default()) {
        Ok(signals) => signals,
        Err(error) => return refuse(Exit::Host, &format!("cannot catch signals: {error}")),
    };
    if let Err(error) = check_limits(args) {
        return refuse(Exit::Usage, &error.to_string());
    }
    if let Err(error) = check_target(&args.output) {
        return refuse(Exit::Host, &error.to_string());
    }
    let file = match load(&args.image) {
        Ok(file) => file,
        Err(error) => return refuse(error.kind().into(), &error.to_string()),
    };
    let image = match Image::parse(&file) {
        Ok(image) => image,
        Err(error) => return refuse(Exit::Usage, &format!("{}: {error}", args.image)),
    };
    let backend = match choose(args) {
        Ok(backend) => backend,
        Err((exit, text)) => return refuse(exit, &text),
    };
    let source = match pages::open(args) {
        Ok(source) => source,
        Err(error) => return refuse(error.exit(), &error.to_string()),
    };
    match backend {
        Backend::Kvm => run_on(&kvm(args, &source), args, &image, (&signals, source)),
        Backend::Soft | Backend::Auto => {
            run_on(&soft(args, &source), args, &image, (&signals, source))
        }
    }
}

/// The backend of a run. `auto` never fails: soft runs everywhere.
fn choose(args: &RunArgs) -> Result<Backend, (Exit, String)> {
    let option = args.needs_soft();
    match (args.backend, option) {
        (Backend::Kvm, Some(option)) => {
            let text = format!(
                "{option} needs the soft backend: leave it out, or give --backend soft or auto"
            );
            Err((Exit::Usage, text))
        }
        (Backend::Kvm, None) => match lacuna_kvm::available() {
            Ok(()) => Ok(Backend::Kvm),
            Err(why) => {
                let text = format!("--backend kvm: {why}; --backend soft needs no KVM");
                Err((Exit::Host, text))
            }
        },
        (Backend::Auto, None) if lacuna_kvm::available().is_ok() => Ok(Backend::Kvm),
        (Backend::Soft | Backend::Auto, _) => Ok(Backend::Soft),
    }
}

/// Runs a guest on any backend, with the pages of `source` if there is one.
fn run_on<B: Builder>(
    builder: &B,
    args: &RunArgs,
    image: &Image<'_>,
    (signals, source): (&Signals, Option<Source>),
) -> Exit
where
    B::Vm: Watched,
{
    let mut observer = Observer::new(at_first::<B>(args), source);
    let mut set_exits = args.exit_on_missing;
    let mut screen = Screen::new(args);
    let console = screen.console();
    let mut watch = |now: &Observed<'_, B::Vm>| {
        if std::mem::take(&mut set_exits)
            && let Err(error) = pages::exit_on_missing(now.vm)
        {
            let cause = format!("--exit-on-missing: {error}");
            let failed = VcpuError::Host { vcpu: 0, cause };
            now.devices.end(Ending::Failed(failed), now.vm);
        }
        screen.show(observer.look(now));
        if signals.caught().is_some() {
            now.devices.end(Ending::Stopped, now.vm);
        }
    };
    let done = builder.run_with_console(image, console, &mut watch);
    screen.finish();
    match done {
        Ok(end) => {
            let verdict = verdict(&end.ending, signals.caught());
            finish(args, builder, observer.last(&end), &end, verdict)
        }
        Err(error) => refuse(error.kind().into(), &error.to_string()),
    }
}

/// The sample before a run has begun, with the parts that this backend and these options have.
fn at_first<B: Builder>(args: &RunArgs) -> RunSample {
    let soft = B::Vm::BACKEND == lacuna_machine::Backend::Soft;
    let huge = args.thp.unwrap_or_default().pages() != HugePages::Never;
    RunSample {
        memory_bytes: args.memory.0,
        budget_bytes: args.resident.0,
        huge: (soft && huge).then(Default::default),
        apf: (soft && args.apf == args::Apf::On).then(Default::default),
        pages: args.pages_from.is_some().then(|| {
            let total = PageCount::from_bytes(args.memory.0).get();
            Pages {
                total,
                missing: total,
                ..Pages::default()
            }
        }),
        ..RunSample::default()
    }
}

/// What is shown while a guest runs: its lines, and the live view on a terminal.
struct Screen {
    live: Option<Live>,
    lines: mpsc::SyncSender<String>,
    printed: mpsc::Receiver<String>,
    dropped: Arc<AtomicU64>,
}

impl Screen {
    fn new(args: &RunArgs) -> Self {
        // Bounded, because a guest may print faster than a terminal scrolls. Lines that do not fit
        // are counted.
        let (lines, printed) = mpsc::sync_channel(LINES);
        Self {
            live: (!args.output.quiet).then(Live::on_stderr).flatten(),
            lines,
            printed,
            dropped: Arc::default(),
        }
    }

    /// Where the guest's lines go.
    fn console(&self) -> impl Fn(&str) + Send + use<> {
        let (lines, dropped) = (self.lines.clone(), Arc::clone(&self.dropped));
        move |line: &str| {
            if lines.try_send(line.to_owned()).is_err() {
                dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn show(&mut self, now: &RunSample) {
        self.show_lines();
        if let Some(live) = &mut self.live {
            live.update(now);
        }
    }

    fn show_lines(&self) {
        for line in self.printed.try_iter().take(LINES) {
            match &self.live {
                Some(live) => live.println(&visible(&line)),
                None => print_guest_line(&line),
            }
        }
    }

    fn finish(self) {
        self.show_lines();
        if let Some(live) = self.live {
            live.finish();
        }
        match self.dropped.load(Ordering::Relaxed) {
            0 => {}
            lines => complain(&format!(
                "{lines} lines of the guest's output came too fast to show"
            )),
        }
    }
}

fn finish<B: Builder>(
    args: &RunArgs,
    builder: &B,
    last: RunSample,
    end: &RunEnd<B::Vm>,
    (exit, text): (Exit, String),
) -> Exit {
    let mut report = RunReport::new(options(args, builder), last);
    report.exit_code = exit.code();
    report.trace_hash = end.trace_hash.map(|hash| format!("{hash:016x}"));
    let mut words = summary(&report.last);
    if let Some(hash) = &report.trace_hash {
        words.push_str(&format!("trace     {hash}\n"));
    }
    words.push_str(&format!("outcome   {text}\n"));
    report.outcome = text;
    let json = serde_json::to_string_pretty(&report).expect("every field has a JSON form");
    match tell(&args.output, &words, &(json + "\n")) {
        Ok(()) => exit,
        Err(error) => refuse(Exit::Host, &error.to_string()),
    }
}

/// The exit code and the words for an ending. `signal` is the one that came during the run.
pub fn verdict(ending: &Ending, signal: Option<Signal>) -> (Exit, String) {
    match (ending, signal) {
        (Ending::Exited(0), _) => (Exit::Done, "done".into()),
        (Ending::Exited(code), _) => (
            Exit::GuestFailed,
            format!("the guest failed with code {code}"),
        ),
        (Ending::Shutdown(text), _) => (Exit::GuestFailed, text.clone()),
        (Ending::Failed(error), _) => (error.kind().into(), error.to_string()),
        (Ending::Stopped, Some(signal)) => (
            Exit::Interrupted(signal),
            format!("interrupted by {signal} before the guest was done"),
        ),
        (Ending::Stopped, None) => (
            Exit::GuestFailed,
            "stopped before the guest was done".into(),
        ),
    }
}

fn refuse(exit: Exit, text: &str) -> Exit {
    complain(text);
    exit
}

fn apf(args: &RunArgs) -> Apf {
    match args.apf {
        args::Apf::On => Apf::On,
        args::Apf::Off => Apf::Off,
    }
}

/// The source as a builder takes it.
fn as_pages(source: &Option<Source>) -> Option<Arc<dyn PageSource>> {
    source.clone().map(|source| source as Arc<dyn PageSource>)
}

fn soft(args: &RunArgs, source: &Option<Source>) -> lacuna_soft::VmBuilder {
    let swap = args.swap.clone().unwrap_or_default();
    lacuna_soft::VmBuilder {
        memory: PageCount::from_bytes(args.memory.0),
        resident: PageCount::from_bytes(args.resident.0),
        vcpus: args.vcpus as usize,
        memory_kind: lacuna_soft::MemoryKind::Budget,
        huge: args.thp.unwrap_or_default().pages(),
        swap: match swap.medium {
            SwapMedium::File { dir } => Swap::File(dir),
            SwapMedium::Memory => Swap::Memory,
        },
        latency: LatencySetting::new(swap.latency),
        apf: apf(args),
        cpu: CpuModel::default(),
        source: as_pages(source),
        seed: args.seed,
        command_line: args.append.clone(),
    }
}

/// The builder for the kvm backend. Evicted pages are kept in memory, as `--swap mem` says.
fn kvm(args: &RunArgs, source: &Option<Source>) -> lacuna_kvm::VmBuilder {
    let latency = args.swap.as_ref().map(|swap| swap.latency);
    lacuna_kvm::VmBuilder {
        memory: PageCount::from_bytes(args.memory.0),
        resident: PageCount::from_bytes(args.resident.0),
        vcpus: args.vcpus as usize,
        latency: LatencySetting::new(latency.unwrap_or_default()),
        first_touch: lacuna_kvm::FirstTouch::Immediate,
        apf: apf(args),
        delivery: Delivery::Bitmap,
        tracker: lacuna_kvm::Tracker::default(),
        cpu: CpuModel::default(),
        source: as_pages(source),
        command_line: args.append.clone(),
    }
}

fn options<B: Builder>(args: &RunArgs, builder: &B) -> RunOptions {
    let soft = B::Vm::BACKEND == lacuna_machine::Backend::Soft;
    let swap = args.swap.as_ref().map(ToString::to_string);
    let thp = args.thp.unwrap_or_default().to_string();
    RunOptions {
        image: args.image.clone(),
        backend: B::Vm::BACKEND.name().into(),
        memory_bytes: args.memory.0,
        resident_bytes: args.resident.0,
        vcpus: args.vcpus,
        swap: swap.unwrap_or_else(|| match soft {
            true => crate::args::SwapSpec::default().to_string(),
            false => "mem".into(),
        }),
        apf: args.apf == args::Apf::On,
        thp: if soft { thp } else { "never".into() },
        pages_from: args.pages_from.as_ref().map(ToString::to_string),
        exit_on_missing: args.exit_on_missing,
        seed: args.seed,
        append: builder.full_command_line(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_addr::Gpa;

    #[test]
    fn an_ending_has_the_code_of_its_cause() {
        let (vcpu, cause) = (0, String::from("the device says so"));
        let lost = VcpuError::PageLost {
            vcpu,
            gpa: Gpa::truncate(0x1000),
            cause: cause.clone(),
        };
        let no_memory = VcpuError::NoMemory {
            vcpu,
            cause: cause.clone(),
        };
        let signal = Some(Signal::Interrupt);
        for (ending, signal, code, word) in [
            (Ending::Exited(0), None, 0, "done"),
            (Ending::Exited(0), signal, 0, "done"),
            (Ending::Exited(7), None, 1, "code 7"),
            (Ending::Shutdown("triple fault".into()), None, 1, "triple"),
            (Ending::Failed(VcpuError::Hang), None, 1, "hangs"),
            (Ending::Failed(lost), None, 3, "page 0x1000 is lost"),
            (Ending::Failed(no_memory), None, 3, "no memory"),
            (
                Ending::Failed(VcpuError::Host { vcpu, cause }),
                None,
                3,
                "says so",
            ),
            (Ending::Stopped, signal, 130, "interrupted by SIGINT"),
            (Ending::Stopped, Some(Signal::Terminate), 143, "by SIGTERM"),
        ] {
            let (exit, text) = verdict(&ending, signal);
            assert_eq!(exit.code(), code, "{ending:?}");
            assert!(text.contains(word), "{text}");
        }
    }
}
