//! `lacuna ctl SOCKET top`: the view of a guest of another process; plain lines without a terminal.

use super::feed::{Feed, News};
use super::model::{Curve, FAULTS, Model};
use super::terminal::{self, Screen};
use super::{End, show};
use crate::args::ViewArgs;
use crate::exit::{Exit, no_answer};
use crate::monitor::{ended, put};
use crate::run::{Refusal, catch_signals};
use crate::signals::Signals;
use crate::size::Size;
use lacuna_control::Client;
use lacuna_lab::report::short;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time between two plain lines.
const PLAIN: Duration = Duration::from_secs(1);

/// Shows the guest until the user quits or the guest ends.
///
/// # Errors
/// The exit code and the text for the user.
pub fn top(control: &Path, args: &ViewArgs) -> Result<Exit, Refusal> {
    let failed = |error: io::Error| (Exit::Host, format!("the view has ended: {error}"));
    let open = |path: &Path| -> Result<Feed, Refusal> {
        let client = Client::connect(path).map_err(no_answer)?;
        Ok(Feed::start(client).map_err(failed)?.0)
    };
    let feed = open(control)?;
    let other = args.other.as_deref().map(open).transpose()?;
    let signals = catch_signals(&Arc::default())?;
    if !(io::stdout().is_terminal() && terminal::is_usable()) {
        return plain(&feed, &signals);
    }
    let is_over = || signals.caught().is_some();
    let mut screen = Screen::open().map_err(failed)?;
    let end = show(&mut screen, feed, other, &is_over);
    drop(screen);
    match (end.map_err(failed)?, signals.caught()) {
        (End::Gone(why), _) => Ok(ended(&why)),
        (_, Some(signal)) => Ok(Exit::Interrupted(signal)),
        _ => Ok(Exit::Done),
    }
}

/// A line a second, until the guest ends or the reader has gone.
fn plain(feed: &Feed, signals: &Signals) -> Result<Exit, Refusal> {
    let mut model = Model::default();
    let mut next = Instant::now() + PLAIN;
    loop {
        let wait = next.saturating_duration_since(Instant::now());
        // A closed channel has sent its reason before.
        let news = feed.news.recv_timeout(wait.min(super::LOOK));
        if let Some(why) = news.ok().and_then(|news: News| model.take(news)) {
            return Ok(ended(&why));
        }
        if let Some(signal) = signals.caught() {
            return Ok(Exit::Interrupted(signal));
        }
        if Instant::now() >= next {
            next += PLAIN;
            if put(&mut io::stdout(), "stdout", &line(&model))?.is_break() {
                return Ok(Exit::Done);
            }
        }
    }
}

fn line(model: &Model) -> String {
    let Some(status) = model.status() else {
        return "connecting\n".into();
    };
    let state = format!("{:?}", status.state).to_lowercase();
    let resident = model.values("lacuna_vm_resident_bytes", &[]).sum::<f64>() as u64;
    let mut text = format!(
        "{:>8.1} s  {state:<8}  resident {} of {}",
        status.seconds,
        Size(resident),
        Size(status.memory_bytes)
    );
    let steps = model.last(Curve::Steps);
    if steps > 0.0 {
        text.push_str(&format!("  {} steps/s", short(steps)));
    }
    for kind in model.faults() {
        let rate = short(model.last(Curve::Faults(kind)));
        text.push_str(&format!("  {} {rate}/s", FAULTS[kind].0));
    }
    text + "\n"
}
