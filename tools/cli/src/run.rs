//! `lacuna run`: one guest, live.

use crate::args::{self, RunArgs, SwapMedium};
use crate::exit::Exit;
use crate::image::{check_limits, load};
use crate::live::{Live, summary};
use crate::observe::Observer;
use crate::output::{complain, print_guest_line, tell, visible};
use crate::signals::{Signal, Signals};
use crate::snapshot::{RunOptions, RunReport, Snapshot};
use lacuna_addr::PageCount;
use lacuna_machine::{Ending, Image};
use lacuna_soft::{Apf, LatencySetting, Observed, RunSummary, Swap, Vm, VmBuilder};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

/// Lines of the guest that may wait to be shown.
const LINES: usize = 10_000;

/// Runs a guest as `args` say; prints and returns how it went.
pub fn run(args: &RunArgs) -> Exit {
    let signals = match Signals::catch(&Arc::default()) {
        Ok(signals) => signals,
        Err(error) => return refuse(Exit::Host, &format!("cannot catch signals: {error}")),
    };
    if let Err(error) = check_limits(args) {
        return refuse(Exit::Usage, &error.to_string());
    }
    let file = match load(&args.image) {
        Ok(file) => file,
        Err(error) => return refuse(error.kind().into(), &error.to_string()),
    };
    let image = match Image::parse(&file) {
        Ok(image) => image,
        Err(error) => return refuse(Exit::Usage, &format!("{}: {error}", args.image)),
    };
    let builder = builder(args);
    let mut observer = Observer::new(&builder);
    let mut screen = Screen::new(args);
    let console = screen.console();
    let done = builder.run(&image, console, |now: &Observed<'_, Vm>| {
        screen.show(observer.look(now));
        if signals.caught().is_some() {
            now.devices.end(Ending::Stopped, now.vm);
        }
    });
    screen.finish();
    match done {
        Ok(outcome) => {
            let (exit, text) = verdict(&outcome.ending, signals.caught());
            finish(
                args,
                &builder,
                observer.last(&outcome),
                &outcome,
                exit,
                text,
            )
        }
        Err(error) => refuse(error.kind().into(), &error.to_string()),
    }
}

/// What is seen of a run while it runs: the guest's lines, and the live view on a terminal.
struct Screen {
    live: Option<Live>,
    lines: mpsc::SyncSender<String>,
    printed: mpsc::Receiver<String>,
    dropped: Arc<AtomicU64>,
}

impl Screen {
    fn new(args: &RunArgs) -> Self {
        // Bounded: a guest may print faster than a terminal scrolls. What does not fit is counted.
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

    fn show(&mut self, now: &Snapshot) {
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

fn finish(
    args: &RunArgs,
    builder: &VmBuilder,
    last: Snapshot,
    outcome: &RunSummary,
    exit: Exit,
    text: String,
) -> Exit {
    let mut report = RunReport::new(options(args, builder), last);
    report.exit_code = exit.code();
    report.trace_hash = outcome.trace.map(|trace| format!("{:016x}", trace.hash));
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

/// What an ending means, in a code and in words. `signal` is the one that came during the run.
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

fn builder(args: &RunArgs) -> VmBuilder {
    VmBuilder {
        memory: PageCount::from_bytes(args.memory.0),
        resident: PageCount::from_bytes(args.resident.0),
        vcpus: args.vcpus as usize,
        huge: args.thp.pages(),
        swap: match &args.swap.medium {
            SwapMedium::File { dir } => Swap::File(dir.clone()),
            SwapMedium::Memory => Swap::Memory,
        },
        latency: LatencySetting::new(args.swap.latency),
        apf: match args.apf {
            args::Apf::On => Apf::On,
            args::Apf::Off => Apf::Off,
        },
        seed: args.seed,
        command_line: args.append.clone(),
    }
}

fn options(args: &RunArgs, builder: &VmBuilder) -> RunOptions {
    RunOptions {
        image: args.image.clone(),
        memory_bytes: builder.memory.bytes(),
        resident_bytes: builder.resident.bytes(),
        vcpus: args.vcpus,
        swap: args.swap.to_string(),
        apf: args.apf == args::Apf::On,
        thp: args.thp.to_string(),
        seed: args.seed,
        append: builder.full_command_line(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_addr::Gpa;
    use lacuna_machine::VcpuError;

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
