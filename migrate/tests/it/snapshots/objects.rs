//! Snapshots in object stores, also slow ones, and stores that lose or change objects.

use super::common::{Moved, soft};
use lacuna_machine::{Arch, Ending, Policy, VcpuError, WhenGone};
use lacuna_migrate::{
    Folder as _, MigrateError, PausedGuest, Snapshot, Store, Target, Tracked, When, save_paused,
};
use lacuna_objects::object_store::memory::InMemory;
use lacuna_objects::object_store::throttle::{ThrottleConfig, ThrottledStore};
use lacuna_objects::{Objects, Options};
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Small chunks, so that a guest of 16 MiB has many, and few of them in memory.
const SMALL: Options = Options {
    chunk: 64 << 10,
    cache: 1 << 20,
    parallel: 8,
    patience: Duration::from_secs(60),
};

fn url(path: &Path) -> String {
    format!("file://{}", path.display())
}

fn open(path: &Path) -> Result<Snapshot, MigrateError> {
    let objects = Objects::open(&url(path), SMALL).expect("a store");
    Snapshot::open_in(Arc::new(objects))
}

/// A snapshot of a guest that checks its memory, and a diff of it.
fn saved(moved: &Moved<lacuna_soft::VmBuilder>, folder: &Path) -> [std::path::PathBuf; 3] {
    let paths = ["first", "second", "third"].map(|name| folder.join(name));
    moved.save_diffs(&paths, &folder.join("cancelled"));
    paths
}

#[test]
fn a_local_folder_is_a_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let moved = Moved::new(soft(Arch::X86_64, 2), "verify", "rounds=6");
    for path in saved(&moved, folder.path()) {
        let snapshot = open(&path).expect("a snapshot");
        let first = moved.replay(&snapshot, None).expect("a restore");
        assert_eq!(first.ending, Ending::Exited(0), "{}", path.display());
        // A record made with a folder fits the same snapshot in a store.
        let local = Snapshot::open(&path).expect("a snapshot");
        let second = moved.replay(&local, Some(&first.asked)).expect("a restore");
        assert_eq!(second.ending, Ending::Exited(0), "{}", path.display());
    }
}

/// A saved guest, in a store with adjustable delays.
fn throttled() -> (Moved<lacuna_soft::VmBuilder>, Arc<ThrottledStore<InMemory>>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let moved = Moved::new(soft(Arch::X86_64, 2), "verify", "rounds=3");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    let store = InMemory::new();
    let put = |name: &str| {
        use lacuna_objects::object_store::ObjectStoreExt as _;
        let bytes = fs::read(path.join(name)).expect("a file");
        let at = format!("snapshots/saved/{name}").into();
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let put = store.put(&at, bytes.into());
        runtime
            .expect("a runtime")
            .block_on(put)
            .expect("an object");
    };
    for name in ["snapshot.json", "pages", "checksums", "memory"] {
        put(name);
    }
    let store = ThrottledStore::new(store, ThrottleConfig::default());
    (moved, Arc::new(store))
}

fn open_in(store: &Arc<ThrottledStore<InMemory>>, options: Options) -> Snapshot {
    let store = Arc::clone(store);
    let objects = Objects::new(store, "snapshots/saved", options).expect("a store");
    Snapshot::open_in(Arc::new(objects)).expect("a snapshot")
}

/// Each request to the store takes a while, and pages arrive all the same.
#[test]
fn a_slow_store() {
    let (moved, store) = throttled();
    store.config_mut(|config| config.wait_get_per_call = Duration::from_millis(2));
    let snapshot = open_in(&store, SMALL);
    let replayed = moved.replay(&snapshot, None).expect("a restore");
    assert_eq!(replayed.ending, Ending::Exited(0));
}

