//! Snapshots restored with all of their memory.

use super::common::{Moved, WithRings, kvm, kvm_tsc, rings, soft};
use lacuna_machine::{Arch, Ending, RingSize};
use lacuna_migrate::{Budget, MigrateError, Progress, Snapshot, Tracked, When};
use std::ops::ControlFlow;
use std::time::Duration;
use std::{fs, thread};

/// The guest checks all of its memory: the saved one and the restored one end without a complaint.
fn moves(moved: &Moved<impl lacuna_machine::Builder>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let (ending, saved) = moved.save_while_it_runs(&path);
    assert_eq!(ending, Ending::Exited(0), "the guest that was saved");
    let saved = saved.expect("it ran when it was saved");
    assert!(saved.rounds.len() > 1 && saved.pages > 0, "{saved:?}");
    assert_eq!(moved.restore(&path).expect("a restore"), Ending::Exited(0));
}

#[test]
fn x86_on_soft() {
    for vcpus in [1, 2] {
        moves(&Moved::new(soft(Arch::X86_64, vcpus), "verify", "rounds=6"));
    }
}

#[test]
fn arm64_on_soft() {
    for vcpus in [1, 2] {
        moves(&Moved::new(soft(Arch::Arm64, vcpus), "verify", "rounds=6"));
    }
}

#[lacuna_skip::test]
fn x86_on_kvm() {
    moves(&Moved::new(kvm(2), "verify", "rounds=60"));
}

/// A vCPU with a full ring waits for the copy to harvest it, and runs again after the copy.
#[test]
fn x86_on_soft_with_rings() {
    let moved = Moved::new(WithRings(soft(Arch::X86_64, 2)), "verify", "rounds=6");
    moves(&moved);
    // The rings are full when the log ends.
    let folder = tempfile::tempdir().expect("a folder");
    let (ending, saved) = moved.run(|guest| {
        let (path, each) = (folder.path().join("saved"), &mut |_: Progress| {
            ControlFlow::Continue(())
        });
        let _ = fs::remove_dir_all(&path);
        let when = When::Runs(&Budget::default());
        let tracked = Tracked::save_first(guest, when, &path, each)?;
        thread::sleep(Duration::from_millis(300));
        drop(tracked);
        Ok(())
    });
    saved.expect("a snapshot");
    assert_eq!(ending, Ending::Exited(0));
}

#[lacuna_skip::test]
fn x86_on_kvm_with_rings() {
    let mut builder = kvm(2);
    // A store that KVM emulates makes an entry each time, and KVM overruns small rings.
    builder.delivery = rings(RingSize::BYTES_MAX);
    moves(&Moved::new(builder, "verify", "rounds=60"));
}

/// A paused guest is saved in one round. A cancelled save leaves nothing, and the guest keeps
/// running.
#[test]
fn a_paused_guest_is_saved_and_a_save_is_cancelled() {
    for arch in [Arch::X86_64, Arch::Arm64] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("saved");
        let moved = Moved::new(soft(arch, 2), "verify", "rounds=6");
        let (ending, saved) = moved.save_paused(&path, &folder.path().join("cancelled"));
        assert_eq!(ending, Ending::Exited(0), "the guest that was saved");
        assert!(saved.rounds.len() == 1 && saved.pages > 0, "{saved:?}");
        assert_eq!(moved.restore(&path).expect("a restore"), Ending::Exited(0));
        let left = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(left, 1, "nothing of the cancelled one");
    }
}

/// A guest saved on one backend resumes on the other.
#[lacuna_skip::test]
fn from_soft_to_kvm_and_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut on_soft, on_kvm) = (soft(Arch::X86_64, 2), kvm(2));
    on_soft.cpu = kvm_tsc();
    let path = folder.path().join("of-soft");
    let soft_guest = Moved::new(on_soft, "verify", "rounds=6 syscall=ud2");
    let (_, saved) = soft_guest.save_while_it_runs(&path);
    saved.expect("it ran when it was saved");
    // soft takes long for the work that KVM leaves.
    let kvm_guest = Moved::new(on_kvm, "verify", "rounds=30");
    assert_eq!(
        kvm_guest.restore(&path).expect("a restore"),
        Ending::Exited(0)
    );

    let path = folder.path().join("of-kvm");
    let (_, saved) = kvm_guest.save_while_it_runs(&path);
    saved.expect("it ran when it was saved");
    assert_eq!(
        soft_guest.restore(&path).expect("a restore"),
        Ending::Exited(0)
    );
}

