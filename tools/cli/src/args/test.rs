//! The options of `lacuna test`.

use super::Output;
use crate::exit::EXIT_CODES;
use clap::{Args, Subcommand};
use lacuna_lab::demand_paging::DemandPaging;
use lacuna_lab::demand_paging::lockstep::LOCKSTEP;

/// `lacuna test`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct TestArgs {
    /// The test
    #[command(subcommand)]
    pub what: TestCommand,
}

/// The tests.
#[derive(Clone, PartialEq, Eq, Debug, Subcommand)]
pub enum TestCommand {
    /// Provide a guest's missing memory page by page: through a queue, or at exits
    DemandPaging(DemandPagingArgs),
}

/// `lacuna test demand-paging`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct DemandPagingArgs {
    /// What the guest touches, and how its missing pages are provided
    #[command(flatten)]
    pub options: DemandPaging,
    /// Boots a guest and lets it touch its memory for each pair of lines on stdin; the lab starts
    /// such processes
    #[arg(long = LOCKSTEP, hide = true)]
    pub lockstep: bool,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}
