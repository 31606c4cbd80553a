//! A memory file and the diffs that were made after it, as Firecracker saves them.
//!
//! ```text
//! page 0 1 2 3 4 5 6 7
//! diff 2 . . C . . . . .      a diff is as long as the base, and has only the pages that the
//! diff 1 . B B . . . B .      guest has written since; the others are holes
//! base   A A A A A A A A
//! guest  A B C A A A B A      each page comes from the newest layer with data
//! ```
//! A page of zeros that the guest has written is data, not a hole. The files must not change, as
//! for [`MemoryFile`].

use crate::holes::data_pages;
use crate::{FileError, MemoryFile, MemoryId, PageRequest, PageSource, Policy};
use lacuna_addr::PageCount;
use std::ops::Range;
use std::path::Path;

/// A memory file below its diffs.
pub struct LayeredFile {
    base: MemoryFile,
    /// The oldest first.
    diffs: Vec<Diff>,
}

struct Diff {
    file: MemoryFile,
    /// Its pages with data, in ascending order.
    data: Vec<Range<u64>>,
}

impl LayeredFile {
    /// Opens the memory file `base` and `diffs`, the oldest first, for a guest of `pages` pages.
    ///
    /// # Errors
    /// As [`MemoryFile::open`]; a diff has another length than the base, or no hole.
    pub fn open<P: AsRef<Path>>(
        base: &Path,
        diffs: &[P],
        pages: PageCount,
        policy: &Policy,
    ) -> Result<Self, FileError> {
        let base = MemoryFile::open(base, pages, policy.clone())?;
        let (_, _, length) = base.file();
        let open = |path: &P| {
            let file = MemoryFile::open(path.as_ref(), pages, policy.clone())?;
            Diff::new(file, length)
        };
        let diffs = diffs.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { base, diffs })
    }

    /// As [`MemoryFile::answering_at_once`].
    #[must_use]
    pub fn answering_at_once(mut self) -> Self {
        self.base = self.base.answering_at_once();
        let diffs = std::mem::take(&mut self.diffs).into_iter();
        let at_once = |Diff { file, data }| Diff {
            file: file.answering_at_once(),
            data,
        };
        self.diffs = diffs.map(at_once).collect();
        self
    }

    /// All files, the oldest first.
    fn files(&self) -> impl Iterator<Item = &MemoryFile> {
        std::iter::once(&self.base).chain(self.diffs.iter().map(|diff| &diff.file))
    }
}

impl Diff {
    fn new(file: MemoryFile, base: u64) -> Result<Self, FileError> {
        // The opened file is searched, and each answer checks that it has not changed since.
        let (opened, path, has) = file.file();
        let path = path.to_owned();
        if has != base {
            return Err(FileError::OtherSize { path, has, base });
        }
        let data = data_pages(opened, has).map_err(|errno| FileError::Open {
            path: path.clone(),
            source: errno.into(),
        })?;
        if let [one] = &data[..]
            && *one == (0..has.div_ceil(lacuna_addr::PAGE_SIZE as u64))
        {
            return Err(FileError::NoHoles(path));
        }
        Ok(Self { file, data })
    }

    fn has(&self, page: u64) -> bool {
        let after = self.data.partition_point(|range| range.start <= page);
        self.data[..after]
            .last()
            .is_some_and(|range| range.contains(&page))
    }
}

impl PageSource for LayeredFile {
    fn describe(&self) -> String {
        let mut files = self.files().map(|file| file.file().1.display().to_string());
        let base = files.next().expect("the base");
        let diffs = files.collect::<Vec<_>>().join(", ");
        format!("the memory file {base} with the diffs {diffs}")
    }

    fn memory_id(&self) -> MemoryId {
        let ids: Vec<_> = self
            .files()
            .map(|file| file.memory_id().0.to_le_bytes())
            .collect();
        MemoryId::of(&[b"layers", ids.as_flattened()])
    }

    fn outage(&self) -> Option<String> {
        self.files().find_map(PageSource::outage)
    }

    fn fetch(&self, request: PageRequest) {
        let page = request.page().0;
        let newest = self.diffs.iter().rev().find(|diff| diff.has(page));
        newest.map_or(&self.base, |diff| &diff.file).fetch(request);
    }
}
