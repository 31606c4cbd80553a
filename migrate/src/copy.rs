//! Reads pages of a VM for a sink.

use crate::bandwidth::Bandwidth;
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_addr::{GfnRange, PAGE_SIZE};
use lacuna_machine::{SourcePage, Vm};
use lacuna_sync::{Mutex, lock_order};
use std::ops::{ControlFlow, Range};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Takes the pages of a guest. A page may be passed several times; the last time counts.
pub trait PageSink {
    /// Whole pages from `first` on; none is all zeros.
    ///
    /// # Errors
    /// The pages cannot be taken.
    fn data(&mut self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError>;

    /// `pages` pages of zeros from `first` on.
    ///
    /// # Errors
    /// The pages cannot be taken.
    fn zeros(&mut self, first: SourcePage, pages: u64) -> Result<(), MigrateError>;

    /// A round has ended. Returns when all pages have arrived, so that the round's time shows how
    /// fast the sink takes pages.
    ///
    /// # Errors
    /// The pages cannot be taken.
    fn end_round(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    /// No page comes for a while. This is called now and then meanwhile.
    ///
    /// # Errors
    /// The sink takes no more pages.
    fn idle(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }
}

/// Gets the number of pages since the last call, and cancels the work by `Break`.
pub type OnPages<'a> = &'a mut dyn FnMut(u64) -> ControlFlow<()>;

/// How the receiver of a copy's progress ends the copy early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Stop {
    /// The copy is cancelled. A guest that ran keeps running.
    Cancel,
    /// The guest is paused now, however many pages are left. Saying it once is enough. A
    /// [`stream::Mode::Hybrid`] sends them after the guest; every other copy takes them from the
    /// paused guest. Without effect on a guest that is paused or has gone.
    ///
    /// [`stream::Mode::Hybrid`]: crate::stream::Mode::Hybrid
    Pause,
}

/// Whether a copy is cancelled. It has no running guest to pause.
pub(crate) fn is_cancelled(step: ControlFlow<Stop>) -> bool {
    step == ControlFlow::Break(Stop::Cancel)
}

/// Pages read at once: 1 MiB, which stays in a core's cache until it is written out.
pub(crate) const CHUNK: u64 = 256;

/// Reads the pages of `set` from `vm` and gives each to one of `sinks`. The sinks work at the same
/// time: the first on this thread, each other one on its own thread. Each ends its round before
/// this returns. Calls `each` with the number of pages since the last call. No sink gets pages
/// while `limit` forbids to send them.
///
/// Returns the pages that were not copied because `each` said [`Stop::Pause`]: the sinks then only
/// finish their runs.
///
/// # Errors
/// A page cannot be read, a sink refuses, or `each` says [`Stop::Cancel`].
pub(crate) fn copy(
    vm: &impl Vm,
    layout: &MemoryLayout,
    set: &PageSet,
    sinks: &mut [impl PageSink + Send],
    limit: Option<&Bandwidth>,
    each: &mut dyn FnMut(u64) -> ControlFlow<Stop>,
) -> Result<PageSet, MigrateError> {
    let mut rest = PageSet::empty(layout.pages());
    let (first, others) = sinks.split_first_mut().expect("pages go somewhere");
    let work = Work {
        vm,
        layout,
        runs: Mutex::new(Runs {
            runs: set.runs(),
            rest: 0..0,
            most: limit.map_or(CHUNK, |limit| limit.pages_at_once(CHUNK)),
        }),
        limit,
        copied: AtomicU64::new(0),
        pause_requested: AtomicBool::new(false),
        is_over: AtomicBool::new(false),
    };
    thread::scope(|scope| {
        let start = |sink| {
            let named = thread::Builder::new().name("lacuna-pages".into());
            let started =
                named.spawn_scoped(scope, || work.share(sink, &mut |pages| work.count(pages)));
            if started.is_err() {
                // The other threads stop: their copies would be in vain.
                work.is_over.store(true, Ordering::Relaxed);
            }
            started
        };
        let started: Vec<_> = others.iter_mut().map(start).collect();
        let mut report = |pages| match each(pages + work.copied.swap(0, Ordering::Relaxed)) {
            ControlFlow::Break(Stop::Cancel) => ControlFlow::Break(()),
            ControlFlow::Break(Stop::Pause) => {
                work.take_rest(&mut rest);
                ControlFlow::Continue(())
            }
            ControlFlow::Continue(()) => ControlFlow::Continue(()),
        };
        let mut ends = vec![work.share(first, &mut report)];
        ends.extend(started.into_iter().map(|thread| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(error) => Err(MigrateError::Thread(error)),
        }));
        first_cause(ends)?;
        match report(0).is_break() {
            true => Err(MigrateError::Cancelled),
            false => Ok(()),
        }
    })?;
    Ok(rest)
}

