//! `lacuna-fuzz KIND`: fuzzes for some time, or runs given seeds, and prints what was reached.
#![forbid(unsafe_code)]

use clap::Parser;
use lacuna_fuzz::{Campaign, Kind};
use serde_json::json;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

/// Fuzzes machines, images, migrations, snapshots and the command. Exit code 1: an oracle failed.
#[derive(Parser)]
#[command(name = "lacuna-fuzz")]
struct Arguments {
    /// machine, threads, images, stream, snapshot, command, control, pager, offload, or all
    kind: String,
    /// Run seeds for so long; `all` divides it among the kinds
    #[arg(long, value_name = "N", default_value_t = 60, conflicts_with_all = ["seeds"])]
    seconds: u64,
    /// Run these seeds, the last one not included
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    seeds: Option<Range<u64>>,
    /// Run this seed alone, to reproduce a finding
    #[arg(long, value_name = "S", conflicts_with_all = ["seconds", "seeds"])]
    seed: Option<u64>,
    /// The first seed when --seconds counts; drawn from the time unless given
    #[arg(long, value_name = "S")]
    from: Option<u64>,
    /// Continue after a finding, up to so many
    #[arg(long, value_name = "N", default_value_t = 1)]
    findings: usize,
    /// The `lacuna` to run; by default the one beside this program
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// Write what was reached and found as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn parse_range(text: &str) -> Result<Range<u64>, String> {
    let parts = text.split_once("..").ok_or("give two numbers: A..B")?;
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|error| format!("{text:?}: {error}"))
    };
    Ok(number(parts.0)?..number(parts.1)?)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let kinds = match arguments.kind.as_str() {
        "all" => Kind::ALL.to_vec(),
        name => match name.parse() {
            Ok(kind) => vec![kind],
            Err(error) => {
                eprintln!("lacuna-fuzz: {error}");
                return ExitCode::from(2);
            }
        },
    };
    let mut campaign = Campaign::new(binary(&arguments));
    for kind in &kinds {
        fuzz(&mut campaign, *kind, &arguments, kinds.len() as u64);
    }
    println!("{}", campaign.tally.table());
    println!("{}; {} findings", campaign.tally, campaign.findings.len());
    for finding in &campaign.findings {
        println!(
            "\nFINDING: {}, seed {}\n{}\nagain: {}",
            finding.kind,
            finding.seed,
            finding.what,
            finding.again()
        );
    }
    if let Some(path) = &arguments.json
        && let Err(error) = std::fs::write(path, to_json(&campaign))
    {
        eprintln!("lacuna-fuzz: {}: {error}", path.display());
        return ExitCode::from(2);
    }
    ExitCode::from(u8::from(!campaign.findings.is_empty()))
}

/// The `lacuna` beside this program, where cargo puts both.
fn binary(arguments: &Arguments) -> PathBuf {
    if let Some(given) = &arguments.binary {
        // The path is made absolute, because `lacuna` is started in another folder.
        return std::path::absolute(given).unwrap_or_else(|_| given.clone());
    }
    let this = std::env::current_exe().unwrap_or_default();
    this.with_file_name("lacuna")
}

fn fuzz(campaign: &mut Campaign, kind: Kind, arguments: &Arguments, kinds: u64) {
    let (began, before) = (Instant::now(), campaign.tally.seeds);
    let from = arguments.from.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.map_or(1, |now| now.as_secs() << 8)
    });
    let (seeds, end) = match (&arguments.seeds, arguments.seed) {
        (Some(seeds), _) => (seeds.clone(), None),
        (None, Some(seed)) => (seed..seed.saturating_add(1), None),
        (None, None) => {
            let share = Duration::from_millis(arguments.seconds * 1000 / kinds);
            (from..u64::MAX, Some(began + share))
        }
    };
    println!("{kind}: from seed {}", seeds.start);
    let mut printed = Instant::now();
    let most = arguments.findings;
    campaign.run(kind, seeds, end, most, |seed, tally| {
        if printed.elapsed() > Duration::from_secs(10) {
            printed = Instant::now();
            println!("{kind}: seed {seed}; {tally}");
        }
    });
    let seeds = campaign.tally.seeds - before;
    println!(
        "{kind}: {seeds} seeds in {:.1} s",
        began.elapsed().as_secs_f64()
    );
}

fn to_json(campaign: &Campaign) -> String {
    let findings: Vec<_> = campaign
        .findings
        .iter()
        .map(|finding| {
            json!({
                "kind": finding.kind.name(),
                "seed": finding.seed,
                "what": finding.what,
                "again": finding.again(),
            })
        })
        .collect();
    let all = json!({ "reached": campaign.tally.to_json(), "findings": findings });
    format!("{all:#}\n")
}