/// The store does not answer when the guest needs its first pages, but answers later. The guest
/// waits, and finds its memory in order.
#[test]
fn a_guest_waits_for_a_store_that_does_not_answer() {
    let (moved, store) = throttled();
    let impatient = Options {
        patience: Duration::from_millis(20),
        ..SMALL
    };
    let snapshot = open_in(&store, impatient);
    store.config_mut(|config| config.wait_get_per_call = Duration::from_secs(3600));
    let policy = Policy {
        patience: Duration::ZERO,
        when_gone: WhenGone::Hold,
    };
    let ending = moved.restore_beside(&snapshot, policy, |asked| {
        while asked.touches().pages().is_empty() {
            std::thread::yield_now();
        }
        // The request in flight has no answer for an hour: another try brings the page.
        store.config_mut(|config| config.wait_get_per_call = Duration::ZERO);
    });
    assert_eq!(ending.expect("a restore"), Ending::Exited(0));
}

#[test]
fn missing_and_damaged_objects() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved");
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=6");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    let snapshot = open(&path).expect("a snapshot");
    // The memory changes after the snapshot was opened: no page of it reaches the guest.
    let memory = path.join("memory");
    let mut bytes = fs::read(&memory).expect("a file");
    bytes.iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(&memory, &bytes).expect("a file");
    let lost = moved
        .replay(&snapshot, None)
        .expect("the state alone")
        .ending;
    let Ending::Failed(VcpuError::PageLost { cause, .. }) = &lost else {
        panic!("{lost:?}");
    };
    assert!(cause.contains("was replaced"), "{cause}");
    // A new open finds pages with other checksums.
    let damaged = moved.replay(&open(&path).expect("a snapshot"), None);
    let damaged = damaged.expect("the state alone").ending;
    let Ending::Failed(VcpuError::PageLost { cause, .. }) = &damaged else {
        panic!("{damaged:?}");
    };
    assert!(cause.contains("the snapshot is damaged"), "{cause}");
    // The object is removed while the snapshot is open.
    let snapshot = open(&path).expect("a snapshot");
    fs::remove_file(&memory).expect("a file");
    let gone = moved
        .replay(&snapshot, None)
        .expect("the state alone")
        .ending;
    let Ending::Failed(VcpuError::PageLost { cause, .. }) = &gone else {
        panic!("{gone:?}");
    };
    assert!(cause.contains("the object is gone"), "{cause}");
    let error = open(&path).err().expect("no memory");
    assert!(error.to_string().contains("saved/memory"), "{error}");
    assert!(matches!(error, MigrateError::Io { .. }), "{error}");
}

/// Gives `save` the place of `objects`.
fn into<R>(objects: &Objects, save: impl FnOnce(Target<'_>) -> R) -> R {
    save(Target::Store(Store {
        folder: objects,
        put: &|name: &str, file: &File| objects.put(name, file),
        remove: &|name: &str| objects.remove(name),
    }))
}

/// A guest is saved to a store, and then its changes. A place with a snapshot is refused. A place
/// with the rest of an interrupted save is not.
#[test]
fn a_guest_is_saved_to_a_store() {
    let store = Arc::new(InMemory::new());
    let place = |name: &str| {
        let prefix = format!("snapshots/{name}");
        Objects::new(Arc::clone(&store) as _, &prefix, SMALL).expect("a place")
    };
    let rest = tempfile::tempfile().expect("a file");
    place("first").put("memory", &rest).expect("an object");
    let moved = Moved::new(soft(Arch::X86_64, 2), "verify", "rounds=6");
    let (_, saved) = moved.run(|guest| {
        let paused = PausedGuest::pause(guest)?;
        let (when, each) = (|| When::Paused(&paused), &mut |_| ControlFlow::Continue(()));
        let (whole, mut tracked) = into(&place("first"), |to| {
            Tracked::save_first(guest, when(), to, each)
        })?;
        let again = into(&place("first"), |to| save_paused(guest, &paused, to, each));
        assert!(matches!(again, Err(MigrateError::Exists(_))), "{again:?}");
        into(&place("second"), |to| {
            tracked.save_changes(guest, when(), to, each)
        })?;
        Ok(whole.pages)
    });
    let pages = saved.expect("two snapshots");
    let memory = place("first").open("memory").expect("an object").length();
    assert_eq!(memory, pages * 4096, "pages of zeros are not stored");
    for name in ["first", "second"] {
        let snapshot = Snapshot::open_in(Arc::new(place(name))).expect("a snapshot");
        let replayed = moved.replay(&snapshot, None).expect("a restore");
        assert_eq!(replayed.ending, Ending::Exited(0), "{name}");
    }
}
