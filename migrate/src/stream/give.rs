//! A guest after `Go`: it stays paused at its source until the destination has all of its memory,
//! or a person decides.

use super::MigrationId;
use super::connection::Connections;
use super::lanes::There;
use super::left::{Reached, Reconnected, RemainingPages};
use crate::changes::Changes;
use crate::guest::PausedGuest;
use crate::rounds::{OnProgress, Round};
use crate::{MemoryLayout, MigrateError};
use lacuna_machine::{Running, Vm};
use std::thread;
use std::time::Instant;

/// How a migration has ended, or was interrupted, after the source has sent `Go`. The guest stays
/// paused here for as long as [`OutgoingGuest`] lives. Then its run here ends, unless
/// [`OutgoingGuest::take_back`] is called.
#[must_use = "if this is dropped, the run of the guest ends here"]
pub enum Sent<'a, V: Vm> {
    /// The guest runs at the destination with all of its memory, or has
    /// [ended](OutgoingGuest::ended) there: drop this.
    Moved(OutgoingGuest<'a, V>),
    /// The destination runs the guest, and lacks pages: the connection was cut, a page could not be
    /// read here, or the caller has said `Break`. [`OutgoingGuest::resume`] continues. If this
    /// process ends first, the guest is lost.
    Cut {
        /// The guest here.
        outgoing: OutgoingGuest<'a, V>,
        /// How the connection has ended.
        why: MigrateError,
    },
    /// The stream was cut before the destination could say that it runs the guest.
    /// [`OutgoingGuest::resume`] asks it. If the destination no longer answers, look whether it
    /// runs the guest. If not, first end its process, because `Go` may still be on its way there.
    /// Then [`OutgoingGuest::take_back`] resumes the guest here.
    Unknown {
        /// The guest here.
        outgoing: OutgoingGuest<'a, V>,
        /// How the connection has ended.
        why: MigrateError,
    },
}

/// A guest that the source has handed over by `Go`. It stays paused here. If this is dropped, its
/// run here ends with [`Ending::Stopped`](lacuna_machine::Ending::Stopped), because the destination
/// runs it or may run it.
pub struct OutgoingGuest<'a, V: Vm> {
    guest: &'a Running<V>,
    /// The destination may run it.
    pub(super) is_away: bool,
    paused: PausedGuest<'a, V>,
    id: MigrationId,
    rounds: Vec<Round>,
    /// Sent pages with content.
    pub(super) pages: u64,
    unchanged: u64,
    /// The pages that the destination may lack, after an interruption.
    left: Option<RemainingPages<'a, V>>,
    /// When the destination reported that it runs the guest.
    pub(super) ran: Option<Instant>,
    /// How it has ended there.
    ended: Option<String>,
    /// The log of writes. It stays on: turning it off would lengthen the pause, and a moved guest
    /// needs no log.
    _changes: Option<Changes<'a, V>>,
}

impl<'a, V: Vm> OutgoingGuest<'a, V> {
    pub(super) fn new(
        guest: &'a Running<V>,
        paused: PausedGuest<'a, V>,
        id: MigrationId,
        (rounds, changes): (Vec<Round>, Option<Changes<'a, V>>),
        there: &There,
    ) -> Self {
        Self {
            guest,
            is_away: false,
            paused,
            id,
            rounds,
            pages: there.sent(),
            unchanged: there.unchanged(),
            left: None,
            ran: None,
            ended: None,
            _changes: changes,
        }
    }

    /// The guest here.
    pub fn paused(&self) -> &PausedGuest<'a, V> {
        &self.paused
    }

    /// The guest's VM here.
    pub(crate) fn vm(&self) -> &V {
        self.guest.vm()
    }

    /// Resumes the guest here. Call this only if the destination does not run the guest, and never
    /// will: it never gets its missing pages.
    pub fn take_back(mut self) {
        self.is_away = false;
    }

    /// The rounds. In the last one of a pre-copy, the guest was paused.
    pub fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    /// All pages of the guest.
    pub fn memory_pages(&self) -> u64 {
        MemoryLayout::of(&**self.guest.vm()).pages()
    }

    /// Sent pages with content. A page sent several times counts each time.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages that the guest has written without a change, so that they were not sent again.
    pub fn unchanged(&self) -> u64 {
        self.unchanged
    }

    /// When the destination reported that it runs the guest.
    pub fn ran(&self) -> Option<Instant> {
        self.ran
    }

    /// How the guest has ended at the destination, before all of its memory was there.
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Pages that the destination lacks, as far as this side knows.
    pub fn pages_left(&self) -> u64 {
        self.left.as_ref().map_or(0, |left| left.len())
    }

    pub(super) fn interrupted(
        mut self,
        left: RemainingPages<'a, V>,
        reached: Reached,
        why: MigrateError,
    ) -> Sent<'a, V> {
        self.ran = left.ran();
        let needs_nothing = left.needed_nothing();
        self.left = Some(left);
        let outgoing = self;
        match reached {
            Reached::Running if needs_nothing => Sent::Moved(outgoing),
            Reached::Running => Sent::Cut { outgoing, why },
            Reached::State | Reached::Go => Sent::Unknown { outgoing, why },
        }
    }

    /// Connects to the destination again, and continues where the connection was cut. `resume` is
    /// for [`Sent::Cut`] and [`Sent::Unknown`]; after [`Sent::Moved`] it does nothing.
    pub fn resume(
        mut self,
        connections: &dyn Connections,
        progress: OnProgress<'_>,
    ) -> Sent<'a, V> {
        let Some(mut left) = self.left.take() else {
            return Sent::Moved(self);
        };
        let talked = match left.reconnect(connections, &self.id) {
            Ok(Reconnected::Open(open)) => {
                let (mut main, mut aside, reached) = *open;
                let talked = left.talk(&mut main, aside.as_mut(), reached, progress);
                talked.map_err(|(_, why)| why)
            }
            Ok(Reconnected::Ended(why)) => {
                self.ended = Some(why);
                Ok(())
            }
            Err(why) => Err(why),
        };
        self.pages += left.take_sent();
        self.ran = left.ran();
        match talked {
            Ok(()) => Sent::Moved(self),
            Err(why) => {
                // The guest was handed over before this call, so `Go` counts as reached, even if
                // the destination has reached less.
                let reached = match self.ran {
                    Some(_) => Reached::Running,
                    None => Reached::Go,
                };
                self.interrupted(left, reached, why)
            }
        }
    }
}

impl<V: Vm> Drop for OutgoingGuest<'_, V> {
    fn drop(&mut self) {
        // This comes before the vCPUs' threads get their vCPUs back, so they execute nothing more.
        // During a panic, the destination may have the guest.
        if self.is_away || thread::panicking() {
            self.guest.stop();
        }
    }
}
