//! Puts pages in place that arrive before the guest, where others arrive after it.
//!
//! A page may arrive again, or stay at the source in the end: then it is missing again.

use super::frames::Frames;
use super::remote::RemotePages;
use crate::layout::{bytes_of, in_slots};
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_addr::{GfnRange, Gpa, PAGE_SIZE};
use lacuna_machine::{MissingMemory, SourcePage, Vm};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::ops::Range;

/// The most pages that are made missing between two looks at the connection: whole units.
const AT_ONCE: usize = 1 << 15;

/// The memory of a VM whose guest has not arrived.
pub(super) struct EarlyPages<'a, V> {
    vm: &'a V,
    missing: &'a dyn MissingMemory,
    layout: &'a MemoryLayout,
    pages: &'a RemotePages,
    /// Pages in place.
    placed: Mutex<PageSet, lock_order::EarlyPages>,
}

impl<'a, V: Vm> EarlyPages<'a, V> {
    pub fn new(
        (vm, missing): (&'a V, &'a dyn MissingMemory),
        layout: &'a MemoryLayout,
        pages: &'a RemotePages,
    ) -> Self {
        Self {
            vm,
            missing,
            layout,
            pages,
            placed: Mutex::new(PageSet::empty(layout.pages())),
        }
    }

    /// Puts pages in place, in place of older copies.
    pub fn put(&self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        let count = (bytes.len() / PAGE_SIZE) as u64;
        self.fill_units(first, count)?;
        in_slots(self.layout, first, count, &mut |gpa, pages| {
            let part = &bytes[bytes_of(&pages)];
            if self.missing.provide(gpa, part)?.late == 0 {
                return Ok(());
            }
            if self.missing.unit().get() > 1 {
                return Ok(self.vm.write(gpa, part)?);
            }
            // A write would first bring evicted pages back.
            self.missing.make_missing(gfns_at(gpa, &pages)?)?;
            self.missing.provide(gpa, part)?;
            Ok(())
        })?;
        self.pages.forget(first, count);
        let mut placed = self.placed();
        (first.0..first.0 + count).for_each(|page| placed.insert(SourcePage(page)));
        Ok(())
    }

    /// These pages are zeros. Only pages in place are replaced: after the guest's arrival, the page
    /// source has zeros for a page that is neither in place nor awaited. So units in place become
    /// missing, and a second frame for them is no work.
    pub fn put_zeros(&self, first: SourcePage, count: u64) -> Result<(), MigrateError> {
        let unit = self.missing.unit().get();
        let (mut from, end) = (first.0, first.0 + count);
        loop {
            let Some(run) = self.placed().first_run(from..end) else {
                return Ok(());
            };
            from = run.end.min(run.start - run.start % unit + AT_ONCE as u64);
            let whole = run.start.next_multiple_of(unit)..from - from % unit;
            if whole.start < whole.end {
                self.write_zeros(run.start..whole.start)?;
                self.take_back(whole.clone())?;
                self.write_zeros(whole.end..from)?;
            } else {
                self.write_zeros(run.start..from)?;
            }
        }
    }

    /// Writes zeros to parts of units in place.
    fn write_zeros(&self, pages: Range<u64>) -> Result<(), MigrateError> {
        let zeros = vec![0; (pages.end - pages.start) as usize * PAGE_SIZE];
        match zeros.is_empty() {
            true => Ok(()),
            false => self.put(SourcePage(pages.start), &zeros),
        }
    }

    /// These pages, whole units, are missing again.
    fn take_back(&self, pages: Range<u64>) -> Result<(), MigrateError> {
        let (first, count) = (SourcePage(pages.start), pages.end - pages.start);
        in_slots(self.layout, first, count, &mut |gpa, pages| {
            Ok(self.missing.make_missing(gfns_at(gpa, &pages)?)?)
        })?;
        let mut placed = self.placed();
        pages.for_each(|page| _ = placed.remove(SourcePage(page)));
        Ok(())
    }

    /// Puts the huge pages of these pages in place, as zeros, because a part of one could not be
    /// written before the rest has arrived.
    fn fill_units(&self, first: SourcePage, count: u64) -> Result<(), MigrateError> {
        let unit = self.missing.unit().get();
        if unit == 1 {
            return Ok(());
        }
        for start in (first.0 - first.0 % unit..first.0 + count).step_by(unit as usize) {
            if self.placed().contains(SourcePage(start)) {
                continue;
            }
            let zeros = vec![0; unit as usize * PAGE_SIZE];
            in_slots(self.layout, SourcePage(start), unit, &mut |gpa, pages| {
                self.missing.provide(gpa, &zeros[bytes_of(&pages)])?;
                Ok(())
            })?;
            self.pages.forget(SourcePage(start), unit);
            let mut placed = self.placed();
            (start..start + unit).for_each(|page| placed.insert(SourcePage(page)));
        }
        Ok(())
    }

    /// The guest arrives, and these pages are still at the source: they are missing again. Shows
    /// the source meanwhile that this side is there.
    pub fn make_missing(&self, awaited: &PageSet, source: &mut Frames) -> Result<(), MigrateError> {
        let mut again = self.placed().clone();
        again.keep(awaited);
        for run in again.runs() {
            for start in run.clone().step_by(AT_ONCE) {
                self.take_back(start..run.end.min(start + AT_ONCE as u64))?;
                source.keep_alive()?;
            }
        }
        Ok(())
    }

    fn placed(&self) -> MutexGuard<'_, PageSet> {
        self.placed.lock().expect("no panic under this lock")
    }
}

/// The frames of these pages of a run, whose first one is at `gpa`.
fn gfns_at(gpa: Gpa, pages: &Range<u64>) -> Result<GfnRange, MigrateError> {
    let gfns = GfnRange::new(gpa.gfn(), pages.end - pages.start);
    gfns.ok_or(MigrateError::SlotsChanged)
}
