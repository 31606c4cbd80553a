//! The live view: of `lacuna run`, `lacuna snapshot restore` and `lacuna ctl SOCKET top`.
//!
//! The view is a client of the control protocol (docs/control.md), also in the process that runs
//! the guest. So it shows no more than any other client can read.
//!
//! ```text
//! control socket ◄── feed: a thread with a Client ──news──► model ──► panels ──► terminal
//!                         ▲                                  │
//!                         └──────────── requests ◄── keys ───┘
//! ```
//! * `terminal`: the terminal's modes, and their restoration.
//! * `feed`: the client's thread. `model`: samples, rates and curves.
//! * `panels`: the parts as lines of text. `keys`: the keys and their requests.
//! * `top`: `lacuna ctl SOCKET top`.

mod feed;
mod keys;
mod model;
mod panels;
mod terminal;
#[cfg(test)]
mod tests;
mod top;

pub use top::top;

use crate::output::{complain, kept_lines};
use crate::signals::{Signal, Signals};
use feed::{Feed, News};
use keys::Action;
use lacuna_control::Client;
use model::Model;
use panels::Panel;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use terminal::Screen;

/// The time between two looks at keys and news.
const LOOK: Duration = Duration::from_millis(100);
/// From this width on there are two columns.
const TWO_COLUMNS: u16 = 100;
/// The gap between them.
const GAP: u16 = 2;
/// Lines of output that the view may show.
const OUTPUT: usize = 50;

/// How a view has ended.
enum End {
    /// The user has quit it.
    Quit,
    /// The connection to the VM is lost, and why.
    Gone(String),
    /// The caller has ended it.
    Over,
}

/// The view of a guest of this process, on a thread of its own. A drop ends the view.
pub struct Live {
    is_over: Arc<AtomicBool>,
    news: Sender<News>,
    thread: Option<JoinHandle<()>>,
}

impl Live {
    /// Whether a view can be shown: stderr is a terminal, with this process in its foreground.
    pub fn is_possible() -> bool {
        terminal::is_usable()
    }

    /// Starts a view for `client`. It ends with the connection, or at a signal. To quit it raises
    /// SIGINT, as Ctrl-C.
    ///
    /// # Errors
    /// The terminal or the host refuses it.
    pub fn start(client: Client, signals: &Signals) -> io::Result<Self> {
        let (feed, news) = Feed::start(client)?;
        let is_over = Arc::<AtomicBool>::default();
        let (over, signals) = (Arc::clone(&is_over), signals.clone());
        let mut screen = Screen::open()?;
        let named = thread::Builder::new().name("lacuna-view".into());
        let thread = named.spawn(move || {
            let is_over = || over.load(Ordering::Acquire) || signals.caught().is_some();
            let end = show(&mut screen, feed, None, &is_over);
            drop(screen);
            match end {
                Ok(End::Quit) => {
                    // The handler is installed, so the signal ends the guest.
                    let _ = nix::sys::signal::raise(Signal::Interrupt.of_kernel());
                }
                Ok(End::Over | End::Gone(_)) => {}
                Err(error) => complain(&format!("the view has ended: {error}; the guest runs")),
            }
        })?;
        Ok(Self {
            is_over,
            news,
            thread: Some(thread),
        })
    }

    /// Text of the caller in the view.
    pub fn caption(&self) -> Caption {
        Caption(self.news.clone())
    }
}

/// Text of a caller in the view. It goes nowhere after the view has ended.
pub struct Caption(Sender<News>);

impl Caption {
    /// Shows `lines` above the panels.
    pub fn say(&self, lines: Vec<String>) {
        let _ = self.0.send(News::Heading(lines));
    }

    /// Marks the time of a switch by `letter`; `text` names the switch.
    pub fn mark(&self, letter: char, text: &str) {
        let _ = self.0.send(News::Done(letter, text.into()));
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The hook has reported a panic of the view; the guest's result follows.
            let _ = thread.join();
        }
    }
}

/// Shows the VM of `feed` until the user quits, the connection is lost, or `is_over`. `other` is
/// the VM on the other side of a migration.
fn show(
    screen: &mut Screen,
    feed: Feed,
    other: Option<Feed>,
    is_over: &dyn Fn() -> bool,
) -> io::Result<End> {
    let no_colours = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let mut model = Model::new(!no_colours);
    let mut is_changed = true;
    while !is_over() && terminal::is_ours() {
        for news in feed.news.try_iter() {
            is_changed = true;
            if let Some(why) = model.take(news) {
                return Ok(End::Gone(why));
            }
        }
        for news in other.iter().flat_map(|other| other.news.try_iter()) {
            model.take_other(news);
        }
        if std::mem::take(&mut is_changed) {
            model.lines = kept_lines(OUTPUT);
            screen.0.draw(|frame| draw(frame, &model))?;
        }
        if !terminal::wait_for_key(LOOK)? {
            continue;
        }
        while event::poll(Duration::ZERO)? {
            is_changed = true;
            let action = pressed(&event::read()?).and_then(|key| keys::action(key, &model));
            match action {
                Some(Action::Quit) => return Ok(End::Quit),
                Some(Action::Help) => model.shows_help = !model.shows_help,
                Some(Action::Refuse(why)) => model.note = why,
                // The news of the feed say whether its thread has ended.
                Some(Action::Ask(ask)) => drop(feed.asks.send(ask)),
                None => {}
            }
        }
    }
    Ok(End::Over)
}

