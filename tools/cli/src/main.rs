//! The command `lacuna`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use lacuna_cli::args::{Cli, Command, DoctorArgs, LabArgs};
use lacuna_cli::doctor;
use lacuna_cli::exit::Exit;
use lacuna_cli::lab::lab;
use lacuna_cli::output::print;
use lacuna_cli::run::run;

fn main() -> ExitCode {
    match Cli::parse().command {
        Some(Command::Doctor(args)) => doctor(&args),
        Some(Command::Run(args)) => run(&args),
        Some(Command::Lab(args)) => lab(&args),
        None => lab(&LabArgs {
            quick: true,
            ..LabArgs::default()
        }),
    }
    .into()
}

fn doctor(args: &DoctorArgs) -> Exit {
    let swap_dir = args.swap_dir.clone().unwrap_or_else(std::env::temp_dir);
    let diagnosis = doctor::examine(&swap_dir);
    print(&if args.json {
        diagnosis.to_json()
    } else {
        diagnosis.to_text()
    });
    Exit::Done
}
