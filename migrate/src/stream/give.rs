//! The source of a migration, after it has given the guest away: the guest stands still, and the
//! pages that are left are sent.
//!
//! ```text
//! this thread      ── pages that are left ─────────► destination
//! another thread  ◄── Want ──
//!                  ── its page ─────────────────────►
//! ```
//! A page leaves the set of pages that are left when a thread takes it in order to send it, so it
//! is sent once. After a cut the destination says which pages it lacks.

use super::connection::Connections;
use super::frame::Kind;
use super::frames::{Frames, unexpected};
use super::lanes::There;
use super::{Compression, MigrationId, Role, Stage};
use crate::changes::Changes;
use crate::copy::{CHUNK, PageSink, copy_run};
use crate::rounds::{OnProgress, Progress, Round, Still};
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{SourcePage, Vm};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// How a migration has ended, or was interrupted, after the destination was told to run the guest.
/// The guest stands still here for as long as [`Given`] lives.
#[must_use = "if this is dropped, the guest goes on here"]
pub enum Sent<'a, V: Vm> {
    /// The destination runs the guest, and has all of its memory: end the run here, then drop this.
    Moved(Given<'a, V>),
    /// The destination runs the guest, and lacks pages: the connection was cut, or the caller has
    /// said `Break`. [`Given::resume`] goes on. If this process ends before, the guest is lost.
    Cut {
        /// The guest here.
        given: Given<'a, V>,
        /// How the connection has ended.
        why: MigrateError,
    },
    /// The stream was cut before the destination could say that it runs the guest.
    /// [`Given::resume`] asks it. If it does not answer any more, look whether it runs the guest.
    /// If it does not, end its process first: `Go` may still be on its way to it. Then drop this,
    /// and the guest goes on here.
    Unknown {
        /// The guest here.
        given: Given<'a, V>,
        /// How the connection has ended.
        why: MigrateError,
    },
}

/// A guest that was given away. It stands still here. Dropped, it goes on here; dropped by a panic,
/// it stands still for ever, because the destination may run it.
pub struct Given<'a, V: Vm> {
    still: Option<Still<'a, V>>,
    id: MigrationId,
    rounds: Vec<Round>,
    /// Pages with content that were sent.
    pub(super) pages: u64,
    unchanged: u64,
    /// The pages that the destination may lack, after an interruption.
    left: Option<Left<'a, V>>,
    /// When the destination has said that it runs.
    pub(super) ran: Option<Instant>,
    /// Still on: to turn it off takes longer than some pauses do, and a guest that has gone needs
    /// no log.
    _changes: Option<Changes<'a, V>>,
}

/// The connections beside the first one.
pub(super) struct Links {
    wants: Frames,
    answers: Frames,
}

/// How far a conversation was when it was cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reached {
    /// The state was sent: the guest is not given away.
    State,
    /// `Go` was sent, at least in part.
    Go,
    /// The destination runs the guest.
    Running,
}

impl<'a, V: Vm> Given<'a, V> {
    pub(super) fn new(
        still: Still<'a, V>,
        id: MigrationId,
        (rounds, changes): (Vec<Round>, Option<Changes<'a, V>>),
        there: &There,
    ) -> Self {
        Self {
            still: Some(still),
            id,
            rounds,
            pages: there.sent(),
            unchanged: there.unchanged(),
            left: None,
            ran: None,
            _changes: changes,
        }
    }

    /// The guest here.
    pub fn still(&self) -> &Still<'a, V> {
        self.still.as_ref().expect("only a panic takes it")
    }

    /// The rounds. In the last one of a pre-copy, the guest was paused.
    pub fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    /// Pages with content that were sent, again and again if they were written.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages that the guest has written, and that were not sent again because they are as before.
    pub fn unchanged(&self) -> u64 {
        self.unchanged
    }

    /// When the destination has said that it runs the guest.
    pub fn ran(&self) -> Option<Instant> {
        self.ran
    }

    /// Pages that the destination lacks, as far as is known here.
    pub fn pages_left(&self) -> u64 {
        self.left.as_ref().map_or(0, |left| left.lock().len())
    }

    pub(super) fn interrupted(
        mut self,
        left: Left<'a, V>,
        reached: Reached,
        why: MigrateError,
    ) -> Sent<'a, V> {
        self.ran = left.ran();
        let needs_nothing = left.needed_nothing;
        self.left = Some(left);
        let given = self;
        match reached {
            Reached::Running if needs_nothing => Sent::Moved(given),
            Reached::Running => Sent::Cut { given, why },
            Reached::State | Reached::Go => Sent::Unknown { given, why },
        }
    }

    /// Connects to the destination again, and goes on where the connection was cut. `resume` is for
    /// [`Sent::Cut`] and [`Sent::Unknown`]; after [`Sent::Moved`] it does nothing.
    pub fn resume(
        mut self,
        connections: &dyn Connections,
        progress: OnProgress<'_>,
    ) -> Sent<'a, V> {
        let Some(mut left) = self.left.take() else {
            return Sent::Moved(self);
        };
        let talked =
            left.reconnect(connections, &self.id)
                .and_then(|(mut main, mut aside, reached)| {
                    let talked = left.talk(&mut main, aside.as_mut(), reached, progress);
                    talked.map_err(|(_, why)| why)
                });
        self.pages += left.take_sent();
        self.ran = left.ran();
        match talked {
            Ok(()) => Sent::Moved(self),
            Err(why) => {
                // The guest was given away before this call, whatever was reached since.
                let reached = match self.ran {
                    Some(_) => Reached::Running,
                    None => Reached::Go,
                };
                self.interrupted(left, reached, why)
            }
        }
    }
}

