//! Puts late pages in place, while the guest runs.

use super::frame::Kind;
use super::frames::{Frames, unexpected};
use super::remote::RemotePages;
use super::take::{pages_of, zeros_of};
use crate::copy::OnPages;
use crate::layout::{bytes_of, in_slots};
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{Answer, MissingMemory, SourcePage};

/// Where late pages are put in place.
pub(super) struct Installer<'a> {
    pub missing: &'a dyn MissingMemory,
    pub layout: &'a MemoryLayout,
    pub pages: &'a RemotePages,
    /// The first pages of huge pages of which parts have arrived.
    pub parts: PageSet,
}

impl Installer<'_> {
    /// Takes a frame of pages.
    pub fn take(
        &mut self,
        frames: &Frames,
        kind: Kind,
        each: OnPages<'_>,
    ) -> Result<(), MigrateError> {
        let count = match kind {
            Kind::Data => {
                let (first, bytes) = pages_of(frames, self.layout)?;
                self.put(first, bytes)?;
                let (whole, _) = bytes.as_chunks::<PAGE_SIZE>();
                let count = whole.len() as u64;
                for request in self.pages.arrived(first, count) {
                    // `put` has answered it: `Answer::Late`.
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

    fn put(&mut self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        let count = (bytes.len() / PAGE_SIZE) as u64;
        in_slots(self.layout, first, count, &mut |gpa, pages| {
            self.missing.provide(gpa, &bytes[bytes_of(&pages)])?;
            Ok(())
        })?;
        let unit = self.missing.unit().get();
        if unit > 1 {
            let starts = (first.0 - first.0 % unit..first.0 + count).step_by(unit as usize);
            starts.for_each(|start| self.parts.insert(SourcePage(start)));
        }
        Ok(())
    }

    /// All pages have arrived: puts the huge pages in place whose other parts are zeros. A page
    /// that has arrived keeps its content, and a huge page that the guest has given back stays
    /// away.
    pub fn complete(&self) -> Result<(), MigrateError> {
        let unit = self.missing.unit().get();
        let zeros = vec![0; unit as usize * PAGE_SIZE];
        for start in self.parts.runs().flatten() {
            in_slots(self.layout, SourcePage(start), unit, &mut |gpa, pages| {
                self.missing.provide(gpa, &zeros[bytes_of(&pages)])?;
                Ok(())
            })?;
        }
        Ok(())
    }
}