/// If threads have failed, the first error that is not a cut, or else the first cut. A failure on
/// one connection cuts the others, so a cut is seldom the cause.
fn first_cause(ends: Vec<Result<(), MigrateError>>) -> Result<(), MigrateError> {
    let mut errors: Vec<_> = ends.into_iter().filter_map(Result::err).collect();
    let cause = errors
        .iter()
        .position(|e| !matches!(e, MigrateError::Cut(_)));
    match errors.is_empty() {
        true => Ok(()),
        false => Err(errors.swap_remove(cause.unwrap_or(0))),
    }
}

/// A copy by several threads.
struct Work<'a, V, R> {
    vm: &'a V,
    layout: &'a MemoryLayout,
    runs: Mutex<Runs<R>, lock_order::RunsToCopy>,
    limit: Option<&'a Bandwidth>,
    /// Pages copied by other threads than the first, since the first one last reported them.
    copied: AtomicU64,
    /// The copy is paused: [`Work::take_rest`].
    pause_requested: AtomicBool,
    /// A thread has failed.
    is_over: AtomicBool,
}

/// Runs of pages still to copy.
struct Runs<R> {
    runs: R,
    /// The rest of the last run.
    rest: Range<u64>,
    /// The most pages of one run.
    most: u64,
}

impl<V: Vm, R: Iterator<Item = Range<u64>>> Work<'_, V, R> {
    /// Copies runs until none is left or another thread has failed.
    fn share(&self, sink: &mut impl PageSink, each: OnPages<'_>) -> Result<(), MigrateError> {
        let shared = self.copy_runs(sink, each);
        if shared.is_err() {
            self.is_over.store(true, Ordering::Relaxed);
        }
        shared
    }

    fn copy_runs(&self, sink: &mut impl PageSink, each: OnPages<'_>) -> Result<(), MigrateError> {
        let mut buffer = vec![0; CHUNK as usize * PAGE_SIZE];
        loop {
            self.wait(sink, each)?;
            if self.is_over() {
                return Ok(());
            }
            let Some(run) = self.next() else {
                return sink.end_round();
            };
            copy_run(self.vm, self.layout, run, &mut buffer, sink, each)?;
        }
    }

    /// Waits until more pages may be sent, or no run is left, or another thread has failed.
    fn wait(&self, sink: &mut impl PageSink, each: OnPages<'_>) -> Result<(), MigrateError> {
        let Some(limit) = self.limit else {
            return Ok(());
        };
        limit.wait(&mut || {
            if self.is_over() || self.pause_requested.load(Ordering::Relaxed) {
                return Ok(ControlFlow::Break(()));
            }
            sink.idle()?;
            match each(0) {
                ControlFlow::Break(()) => Err(MigrateError::Cancelled),
                go_on => Ok(go_on),
            }
        })
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// The next run.
    fn next(&self) -> Option<Range<u64>> {
        self.runs.lock().expect("no panic under this lock").next()
    }

    /// Moves all runs that no thread has taken to `rest`.
    fn take_rest(&self, rest: &mut PageSet) {
        let mut runs = self.runs.lock().expect("no panic under this lock");
        while let Some(run) = runs.next() {
            run.for_each(|page| rest.insert(SourcePage(page)));
        }
        self.pause_requested.store(true, Ordering::Relaxed);
    }

    fn count(&self, pages: u64) -> ControlFlow<()> {
        self.copied.fetch_add(pages, Ordering::Relaxed);
        ControlFlow::Continue(())
    }
}

