//! `lacuna migrate`: moves a running guest to another process.

use crate::args::{MODES, MigrateArgs};
use crate::client;
use crate::exit::Exit;
use crate::output::visible;
use crate::progress::line;
use crate::run::{Refusal, exit_of};
use crate::size::Size;
use crate::snapshot::absolute;
use lacuna::migrate::Budget;
use lacuna::migrate::session::{Migrated, OutgoingProgress, OutgoingStage};
use lacuna::migrate::stream::Mode;
use lacuna::migrate::transport::{Address, TlsFiles};
use lacuna_control::{AskError, Client, MoveRequest, Status};
use lacuna_lab::options::name_of;
use lacuna_lab::report::{short, time};
use serde_json::json;
use std::time::Duration;

/// Does what `args` say; prints the result and returns the exit code.
pub fn migrate(args: &MigrateArgs) -> Exit {
    exit_of(match &args.to {
        Some(to) => move_to(args, to),
        None if args.cancel => decide(args, Client::cancel, "cancelled"),
        None if args.post_copy => decide(args, Client::post_copy, "the guest is asked to go now"),
        None => decide(args, Client::keep, "the guest is resumed here"),
    })
}

fn move_to(args: &MigrateArgs, to: &Address) -> Result<Exit, Refusal> {
    let to = match to {
        Address::Unix(path) => Address::Unix(absolute(path)?),
        other => other.clone(),
    };
    let files = args.tls.files(&to).map_err(|text| (Exit::Usage, text))?;
    let files = files.map(|files| {
        Ok::<_, Refusal>(TlsFiles {
            ca: absolute(&files.ca)?,
            cert: absolute(&files.cert)?,
            key: absolute(&files.key)?,
        })
    });
    let request = MoveRequest {
        tls: files.transpose()?,
        to: to.to_string(),
        mode: args.mode,
        streams: args.streams,
        compress: args.compress,
        bandwidth: args.bandwidth,
        downtime_ms: args.downtime.map(|downtime| downtime.as_millis() as u64),
    };
    let live = line(args.output.quiet);
    let mut show = |now: OutgoingProgress| {
        live.set_message(format!("moving {}", progress(&now)));
        live.tick();
    };
    let migrated = client::ask(&args.control, &args.output, |client| {
        client.migrate(request, &mut show)
    });
    live.finish_and_clear();
    let migrated = migrated?;
    let text = summary(&migrated) + &advice(args, &migrated);
    let outcome = migrated.outcome();
    client::report(
        &args.output,
        &text,
        outcome,
        json!({ "migrated": migrated }),
    )
}

fn decide(
    args: &MigrateArgs,
    request: fn(&mut Client) -> Result<Status, AskError>,
    outcome: &str,
) -> Result<Exit, Refusal> {
    client::ask(&args.control, &args.output, request)?;
    let text = format!("{outcome}\n");
    client::report(&args.output, &text, outcome, json!({ "migrated": null }))
}

/// The advice about a pause longer than requested.
fn advice(args: &MigrateArgs, migrated: &Migrated) -> String {
    let asked = args.downtime.unwrap_or(Budget::default().downtime);
    let is_longer = Duration::from_micros(migrated.downtime_us) > asked;
    match migrated.mode {
        Mode::PreCopy if is_longer => format!(
            "          the pause is longer than {asked:?}, because the guest writes about as fast \
             as its pages are sent; --mode hybrid moves such a guest with a short pause\n"
        ),
        _ => String::new(),
    }
}

/// A migration in one line.
pub(crate) fn summary(migrated: &Migrated) -> String {
    let Migrated {
        to,
        mode,
        rounds,
        late,
        pages,
        detected_by,
        again,
        cuts,
        bytes,
        downtime_us,
        seconds,
        ended,
    } = migrated;
    let ended = match ended {
        None => String::new(),
        Some(why) => format!("; it has ended there: {}", visible(why)),
    };
    let by = match detected_by {
        None => String::new(),
        Some(by) => format!(" by {by}"),
    };
    let cuts = match cuts {
        0 => String::new(),
        cuts => format!("; the connection was cut {cuts} times"),
    };
    format!(
        "moved     to {to} in {seconds:.1} s ({}): {} over the connections, {pages} pages with \
         content in {} rounds{}, {late} pages after the guest, {again} pages again; downtime \
         {}{cuts}{ended}\n",
        name_of(&MODES, mode),
        Size(*bytes),
        rounds.len(),
        by,
        time(downtime_us * 1000),
    )
}

