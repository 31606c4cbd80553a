//! The options of `lacuna test`.

use super::Output;
use crate::exit::EXIT_CODES;
use clap::{Args, Subcommand};
use lacuna_lab::access_tracking::AccessTracking;
use lacuna_lab::demand_paging::DemandPaging;
use lacuna_lab::demand_paging::lockstep::LOCKSTEP;
use lacuna_lab::dirty_log::DirtyLog;

/// `lacuna test`.
#[derive(Clone, PartialEq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct TestArgs {
    /// The test
    #[command(subcommand)]
    pub test: TestCommand,
}

/// The tests.
#[derive(Clone, PartialEq, Debug, Subcommand)]
pub enum TestCommand {
    /// Provide a guest's missing memory page by page, through a queue or at exits, as Linux's
    /// demand_paging_test
    #[command(after_help = EXIT_CODES)]
    DemandPaging(DemandPagingArgs),
    /// The time of a guest's writes and of the harvests while its slots log, as of Linux's
    /// dirty_log_perf_test
    #[command(after_help = EXIT_CODES)]
    DirtyLog(Tool<DirtyLog>),
    /// The time of a guest's accesses to memory that was marked idle, as of Linux's
    /// access_tracking_perf_test
    #[command(after_help = EXIT_CODES)]
    AccessTracking(Tool<AccessTracking>),
}

/// The options of a test, and where its result goes.
#[derive(Clone, PartialEq, Debug, Args)]
pub struct Tool<T: Args> {
    /// The options
    #[command(flatten)]
    pub options: T,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

/// `lacuna test demand-paging`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
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
