//! The source of a migration, after it has handed the guest over: sends the remaining pages.
//!
//! ```text
//! this thread      ── remaining pages ────────────► destination
//! another thread  ◄── Want ──
//!                  ── its page ─────────────────────►
//! ```
//! A thread takes a page out of the set of remaining pages before it sends the page, so each is
//! sent once. After a cut the destination sends the list of pages that it lacks.
//!
//! A page that this side cannot read stays in the set until all others are sent. Then the
//! conversation ends with the error. After the next connection this side tries to read the page
//! again.

use super::connection::Connections;
use super::frame::Kind;
use super::frames::{Frames, unexpected};
use super::packing::Carriage;
use super::{MigrationId, Role, Stage};
use crate::copy::{CHUNK, PageSink, copy_run, is_cancelled};
use crate::error::printable;
use crate::rounds::{OnProgress, Progress};
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{SourcePage, Vm};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tracing::info;

/// The time between two looks at a page on its way.
const LOOK: Duration = Duration::from_millis(1);

/// The connections beside the first one.
pub(super) struct Links {
    wants: Frames,
    answers: Frames,
}

/// A destination after a new connection.
pub(super) enum Reconnected {
    /// How far it is, and the new connections.
    Open(Box<(Frames, Option<Links>, Reached)>),
    /// The guest has ended there.
    Ended(String),
}

/// How far a conversation was when it was cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reached {
    /// The state was sent: the guest is not handed over.
    State,
    /// `Go` was sent, at least in part.
    Go,
    /// The destination runs the guest.
    Running,
}

impl Links {
    pub(super) fn join(
        connections: &dyn Connections,
        id: &MigrationId,
    ) -> Result<Self, MigrateError> {
        let (wants, _) = Frames::join(connections, id, Role::Wants)?;
        let (answers, _) = Frames::join(connections, id, Role::Answers)?;
        Ok(Self { wants, answers })
    }
}

/// The memory of a handed-over guest.
pub(super) struct RemainingPages<'a, V: Vm> {
    vm: &'a V,
    layout: MemoryLayout,
    /// Pages still to send.
    pages: Mutex<PageSet, lock_order::PagesLeft>,
    carriage: Carriage,
    /// No page remained at the handover of the guest.
    needed_nothing: bool,
    /// The guest waits for a page that the other thread has taken, perhaps only into its buffer.
    waits: AtomicBool,
    /// The page behind the last `Want`: the guest may need it next. `u64::MAX`: taken.
    near: AtomicU64,
    /// Sent pages with content.
    sent: AtomicU64,
    /// Pages sent because the guest needs them.
    answered: AtomicU64,
    /// Such a page is on its way. Set under the lock of `pages`, with the page's removal.
    answering: AtomicBool,
    /// `End` was sent on the connections in use, or will be at once.
    is_ended: AtomicBool,
    ran: Mutex<Option<Instant>, lock_order::TimeOfRun>,
}

impl<'a, V: Vm> RemainingPages<'a, V> {
    pub fn new(vm: &'a V, layout: MemoryLayout, pages: PageSet, carriage: Carriage) -> Self {
        Self {
            vm,
            layout,
            carriage,
            needed_nothing: pages.is_empty(),
            pages: Mutex::new(pages),
            waits: AtomicBool::new(false),
            near: AtomicU64::new(u64::MAX),
            sent: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            answering: AtomicBool::new(false),
            is_ended: AtomicBool::new(false),
            ran: Mutex::new(None),
        }
    }

    /// Whether the destination had all pages at the handover of the guest.
    pub fn needed_nothing(&self) -> bool {
        self.needed_nothing
    }

    /// Pages with content sent since the last call.
    pub fn take_sent(&self) -> u64 {
        self.sent.swap(0, Ordering::Relaxed)
    }

    /// Records that the destination runs the guest.
    fn note_run(&self) {
        let mut ran = self.ran.lock().expect("no panic under this lock");
        ran.get_or_insert_with(Instant::now);
    }

    pub fn ran(&self) -> Option<Instant> {
        *self.ran.lock().expect("no panic under this lock")
    }