/// A migration in progress, in one line behind `moving`.
pub(crate) fn progress(now: &OutgoingProgress) -> String {
    let OutgoingProgress { to, remaining, .. } = now;
    let seconds = now
        .seconds_left
        .map_or_else(String::new, |s| format!(", {s:.1} s"));
    let remaining = format!("{} pages left{seconds}", short(*remaining as f64));
    let written = match now.dirty_rate {
        0 => String::new(),
        pages => format!("; the guest writes {} pages/s", short(pages as f64)),
    };
    let held = match now.throttle {
        0 => String::new(),
        percent => format!("; it is held for {percent} % of the time"),
    };
    let mode = name_of(&MODES, &now.mode);
    let rate = format!("{} sent, {}/s", Size(now.bytes), Size(now.rate as u64));
    let percent = (now.done * 100).checked_div(now.pages).unwrap_or(0);
    match now.stage {
        OutgoingStage::Here => format!(
            "to {to} ({mode}): round {} {percent} %, {remaining}; {rate}{written}{held}",
            now.round
        ),
        OutgoingStage::There => {
            format!("to {to} ({mode}), where it runs: {remaining}; {rate}")
        }
        OutgoingStage::Cut | OutgoingStage::Unknown => format!(
            "to {to}, connecting again ({} cuts and attempts): {}",
            now.cuts,
            visible(now.cut.as_deref().unwrap_or_default())
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_in_words() {
        let now = OutgoingProgress {
            to: "tcp:h:1".into(),
            round: 2,
            done: 250,
            pages: 1000,
            remaining: 750,
            bytes: 5 << 20,
            rate: 1024.0 * 1024.0,
            ..OutgoingProgress::default()
        };
        let at = |stage| OutgoingProgress {
            stage,
            mode: Mode::Hybrid,
            cuts: 3,
            cut: Some("refused".into()),
            ..now.clone()
        };
        for (now, line) in [
            (
                now.clone(),
                "to tcp:h:1 (precopy): round 2 25 %, 750 pages left; 5M sent, 1M/s",
            ),
            (
                OutgoingProgress {
                    seconds_left: Some(1.5),
                    dirty_rate: 500,
                    throttle: 75,
                    ..now.clone()
                },
                "to tcp:h:1 (precopy): round 2 25 %, 750 pages left, 1.5 s; 5M sent, 1M/s; the \
                 guest writes 500 pages/s; it is held for 75 % of the time",
            ),
            (
                at(OutgoingStage::There),
                "to tcp:h:1 (hybrid), where it runs: 750 pages left; 5M sent, 1M/s",
            ),
            (
                at(OutgoingStage::Unknown),
                "to tcp:h:1, connecting again (3 cuts and attempts): refused",
            ),
        ] {
            assert_eq!(progress(&now), line);
        }
        let first = progress(&OutgoingProgress::default());
        assert!(first.contains("round 0 0 %"), "{first}");
    }

    #[test]
    fn a_summary_in_words() {
        let migrated = Migrated {
            to: "tcp:h:1".into(),
            mode: Mode::Hybrid,
            rounds: vec![4096, 30, 7],
            late: 11,
            pages: 900,
            detected_by: Some("write protection".into()),
            again: 48,
            cuts: 2,
            bytes: 4 << 20,
            downtime_us: 1500,
            seconds: 0.25,
            ended: Some("interrupted by SIGTERM".into()),
        };
        let text = summary(&migrated);
        let expected = "to tcp:h:1 in 0.2 s (hybrid): 4M over the connections, 900 pages with \
                        content in 3 rounds by write protection, 11 pages after the guest, 48 \
                        pages again; downtime 1.5 ms; the connection was cut 2 times; it has ended \
                        there: interrupted by SIGTERM\n";
        assert!(text.ends_with(expected), "{text}");
    }
}
