//! Snapshots with the pages only that have changed since the one before.

use crate::common::{Moved, kvm, soft};
use lacuna_machine::{Arch, Builder, Ending};

/// Each of three snapshots goes on well. Between them, one is cancelled after it has harvested the
/// log: its pages are in the next one.
fn differ(moved: &Moved<impl Builder>) {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["first", "second", "third"].map(|name| folder.path().join(name));
    let cancelled = folder.path().join("cancelled");
    assert_eq!(moved.save_diffs(&paths, &cancelled), Ending::Exited(0));
    assert!(!cancelled.exists());
    for path in paths {
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
