//! `lacuna ctl SOCKET stat` and `dirty`: a running guest, period by period.

use crate::args::{JsonTarget, Pacing, WritesArgs};
use crate::exit::{Exit, no_answer};
use crate::output::{complain, visible};
use crate::run::Refusal;
use crate::size::Size;
use lacuna::PAGE_SIZE;
use lacuna_control::{AskError, Client, WatchRequest, Writes};
use lacuna_lab::report::short;
use rustix::termios::tcgetwinsize;
use serde::Serialize;
use serde_json::Number;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Shows the rates of the guest's counters.
///
/// # Errors
/// The exit code and the text for the user.
pub fn stat(control: &Path, pacing: &Pacing) -> Result<Exit, Refusal> {
    let mut printer = Printer::of(pacing.json.as_ref())?;
    let mut client = Client::connect(control).map_err(no_answer)?;
    let mut read = || Ok((Instant::now(), client.counters()?));
    let mut before = read().map_err(no_answer)?;
    let mut left = pacing.count.map(u64::from);
    while left != Some(0) {
        thread::sleep(pacing.every);
        let now = match read() {
            Ok(now) => now,
            Err(AskError::Gone { .. }) => return Ok(ended(GONE)),
            Err(error) => return Err(no_answer(error)),
        };
        let rates = Rates::between(&before, &now);
        let rows = io::stdout().is_terminal().then(rows);
        if printer.print(&rates.text(rows), &rates)?.is_break() {
            break;
        }
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(Exit::Done)
}

/// Shows how many pages the guest writes.
///
/// # Errors
/// The exit code and the text for the user.
pub fn writes(control: &Path, args: &WritesArgs) -> Result<Exit, Refusal> {
    let mut printer = Printer::of(args.pacing.json.as_ref())?;
    let client = Client::connect(control).map_err(no_answer)?;
    let periods = client.watch(WatchRequest {
        every_ms: Some(milliseconds(args.pacing.every)),
        window_ms: Some(milliseconds(args.window)),
        count: args.pacing.count,
        detect: args.dirty,
    });
    for (index, writes) in periods.map_err(no_answer)?.enumerate() {
        let writes = match writes {
            Ok(writes) => writes,
            Err(error @ AskError::Ended(_)) => return Ok(ended(&error.to_string())),
            Err(AskError::Gone { .. }) if index > 0 => return Ok(ended(GONE)),
            Err(error) => return Err(no_answer(error)),
        };
        let text = in_words(&writes, args.window);
        if printer.print(&text, &writes)?.is_break() {
            break;
        }
    }
    Ok(Exit::Done)
}

/// Why a client's connection has ended.
pub(crate) const GONE: &str =
    "the VM has closed its control socket: its own output says why it ended";

/// The run has ended, and the monitor with it.
pub(crate) fn ended(how: &str) -> Exit {
    complain(&visible(how));
    Exit::Done
}

fn milliseconds(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The counters that have grown in a period.
#[derive(Serialize)]
struct Rates {
    /// The length of the period.
    seconds: f64,
    /// Their growth a second.
    rates: BTreeMap<String, f64>,
}

impl Rates {
    fn between(
        (began, before): &(Instant, BTreeMap<String, Number>),
        (ended, now): &(Instant, BTreeMap<String, Number>),
    ) -> Self {
        let seconds = ended.duration_since(*began).as_secs_f64();
        let rate = |(name, now): (&String, &Number)| {
            // A counter that was not there before, such as a new migration's, began at 0.
            let before = before.get(name).and_then(Number::as_f64).unwrap_or(0.0);
            let grown = now.as_f64()? - before;
            (is_counter(name) && grown > 0.0).then(|| (name.clone(), grown / seconds))
        };
        Self {
            seconds,
            rates: now.iter().filter_map(rate).collect(),
        }
    }

    /// A line for each counter, the largest rate first. `rows`: the lines of a terminal, which is
    /// cleared first.
    fn text(&self, rows: Option<usize>) -> String {
        let mut rates: Vec<_> = self.rates.iter().collect();
        rates.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let shown = rates
            .iter()
            .take(rows.map_or(usize::MAX, |rows| rows.saturating_sub(2)));
        let lines: String = shown
            .map(|(name, rate)| format!("{:>10}/s  {}\n", in_short(**rate), short_name(name)))
            .collect();
        let begin = if rows.is_some() { "\x1b[H\x1b[J" } else { "" };
        match lines.is_empty() {
            true => format!("{begin}no counter has changed\n\n"),
            false => format!("{begin}{lines}\n"),
        }
    }
}

/// Whether a value only grows, by the name that `--metrics` gives it.
fn is_counter(name: &str) -> bool {
    let metric = name.split('{').next().unwrap_or_default();
    metric.ends_with("_total") || metric.ends_with("_count")
}

/// `lacuna_vcpu_exits_total{vcpu="0",kind="io"}` as `vcpu_exits vcpu=0,kind=io`.
fn short_name(name: &str) -> String {
    let (metric, labels) = name.split_once('{').unwrap_or((name, ""));
    let metric = metric.strip_prefix("lacuna_").unwrap_or(metric);
    let metric = metric.strip_suffix("_total").unwrap_or(metric);
    let labels = labels.trim_end_matches('}').replace('"', "");
    visible(format!("{metric} {labels}").trim_end()).into_owned()
}

fn in_short(rate: f64) -> String {
    match rate {
        ..100.0 => format!("{rate:.1}"),
        _ => short(rate),
    }
}

fn in_words(writes: &Writes, window: Duration) -> String {
    if let Some(why) = &writes.in_use {
        return format!("not known: {}\n", visible(why));
    }
    let bytes = Size((writes.rate * PAGE_SIZE as f64) as u64);
    let (rate, set) = (in_short(writes.rate), writes.working_set);
    let size = Size(set * PAGE_SIZE as u64);
    format!(
        "{rate:>8} pages/s {:>8}/s   {set:>8} pages ({size}) in {window:?}   by {}\n",
        bytes.to_string(),
        visible(&writes.detected_by)
    )
}

/// The lines of the terminal on stdout.
fn rows() -> usize {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_row > 0 => size.ws_row.into(),
        _ => 24,
    }
}

/// Where the periods go.
pub(crate) struct Printer {
    /// Gets a line of JSON for each.
    json: Option<(String, Box<dyn Write>)>,
    /// Whether stdout gets text.
    has_text: bool,
}

impl Printer {
    pub(crate) fn of(json: Option<&JsonTarget>) -> Result<Self, Refusal> {
        let has_text = json != Some(&JsonTarget::Stdout);
        let json: Option<(_, Box<dyn Write>)> = match json {
            None => None,
            Some(JsonTarget::Stdout) => Some(("stdout".into(), Box::new(io::stdout()))),
            Some(JsonTarget::File(path)) => {
                let name = path.display().to_string();
                let file = File::create(path).map_err(|error| cannot_write(&name, &error))?;
                Some((name, Box::new(file)))
            }
        };
        Ok(Self { json, has_text })
    }

    /// `Break`: the reader of the output has gone.
    pub(crate) fn print(
        &mut self,
        text: &str,
        json: &impl Serialize,
    ) -> Result<ControlFlow<()>, Refusal> {
        let mut printed = ControlFlow::Continue(());
        if let Some((name, target)) = &mut self.json {
            let line = serde_json::to_string(json).expect("every field has a JSON form");
            printed = put(&mut **target, name, &(line + "\n"))?;
        }
        if self.has_text && printed.is_continue() {
            printed = put(&mut io::stdout(), "stdout", text)?;
        }
        Ok(printed)
    }
}

/// Writes `text`. `Break`: the reader of the output has gone.
pub(crate) fn put(
    target: &mut dyn Write,
    name: &str,
    text: &str,
) -> Result<ControlFlow<()>, Refusal> {
    let written = target.write_all(text.as_bytes());
    match written.and_then(|()| target.flush()) {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(error) => Err(cannot_write(name, &error)),
    }
}

fn cannot_write(name: &str, error: &io::Error) -> Refusal {
    (Exit::Host, format!("cannot write to {name}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_counters() {
        let read = |at: Instant, values: &str| (at, serde_json::from_str(values).unwrap());
        let began = Instant::now();
        let before = r#"{"lacuna_vcpu_exits_total{vcpu=\"0\",kind=\"io\"}": 5,
            "lacuna_still_total": 1,
            "lacuna_vm_resident_bytes": 5, "lacuna_wait_seconds_count{by=\"a\"}": 1}"#;
        let now = r#"{"lacuna_vcpu_exits_total{vcpu=\"0\",kind=\"io\"}": 15,
            "lacuna_still_total": 1,
            "lacuna_vm_resident_bytes": 9, "lacuna_wait_seconds_count{by=\"a\"}": 40001,
            "lacuna_new_total": 1}"#;
        let now = read(began + Duration::from_secs(2), now);
        let rates = Rates::between(&read(began, before), &now);
        let expected = "\
\x20    20.0k/s  wait_seconds_count by=a
       5.0/s  vcpu_exits vcpu=0,kind=io
       0.5/s  new

";
        assert_eq!(rates.text(None), expected);
        assert_eq!(rates.text(Some(3)).lines().count(), 2);
        let nothing = Rates::between(&now, &now);
        assert_eq!(nothing.text(None), "no counter has changed\n\n");
    }
}
