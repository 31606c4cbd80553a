//! The options of `lacuna migrate`.

use super::group::DECISION;
use super::{Output, TlsArgs};
use crate::exit::EXIT_CODES;
use crate::size::{parse_duration, parse_rate};
use clap::Args;
use lacuna::migrate::stream::{Compression, Mode};
use lacuna::migrate::transport::Address;
use lacuna_lab::options::{Value, named};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

/// `lacuna migrate`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct MigrateArgs {
    /// Where a lacuna run --incoming waits for the guest: unix:PATH, tcp:HOST:PORT, tls:HOST:PORT,
    /// fd:N or exec:COMMAND. The process that runs the guest has the descriptor N, or executes the
    /// command
    #[arg(value_name = "ADDRESS", required_unless_present = "decision")]
    pub to: Option<Address>,
    /// The control socket of the guest, as in lacuna run --control SOCKET. With --keep and
    /// --cancel, either side's; with --post-copy, the source's
    #[arg(long, value_name = "SOCKET")]
    pub control: PathBuf,
    /// Certificates for tls:HOST:PORT
    #[command(flatten)]
    pub tls: TlsArgs,
    /// When the guest goes: precopy (after its memory), postcopy (before its memory) or hybrid
    /// (after the memory that it does not write again). After the guest, this process has to live
    /// until the rest of its memory is there: if it ends before, the guest is lost [default:
    /// precopy]
    #[arg(long, value_name = "MODE", value_parser = named(MODES), hide_possible_values = true)]
    pub mode: Option<Mode>,
    /// The limit of the guest's downtime for its last pages; in a precopy it is longer if the guest
    /// writes faster than pages are sent [default: 50ms]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub downtime: Option<Duration>,
    /// Connections for the memory that moves before the guest, each with a thread on both sides:
    /// more than 1 for a network that is faster than one processor [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub streams: Option<u32>,
    /// How pages are compressed on their way: none, lz4 (for networks of a few hundred megabytes a
    /// second) or zstd (for slower ones) [default: none]
    #[arg(long, value_name = "METHOD", value_parser = named(COMPRESS), hide_possible_values = true)]
    pub compress: Option<Compression>,
    /// The most that is sent for the guest's memory while the guest runs, such as 100M/s; its last
    /// pages, and pages that it needs at once, are sent beside this limit [default: none]
    #[arg(long, value_name = "SIZE/s", value_parser = parse_rate)]
    pub bandwidth: Option<NonZeroU64>,
    /// Resume the guest at this side, if the connection was cut while the guest was handed over.
    /// First end the other side, or make sure that it has ended
    #[arg(long, group = "decision", conflicts_with_all = MOVING, help_heading = DECISION)]
    pub keep: bool,
    /// At the source: end the migration, or the attempts to connect again. At the destination, when
    /// the source has ended: wait no longer for the pages that only it had
    #[arg(long, group = "decision", conflicts_with_all = MOVING, help_heading = DECISION)]
    pub cancel: bool,
    /// At the source of a hybrid: the guest goes now, and the rest of its memory after it
    #[arg(long, group = "decision", conflicts_with_all = MOVING, help_heading = DECISION)]
    pub post_copy: bool,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

/// The options of a new migration, which do not go with a decision about another one.
const MOVING: [&str; 6] = ["to", "downtime", "mode", "streams", "compress", "bandwidth"];

/// `--mode`.
pub const MODES: [Value<Mode>; 3] = [
    ("precopy", Mode::PreCopy, "After its memory"),
    ("postcopy", Mode::PostCopy, "Before its memory"),
    (
        "hybrid",
        Mode::Hybrid,
        "After the memory that it does not write again",
    ),
];

/// `--compress`.
const COMPRESS: [Value<Compression>; 3] = [
    ("none", Compression::None, "Not at all"),
    ("lz4", Compression::Lz4, "LZ4"),
    ("zstd", Compression::Zstd, "Zstandard, level 1"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::parse;

    #[test]
    fn migrate_goes_to_an_address_or_keeps() {
        let migrate = |line: &str| match parse(line).unwrap().command {
            Some(Command::Migrate(args)) => args,
            other => panic!("{line}: {other:?}"),
        };
        let args = migrate("lacuna migrate --control c tcp:h:7000 --downtime 5ms");
        assert_eq!(args.to, Some("tcp:h:7000".parse().unwrap()));
        assert_eq!(args.downtime, Some(Duration::from_millis(5)));
        assert_eq!((args.mode, args.cancel), (None, false));
        let args = "--mode hybrid --streams 4 --compress zstd --bandwidth 1M/s";
        let args = migrate(&format!("lacuna migrate --control c unix:/s {args}"));
        assert_eq!(args.mode, Some(Mode::Hybrid));
        assert_eq!(
            (args.streams, args.compress),
            (Some(4), Some(Compression::Zstd))
        );
        assert_eq!(args.bandwidth, NonZeroU64::new(1 << 20));
        assert!(migrate("lacuna migrate --control c --cancel").cancel);
        assert!(migrate("lacuna migrate --control c --post-copy").post_copy);
        let args = migrate("lacuna migrate --control c --keep");
        assert_eq!((args.to, args.keep), (None, true));
        for (line, reason) in [
            ("lacuna migrate --control c", "<ADDRESS>"),
            ("lacuna migrate tcp:h:1", "--control <SOCKET>"),
            ("lacuna migrate --control c h:1", "is no address"),
            (
                "lacuna migrate --control c tcp:h:1 --mode fast",
                "[possible values: precopy, postcopy, hybrid]",
            ),
            (
                "lacuna migrate --control c tcp:h:1 --streams 65",
                "65 is not in 1..=64",
            ),
            (
                "lacuna migrate --control c tcp:h:1 --bandwidth 1M",
                "no size a second",
            ),
            (
                "lacuna migrate --control c --keep --cancel",
                "cannot be used with",
            ),
            (
                "lacuna migrate --control c tcp:h:1 --keep",
                "cannot be used with",
            ),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
