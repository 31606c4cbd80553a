//! A memory file below its diffs.

use crate::common;

use common::{Answers, Bytes, PAGE, page};
use lacuna_addr::PageCount;
use lacuna_skip::test;
use lacuna_source::{FileError, LayeredFile, MemoryFile, PageSource, Policy};
use std::os::unix::fs::FileExt as _;
use tempfile::NamedTempFile;

/// Far apart, because a file system's blocks may be larger than a page.
const STEP: u64 = 64;
const PAGES: u64 = 8 * STEP;

/// A sparse file; `content` has some of its pages, each with a number in it.
fn sparse(content: &[(u64, [u8; PAGE])]) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(PAGES * PAGE as u64).unwrap();
    for (at, content) in content {
        let offset = at * STEP * PAGE as u64;
        file.as_file().write_all_at(content, offset).unwrap();
    }
    file
}

fn open(base: &NamedTempFile, diffs: &[&NamedTempFile]) -> Result<LayeredFile, FileError> {
    let diffs: Vec<_> = diffs.iter().map(|diff| diff.path()).collect();
    let pages = PageCount::new(PAGES);
    LayeredFile::open(base.path(), &diffs, pages, &Policy::default())
}

/// A written page of zeros hides the base too, and the newest layer wins.
#[test]
fn each_page_comes_from_the_newest_layer_with_data() {
    let base = sparse(&[(0, page(1)), (1, page(2)), (2, page(3)), (7, page(4))]);
    let first = sparse(&[(1, page(5)), (2, [0; PAGE]), (3, page(6))]);
    let second = sparse(&[(3, page(7))]);
    let layers = open(&base, &[&first, &second]).unwrap();
    let zeros = Bytes::from(&[0; PAGE]);
    let expected = [1, 5, 0, 7, 0, 0, 0, 4];
    for (at, number) in (0..).zip(expected) {
        let content = match number {
            0 => zeros.clone(),
            number => Bytes::from(&page(number)),
        };
        assert_eq!(Answers::fetch(&layers, at * STEP), Ok(content), "page {at}");
    }
    let only = MemoryFile::open(base.path(), PageCount::new(PAGES), Policy::default()).unwrap();
    assert_ne!(layers.memory_id(), only.memory_id());
    let reversed = open(&base, &[&second, &first]).unwrap();
    assert_ne!(layers.memory_id(), reversed.memory_id());
    let text = layers.describe();
    assert!(text.contains(" with the diffs "), "{text}");
}

#[test]
fn a_changed_diff_loses_its_pages() {
    let (base, diff) = (sparse(&[(0, page(1))]), sparse(&[(1, page(2))]));
    let old = std::time::SystemTime::UNIX_EPOCH;
    diff.as_file().set_modified(old).unwrap();
    let layers = open(&base, &[&diff]).unwrap();
    diff.as_file().write_all_at(&[9], 0).unwrap();
    assert_eq!(Answers::fetch(&layers, 0), Ok(Bytes::from(&page(1))));
    let lost = Answers::fetch(&layers, STEP).unwrap_err();
    assert!(lost.contains("written to"), "{lost}");
}

#[test]
fn files_that_are_no_diffs_are_refused() {
    let base = sparse(&[(0, page(1))]);
    let longer = sparse(&[]);
    longer.as_file().set_len((PAGES + 1) * PAGE as u64).unwrap();
    let error = open(&base, &[&longer]).err().unwrap();
    assert!(matches!(error, FileError::OtherSize { .. }), "{error}");
    let full = NamedTempFile::new().unwrap();
    let bytes = vec![1; PAGES as usize * PAGE];
    full.as_file().write_all_at(&bytes, 0).unwrap();
    let error = open(&base, &[&full]).err().unwrap();
    assert!(matches!(error, FileError::NoHoles(_)), "{error}");
}
