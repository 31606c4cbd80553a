//! Takes the pages that arrive ahead of the guest.
//!
//! They arrive on one connection, or on several at the same time. The thread that takes the guest
//! in reads the first one, and each other one has its own thread. A round ends on all of them, so
//! the second copy of a page arrives after the first, on any connection.

use super::early::EarlyPages;
use super::frame::Kind;
use super::frames::{Frames, unexpected};
use crate::copy::OnPages;
use crate::layout::{bytes_of, in_slots};
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{SourcePage, Vm};
use lacuna_sync::{Mutex, lock_order};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Where early pages go.
pub(super) struct Early<'a, V> {
    pub vm: &'a V,
    pub layout: &'a MemoryLayout,
    /// Puts the pages in place, if others arrive after the guest.
    pub late: Option<EarlyPages<'a, V>>,
}

/// The connections beside the first one.
struct Streams {
    /// The number of pages that arrived on them since the last look.
    pages: AtomicU64,
    /// The first connection has no more pages: the state has arrived, or it has failed.
    is_over: AtomicBool,
    /// This side has ended them.
    are_ended: AtomicBool,
    /// Why one of them has failed.
    cause: Mutex<Option<MigrateError>, lock_order::CauseOfEnd>,
}

impl Streams {
    /// Notes why one of them has failed. A cut is seldom the cause.
    fn fail(&self, why: MigrateError) {
        let mut cause = self.cause.lock().expect("no panic under this lock");
        match (&*cause, &why) {
            (None, MigrateError::Cut(_)) if self.are_ended.load(Ordering::SeqCst) => {}
            (None, _) => *cause = Some(why),
            (Some(MigrateError::Cut(_)), other) if !is_cut(other) => *cause = Some(why),
            _ => {}
        }
    }

    /// Whether one of them has failed here.
    fn has_failed(&self) -> bool {
        let cause = self.cause.lock().expect("no panic under this lock");
        cause.as_ref().is_some_and(|cause| !is_cut(cause))
    }
}

const fn is_cut(why: &MigrateError) -> bool {
    matches!(why, MigrateError::Cut(_))
}

