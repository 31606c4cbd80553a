//! The swap file.

use lacuna_addr::PageCount;
use lacuna_swap::{FileStore, SetupFailed, Swap, SwapFile};
use std::path::Path;

#[test]
fn a_swap_directory_that_is_not_there() {
    let error = FileStore::create(Path::new("/nonexistent/dir"), PageCount::new(1));
    assert_eq!(
        error.err().expect("refused").to_string(),
        "cannot create a swap file in /nonexistent/dir: No such file or directory (os error 2): \
         give a folder on a disk with room for it"
    );
}

#[test]
fn the_swap_file_has_no_name() {
    let dir = tempfile::tempdir().unwrap();
    let _store = FileStore::create(dir.path(), PageCount::new(10)).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_made_file_serves_one_vm_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let swap = Swap::Made(SwapFile::create(dir.path()).unwrap());
    let first = swap.open(PageCount::new(10)).unwrap();
    let second = swap.clone().open(PageCount::new(10));
    let error = second.err().expect("refused");
    assert_eq!(error, SetupFailed::Taken(dir.path().display().to_string()));
    drop(first);
    swap.open(PageCount::new(10)).expect("the file is free");
}
