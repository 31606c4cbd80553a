//! The destination of a migration, after it may run the guest: takes the remaining pages.
//!
//! ```text
//! this thread     ◄── remaining pages ─── source: put in place
//! "lacuna-answers" ◄── requested pages ─── the requests are answered
//! ```

use super::connection::{Connections, HangUp};
use super::frame::Kind;
use super::frames::{Frames, unexpected};
use super::install::Installer;
use super::remote::RemotePages;
use super::{Departure, MigrationId, Role, Stage};
use crate::copy::OnPages;
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{SourcePage, Vm};
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A guest that the source has handed to this side.
#[must_use = "run the vCPUs, and take the remaining pages"]
pub struct Arrived<V: Vm> {
    /// The VMM runs them: they have the state that they had at the source.
    pub vcpus: Vec<V::Vcpu>,
    /// The remaining pages, and the end of the migration.
    pub arriving: Arriving<V>,
}

/// The pages, still at the source, of a guest that runs here. They are lost if this is dropped.
pub struct Arriving<V> {
    vm: Arc<V>,
    /// `None`: the connection was cut.
    main: Option<Frames>,
    id: MigrationId,
    layout: MemoryLayout,
    /// `None`: all memory has arrived before the guest.
    late: Option<Late>,
    /// See [`Installer::parts`].
    parts: PageSet,
    departure: Departure,
    /// When its state had arrived.
    came: Instant,
    /// When the guest could run here.
    ran: Option<Instant>,
}

/// The pages that arrive after the guest, and the connections beside the first one.
pub(super) struct Late {
    pages: Arc<RemotePages>,
    /// Accepted connections for `Want`s and answers, until they are used.
    accepted: Option<(Frames, Frames)>,
    answers: Option<Answers>,
}

/// The thread that takes answers.
struct Answers {
    end: HangUp,
    thread: JoinHandle<()>,
}

impl Late {
    pub fn new(pages: Arc<RemotePages>) -> Self {
        Self {
            pages,
            accepted: None,
            answers: None,
        }
    }

    pub fn pages(&self) -> &Arc<RemotePages> {
        &self.pages
    }

    /// Takes the connections beside the first one. If the source replaces the first one meanwhile,
    /// returns the new one.
    pub fn accept(
        &mut self,
        connections: &dyn Connections,
        id: &MigrationId,
    ) -> Result<Option<Frames>, MigrateError> {
        let beside = |role| -> Result<_, MigrateError> {
            let (mut frames, joined) = Frames::accept(connections, id, &[role, Role::Main])?;
            if joined == role {
                frames.welcome(None, None)?;
            }
            Ok((frames, joined == Role::Main))
        };
        let (wants, is_main) = beside(Role::Wants)?;
        if is_main {
            return Ok(Some(wants));
        }
        let (answers, is_main) = beside(Role::Answers)?;
        if is_main {
            return Ok(Some(answers));
        }
        self.accepted = Some((wants, answers));
        Ok(None)
    }

    /// Uses the accepted connections beside `main`, or ends them if no page is awaited.
    pub fn begin(&mut self, main: &Frames) -> Result<(), MigrateError> {
        let accepted = self.accepted.take();
        let needed = accepted.filter(|_| !self.pages.awaited().is_empty());
        let Some((wants, answers)) = needed else {
            return Ok(());
        };
        let (end, end_main) = (answers.hang_up()?, main.hang_up()?);
        self.pages.begin_answers();
        let pages = Arc::clone(&self.pages);
        let named = thread::Builder::new().name("lacuna-answers".into());
        let thread = named.spawn(move || {
            let _ended = AnswersEnd {
                pages: &pages,
                end_main,
            };
            // The result does not matter: an answer may have been lost, so a new connection is
            // needed.
            let _ = take_answers(&pages, answers);
        });
        let thread = thread.map_err(MigrateError::Thread)?;
        self.answers = Some(Answers { end, thread });
        // Answers are taken already. The source stops reading Wants while its answers are not read.
        // So without the thread, more Wants than the sockets hold would wait for ever.
        self.pages.connect(wants)
    }

    /// As [`RemotePages::outlive_cuts`].
    pub fn outlive_cuts(&self) -> Result<(), MigrateError> {
        self.pages.outlive_cuts()
    }

