//! The options of `lacuna serve`.

use super::group::LINK;
use super::{Output, PagesFrom, SandboxArgs};
use crate::exit::EXIT_CODES;
use crate::size::{Size, parse_duration};
use clap::Args;
use lacuna::source::Faults;
use std::path::PathBuf;
use std::time::Duration;

/// `lacuna serve`.
#[derive(Clone, PartialEq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct ServeArgs {
    /// Where the pages come from: zeros, file:PATH, file:BASE+DIFF, snapshot:PATH, objects:URL or
    /// peer:PATH, as in lacuna run --pages-from
    #[arg(value_name = "SOURCE")]
    pub source: PagesFrom,
    /// The socket to make; a process runs with --pages-from peer:SOCKET
    pub socket: PathBuf,
    /// Memory of the guest whose pages these are
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub memory: Size,
    /// Delay each request by this time, as a network would
    #[arg(long, value_name = "TIME", default_value = "0ms",
          value_parser = parse_duration, help_heading = LINK)]
    pub latency: Duration,
    /// Lose this share of the requests, 0 to 1; each is sent again 10 ms later
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share,
          help_heading = LINK)]
    pub loss: f64,
    /// Hold this share of the requests back by up to twice the latency, so that later ones overtake
    /// them
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share,
          help_heading = LINK)]
    pub reordering: f64,
    /// Which requests are lost or held back
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = LINK)]
    pub seed: u64,
    /// The limits of this process
    #[command(flatten)]
    pub sandbox: SandboxArgs,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

impl ServeArgs {
    /// The faults of the link; `None` without any.
    pub fn faults(&self) -> Option<Faults> {
        let wanted = self.latency > Duration::ZERO || self.loss > 0.0 || self.reordering > 0.0;
        wanted.then(|| Faults {
            seed: self.seed,
            loss: self.loss,
            resend: Duration::from_millis(10),
            reordering: self.reordering,
            ..Faults::latency(self.latency)
        })
    }
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok();
    let share = share.filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("{text:?} is no share: give a number from 0 to 1, as in 0.05"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::parse;
    use crate::args::{Cli, Command};

    fn serve(options: &str) -> Result<ServeArgs, String> {
        match parse(&format!("lacuna serve {options}")) {
            Ok(Cli {
                command: Some(Command::Serve(args)),
            }) => Ok(args),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn a_link_has_the_faults_that_are_wanted() {
        assert_eq!(serve("zeros s").unwrap().faults(), None);
        let args = serve("file:/m /s --memory 32M --latency 1ms --loss 0.05 --seed 7").unwrap();
        let faults = args.faults().unwrap();
        assert_eq!((faults.seed, faults.loss), (7, 0.05));
        assert_eq!(faults.latency.start, Duration::from_millis(1));
        for (options, reason) in [
            ("zeros", "<SOCKET>"),
            ("tape s", "is no page source"),
            ("zeros s --loss 2", "is no share"),
            ("zeros s --loss some", "is no share"),
            ("zeros s --latency 1", "1"),
        ] {
            let error = serve(options).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
