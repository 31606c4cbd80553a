//! Copies of memory without its zeros: pages of zeros become holes.

use lacuna_addr::PAGE_SIZE;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

/// Bytes that are copied at a time: large enough that system calls cost little, and a small part of
/// a processor's cache.
pub const CHUNK: usize = 256 << 10;

const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Writes whole pages at `offset` of `file`. `is_hole`: the file has a hole there, so zeros need no
/// write.
///
/// # Errors
/// As `pwrite(2)`.
pub fn write_pages(file: &File, mut offset: u64, bytes: &[u8], is_hole: bool) -> io::Result<()> {
    let (pages, rest) = bytes.as_chunks::<PAGE_SIZE>();
    assert!(rest.is_empty(), "whole pages");
    for run in pages.chunk_by(|a, b| (*a == ZEROS) == (*b == ZEROS)) {
        let bytes = run.as_flattened();
        let length = bytes.len() as u64;
        if run[0] != ZEROS {
            file.write_all_at(bytes, offset)?;
        } else if !is_hole {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Not each file system makes holes.
            if fallocate(file, punch, offset, length).is_err() {
                file.write_all_at(bytes, offset)?;
            }
        }
        offset += length;
    }
    Ok(())
}

/// Copies the bytes `from` of `source` to `offset` of `file`, which has a hole there. `keep_on` is
/// asked between two chunks, with the bytes that are behind it.
///
/// # Errors
/// As `pread(2)` and `pwrite(2)`; `UnexpectedEof` if `source` is shorter; `Interrupted` if
/// `keep_on` says no.
pub fn copy(
    source: &File,
    from: Range<u64>,
    file: &File,
    offset: u64,
    keep_on: impl Fn(u64) -> bool,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut at = from.start;
    while at < from.end {
        let found = stretch(source, at)?.filter(|found| found.start < from.end);
        let Some(found) = found else { break };
        at = found.start.max(at);
        let end = found.end.min(from.end);
        while at < end {
            if !keep_on(at - from.start) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let length = CHUNK.min((end - at) as usize);
            let chunk = &mut chunk[..length];
            source.read_exact_at(chunk, at)?;
            write_pages(file, offset + (at - from.start), chunk, true)?;
            at += length as u64;
        }
    }
    // A hole at the end and a missing end look the same to `lseek`.
    match source.metadata()?.len() < from.end {
        true => Err(io::ErrorKind::UnexpectedEof.into()),
        false => Ok(()),
    }
}

/// The first stretch of data from `at` on, in whole pages.
fn stretch(file: &File, at: u64) -> io::Result<Option<Range<u64>>> {
    let page = PAGE_SIZE as u64;
    match seek(file, SeekFrom::Data(at)) {
        Ok(data) => {
            // A file system without holes has one at the end of the file.
            let hole = seek(file, SeekFrom::Hole(data))?;
            Ok(Some(data / page * page..hole.next_multiple_of(page)))
        }
        Err(Errno::NXIO) => Ok(None),
        // It does not know holes, so all may be data.
        Err(Errno::INVAL) => Ok(Some(at..u64::MAX / page * page)),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    const PAGE: u64 = PAGE_SIZE as u64;

    /// Contents arrive exactly, whatever the layout of data, zeros and holes.
    #[test]
    fn copies_keep_holes_and_content() {
        let [source, file] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        source.set_len(2048 * PAGE).unwrap();
        for page in [0, 1, 3, 500, 2047] {
            let byte = [page as u8 | 1; PAGE_SIZE];
            source.write_all_at(&byte, page * PAGE).unwrap();
        }
        // Data of zeros is none.
        source.write_all_at(&[0; CHUNK], 1000 * PAGE).unwrap();
        file.set_len(3000 * PAGE).unwrap();
        let copied = copy(&source, PAGE..2048 * PAGE, &file, 10 * PAGE, |_| true);
        copied.unwrap();
        let (mut wanted, mut got) = (vec![0; 2047 * PAGE_SIZE], vec![0; 2047 * PAGE_SIZE]);
        source.read_exact_at(&mut wanted, PAGE).unwrap();
        file.read_exact_at(&mut got, 10 * PAGE).unwrap();
        assert!(wanted == got);
        assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20);
        let end = copy(&source, 0..2049 * PAGE, &file, 0, |_| true).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
        let end = copy(&source, 0..PAGE, &file, 0, |_| false).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn later_zeros_replace_content() {
        let file = tempfile::tempfile().unwrap();
        write_pages(&file, 0, &[7; 3 * PAGE_SIZE], true).unwrap();
        let mut pages = vec![0; 3 * PAGE_SIZE];
        pages[2 * PAGE_SIZE] = 1;
        write_pages(&file, 0, &pages, false).unwrap();
        let mut got = vec![1; 3 * PAGE_SIZE];
        file.read_exact_at(&mut got, 0).unwrap();
        assert!(got == pages);
    }
}
