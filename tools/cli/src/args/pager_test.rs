//! The options of `lacuna pager-test`.

use super::Output;
use crate::exit::EXIT_CODES;
use crate::size::parse_duration;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// `lacuna pager-test`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct PagerTestArgs {
    /// The socket where the handler listens
    #[arg(long, value_name = "PATH", required_unless_present_any = NO_HANDLER)]
    pub socket: Option<PathBuf>,
    /// The memory file that the handler serves
    #[arg(long, value_name = "FILE", required_unless_present_any = NO_HANDLER)]
    pub memory: Option<PathBuf>,
    /// A daemon that saves VMs by Cloud Hypervisor's migration protocol: a shell command that runs
    /// in the foreground and listens at the socket {socket}
    #[arg(long, value_name = "COMMAND", conflicts_with_all = HANDLER)]
    pub save_daemon: Option<String>,
    /// A daemon that restores the VM that was saved: a command that connects to the socket {socket}
    #[arg(long, value_name = "COMMAND", conflicts_with_all = HANDLER)]
    pub restore_daemon: Option<String>,
    /// As --restore-daemon, for a daemon that sends memory on demand
    #[arg(long, value_name = "COMMAND", conflicts_with_all = HANDLER)]
    pub on_demand_daemon: Option<String>,
    /// Write a memory file of this size, a multiple of 2M, and end
    #[arg(long, value_names = ["FILE", "SIZE"], num_args = 2,
          conflicts_with_all = ["socket", "memory", "rules", "restart"])]
    pub make_memory: Option<Vec<String>>,
    /// Check these rules only; docs/pager-test.md has all of them
    #[arg(long = "rule", value_name = "RULE", value_delimiter = ',')]
    pub rules: Vec<String>,
    /// The longest time without any progress of a rule
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// For a handler that serves one VM: a shell command that ends the last handler, starts a new
    /// one in the background, and returns. It is executed before each rule
    #[arg(long, value_name = "COMMAND")]
    pub restart: Option<String>,
    /// Checks one rule; the command starts itself so for each rule
    #[arg(long = CHECK_ONE, hide = true)]
    pub check_one: Option<String>,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

/// Without a handler, one of these says what to do.
const NO_HANDLER: [&str; 5] = [
    "make_memory",
    "check_one",
    "save_daemon",
    "restore_daemon",
    "on_demand_daemon",
];
/// The options of a run for a handler.
const HANDLER: [&str; 4] = ["socket", "memory", "restart", "make_memory"];

/// The option of a process for one rule.
pub const CHECK_ONE: &str = "check-one";
