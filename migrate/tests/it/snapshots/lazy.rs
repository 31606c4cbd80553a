//! Snapshots whose pages are read while the guest runs, on every backend and architecture.

use super::common::{Beside, MEMORY, Moved, WithSource, kvm, soft};
use lacuna_machine::{Arch, Ending, VcpuError};
use lacuna_migrate::MigrateError;
use std::fs;
use std::os::unix::fs::FileExt;

/// The guest checks all of its memory, so a wrong or missing page is found.
fn comes_lazily(moved: &Moved<impl WithSource>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let (_, saved) = moved.save_while_it_runs(&path);
    saved.expect("it ran when it was saved");
    let again = folder.path().join("again");
    for beside in [Beside::Nothing, Beside::Prefetch, Beside::Save(&again)] {
        let (ending, done) = moved.restore_lazily(&path, beside).expect("a restore");
        assert_eq!(ending, Ending::Exited(0), "{beside:?}");
        done.unwrap_or_else(|error| panic!("{beside:?}: {error}"));
    }
    let ending = moved.restore(&again).expect("a restore");
    assert_eq!(
        ending,
        Ending::Exited(0),
        "saved while it was restored lazily"
    );
    // The save requests the pages that the guest has not requested, so none remains.
    let missing = folder.path().join("missing");
    let (ending, asked) = moved.save_while_all_is_missing(&path, &missing);
    assert_eq!(
        (ending, asked),
        (Ending::Exited(0), (MEMORY >> 12) as usize)
    );
    let ending = moved.restore(&missing).expect("a restore");
    assert_eq!(ending, Ending::Exited(0), "saved while all was missing");
}

#[test]
fn on_soft() {
    comes_lazily(&Moved::new(soft(Arch::X86_64, 2), "verify", "rounds=6"));
    comes_lazily(&Moved::new(soft(Arch::Arm64, 2), "verify", "rounds=6"));
}

#[lacuna_skip::test]
fn on_kvm() {
    comes_lazily(&Moved::new(kvm(2), "verify", "rounds=60"));
}

/// A page that differs from its checksum never reaches the guest: the page is lost.
#[test]
fn a_damaged_page_is_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=6");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    let memory = fs::File::options()
        .write(true)
        .open(path.join("memory"))
        .expect("a file");
    // All pages with content have another content now.
    let entries = fs::read(path.join("pages")).expect("a file");
    for (page, entry) in entries.chunks_exact(4).enumerate() {
        if entry != [0; 4] {
            let byte = page as u64 * 4096 + 77;
            memory
                .write_all_at(&[0xa5, 0x5a, 1], byte)
                .expect("a write");
        }
    }
    let (ending, _) = moved.restore_lazily(&path, Beside::Nothing).expect("state");
    let Ending::Failed(VcpuError::PageLost { cause, .. }) = &ending else {
        panic!("{ending:?}");
    };
    assert!(cause.contains("the snapshot is damaged"), "{cause}");
    let (_, done) = moved
        .restore_lazily(&path, Beside::Prefetch)
        .expect("state");
    assert!(
        matches!(done, Err(MigrateError::Damaged { .. })),
        "{done:?}"
    );
}

#[test]
fn a_vm_without_a_source_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=6");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    let error = moved.restore_state_alone(&path);
    assert!(matches!(error, Err(MigrateError::NoSource)), "{error:?}");
}
