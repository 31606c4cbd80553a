//! The memory file: the handler has the same one, so the suite knows the content of each page.

use crate::memory::{BLOCK, WORDS};
use lacuna_addr::PAGE_SIZE;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a page before its checksum.
const CHECKED: usize = PAGE_SIZE - 8;
/// Pages of the smallest memory file: two blocks of 2 MiB.
pub const PAGES_MIN: u64 = 2 * BLOCK;

/// Why a file cannot be the memory of the suite's VMs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file cannot be read or written.
    #[error("cannot use the memory file {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The length is wrong.
    #[error(
        "the memory file has {0} bytes: a multiple of 2 MiB is needed, at least 4 MiB; make one \
         with --make-memory"
    )]
    Length(u64),
    /// A wrong answer with this page would look right.
    #[error(
        "page {0} of the memory file is all zeros, or another page has the same bytes, so a wrong \
         answer could look right; make a file with --make-memory"
    )]
    Page(u64),
}

/// A memory file.
#[derive(Debug)]
pub struct Image {
    file: File,
    pages: u64,
}

impl Image {
    /// Writes a file of `bytes` bytes to `path`. Each page has its number in the first 8 bytes,
    /// then bytes of a generator that the number seeds. The last 8 bytes are the XXH3 of the
    /// others. All numbers are little-endian.
    ///
    /// # Errors
    /// The length is wrong, or the file cannot be written.
    pub fn make(path: &Path, bytes: u64) -> Result<(), ImageError> {
        let pages = pages(bytes)?;
        let failed = |source| ImageError::Io {
            path: path.to_owned(),
            source,
        };
        let mut file = BufWriter::new(File::create(path).map_err(failed)?);
        for page in 0..pages {
            file.write_all(&content(page)).map_err(failed)?;
        }
        file.flush().map_err(failed)
    }

    /// Opens the file at `path`.
    ///
    /// # Errors
    /// The length is wrong, or the file cannot be read.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let failed = |source| ImageError::Io {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let pages = pages(bytes)?;
        Ok(Self { file, pages })
    }

    /// Checks that no two pages are equal, and that no page is all zeros.
    ///
    /// # Errors
    /// There is such a page, or the file cannot be read.
    pub fn check(path: &Path) -> Result<(), ImageError> {
        let image = Self::open(path)?;
        let mut reader = BufReader::new(&image.file);
        let (mut page, mut seen) = ([0; PAGE_SIZE], HashMap::new());
        for number in 0..image.pages {
            let read = reader.read_exact(&mut page);
            read.map_err(|source| ImageError::Io {
                path: path.to_owned(),
                source,
            })?;
            let is_new = seen.insert(xxh3_64(&page), number).is_none();
            if page == [0; PAGE_SIZE] || !is_new {
                return Err(ImageError::Page(number));
            }
        }
        Ok(())
    }

    /// The number of its pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The words of page `page`.
    ///
    /// # Panics
    /// If the file cannot be read any more.
    pub fn page(&self, page: u64) -> [u64; WORDS] {
        let mut bytes = [0; PAGE_SIZE];
        let read = self.file.read_exact_at(&mut bytes, page * PAGE_SIZE as u64);
        read.expect("the memory file was readable before");
        words(&bytes)
    }
}

fn pages(bytes: u64) -> Result<u64, ImageError> {
    let pages = bytes / PAGE_SIZE as u64;
    match bytes.is_multiple_of(BLOCK * PAGE_SIZE as u64) && pages >= PAGES_MIN {
        true => Ok(pages),
        false => Err(ImageError::Length(bytes)),
    }
}

/// The bytes of page `page` of a made file.
pub fn content(page: u64) -> [u8; PAGE_SIZE] {
    let mut bytes = [0; PAGE_SIZE];
    fastrand::Rng::with_seed(page).fill(&mut bytes[8..CHECKED]);
    bytes[..8].copy_from_slice(&page.to_le_bytes());
    let sum = xxh3_64(&bytes[..CHECKED]);
    bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn words(bytes: &[u8; PAGE_SIZE]) -> [u64; WORDS] {
    let (words, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|index| u64::from_ne_bytes(words[index]))
}

/// Says what a page has, for a report.
pub fn describe(found: &[u64; WORDS]) -> String {
    let made = content(u64::from_le(found[0]));
    if found == &[0; WORDS] {
        "zeros".into()
    } else if found == &words(&made) {
        format!("page {} of the memory file", u64::from_le(found[0]))
    } else if found.iter().all(|word| *word == found[0]) {
        format!("the value {:#x} in each word", found[0])
    } else {
        let zeros = found.iter().filter(|word| **word == 0).count();
        format!(
            "other bytes: {zeros} of {WORDS} words are 0, the first is {:#x}",
            found[0]
        )
    }
}
