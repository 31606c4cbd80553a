//! The lines of the guest `paced`: signs of life, and reports of damage.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a guest is watched for damage after its move.
const WATCH: Duration = Duration::from_millis(300);

/// The outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    /// A line of each thread.
    All,
    /// A message that something is wrong.
    Damage,
    /// Not all threads have printed a line in time, or the guest has ended.
    Silence,
}

/// When each thread of a guest has printed its first line.
pub struct Beats(Vec<Option<Instant>>);

impl Beats {
    /// No beat was received.
    pub fn new(threads: usize) -> Self {
        Self(vec![None; threads])
    }

    /// Listens until all threads have beaten, something is wrong, or `limit` has passed.
    pub fn listen(&mut self, lines: &Receiver<(Instant, String)>, limit: Duration) -> Seen {
        let deadline = Instant::now() + limit;
        while self.last_first().is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            match lines.recv_timeout(left) {
                Ok((_, line)) if is_damage(&line) => return Seen::Damage,
                Ok((at, line)) => self.note(at, &line),
                Err(_) => return Seen::Silence,
            }
        }
        Seen::All
    }

    /// Whether the guest reports damage a little later.
    pub fn is_damaged_later(&self, lines: &Receiver<(Instant, String)>) -> bool {
        let deadline = Instant::now() + WATCH;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match lines.recv_timeout(left) {
                Ok((_, line)) if is_damage(&line) => return true,
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => return true,
            }
        }
    }

    /// When the last of them has printed its first line. `None`: one has not.
    pub fn last_first(&self) -> Option<Instant> {
        let all: Option<Vec<_>> = self.0.iter().copied().collect();
        all?.into_iter().max()
    }

    fn note(&mut self, at: Instant, line: &str) {
        let thread = line.parse::<usize>().ok();
        if let Some(first) = thread.and_then(|thread| self.0.get_mut(thread)) {
            first.get_or_insert(at);
        }
    }
}

/// Lines of the guest's kernel, and of the workload about a page.
fn is_damage(line: &str) -> bool {
    line.contains("panic:") || line.contains("paced: ") || line.starts_with("RESULT")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn the_last_thread_counts_and_damage_ends_it() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let (sender, lines) = channel();
        let send = |ms, line: &str| sender.send((at(ms), line.to_owned())).unwrap();
        for (ms, line) in [(1, "1"), (2, ""), (3, "7"), (4, "1"), (5, "0"), (6, "0")] {
            send(ms, line);
        }
        let mut beats = Beats::new(2);
        assert_eq!(beats.listen(&lines, Duration::from_secs(60)), Seen::All);
        assert_eq!(beats.last_first(), Some(at(5)));
        send(7, "paced: page 3 is lost: gpa=1000 round=2 found=0");
        assert!(beats.is_damaged_later(&lines));
        send(8, "0");
        send(9, "panic: exception 13");
        let mut beats = Beats::new(2);
        assert_eq!(beats.listen(&lines, Duration::from_secs(60)), Seen::Damage);
        assert_eq!(beats.last_first(), None);
        drop(sender);
        assert_eq!(beats.listen(&lines, Duration::from_secs(60)), Seen::Silence);
        assert!(beats.is_damaged_later(&lines));
    }
}