/// The pressed key. Ctrl-C is `q`, because the terminal sends no signal in raw mode.
fn pressed(event: &Event) -> Option<char> {
    let key = event
        .as_key_event()
        .filter(|key| key.kind != KeyEventKind::Release)?;
    match (key.code, key.modifiers) {
        (KeyCode::Char('c'), KeyModifiers::CONTROL) => Some('q'),
        (KeyCode::Char(key), KeyModifiers::NONE | KeyModifiers::SHIFT) => Some(key),
        _ => None,
    }
}

/// The panels of a narrow terminal from top to bottom, each with the rows that it gets first. Rows
/// that are left go to the panels in this order.
const ONE: [(Panel, u16); 7] = [
    (panels::vcpus, 3),
    (panels::memory, 3),
    (panels::curves, 8),
    (panels::moving, 3),
    (panels::threads, 2),
    (panels::map, 3),
    (panels::output, 2),
];
/// The panels of a wide terminal.
const LEFT: [(Panel, u16); 3] = [(panels::vcpus, 4), (panels::memory, 4), (panels::curves, 8)];
const RIGHT: [(Panel, u16); 4] = [
    (panels::moving, 4),
    (panels::map, 6),
    (panels::threads, 5),
    (panels::output, 4),
];

fn draw(frame: &mut Frame<'_>, model: &Model) {
    let area = frame.area();
    let width = usize::from(area.width);
    let mut head = vec![panels::head(model, width)];
    head.extend(panels::heading(model, width));
    let foot = panels::foot(model, width);
    let [above, below] = [head.len(), foot.len()].map(|lines| lines as u16);
    let above = above.min(area.height);
    let below = below.min(area.height - above);
    let body = Rect {
        y: area.y + above,
        height: area.height - above - below,
        ..area
    };
    put(
        frame,
        Rect {
            height: above,
            ..area
        },
        head,
    );
    let at = Rect {
        y: body.bottom(),
        height: below,
        ..area
    };
    put(frame, at, foot);
    if model.shows_help {
        put(frame, body, keys::HELP.map(Line::raw).into());
    } else if area.width < TWO_COLUMNS {
        column(frame, body, model, &ONE);
    } else {
        let left = (area.width - GAP) / 2;
        let right = Rect {
            x: body.x + left + GAP,
            width: area.width - left - GAP,
            ..body
        };
        column(
            frame,
            Rect {
                width: left,
                ..body
            },
            model,
            &LEFT,
        );
        column(frame, right, model, &RIGHT);
    }
}

/// Draws `panels` one below the other.
fn column(frame: &mut Frame<'_>, area: Rect, model: &Model, panels: &[(Panel, u16)]) {
    let width = usize::from(area.width);
    let full = panels
        .iter()
        .map(|(panel, _)| panel(model, width, usize::MAX));
    let full: Vec<_> = full.collect();
    let wanted: Vec<_> = full.iter().map(|lines| lines.len() as u16).collect();
    let mut left = area.height;
    let mut rows = vec![0; panels.len()];
    let mut give = |rows: &mut u16, most: u16| {
        let more = most.saturating_sub(*rows).min(left);
        *rows += more;
        left -= more;
    };
    for ((rows, wanted), (_, least)) in rows.iter_mut().zip(&wanted).zip(panels) {
        give(rows, (*wanted).min(*least));
    }
    for (rows, wanted) in rows.iter_mut().zip(&wanted) {
        give(rows, *wanted);
    }
    let mut y = area.y;
    for (((panel, _), full), rows) in panels.iter().zip(full).zip(rows) {
        let lines = match usize::from(rows) {
            rows if rows == full.len() => full,
            rows => panel(model, width, rows),
        };
        let at = Rect {
            y,
            height: rows,
            ..area
        };
        y += lines.len() as u16;
        put(frame, at, lines);
    }
}

fn put(frame: &mut Frame<'_>, area: Rect, lines: Vec<Line<'static>>) {
    frame.render_widget(Paragraph::new(lines), area);
}
