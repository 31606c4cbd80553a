//! `lacuna run`: one guest, live.

use crate::args::{self, RunArgs, SwapMedium};
use crate::exit::Exit;
use crate::live::{Live, summary};
use crate::observe::Observer;
use crate::output::tell;
use crate::snapshot::{RunOptions, RunReport};
use lacuna_addr::PageCount;
use lacuna_machine::{Ending, Image};
use lacuna_soft::{Apf, Dial, HostError, Launch, Outcome, SoftError, Swap};
use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

/// Lines of the guest that may wait to be shown.
const LINES: usize = 10_000;

/// Runs a guest as `args` say; prints and returns how it went.
pub fn run(args: &RunArgs) -> Exit {
    let file = match load(&args.image) {
        Ok(file) => file,
        Err(text) => return refuse(Exit::Usage, &text),
    };
    let image = match Image::parse(&file) {
        Ok(image) => image,
        Err(error) => return refuse(Exit::Usage, &format!("{}: {error}", args.image)),
    };
    let launch = launch(args);
    let mut live = if args.output.quiet {
        None
    } else {
        Live::on_stderr()
    };
    let mut observer = Observer::new(&launch);
    // Bounded: a guest may print faster than a terminal scrolls. What does not fit is counted.
    let (lines, printed) = mpsc::sync_channel(LINES);
    let dropped = Arc::new(AtomicU64::new(0));
    let console = {
        let dropped = Arc::clone(&dropped);
        move |line: &str| {
            if lines.try_send(line.to_owned()).is_err() {
                dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    let show = |live: &Option<Live>| {
        for line in printed.try_iter().take(LINES) {
            match live {
                Some(live) => live.println(&line),
                None => eprintln!("{line}"),
            }
        }
    };
    let done = launch.run(&image, console, |now| {
        show(&live);
        let snapshot = observer.look(now);
        if let Some(live) = &mut live {
            live.update(snapshot);
        }
    });
    show(&live);
    if let Some(live) = live {
        live.finish();
    }
    match dropped.load(Ordering::Relaxed) {
        0 => {}
        lines => eprintln!("lacuna: {lines} lines of the guest's output came too fast to show"),
    }
    match done {
        Ok(outcome) => finish(args, &launch, &observer, &outcome),
        Err(error) => refuse(blame(&error), &error.to_string()),
    }
}

fn finish(args: &RunArgs, launch: &Launch, observer: &Observer, outcome: &Outcome) -> Exit {
    let last = observer.last(outcome);
    let (exit, text) = verdict(&outcome.ending);
    let mut report = RunReport::new(options(args, launch), last);
    report.outcome.clone_from(&text);
    report.exit_code = exit.code();
    report.trace_hash = outcome.trace.map(|trace| format!("{:016x}", trace.hash));
    let mut words = summary(&report.last);
    if let Some(hash) = &report.trace_hash {
        words.push_str(&format!("trace     {hash}\n"));
    }
    words.push_str(&format!("outcome   {text}\n"));
    let json = serde_json::to_string_pretty(&report).expect("every field has a JSON form");
    match tell(&args.output, &words, &(json + "\n")) {
        Ok(()) => exit,
        Err(error) => refuse(Exit::Host, &error.to_string()),
    }
}

/// What an ending means, in a code and in words.
pub fn verdict(ending: &Ending) -> (Exit, String) {
    match ending {
        Ending::Exited(0) => (Exit::Done, "done".into()),
        Ending::Exited(code) => (
            Exit::GuestFailed,
            format!("the guest failed with code {code}"),
        ),
        Ending::Shutdown(text) => (Exit::GuestFailed, text.clone()),
        Ending::Failed(error) => (Exit::Host, error.to_string()),
        Ending::Stopped => (
            Exit::GuestFailed,
            "stopped before the guest was done".into(),
        ),
    }
}

fn refuse(exit: Exit, text: &str) -> Exit {
    eprintln!("lacuna: {text}");
    exit
}

/// Who can do something about it.
fn blame(error: &SoftError) -> Exit {
    match error {
        SoftError::Boot(_) | SoftError::Vcpus(_) | SoftError::Slot(_) => Exit::Usage,
        SoftError::Host(HostError::BudgetTooSmall { .. } | HostError::BudgetTooLarge { .. }) => {
            Exit::Usage
        }
        SoftError::Host(_) | SoftError::Mmu(_) | SoftError::Booted => Exit::Host,
    }
}

/// A built-in image, or a file.
fn load(name: &str) -> Result<Cow<'static, [u8]>, String> {
    if let Some(image) = lacuna_guest::image(name) {
        return Ok(Cow::Borrowed(image.elf));
    }
    std::fs::read(name).map(Cow::Owned).map_err(|error| {
        let names: Vec<_> = lacuna_guest::images()
            .iter()
            .map(|image| image.name)
            .collect();
        format!(
            "{name}: neither a built-in guest ({}) nor a file to read: {error}",
            names.join(", ")
        )
    })
}

fn launch(args: &RunArgs) -> Launch {
    Launch {
        memory: PageCount::from_bytes(args.memory.0),
        resident: PageCount::from_bytes(args.resident.0),
        vcpus: args.vcpus as usize,
        huge: args.thp.pages(),
        swap: match &args.swap.medium {
            SwapMedium::File { dir } => Swap::File(dir.clone()),
            SwapMedium::Memory => Swap::Memory,
        },
        latency: Dial::new(args.swap.latency),
        apf: match args.apf {
            args::Apf::On => Apf::On,
            args::Apf::Off => Apf::Off,
        },
        seed: args.seed,
        command_line: args.append.clone(),
    }
}

fn options(args: &RunArgs, launch: &Launch) -> RunOptions {
    RunOptions {
        image: args.image.clone(),
        memory_bytes: launch.memory.bytes(),
        resident_bytes: launch.resident.bytes(),
        vcpus: args.vcpus,
        swap: args.swap.to_string(),
        apf: args.apf == args::Apf::On,
        thp: args.thp.to_string(),
        seed: args.seed,
        append: launch.full_command_line(),
    }
}
