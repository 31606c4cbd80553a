//! A client of a control socket on a thread of its own. The view never waits for an answer: a VM
//! that does not answer leaves the keys usable.

use crate::counters::Counters;
use crate::monitor::GONE;
use lacuna::memory::PageMap;
use lacuna_control::{AskError, Client, SetRequest, Settings, Status};
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// The time between two samples.
pub(super) const EVERY: Duration = Duration::from_millis(500);
/// The least time between two maps.
const MAP_EVERY: Duration = Duration::from_secs(2);
/// The time between two maps is at least this many times the time of a map, because the VMM reads a
/// word of each page for it.
const MAP_SHARE: u32 = 500;
/// Cells of the map: enough for the largest terminal that shows all of them.
const CELLS: u32 = 1024;

/// What a user can ask for.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Wanted {
    Set(SetRequest),
    Pause,
    Resume,
}

/// A request of the user.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Ask {
    pub wanted: Wanted,
    /// Marks the time of the answer on the axis.
    pub mark: char,
    /// Names the request.
    pub text: String,
}

/// The VM at one moment.
pub(super) struct Sample {
    pub at: Instant,
    pub status: Status,
    pub counters: Counters,
}

/// What the feed's thread reports.
pub(super) enum News {
    Sample(Box<Sample>),
    Settings(Box<Settings>),
    Map(PageMap),
    /// The VM has done what was asked for: its mark, and its text.
    Done(char, String),
    /// Lines above the panels.
    Heading(Vec<String>),
    /// The VM has refused a request, and why.
    Refused(String),
    /// The connection is lost, and why.
    Gone(String),
}

/// Requests to a VM, and its news.
pub(super) struct Feed {
    pub asks: Sender<Ask>,
    pub news: Receiver<News>,
}

impl Feed {
    /// Starts the thread. Other threads may send news beside it. The thread ends with the
    /// connection, or after the feed was dropped.
    ///
    /// # Errors
    /// The host has no thread.
    pub fn start(client: Client) -> io::Result<(Self, Sender<News>)> {
        let (asks, asked) = mpsc::channel();
        let (send, news) = mpsc::channel();
        let named = thread::Builder::new().name("lacuna-feed".into());
        let beside = send.clone();
        named.spawn(move || {
            if let Err(error) = serve(client, &asked, &send) {
                let why = match error {
                    AskError::Gone { .. } => GONE.into(),
                    error => error.to_string(),
                };
                // The view has ended if the channel is closed.
                let _ = send.send(News::Gone(why));
            }
        })?;
        Ok((Self { asks, news }, beside))
    }
}

/// Samples the VM, and sends it the requests in between, until the view ends.
fn serve(mut client: Client, asked: &Receiver<Ask>, news: &Sender<News>) -> Result<(), AskError> {
    let mut next = Instant::now();
    let mut next_map = next;
    loop {
        match asked.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(ask) => {
                let done = match ask.wanted {
                    Wanted::Set(request) => client.set(request).map(Some),
                    Wanted::Pause => client.pause().map(|_| None),
                    Wanted::Resume => client.resume().map(|_| None),
                };
                // The next sample finds a closed channel.
                let _ = match done {
                    Err(AskError::Refused(why)) => news.send(News::Refused(why.to_string())),
                    done => {
                        if let Some(settings) = done? {
                            let _ = news.send(News::Settings(Box::new(settings)));
                        }
                        news.send(News::Done(ask.mark, ask.text))
                    }
                };
            }
            Err(RecvTimeoutError::Timeout) => {
                let began = Instant::now();
                next = began + EVERY;
                let mut is_read = sample(&mut client, news)?;
                if began >= next_map {
                    let began = Instant::now();
                    is_read &= sample_map(&mut client, news)?;
                    next_map = Instant::now() + MAP_EVERY.max(began.elapsed() * MAP_SHARE);
                }
                if !is_read {
                    return Ok(());
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// `None` instead of a refusal: the guest has not arrived.
fn unless_refused<T>(done: Result<T, AskError>) -> Result<Option<T>, AskError> {
    match done {
        Err(AskError::Refused(_)) => Ok(None),
        done => done.map(Some),
    }
}

/// Samples the VM. Returns whether the view still reads the news.
fn sample(client: &mut Client, news: &Sender<News>) -> Result<bool, AskError> {
    let status = client.status()?;
    let counters = unless_refused(client.counters())?;
    let counters = counters.map_or_else(Counters::default, |all| Counters::of_stat(&all));
    let at = Instant::now();
    let sample = Sample {
        at,
        status,
        counters,
    };
    let mut is_read = news.send(News::Sample(Box::new(sample))).is_ok();
    if let Some(settings) = unless_refused(client.settings())? {
        is_read &= news.send(News::Settings(Box::new(settings))).is_ok();
    }
    Ok(is_read)
}

/// Reads a map, as [`sample`].
fn sample_map(client: &mut Client, news: &Sender<News>) -> Result<bool, AskError> {
    let map = unless_refused(client.map(CELLS))?;
    Ok(map.is_none_or(|map| news.send(News::Map(map)).is_ok()))
}
