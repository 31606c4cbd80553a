//! The command `lacuna`.
#![forbid(unsafe_code)]

use std::io;
use std::panic::resume_unwind;
use std::process::ExitCode;
use std::thread::{self, JoinHandle};

use clap::Parser;
use lacuna_cli::args::{Cli, Command, DoctorArgs, LabArgs, temp_dir};
use lacuna_cli::ctl::ctl;
use lacuna_cli::demo::demo;
use lacuna_cli::exit::Exit;
use lacuna_cli::lab::lab;
use lacuna_cli::manual::manual;
use lacuna_cli::migrate::migrate;
use lacuna_cli::offload::offload;
use lacuna_cli::output::{complain, print, print_json};
use lacuna_cli::pager::pager;
use lacuna_cli::pager_test::pager_test;
use lacuna_cli::park::park;
use lacuna_cli::run::{exit_of, run};
use lacuna_cli::serve::serve;
use lacuna_cli::snapshot::snapshot;
use lacuna_cli::test::test;
use lacuna_cli::trace::Trace;
use lacuna_cli::{doctor, log, signals};
use rustix::process::{Resource, getrlimit};

fn main() -> ExitCode {
    if let Err(error) = signals::survive_file_size_limit() {
        complain(&format!("cannot catch signals: {error}"));
        return Exit::Host.into();
    }
    let limit = getrlimit(Resource::Stack).current;
    if limit.is_none_or(|bytes| bytes >= STACK_MIN) {
        return parsed().into();
    }
    let named = thread::Builder::new().name("main".into());
    match named.stack_size(STACK).spawn(parsed).map(JoinHandle::join) {
        Ok(Ok(exit)) => exit.into(),
        Ok(Err(panic)) => resume_unwind(panic),
        Err(error) => {
            complain(&format!(
                "cannot start a thread: {error}; raise the limit on the stack (ulimit -s 8192)"
            ));
            Exit::Host.into()
        }
    }
}

/// A command needs more than 96 KiB of stack. With a smaller limit than this on the main thread's
/// stack (`ulimit -s`), the command has a thread of its own.
const STACK_MIN: u64 = 1 << 20;
/// The stack of that thread.
const STACK: usize = 8 << 20;

fn parsed() -> Exit {
    match Cli::try_parse() {
        Ok(cli) => traced(cli.command),
        Err(answer) => print_answer(&answer),
    }
}

/// Executes the command. Its events go where the user wants them.
fn traced(wanted: Option<Command>) -> Exit {
    let trace = wanted.as_ref().and_then(Command::trace);
    let trace = match trace.map(Trace::create).transpose() {
        Ok(trace) => trace,
        Err(refused) => {
            complain(&refused);
            return Exit::Host;
        }
    };
    if let Err(wrong) = log::start(trace.is_some()) {
        complain(&wrong);
        return Exit::Usage;
    }
    let exit = command(wanted);
    match (trace.map_or(Ok(()), Trace::write), exit) {
        (Ok(()), exit) => exit,
        (Err(refused), exit) => {
            complain(&refused);
            match exit {
                Exit::Done => Exit::Host,
                failed => failed,
            }
        }
    }
}

fn command(command: Option<Command>) -> Exit {
    match command {
        Some(Command::Doctor(args)) => doctor(&args),
        Some(Command::Run(args)) => run(&args),
        Some(Command::Serve(args)) => serve(&args),
        Some(Command::Pager(args)) if args.park => park(),
        Some(Command::Pager(args)) => pager(&args),
        Some(Command::Offload(args)) => offload(&args),
        Some(Command::Snapshot(args)) => snapshot(&args),
        Some(Command::Migrate(args)) => migrate(&args),
        Some(Command::Ctl(args)) => ctl(&args),
        Some(Command::Demo(args)) => demo(&args),
        Some(Command::Lab(args)) => lab(&args),
        Some(Command::Test(args)) => test(&args),
        Some(Command::PagerTest(args)) => pager_test(&args),
        Some(Command::Manual(args)) => manual(&args),
        None => lab(&LabArgs::default()),
    }
}

/// Prints the answer of `clap` where it is not a command: help on stdout, or an error on stderr.
fn print_answer(answer: &clap::Error) -> Exit {
    let printed = answer.print();
    if answer.use_stderr() {
        return Exit::Usage;
    }
    match printed {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            complain(&format!("cannot write to stdout: {error}"));
            Exit::Host
        }
        _ => Exit::Done,
    }
}

fn doctor(args: &DoctorArgs) -> Exit {
    let swap_dir = args.swap_dir.clone().unwrap_or_else(temp_dir);
    let diagnosis = doctor::examine(&swap_dir);
    let printed = if args.json {
        print_json(&diagnosis.to_json())
    } else {
        print(&diagnosis.to_text())
    };
    exit_of(printed.map(|()| Exit::Done).map_err(Into::into))
}
