//! First touches are recorded, kept in a file, and replayed, on every backend.

use super::common::{MEMORY, Moved, WithSource, kvm, soft};
use lacuna_machine::{Arch, Ending, ErrorKind};
use lacuna_migrate::{MigrateError, Snapshot, Touches, TouchesError};
use std::fs;
use std::path::Path;

/// A guest whose first touches are replayed before it runs asks for few pages.
fn replays(moved: &Moved<impl WithSource>) {
    let folder = tempfile::tempdir().expect("a folder");
    let [saved, record] = ["saved", "record"].map(|name| folder.path().join(name));
    moved.save_while_it_runs(&saved).1.expect("a snapshot");
    let snapshot = Snapshot::open(&saved).expect("a snapshot");
    let first = moved.replay(&snapshot, None).expect("a restore");
    assert_eq!((first.ending, first.replayed), (Ending::Exited(0), 0));
    let asked = first.asked.pages().len();
    assert!(asked > 100, "it asks for its memory: {asked}");
    first.asked.save(&record).expect("a record");
    let touches = Touches::load(&record, snapshot.touched_memory()).expect("a record");
    assert_eq!(touches, first.asked);
    for head in [0, 7, asked, usize::MAX] {
        let (first, others) = touches.split_at(head);
        assert_eq!(first.pages().len(), head.min(asked));
        assert_eq!([first.pages(), others.pages()].concat(), touches.pages());
    }
    let names: Vec<_> = fs::read_dir(folder.path()).expect("a folder").collect();
    assert_eq!(names.len(), 2, "no temporary file is left: {names:?}");
    // A record is replaced.
    touches.save(&record).expect("a record");
    let second = moved.replay(&snapshot, Some(&touches)).expect("a restore");
    assert_eq!(second.ending, Ending::Exited(0));
    // Pages of zeros do not count. They are provided too: the guest does not request them again.
    assert!((1..=asked as u64).contains(&second.replayed), "{asked}");
    let asked_again = second.asked.pages().len();
    assert!(asked_again * 5 <= asked, "{asked_again} after {asked}");
}

#[test]
fn on_soft() {
    replays(&Moved::new(soft(Arch::X86_64, 2), "verify", "rounds=6"));
    replays(&Moved::new(soft(Arch::Arm64, 2), "verify", "rounds=6"));
}

#[lacuna_skip::test]
fn on_kvm() {
    replays(&Moved::new(kvm(2), "verify", "rounds=60"));
}

/// The error of a load of the record at `path`.
fn wrong(path: &Path, snapshot: &Snapshot, bytes: &[u8]) -> TouchesError {
    fs::write(path, bytes).expect("a file");
    Touches::load(path, snapshot.touched_memory()).expect_err("no record")
}

#[test]
fn records_that_are_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let [saved, other, record] = ["saved", "other", "record"].map(|name| folder.path().join(name));
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=2");
    let both = [&saved, &other].map(|path| {
        moved.save_while_it_runs(path).1.expect("a snapshot");
        Snapshot::open(path).expect("a snapshot")
    });
    let [snapshot, other] = both;
    let touches = moved.replay(&snapshot, None).expect("a restore").asked;
    touches.save(&record).expect("a record");
    let whole = fs::read(&record).expect("a file");
    // Every length but the right one.
    for length in (0..64).chain(whole.len() - 40..whole.len()) {
        let error = wrong(&record, &snapshot, &whole[..length]);
        assert!(matches!(error, TouchesError::NoRecord { .. }), "{error}");
    }
    let mut long = whole.clone();
    long.extend([0; 8]);
    let error = wrong(&record, &snapshot, &long).to_string();
    assert!(error.contains("its length"), "{error}");
    // A bit anywhere.
    for at in (0..64).chain(whole.len() - 8..whole.len()) {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        let error = wrong(&record, &snapshot, &bytes);
        let expected = match at {
            0..8 | 24..32 => matches!(error, TouchesError::NoRecord { .. }),
            8..12 => matches!(error, TouchesError::Version { known: 1, .. }),
            12..24 => matches!(error, TouchesError::OtherMemory(_)),
            _ => error.to_string().contains("its checksum differs"),
        };
        assert!(expected, "byte {at}: {error}");
    }
    // A page beyond the snapshot, in an otherwise whole record.
    let mut bytes = whole[..whole.len() - 4].to_vec();
    bytes[32..40].copy_from_slice(&(MEMORY >> 12).to_le_bytes());
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    let error = wrong(&record, &snapshot, &bytes).to_string();
    assert!(error.contains("beyond the memory"), "{error}");
    let error = wrong(&record, &other, &whole);
    assert!(matches!(error, TouchesError::OtherMemory(_)), "{error}");
    let error = moved.replay(&other, Some(&touches)).err();
    assert!(
        matches!(error, Some(MigrateError::OtherSnapshot)),
        "{error:?}"
    );
    let error = Touches::load(folder.path(), snapshot.touched_memory()).expect_err("a folder");
    assert!(matches!(error, TouchesError::NoRecord { .. }), "{error}");
    let nowhere = folder.path().join("no folder").join("record");
    for error in [
        touches.save(&nowhere),
        Touches::check_target(&nowhere),
        Touches::load(&nowhere, snapshot.touched_memory()).map(drop),
    ] {
        assert!(matches!(error, Err(TouchesError::Io(_))), "{error:?}");
    }
    Touches::check_target(&record).expect("it can be written");
    // A record of a raw memory file has no checksum, and fits each memory of this size.
    let mut bytes = whole[..whole.len() - 4].to_vec();
    bytes[12..16].fill(0);
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    fs::write(&record, bytes).expect("a file");
    for snapshot in [&snapshot, &other] {
        let loaded = Touches::load(&record, snapshot.touched_memory()).expect("a record");
        assert_eq!(loaded.pages(), touches.pages());
    }
}

/// Refused before the guest runs, and not when its record is complete.
#[test]
fn a_record_does_not_replace_a_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let error = Touches::check_target(folder.path()).expect_err("a folder");
    let error = MigrateError::from(error);
    assert_eq!(error.kind(), ErrorKind::Request);
    let error = error.to_string();
    assert!(error.ends_with("it is a folder: name a file"), "{error}");
}