impl<R: Iterator<Item = Range<u64>>> Runs<R> {
    fn next(&mut self) -> Option<Range<u64>> {
        if self.rest.is_empty() {
            self.rest = self.runs.next()?;
        }
        let end = self.rest.end.min(self.rest.start + self.most);
        let run = self.rest.start..end;
        self.rest.start = end;
        Some(run)
    }
}

/// Reads one run of pages for `sink`, at most as many at once as `buffer` holds.
pub(crate) fn copy_run(
    vm: &impl Vm,
    layout: &MemoryLayout,
    run: Range<u64>,
    buffer: &mut [u8],
    sink: &mut impl PageSink,
    each: OnPages<'_>,
) -> Result<(), MigrateError> {
    let missing = vm.missing_memory();
    let most = (buffer.len() / PAGE_SIZE) as u64;
    let mut at = run.start;
    while at < run.end {
        let first = SourcePage(at);
        let (gpa, pages) = layout
            .place(first, most.min(run.end - at))
            .ok_or(MigrateError::SlotsChanged)?;
        let bytes = &mut buffer[..pages as usize * PAGE_SIZE];
        if let (Some(missing), Some(gfns)) = (missing, GfnRange::new(gpa.gfn(), pages)) {
            // `populate` requests several missing pages at a time. The read alone would request
            // them one by one.
            missing.populate(gfns)?;
        }
        vm.read(gpa, bytes)?;
        split(first, bytes, sink)?;
        if each(pages).is_break() {
            return Err(MigrateError::Cancelled);
        }
        at += pages;
    }
    Ok(())
}

/// Gives `bytes` to the sink as runs of data and runs of zeros.
fn split(first: SourcePage, bytes: &[u8], sink: &mut impl PageSink) -> Result<(), MigrateError> {
    let pages = bytes.chunks_exact(PAGE_SIZE).map(is_zero).enumerate();
    let mut start = 0;
    let mut kind = None;
    let mut end = |start: usize, end: usize, kind: Option<bool>| {
        let from = SourcePage(first.0 + start as u64);
        match kind {
            None => Ok(()),
            Some(true) => sink.zeros(from, (end - start) as u64),
            Some(false) => sink.data(from, &bytes[start * PAGE_SIZE..end * PAGE_SIZE]),
        }
    };
    for (index, zero) in pages {
        if kind != Some(zero) {
            end(start, index, kind)?;
            (start, kind) = (index, Some(zero));
        }
    }
    end(start, bytes.len() / PAGE_SIZE, kind)
}

/// Whether a page has only zeros.
fn is_zero(page: &[u8]) -> bool {
    // In pieces: the search in a page with content ends at the first piece with a bit set.
    page.chunks(256)
        .all(|piece| piece.iter().fold(0, |or, byte| or | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Runs(Vec<(u64, u64, bool)>);

    impl PageSink for Runs {
        fn data(&mut self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
            self.0
                .push((first.0, (bytes.len() / PAGE_SIZE) as u64, false));
            Ok(())
        }

        fn zeros(&mut self, first: SourcePage, pages: u64) -> Result<(), MigrateError> {
            self.0.push((first.0, pages, true));
            Ok(())
        }
    }

    #[test]
    fn zeros_and_data_are_apart() {
        let mut bytes = vec![0; 6 * PAGE_SIZE];
        // The last byte of page 1, the first of page 2, the middle of page 5.
        for at in [2 * PAGE_SIZE - 1, 2 * PAGE_SIZE, 5 * PAGE_SIZE + 2000] {
            bytes[at] = 1;
        }
        let mut runs = Runs::default();
        split(SourcePage(10), &bytes, &mut runs).expect("no error");
        let expected = [(10, 1, true), (11, 2, false), (13, 2, true), (15, 1, false)];
        assert_eq!(runs.0, expected);
    }
}
