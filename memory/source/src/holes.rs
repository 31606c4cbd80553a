//! Finds the holes of a sparse file: their pages are zeros, and need no read.

use lacuna_addr::PAGE_SIZE;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
use std::ops::Range;

/// Answers from the kernel's last answer, a stretch of data or a hole. The caller makes sure that
/// the file does not change.
#[derive(Default)]
pub struct Holes {
    known: Option<Stretch>,
}

/// Bytes of the file: either only data, or only a hole.
struct Stretch {
    bytes: Range<u64>,
    is_hole: bool,
}

impl Holes {
    /// Whether the page at `offset` lies in a hole. False if the page is only partly a hole, or if
    /// the file system does not say.
    pub fn is_hole(&mut self, file: &File, offset: u64) -> bool {
        let end = offset + PAGE_SIZE as u64;
        let covers = |stretch: &&Stretch| stretch.bytes.start <= offset && end <= stretch.bytes.end;
        if let Some(stretch) = self.known.as_ref().filter(covers) {
            return stretch.is_hole;
        }
        let found = find(file, offset);
        let is_hole = found.as_ref().filter(covers).is_some_and(|s| s.is_hole);
        self.known = found;
        is_hole
    }
}

/// The pages of the first `length` bytes with data, a part of the page suffices. In ascending
/// order, none twice.
///
/// # Errors
/// As `lseek(2)`.
pub(crate) fn data_pages(file: &File, length: u64) -> Result<Vec<Range<u64>>, Errno> {
    let (mut found, mut at) = (Vec::<Range<u64>>::new(), 0);
    while at < length {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < length => start,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno),
        };
        at = seek(file, SeekFrom::Hole(start))?.min(length);
        let pages = start / PAGE_SIZE as u64..at.div_ceil(PAGE_SIZE as u64);
        match found.last_mut() {
            Some(last) if last.end >= pages.start => last.end = pages.end,
            _ => found.push(pages),
        }
    }
    Ok(found)
}

/// The stretch that begins at `offset`.
fn find(file: &File, offset: u64) -> Option<Stretch> {
    let (end, is_hole) = match seek(file, SeekFrom::Data(offset)) {
        Ok(data) if data > offset => (data, true),
        Ok(_) => (seek(file, SeekFrom::Hole(offset)).ok()?, false),
        // No data follows. The file's length shows whether the file ends before `offset`.
        Err(Errno::NXIO) => (u64::MAX, true),
        Err(_) => return None,
    };
    let bytes = offset..end;
    Some(Stretch { bytes, is_hole })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn holes_are_found_between_data_and_at_the_end() {
        let file = tempfile::tempfile().unwrap();
        // The data is far apart, because a file system's blocks may be larger than a page.
        file.set_len(4096 * PAGE).unwrap();
        for page in [0, 1024] {
            file.write_all_at(&[1; PAGE_SIZE], page * PAGE).unwrap();
        }
        let mut holes = Holes::default();
        let mut is_hole = |page: u64| holes.is_hole(&file, page * PAGE);
        assert_eq!(
            [0, 512, 1024, 4095].map(&mut is_hole),
            [false, true, false, true]
        );
        assert_eq!([1024, 513, 0].map(&mut is_hole), [false, true, false]);
    }
}