    /// Pages still to send.
    pub fn len(&self) -> u64 {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, PageSet> {
        self.pages.lock().expect("no panic under this lock")
    }

    /// New connections, and how far the destination is.
    pub fn reconnect(
        &mut self,
        connections: &dyn Connections,
        id: &MigrationId,
    ) -> Result<Reconnected, MigrateError> {
        let (mut main, welcome) = Frames::join(connections, id, Role::Main)?;
        main.carry(&self.carriage)?;
        let reached = match welcome.stage {
            Some(Stage::Prepared) => Reached::State,
            Some(Stage::Running) => Reached::Running,
            None => return Err(MigrateError::stream("a Welcome without a stage")),
        };
        if reached == Reached::Running {
            self.note_run();
        }
        if let Some(why) = welcome.ended {
            return Ok(Reconnected::Ended(printable(&why)));
        }
        let mut lacks = PageSet::empty(self.layout.pages());
        loop {
            match main.read()? {
                Kind::Awaited => main.read_set(&mut lacks)?,
                Kind::Synced => break,
                other => return Err(unexpected(other, Kind::Synced)),
            }
        }
        let aside = match lacks.is_empty() {
            true => None,
            false => Some(Links::join(connections, id)?),
        };
        self.pages = Mutex::new(lacks);
        self.is_ended = AtomicBool::new(false);
        Ok(Reconnected::Open(Box::new((main, aside, reached))))
    }

    /// Speaks with the destination, which has reached `reached`, until it has every page.
    pub fn talk(
        &self,
        main: &mut Frames,
        aside: Option<&mut Links>,
        reached: Reached,
        progress: OnProgress<'_>,
    ) -> Result<(), (Reached, MigrateError)> {
        let Some(Links { wants, answers }) = aside else {
            return self.speak(main, reached, progress);
        };
        let ends = [&*main, wants, answers].map(Frames::hang_up);
        let [end_main, end_wants, end_answers] = ends.map(|end| end.map_err(|why| (reached, why)));
        let (end_main, end_wants, end_answers) = (end_main?, end_wants?, end_answers?);
        let end_answers = &end_answers;
        thread::scope(|scope| {
            let named = thread::Builder::new().name("lacuna-answers".into());
            let answering = named.spawn_scoped(scope, || {
                let ended = self.answer(wants, answers);
                // The destination may wait for a lost answer.
                end_answers();
                // After `End` the destination itself notices a cut. It may have all pages and have
                // ended its connections: then `Complete` is on its way on the first one.
                if !self.is_ended.load(Ordering::SeqCst) {
                    end_main();
                }
                ended
            });
            if let Err(error) = &answering {
                let error = std::io::Error::from(error.kind());
                return Err((reached, MigrateError::Thread(error)));
            }
            let spoken = self.speak(main, reached, progress);
            end_wants();
            end_answers();
            spoken
        })
    }

    fn speak(
        &self,
        main: &mut Frames,
        mut reached: Reached,
        progress: OnProgress<'_>,
    ) -> Result<(), (Reached, MigrateError)> {
        let spoken = self.speak_from(main, &mut reached, progress);
        spoken.map_err(|why| (reached, why))
    }

    fn speak_from(
        &self,
        main: &mut Frames,
        reached: &mut Reached,
        progress: OnProgress<'_>,
    ) -> Result<(), MigrateError> {
        if *reached != Reached::Running {
            // Until `Prepared`, the guest can stay here.
            let may_stay = *reached == Reached::State;
            let mut goes_on = || match may_stay && is_cancelled(progress(self.giving())) {
                true => Err(MigrateError::Cancelled),
                false => Ok(()),
            };
            main.expect_after_work(Kind::Prepared, &mut goes_on)?;
            goes_on()?;
            *reached = Reached::Go;
            info!(target: "lacuna::migration", lacks = self.len(), "guest is handed over");
            main.signal(Kind::Go)?;
            main.expect(Kind::Running)?;
            *reached = Reached::Running;
            info!(target: "lacuna::migration", "guest runs at its destination");
        }
        self.note_run();
        self.push(main, progress)?;
        self.is_ended.store(true, Ordering::SeqCst);
        main.signal(Kind::End)?;
        main.expect(Kind::Complete)?;
        info!(target: "lacuna::migration", "destination has all memory");
        Ok(())
    }

    /// The progress report at the handover of the guest.
    fn giving(&self) -> Progress {
        Progress {
            pages: self.len(),
            ..Progress::default()
        }
    }

    /// Sends all remaining pages. The pages behind a requested one come first: the guest may need
    /// them next.
    fn push(&self, main: &mut Frames, progress: OnProgress<'_>) -> Result<(), MigrateError> {
        let mut buffer = vec![0; CHUNK as usize * PAGE_SIZE];
        let mut now = self.giving();
        let pages = now.pages;
        let answered = self.answered.load(Ordering::Relaxed);
        let mut report = |pushed| {
            now.done = pages.min(pushed + self.answered.load(Ordering::Relaxed) - answered);
            match is_cancelled(progress(now)) {
                true => Err(MigrateError::Cancelled),
                false => Ok(now.done == pages),
            }
        };
        let limit = self.carriage.limit.as_deref();
        let most = limit.map_or(CHUNK, |limit| limit.pages_at_once(CHUNK));
        let (mut next, mut pushed) = (0, 0);
        let mut unread = Vec::new();
        loop {
            if let Some(limit) = limit {
                limit.wait(&mut || {
                    main.idle()?;
                    // The guest may have requested all pages that remained.
                    Ok(match report(pushed)? {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    })
                })?;
            }
            let near = self.near.swap(u64::MAX, Ordering::Relaxed);
            if near != u64::MAX {
                next = near;
            }
            let Some(run) = self.lock().take_run(SourcePage(next), most) else {
                main.flush()?;
                let done = self.put_back(unread);
                // After an error the connections end. The page on its way is the guest's last
                // chance, if the source does not connect again.
                while done.is_err() && self.answering.load(Ordering::Acquire) {
                    thread::sleep(LOOK);
                }
                return done;
            };
            next = run.end;
            pushed += run.end - run.start;
            report(pushed)?;
            self.send_run(run, main, &mut buffer, &mut unread)?;
            if self.waits.swap(false, Ordering::Relaxed) {
                main.flush()?;
            }
        }
    }

    /// Answers `Want`s until the connection ends.
    fn answer(&self, wants: &mut Frames, answers: &mut Frames) -> Result<(), MigrateError> {
        let mut buffer = vec![0; PAGE_SIZE];
        loop {
            match wants.read_or_idle()? {
                None => continue,
                Some(Kind::Want) => {}
                Some(other) => return Err(unexpected(other, Kind::Want)),
            }
            let (page, _) = wants.numbered()?;
            // A page outside the set has been sent, or the other thread is about to send it.
            let mut pages = self.lock();
            if !pages.remove(page) {
                self.waits.store(true, Ordering::Relaxed);
                continue;
            }
            self.answering.store(true, Ordering::Relaxed);
            drop(pages);
            self.near.store(page.0 + 1, Ordering::Relaxed);
            self.answered.fetch_add(1, Ordering::Relaxed);
            let mut unread = Vec::new();
            let sent = self.send_run(page.0..page.0 + 1, answers, &mut buffer, &mut unread);
            let sent = sent.and_then(|()| answers.flush());
            self.answering.store(false, Ordering::Release);
            sent?;
            // The other thread takes the page, and ends with the error. If it has sent `End`, the
            // destination gives this connection up.
            let _ = self.put_back(unread);
        }
    }

    /// Puts unreadable pages back, to be sent after the next connection.
    ///
    /// # Errors
    /// The first one's error.
    fn put_back(&self, unread: Vec<Unread>) -> Result<(), MigrateError> {
        let mut pages = self.lock();
        unread.iter().for_each(|(page, _)| pages.insert(*page));
        drop(pages);
        let first = unread.into_iter().next();
        first.map_or(Ok(()), |(_, why)| Err(why))
    }

    /// Sends the pages of `run`. Unreadable pages go to `unread`, because the guest needs the
    /// others all the same.
    fn send_run(
        &self,
        run: Range<u64>,
        frames: &mut Frames,
        buffer: &mut [u8],
        unread: &mut Vec<Unread>,
    ) -> Result<(), MigrateError> {
        let mut sent = run.start;
        let each = &mut |pages| {
            sent += pages;
            ControlFlow::Continue(())
        };
        let mut sink = LateSink(frames, &self.sent);
        match copy_run(self.vm, &self.layout, run.clone(), buffer, &mut sink, each) {
            Err(MigrateError::Memory(_)) => {}
            done => return done,
        }
        // One by one, because a chunk with an unreadable page sends nothing.
        for page in sent..run.end {
            let each = &mut |_| ControlFlow::Continue(());
            let mut sink = LateSink(frames, &self.sent);
            let one = page..page + 1;
            match copy_run(self.vm, &self.layout, one, buffer, &mut sink, each) {
                Err(why @ MigrateError::Memory(_)) => unread.push((SourcePage(page), why)),
                done => done?,
            }
        }
        frames.keep_alive()
    }
}

/// An unreadable page, and the error.
type Unread = (SourcePage, MigrateError);

/// Sends pages that the destination lacks.
struct LateSink<'a>(&'a mut Frames, &'a AtomicU64);

impl PageSink for LateSink<'_> {
    fn data(&mut self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        let pages = (bytes.len() / PAGE_SIZE) as u64;
        self.1.fetch_add(pages, Ordering::Relaxed);
        self.0.write_pages(first, bytes)
    }

    fn zeros(&mut self, first: SourcePage, pages: u64) -> Result<(), MigrateError> {
        self.0.write_zeros(first, pages)?;
        // Many small frames wait for each other.
        self.0.keep_alive()
    }
}
