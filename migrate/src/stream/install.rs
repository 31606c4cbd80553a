//! Puts late pages in place, while the guest runs.

use super::frame::Kind;
use super::frames::{Frames, unexpected};
use super::remote::RemotePages;
use super::take::{in_slots, pages_of, zeros_of};
use crate::copy::CHUNK;
use crate::copy::OnPages;
use crate::{MemoryLayout, MigrateError};
use lacuna_addr::{GfnRange, Gpa, PAGE_SIZE};
use lacuna_machine::{Answer, MemoryError, MissingMemory, SourcePage};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The treatment of a huge page's staged part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parts {
    /// Leave it staged. Other parts may be awaited: a thread that waits for them would outlive a
    /// cut of the connection, and [`super::Arriving::finish`] would not return.
    Leave,
    /// No page is awaited: the VM requests the other parts, and gets each at once.
    Complete,
}

/// Where pages are put in place.
pub(super) struct Installer<'a> {
    missing: &'a dyn MissingMemory,
    layout: &'a MemoryLayout,
    pages: &'a RemotePages,
    /// The connection has failed: staged pages wait for the next one.
    is_over: AtomicBool,
}

impl<'a> Installer<'a> {
    pub fn new(
        missing: &'a dyn MissingMemory,
        layout: &'a MemoryLayout,
        pages: &'a RemotePages,
    ) -> Self {
        Self {
            missing,
            layout,
            pages,
            is_over: AtomicBool::new(false),
        }
    }

    /// The connection has failed: [`Installer::install_staged`] ends.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Takes a frame of pages.
    pub fn take(&self, frames: &Frames, kind: Kind, each: OnPages<'_>) -> Result<(), MigrateError> {
        let count = match kind {
            Kind::Data => {
                let (first, bytes) = pages_of(frames, self.layout)?;
                self.put(first, bytes)?;
                let (whole, _) = bytes.as_chunks::<PAGE_SIZE>();
                let count = whole.len() as u64;
                for request in self.pages.arrived(first, count) {
                    // `put` has answered it (`Answer::Late`), unless it has staged the page.
                    let _: Answer = request.provide(&whole[(request.page().0 - first.0) as usize]);
                }
                count
            }
            Kind::Zeros => {
                let (first, count) = zeros_of(frames, self.layout)?;
                self.pages.arrived_zeros(first, count);
                count
            }
            other => return Err(unexpected(other, Kind::End)),
        };
        match each(count).is_break() {
            true => Err(MigrateError::Cancelled),
            false => Ok(()),
        }
    }

    /// Puts pages in place, or stages them where pages are parts of huge pages.
    fn put(&self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        let count = (bytes.len() / PAGE_SIZE) as u64;
        in_slots(self.layout, first, count, &mut |gpa, pages| {
            let part = &bytes[bytes_of(&pages)];
            match self.missing.provide(gpa, part) {
                Ok(_) => Ok(()),
                Err(MemoryError::Refused { .. }) => {
                    self.pages.stage(SourcePage(first.0 + pages.start), part)
                }
                Err(error) => Err(error.into()),
            }
        })
    }

    /// Puts staged pages in place, without waiting for others.
    pub fn install_staged(&self) -> Result<(), MigrateError> {
        self.install(Parts::Leave)
    }

    fn install(&self, parts: Parts) -> Result<(), MigrateError> {
        let mut buffer = vec![0; CHUNK as usize * PAGE_SIZE];
        for run in self.pages.staged().runs() {
            let mut at = run.start;
            while at < run.end {
                if self.is_over.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let now = CHUNK.min(run.end - at);
                let (first, bytes) = (SourcePage(at), &mut buffer[..now as usize * PAGE_SIZE]);
                self.pages.read_staged(first, bytes)?;
                in_slots(self.layout, first, now, &mut |gpa, pages| {
                    let is_in_place = self.install_part(gpa, &bytes[bytes_of(&pages)], parts)?;
                    if is_in_place {
                        let (start, count) = (first.0 + pages.start, pages.end - pages.start);
                        self.pages.installed(SourcePage(start), count);
                    }
                    Ok(())
                })?;
                at += now;
            }
        }
        Ok(())
    }

    /// Puts the staged pages in place after all pages have arrived.
    pub fn install_last(&self) -> Result<(), MigrateError> {
        self.install(Parts::Complete)?;
        self.pages.free_void();
        Ok(())
    }

    /// Returns whether the pages are in place.
    fn install_part(&self, gpa: Gpa, bytes: &[u8], parts: Parts) -> Result<bool, MigrateError> {
        match self.missing.provide(gpa, bytes) {
            Ok(_) => Ok(true),
            Err(MemoryError::Refused { .. }) if parts == Parts::Leave => Ok(false),
            Err(MemoryError::Refused { .. }) => {
                // For each huge page, the VM requests the other parts.
                let gfns = GfnRange::new(gpa.gfn(), (bytes.len() / PAGE_SIZE) as u64);
                let gfns = gfns.ok_or(MigrateError::SlotsChanged)?;
                self.missing.populate(gfns)?;
                Ok(true)
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn bytes_of(pages: &Range<u64>) -> Range<usize> {
    pages.start as usize * PAGE_SIZE..pages.end as usize * PAGE_SIZE
}
