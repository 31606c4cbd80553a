//! `--no-sandbox`.

use super::group::SECURITY;
use clap::Args;

/// What a process of a long-lived command may do after its start.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
#[command(next_help_heading = SECURITY)]
pub struct SandboxArgs {
    /// Do not confine this process to the files, connections and system calls that its options
    /// need: for debugging, and on hosts where the sandbox is in the way (docs/sandbox.md)
    #[arg(long)]
    pub no_sandbox: bool,
}