/// One wrong byte in any file is found, and the message names the file.
#[test]
fn damage_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=6");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    for name in ["snapshot.json", "memory", "pages", "checksums"] {
        let file = path.join(name);
        let whole = fs::read(&file).expect("a file");
        let content = whole
            .iter()
            .position(|byte| *byte != 0)
            .expect("some content");
        let mut damaged = whole.clone();
        damaged[content] ^= 1;
        fs::write(&file, &damaged).expect("a write");
        let error = moved.restore(&path).expect_err("damage").to_string();
        let named = name == "checksums" || error.contains(name);
        assert!(named && error.contains("damaged"), "{name}: {error}");
        fs::write(&file, &whole[..whole.len() / 2]).expect("a write");
        assert!(moved.restore(&path).is_err(), "{name} is too short");
        fs::write(&file, &whole).expect("a write");
    }
    assert_eq!(
        moved.restore(&path).expect("whole again"),
        Ending::Exited(0)
    );
}

/// Files of another kind or size are refused before memory for them is allocated.
#[test]
fn files_of_any_kind_and_size_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=6");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    for name in ["snapshot.json", "memory", "pages", "checksums"] {
        let file = path.join(name);
        let whole = fs::read(&file).expect("a file");
        let refused = |wrong: &str| {
            let error = moved.restore(&path).expect_err(wrong).to_string();
            assert!(error.contains(name) && error.contains(wrong), "{error}");
        };
        let sparse = fs::File::create(&file).expect("a file");
        sparse.set_len(1 << 40).expect("a sparse file");
        refused("it has 1099511627776 bytes, and");
        fs::remove_file(&file).expect("a file");
        fs::create_dir(&file).expect("a folder");
        refused("it is no regular file");
        fs::remove_dir(&file).expect("a folder");
        refused("No such file");
        fs::write(&file, &whole).expect("a write");
    }
}

#[test]
fn other_machines_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=6");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    for other in [soft(Arch::X86_64, 2), soft(Arch::Arm64, 1)] {
        let error = Moved::new(other, "verify", "").restore(&path);
        assert!(
            matches!(error, Err(MigrateError::OtherMachine { .. })),
            "{error:?}"
        );
    }
    let again = moved.save_while_it_runs(&path).1;
    assert!(matches!(again, Err(MigrateError::Exists(_))));
    assert!(
        Snapshot::open(folder.path()).is_err(),
        "a folder without a snapshot"
    );
    let none = folder.path().join("none").join("saved");
    assert!(moved.save_while_it_runs(&none).1.is_err(), "no such folder");
    let left: Vec<_> = fs::read_dir(folder.path()).expect("a folder").collect();
    assert_eq!(left.len(), 1, "nothing is left of what failed");
}

/// The save of an ended guest fails, and leaves nothing.
#[test]
fn a_guest_that_has_ended_is_not_saved() {
    let folder = tempfile::tempdir().expect("a folder");
    let moved = Moved::new(soft(Arch::X86_64, 1), "hello", "");
    let error = moved.save_after_the_end(&folder.path().join("saved"));
    assert!(matches!(error, Err(MigrateError::NotRunning)), "{error:?}");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

/// All of a guest's memory is in these files.
#[test]
fn only_its_user_can_read_a_snapshot() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let (path, record) = (folder.path().join("saved"), folder.path().join("touches"));
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=6");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    let snapshot = Snapshot::open(&path).expect("a snapshot");
    let touches = snapshot.recorder().touches();
    touches.save(&record).expect("a record");
    let mode = |path: &std::path::Path| {
        let found = path.metadata().expect("it is there");
        found.permissions().mode() & 0o777
    };
    assert_eq!((mode(&path), mode(&record)), (0o700, 0o600));
    for name in ["snapshot.json", "memory", "pages", "checksums"] {
        assert_eq!(mode(&path.join(name)), 0o600, "{name}");
    }
}