    fn disconnect(&mut self) {
        self.accepted = None;
        self.pages.disconnect();
        if let Some(Answers { end, thread }) = self.answers.take() {
            end();
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

impl Drop for Late {
    /// No page arrives any more.
    fn drop(&mut self) {
        self.disconnect();
        self.pages
            .abandon("the migration has ended before this page arrived");
    }
}

/// Ends the waits for answers, also after a panic.
struct AnswersEnd<'a> {
    pages: &'a RemotePages,
    end_main: HangUp,
}

impl Drop for AnswersEnd<'_> {
    fn drop(&mut self) {
        self.pages.end_answers();
        (self.end_main)();
    }
}

/// Takes answers until the connection ends.
fn take_answers(pages: &RemotePages, mut answers: Frames) -> Result<(), MigrateError> {
    let mut has_waited = false;
    loop {
        let kind = answers.read_or_idle()?;
        // A stopped source process keeps its connections. A new request may be a moment old, so
        // this waits for one more timeout.
        let waits = kind.is_none() && pages.awaits_answer();
        if waits && has_waited {
            return Err(MigrateError::Cut(io::ErrorKind::TimedOut.into()));
        }
        has_waited = waits;
        match kind {
            None => {}
            Some(Kind::Data) => {
                let (first, bytes) = answers.numbered()?;
                let (whole, rest) = bytes.as_chunks::<PAGE_SIZE>();
                if !rest.is_empty() || !pages.has(first, whole.len() as u64) {
                    return Err(MigrateError::stream("an answer that is no page"));
                }
                for (page, content) in (first.0..).zip(whole) {
                    pages.answered(SourcePage(page), content)?;
                }
            }
            Some(Kind::Zeros) => {
                let (first, count) = answers.numbered()?;
                let count = count.first_chunk().map_or(0, |c| u64::from_le_bytes(*c));
                if !pages.has(first, count) {
                    return Err(MigrateError::stream("an answer that is no page"));
                }
                pages.arrived_zeros(first, count);
            }
            Some(other) => return Err(unexpected(other, Kind::Data)),
        }
    }
}

impl<V: Vm> Arriving<V> {
    pub(super) fn new(
        vm: Arc<V>,
        main: Frames,
        (id, layout): (MigrationId, MemoryLayout),
        (departure, came): (Departure, Instant),
        late: Option<Late>,
    ) -> Self {
        Self {
            vm,
            main: Some(main),
            id,
            late,
            parts: PageSet::empty(layout.pages()),
            layout,
            departure,
            came,
            ran: None,
        }
    }

    fn main(&mut self) -> Result<&mut Frames, MigrateError> {
        let cut = || MigrateError::Cut(io::ErrorKind::NotConnected.into());
        self.main.as_mut().ok_or_else(cut)
    }

    /// Waits for the source's `Go`.
    pub(super) fn until_go(&mut self) -> Result<(), MigrateError> {
        let main = self.main()?;
        main.signal(Kind::Prepared)?;
        main.expect(Kind::Go)
    }

    /// The guest runs from now on.
    pub(super) fn run(&mut self) {
        self.ran = Some(Instant::now());
        // The guest runs here even if this message does not reach the source: the source has handed
        // it over.
        if let Some(main) = &mut self.main {
            let _ = main.signal(Kind::Running);
        }
    }

    /// The guest's downtime, without the time that its state took on the way.
    pub fn downtime(&self) -> Duration {
        let ran = self.ran.unwrap_or_else(Instant::now);
        Duration::from_micros(self.departure.paused_us).saturating_add(ran - self.came)
    }

    /// Pages that the source has sent in each round before the guest, zeros included.
    pub fn rounds(&self) -> &[u64] {
        &self.departure.rounds
    }

    /// Pages that are still at the source.
    pub fn awaited(&self) -> PageSet {
        match &self.late {
            Some(late) => late.pages.awaited(),
            None => PageSet::empty(self.layout.pages()),
        }
    }

    /// As [`Arriving::awaited`], for other threads, and while [`Arriving::finish`] runs.
    pub fn awaited_now(&self) -> Box<dyn Fn() -> PageSet + Send + Sync> {
        let pages = self.late.as_ref().map(|late| Arc::clone(&late.pages));
        let none = PageSet::empty(self.layout.pages());
        Box::new(move || match &pages {
            Some(pages) => pages.awaited(),
            None => none.clone(),
        })
    }

    /// Takes all remaining pages while the guest runs. Calls `each` with the number of pages since
    /// the last call. Afterwards the guest needs no page of the source, and the source may end.
    ///
    /// # Errors
    /// [`MigrateError::Cut`]: if pages are [awaited](Arriving::awaited), [`Arriving::resume`] takes
    /// another connection, and vCPUs that need such a page wait until then. If none is, the guest
    /// lacks nothing, and the source need not come back. [`MigrateError::Cancelled`] if `each` says
    /// `Break`: call this again, or drop this value.
    pub fn finish(&mut self, each: OnPages<'_>) -> Result<(), MigrateError> {
        let layout = self.layout.clone();
        let Some(late) = &self.late else {
            return self.until_end(&mut |_: &Frames, kind| Err(unexpected(kind, Kind::End)));
        };
        let pages = Arc::clone(&late.pages);
        let vm = Arc::clone(&self.vm);
        let missing = vm.missing_memory().ok_or(MigrateError::NoSource)?;
        let mut place = Installer {
            missing,
            layout: &layout,
            pages: &pages,
            parts: self.parts.clone(),
        };
        let come = self.until_end(&mut |frames, kind| place.take(frames, kind, each));
        let come = come.and_then(|()| place.complete());
        self.parts = place.parts;
        if !matches!(come, Ok(()) | Err(MigrateError::Cancelled)) {
            self.disconnect();
        }
        come
    }

