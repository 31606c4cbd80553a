//! Snapshots with only the pages changed since the one before.

use super::common::{Moved, kvm, soft};
use lacuna_machine::{Arch, Builder, Ending};
use lacuna_migrate::{MigrateError, PausedGuest, Snapshot, Tracked, When};
use std::fs;
use std::ops::ControlFlow;

/// Three snapshots succeed. Between them, one is cancelled after its harvest of the log: its pages
/// are in the next one.
fn differ(moved: &Moved<impl Builder>) {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["first", "second", "third"].map(|name| folder.path().join(name));
    let cancelled = folder.path().join("cancelled");
    assert_eq!(moved.save_diffs(&paths, &cancelled), Ending::Exited(0));
    assert!(!cancelled.exists());
    for path in paths {
        // A diff's memory is as long as its own pages with content. A whole snapshot's memory has a
        // place for each page.
        let entries = fs::read(path.join("pages")).expect("a file");
        let entries = entries.chunks_exact(4);
        let is_diff = !path.ends_with("first");
        let stored = entries.filter(|entry| !is_diff || !matches!(entry, [0 | 1, 0, 0, 0]));
        let memory = path.join("memory").metadata().expect("a file");
        assert_eq!(memory.len(), stored.count() as u64 * 4096);
        let ending = moved.restore(&path).expect("a restore");
        assert_eq!(ending, Ending::Exited(0), "{}", path.display());
    }
}

#[test]
fn on_soft() {
    differ(&Moved::new(soft(Arch::X86_64, 2), "verify", "rounds=6"));
    differ(&Moved::new(soft(Arch::Arm64, 2), "verify", "rounds=6"));
}

#[lacuna_skip::test]
fn on_kvm() {
    differ(&Moved::new(kvm(2), "verify", "rounds=60"));
}

/// A save refuses a diff that no restore would take: its base is gone, or it would have too many
/// layers.
#[test]
fn a_diff_needs_its_base_and_has_a_depth() {
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=6");
    let folder = tempfile::tempdir().expect("a folder");
    let path = |number: usize| folder.path().join(number.to_string());
    let last = Snapshot::LAYERS_MAX - 1;
    let (_, saved) = moved.run(|guest| {
        let paused = PausedGuest::pause(guest)?;
        let (when, each) = (|| When::Paused(&paused), &mut |_| ControlFlow::Continue(()));
        let (_, mut tracked) = Tracked::save_first(guest, when(), &path(0), each)?;
        let away = folder.path().join("away");
        fs::rename(path(0), &away).expect("a snapshot");
        let error = tracked.save_changes(guest, when(), &path(1), each);
        assert!(matches!(error, Err(MigrateError::NoBase(_))), "{error:?}");
        fs::rename(away, path(0)).expect("a folder");
        for number in 1..=last {
            tracked.save_changes(guest, when(), &path(number), each)?;
        }
        let error = tracked.save_changes(guest, when(), &path(last + 1), each);
        assert!(matches!(error, Err(MigrateError::Layers(_))), "{error:?}");
        Ok(())
    });
    saved.expect("all but two are saved");
    let ending = moved.restore(&path(last)).expect("a restore");
    assert_eq!(ending, Ending::Exited(0));
}