impl<V: Vm> Early<'_, V> {
    /// Takes pages until the state arrives on `main`. Returns the pages that stay at the source.
    pub fn take_all(
        &self,
        main: &mut Frames,
        lanes: Vec<Frames>,
        each: OnPages<'_>,
    ) -> Result<PageSet, MigrateError> {
        let ends: Vec<_> = lanes
            .iter()
            .map(Frames::hang_up)
            .collect::<Result<_, _>>()?;
        let streams = Streams {
            pages: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            are_ended: AtomicBool::new(false),
            cause: Mutex::new(None),
        };
        let taken = thread::scope(|scope| {
            let mut taken = Ok(());
            for lane in lanes {
                let named = thread::Builder::new().name("lacuna-pages".into());
                let started = named.spawn_scoped(scope, || self.take_or_refuse(lane, &streams));
                if let Err(error) = started {
                    taken = Err(MigrateError::Thread(error));
                }
            }
            let taken = taken.and_then(|()| self.take_main(main, &streams, each));
            streams.is_over.store(true, Ordering::SeqCst);
            if taken.is_err() {
                streams.are_ended.store(true, Ordering::SeqCst);
                ends.iter().for_each(|end| end());
            }
            taken
        });
        let cause = streams
            .cause
            .lock()
            .expect("no panic under this lock")
            .take();
        match (taken, cause) {
            // A further connection has failed: its error is the cause, and the others only follow.
            (Ok(_) | Err(MigrateError::Cut(_)), Some(cause)) => Err(cause),
            (Err(MigrateError::Refused(_)), Some(cause)) if !is_cut(&cause) => Err(cause),
            // Report the pages that arrived on the others after the last look.
            (Ok(awaited), None) => match each(streams.pages.into_inner()).is_break() {
                true => Err(MigrateError::Cancelled),
                false => Ok(awaited),
            },
            (taken, _) => taken,
        }
    }

    /// Takes the pages of a further connection.
    ///
    /// If this side fails, the source notices it on this connection, gets the reason there, and
    /// ends the first connection. This side does not end that one: the source may have sent a
    /// failure reason of its own there.
    fn take_or_refuse(&self, mut lane: Frames, streams: &Streams) {
        let Err(why) = self.take_lane(&mut lane, streams) else {
            return;
        };
        let reason = MigrateError::Refused(why.to_string());
        let is_from_there = matches!(why, MigrateError::Cut(_) | MigrateError::Refused(_));
        // Recorded before the source can end the first connection.
        streams.fail(why);
        if !is_from_there {
            lane.refuse(&reason);
        }
    }

    fn take_main(
        &self,
        main: &mut Frames,
        streams: &Streams,
        each: OnPages<'_>,
    ) -> Result<PageSet, MigrateError> {
        let mut awaited = PageSet::empty(self.layout.pages());
        loop {
            match main.read()? {
                Kind::Awaited => main.read_set(&mut awaited)?,
                Kind::State => return Ok(awaited),
                kind => {
                    let pages = self.take(main, kind)?;
                    let others = streams.pages.swap(0, Ordering::Relaxed);
                    if streams.has_failed() {
                        return Err(MigrateError::Cut(io::ErrorKind::ConnectionAborted.into()));
                    }
                    if each(pages + others).is_break() {
                        return Err(MigrateError::Cancelled);
                    }
                }
            }
        }
    }

    /// Takes pages until the source has no more for this connection.
    fn take_lane(&self, lane: &mut Frames, streams: &Streams) -> Result<(), MigrateError> {
        loop {
            match lane.read_or_idle()? {
                // This connection may be silent while others have pages.
                None if !streams.is_over.load(Ordering::SeqCst) => {}
                None => return Err(MigrateError::stream("a connection for pages does not end")),
                Some(Kind::End) => return Ok(()),
                Some(kind) => {
                    let pages = self.take(lane, kind)?;
                    streams.pages.fetch_add(pages, Ordering::Relaxed);
                }
            }
        }
    }

    /// Takes a frame. Returns how many pages with content it has.
    fn take(&self, frames: &mut Frames, kind: Kind) -> Result<u64, MigrateError> {
        match kind {
            Kind::Data => {
                let (first, bytes) = pages_of(frames, self.layout)?;
                match &self.late {
                    Some(pages) => pages.put(first, bytes)?,
                    None => self.write(first, bytes)?,
                }
                Ok((bytes.len() / PAGE_SIZE) as u64)
            }
            Kind::Zeros => {
                let (first, count) = zeros_of(frames, self.layout)?;
                match &self.late {
                    Some(pages) => pages.put_zeros(first, count)?,
                    None => self.write_zeros(first, count)?,
                }
                Ok(0)
            }
            Kind::Sync => frames.signal(Kind::Synced).map(|()| 0),
            other => Err(unexpected(other, Kind::State)),
        }
    }

    fn write(&self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        let count = (bytes.len() / PAGE_SIZE) as u64;
        in_slots(self.layout, first, count, &mut |gpa, pages| {
            Ok(self.vm.write(gpa, &bytes[bytes_of(&pages)])?)
        })
    }

    fn write_zeros(&self, first: SourcePage, count: u64) -> Result<(), MigrateError> {
        static ZEROS: [u8; 16 * PAGE_SIZE] = [0; 16 * PAGE_SIZE];
        let mut at = first.0;
        while at < first.0 + count {
            let now = (first.0 + count - at).min(16);
            self.write(SourcePage(at), &ZEROS[..now as usize * PAGE_SIZE])?;
            at += now;
        }
        Ok(())
    }
}

/// The pages of a `Data` frame.
pub(super) fn pages_of<'f>(
    frames: &'f Frames,
    layout: &MemoryLayout,
) -> Result<(SourcePage, &'f [u8]), MigrateError> {
    let (first, bytes) = frames.numbered()?;
    if bytes.is_empty() || !bytes.len().is_multiple_of(PAGE_SIZE) {
        return Err(MigrateError::stream("a Data frame without whole pages"));
    }
    check_range(first, (bytes.len() / PAGE_SIZE) as u64, layout)?;
    Ok((first, bytes))
}

/// The pages of a `Zeros` frame: the first, and their number.
pub(super) fn zeros_of(
    frames: &Frames,
    layout: &MemoryLayout,
) -> Result<(SourcePage, u64), MigrateError> {
    let (first, rest) = frames.numbered()?;
    let count: [u8; 8] = rest
        .try_into()
        .map_err(|_| MigrateError::stream("a Zeros frame of another length"))?;
    let count = u64::from_le_bytes(count);
    check_range(first, count, layout)?;
    Ok((first, count))
}

fn check_range(first: SourcePage, count: u64, layout: &MemoryLayout) -> Result<(), MigrateError> {
    let end = first.0.checked_add(count);
    match end.is_some_and(|end| end <= layout.pages()) {
        true => Ok(()),
        false => Err(MigrateError::stream(format!(
            "{first} and the {count} pages from there on are beyond the machine's memory"
        ))),
    }
}