    /// Takes frames until the source has sent all, and confirms that all have arrived.
    fn until_end(
        &mut self,
        take: &mut dyn FnMut(&Frames, Kind) -> Result<(), MigrateError>,
    ) -> Result<(), MigrateError> {
        let pages = self.late.as_ref().map(|late| Arc::clone(&late.pages));
        let main = self.main()?;
        loop {
            match main.read()? {
                Kind::End => break,
                kind => take(main, kind)?,
            }
        }
        if !pages.is_none_or(|pages| pages.wait_for_all()) {
            return Err(MigrateError::Cut(io::ErrorKind::ConnectionAborted.into()));
        }
        main.signal(Kind::Complete)
    }

    /// Takes a new connection of the source after a cut. Then [`Arriving::finish`] continues.
    ///
    /// # Errors
    /// There is none, or it was cut.
    pub fn resume(&mut self, connections: &dyn Connections) -> Result<(), MigrateError> {
        let connected = self.reconnect(connections, Stage::Running);
        connected.inspect_err(|_| self.disconnect())
    }

    /// For a guest that has ended here and needs no more pages: takes the source's next connection,
    /// and sends it `why`, in a few words. Then the source ends too.
    ///
    /// # Errors
    /// There is none, or it was cut.
    pub fn end(&mut self, connections: &dyn Connections, why: &str) -> Result<(), MigrateError> {
        self.disconnect();
        let (mut main, _) = Frames::accept(connections, &self.id, &[Role::Main])?;
        main.has_ended(why)
    }

    pub(super) fn reconnect(
        &mut self,
        connections: &dyn Connections,
        stage: Stage,
    ) -> Result<(), MigrateError> {
        self.disconnect();
        let (mut main, _) = Frames::accept(connections, &self.id, &[Role::Main])?;
        loop {
            main.welcome(Some(stage), None)?;
            main.write_set(&self.awaited())?;
            main.signal(Kind::Synced)?;
            let late = self.late.as_mut();
            let Some(late) = late.filter(|late| !late.pages.awaited().is_empty()) else {
                break;
            };
            match late.accept(connections, &self.id)? {
                Some(newer) => main = newer,
                None => {
                    late.begin(&main)?;
                    break;
                }
            }
        }
        self.main = Some(main);
        Ok(())
    }

    /// Ends all connections. The source sees a cut.
    pub(super) fn disconnect(&mut self) {
        self.main = None;
        if let Some(late) = &mut self.late {
            late.disconnect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::Connection;
    use lacuna_machine::{Answer, PageRequest, PageSource as _};
    use lacuna_source::{Failure, PageRequester};
    use std::os::unix::net::UnixStream;

    /// An existing connection.
    struct Ready(UnixStream);

    impl Connections for Ready {
        fn open(&self) -> io::Result<Box<dyn Connection>> {
            Ok(Box::new(self.0.try_clone()?))
        }
    }

    struct Waits;

    impl PageRequester for Waits {
        fn answer(&self, _key: u64, _content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
            Answer::Taken
        }
    }

    /// The source's process is stopped: its connections stay, and no frame arrives.
    #[test]
    fn a_source_that_does_not_answer_counts_as_cut() {
        let (here, _there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(Duration::from_millis(1)))
            .unwrap();
        let answers = Frames::open(&Ready(here)).unwrap();
        let pages = RemotePages::new();
        pages.set_awaited(PageSet::full(4));
        pages.begin_answers();
        pages.fetch(PageRequest::new(Arc::new(Waits), 0, SourcePage(3)));
        let ended = take_answers(&pages, answers);
        assert!(matches!(ended, Err(MigrateError::Cut(_))), "{ended:?}");
    }

    /// The destination works between State and Prepared.
    #[test]
    fn a_source_waits_while_the_destination_works() {
        let pair = UnixStream::pair().unwrap();
        let (mut here, mut there) = (
            Frames::open(&Ready(pair.0)).unwrap(),
            Frames::open(&Ready(pair.1)).unwrap(),
        );
        for _ in 0..2 {
            there.write_zeros(SourcePage(0), 0).unwrap();
        }
        there.signal(Kind::Prepared).unwrap();
        let mut waits = 0;
        let prepared = here.expect_after_work(Kind::Prepared, &mut || {
            waits += 1;
            Ok(())
        });
        assert!(prepared.is_ok() && waits == 2, "{prepared:?}, {waits}");

        there.write_zeros(SourcePage(0), 0).unwrap();
        there.write_zeros(SourcePage(0), 1).unwrap();
        there.flush().unwrap();
        let cancelled = &mut || Err(MigrateError::Cancelled);
        let ended = here.expect_after_work(Kind::Prepared, cancelled);
        assert!(matches!(ended, Err(MigrateError::Cancelled)), "{ended:?}");
        let odd = here.expect_after_work(Kind::Prepared, &mut || Ok(()));
        assert!(matches!(odd, Err(MigrateError::Stream(_))), "{odd:?}");
    }
}
