//! The options of `lacuna demo`.

use crate::exit::EXIT_CODES;
use clap::{Args, ValueEnum};

/// `lacuna demo`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct DemoArgs {
    /// Which one; without it, the list
    #[arg(value_enum, value_name = "NAME")]
    pub name: Option<DemoName>,
}

/// The demos, one for each system.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum DemoName {
    /// Asynchronous page faults on x86-64: the guest computes while a page is read from swap
    Apf,
    /// Huge pages: one leaf maps 2 MiB, so random reads miss the TLB less often
    Thp,
    /// Page-modification logging: a vCPU logs the pages that it writes, instead of a fault for each
    Pml,
    /// Missing memory: a vCPU exits for its page, instead of a wait in one queue
    Missing,
    /// Asynchronous page faults on AArch64
    Arm64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::parse;

    #[test]
    fn a_demo_has_a_name_of_the_list() {
        let parsed = |line| match parse(line).unwrap().command {
            Some(Command::Demo(args)) => args.name,
            other => panic!("{other:?}"),
        };
        assert_eq!(parsed("lacuna demo"), None);
        assert_eq!(parsed("lacuna demo arm64"), Some(DemoName::Arm64));
        let error = parse("lacuna demo fly").unwrap_err().to_string();
        let values = "[possible values: apf, thp, pml, missing, arm64]";
        assert!(error.contains(values), "{error}");
    }
}
