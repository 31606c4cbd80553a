//! `lacuna` alone: a guest in a quarter of the memory it believes it has, losing nothing.

use crate::args::{Cli, Command};
use crate::exit::Exit;
use crate::run::run;
use clap::Parser as _;

/// The command that the demonstration runs: what a person would type.
const COMMAND: [&str; 10] = [
    "run",
    "verify",
    "--memory",
    "256M",
    "--resident",
    "64M",
    "--vcpus",
    "2",
    "--append",
    "rounds=1",
];

/// Runs it.
pub fn demo() -> Exit {
    eprintln!(
        "A guest with its own kernel, processes and page tables believes it has 256 MiB.\n\
         It gets 64; the rest is swapped to a file, without /dev/kvm. It writes a keyed pattern\n\
         to its memory and checks every word of it. The same by hand:\n\n    lacuna {}\n",
        COMMAND.join(" ")
    );
    let words = std::iter::once("lacuna").chain(COMMAND);
    match Cli::parse_from(words).command {
        Some(Command::Run(args)) => run(&args),
        other => unreachable!("the demonstration is a run, not {other:?}"),
    }
}
