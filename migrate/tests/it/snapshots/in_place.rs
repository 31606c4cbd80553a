//! Guests that have their pages in the snapshot's memory file.

use super::common::{Moved, WithSource, kvm, soft};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{Arch, Ending};
use lacuna_migrate::Snapshot;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

/// The guest checks all of its memory. It is restored twice: the first one has not written to the
/// file.
fn moves(moved: &Moved<impl WithSource>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let (ending, saved) = moved.save_while_it_runs(&path);
    assert_eq!(ending, Ending::Exited(0), "the guest that was saved");
    saved.expect("it ran when it was saved");
    let memory = || fs::read(path.join("memory")).expect("a file");
    let before = memory();
    for _ in 0..2 {
        let restored = moved.restore_in_place(&path).expect("a restore");
        assert_eq!(restored, Ending::Exited(0));
    }
    assert!(memory() == before, "the file has changed");
}

#[test]
fn x86_on_soft() {
    moves(&Moved::new(soft(Arch::X86_64, 2), "verify", "rounds=6"));
}

#[test]
fn arm64_on_soft() {
    moves(&Moved::new(soft(Arch::Arm64, 2), "verify", "rounds=6"));
}

#[lacuna_skip::test]
fn x86_on_kvm() {
    moves(&Moved::new(kvm(2), "verify", "rounds=60"));
}

/// Pages of zeros are checked too: the guest would have the file's content.
#[test]
fn damaged_pages_are_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let moved = Moved::new(soft(Arch::Arm64, 1), "verify", "rounds=6");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    let entries = fs::read(path.join("pages")).expect("a file");
    let entries: Vec<_> = entries.chunks(4).map(|entry| entry != [0; 4]).collect();
    let file = File::options().write(true).open(path.join("memory"));
    let file = file.expect("a file");
    for (has_content, expected) in [(true, "the checksum of page"), (false, "is not zeros")] {
        let page = entries.iter().position(|has| *has == has_content);
        let page = page.expect("a page of this kind");
        let at = (page * PAGE_SIZE + 99) as u64;
        let mut byte = [0];
        let own = File::open(path.join("memory")).expect("a file");
        own.read_exact_at(&mut byte, at).expect("a page");
        file.write_all_at(&[byte[0] ^ 1], at).expect("a page");
        let refused = moved.restore_in_place(&path).expect_err("a damaged page");
        assert!(refused.to_string().contains(expected), "{refused}");
        file.write_all_at(&byte, at).expect("a page");
    }
    assert_eq!(
        moved.restore_in_place(&path).expect("a restore"),
        Ending::Exited(0)
    );
}

/// A whole snapshot has a file for a VM as it is made. A diff, whose memory is packed, has none.
#[test]
fn a_diff_is_not_mapped() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["first", "second", "third"].map(|name| folder.path().join(name));
    let moved = Moved::new(soft(Arch::Arm64, 1), "verify", "rounds=6");
    let ending = moved.save_diffs(&paths, &folder.path().join("cancelled"));
    assert_eq!(ending, Ending::Exited(0));
    let has_file = paths.map(|path| {
        let snapshot = Snapshot::open(&path).expect("a snapshot");
        snapshot.memory_file().is_some()
    });
    assert_eq!(has_file, [true, false, false]);
}