impl<V: Vm> Drop for Given<'_, V> {
    fn drop(&mut self) {
        if thread::panicking() {
            std::mem::forget(self.still.take());
        }
    }
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

/// The memory of a guest that was given away.
pub(super) struct Left<'a, V: Vm> {
    vm: &'a V,
    layout: MemoryLayout,
    /// Pages that are left to send.
    pages: Mutex<PageSet, lock_order::PagesLeft>,
    compression: Compression,
    /// No page was left when the guest was given away.
    needed_nothing: bool,
    /// The page behind the last `Want`: the guest may need it next. `u64::MAX`: taken.
    near: AtomicU64,
    /// Pages with content that were sent.
    sent: AtomicU64,
    /// Pages that were sent because the guest needs them.
    answered: AtomicU64,
    /// `End` was sent on the connections in use, or is about to be.
    is_ended: AtomicBool,
    ran: Mutex<Option<Instant>, lock_order::TimeOfRun>,
}

impl<'a, V: Vm> Left<'a, V> {
    pub fn new(vm: &'a V, layout: MemoryLayout, pages: PageSet, compression: Compression) -> Self {
        Self {
            vm,
            layout,
            compression,
            needed_nothing: pages.is_empty(),
            pages: Mutex::new(pages),
            near: AtomicU64::new(u64::MAX),
            sent: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            is_ended: AtomicBool::new(false),
            ran: Mutex::new(None),
        }
    }

    /// Whether the destination had all pages when the guest was given away.
    pub fn needed_nothing(&self) -> bool {
        self.needed_nothing
    }

    /// Pages with content that were sent since the last call.
    pub fn take_sent(&self) -> u64 {
        self.sent.swap(0, Ordering::Relaxed)
    }

    /// The destination has said that it runs the guest.
    fn note_run(&self) {
        let mut ran = self.ran.lock().expect("no panic under this lock");
        ran.get_or_insert_with(Instant::now);
    }

    pub fn ran(&self) -> Option<Instant> {
        *self.ran.lock().expect("no panic under this lock")
    }

    fn lock(&self) -> MutexGuard<'_, PageSet> {
        self.pages.lock().expect("no panic under this lock")
    }

    /// New connections, and how far the destination is.
    fn reconnect(
        &mut self,
        connections: &dyn Connections,
        id: &MigrationId,
    ) -> Result<(Frames, Option<Links>, Reached), MigrateError> {
        let (mut main, welcome) = Frames::join(connections, id, Role::Main)?;
        main.pack(self.compression)?;
        let reached = match welcome.stage {
            Some(Stage::Prepared) => Reached::State,
            Some(Stage::Running) => Reached::Running,
            None => return Err(MigrateError::stream("a Welcome without a stage")),
        };
        if reached == Reached::Running {
            self.note_run();
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
        Ok((main, aside, reached))
    }

    /// Speaks with the destination, which has `reached` that much, until it has every page.
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
                // The destination may wait for an answer that was lost.
                end_answers();
                // After `End` the destination notices that itself. It may have all pages, and have
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
            main.expect(Kind::Prepared)?;
            // The last moment at which the guest can stay here.
            if *reached == Reached::State && progress(self.giving()).is_break() {
                return Err(MigrateError::Cancelled);
            }
            *reached = Reached::Go;
            main.signal(Kind::Go)?;
            main.expect(Kind::Running)?;
            *reached = Reached::Running;
        }
        self.note_run();
        self.push(main, progress)?;
        self.is_ended.store(true, Ordering::SeqCst);
        main.signal(Kind::End)?;
        main.expect(Kind::Complete)
    }

    /// What is told when the guest is given away.
    fn giving(&self) -> Progress {
        Progress {
            round: 0,
            done: 0,
            pages: self.lock().len(),
        }
    }

    /// Sends all pages that are left. The guest may need the pages behind one that it has asked
    /// for, so they come first.
    fn push(&self, main: &mut Frames, progress: OnProgress<'_>) -> Result<(), MigrateError> {
        let mut buffer = vec![0; CHUNK as usize * PAGE_SIZE];
        let mut now = self.giving();
        let pages = now.pages;
        let answered = self.answered.load(Ordering::Relaxed);
        let (mut next, mut pushed) = (0, 0);
        loop {
            let near = self.near.swap(u64::MAX, Ordering::Relaxed);
            if near != u64::MAX {
                next = near;
            }
            let Some(run) = self.lock().take_run(SourcePage(next), CHUNK) else {
                return Ok(());
            };
            next = run.end;
            pushed += run.end - run.start;
            now.done = pages.min(pushed + self.answered.load(Ordering::Relaxed) - answered);
            if progress(now).is_break() {
                return Err(MigrateError::Cancelled);
            }
            self.send_run(run, main, &mut buffer)?;
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
            // A page that is not left has been sent, or the other thread is about to send it.
            if self.lock().remove(page) {
                self.near.store(page.0 + 1, Ordering::Relaxed);
                self.answered.fetch_add(1, Ordering::Relaxed);
                self.send_run(page.0..page.0 + 1, answers, &mut buffer)?;
                answers.flush()?;
            }
        }
    }

    fn send_run(
        &self,
        run: Range<u64>,
        frames: &mut Frames,
        buffer: &mut [u8],
    ) -> Result<(), MigrateError> {
        let each = &mut |_| ControlFlow::Continue(());
        let mut sink = LateSink(frames, &self.sent);
        copy_run(self.vm, &self.layout, run, buffer, &mut sink, each)
    }
}

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
