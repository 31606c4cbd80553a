//! The swap file.

use lacuna_addr::PageCount;
use lacuna_swap::FileStore;
use std::path::Path;

#[test]
fn a_swap_directory_that_is_not_there() {
    let error = FileStore::create(Path::new("/nonexistent/dir"), PageCount::new(1));
    assert_eq!(
        error.err().expect("refused").to_string(),
        "cannot create a swap file in /nonexistent/dir: No such file or directory (os error 2)"
    );
}

#[test]
fn the_swap_file_has_no_name() {
    let dir = tempfile::tempdir().unwrap();
    let _store = FileStore::create(dir.path(), PageCount::new(10)).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
