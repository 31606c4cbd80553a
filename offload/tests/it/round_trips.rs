//! A saved guest is the restored one.

use crate::vmm::{
    Guest, GuestSlot, PAGE, Page, Received, SaveDaemon, content, impatient, memory, saved,
};
use lacuna_offload::wire::Command;
use lacuna_offload::{Restored, Settings, Snapshot, Sources, When, restore};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::{JoinHandle, spawn};

/// A restore daemon of the snapshot `saved` in `folder`, and the VMM's received migration.
pub fn restored(folder: &Path, when: When, settings: Settings) -> (JoinHandle<Restored>, Received) {
    let socket = folder.join("restore");
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).unwrap();
    let from = folder.join("saved");
    let daemon = spawn(move || {
        let snapshot = Snapshot::open(&from).unwrap();
        let sources = Sources {
            faults: &snapshot.pages().unwrap(),
            fill: &snapshot.pages().unwrap(),
        };
        restore(&snapshot, &socket, sources, when, &settings).unwrap()
    });
    let mut received = Received::receive(&listener, when != When::Before);
    received.main.answer(true);
    (daemon, received)
}

#[test]
fn by_memory_files_before_the_vm_resumes() {
    let guest = Guest::new();
    let (folder, saved) = saved(&guest, Command::Complete);
    assert_eq!(
        (saved.slots, saved.bytes, saved.was_running),
        (2, 48 * PAGE, true)
    );
    let memory = folder.path().join("saved/memory").metadata().unwrap();
    assert!(memory.blocks() * 512 == saved.disk && saved.disk <= 48 * PAGE);
    // The guest's memory is for no other user.
    let mode = folder.path().join("saved").metadata().unwrap().mode();
    assert_eq!(mode & 0o777, 0o700);
    let (daemon, received) = restored(folder.path(), When::Before, Settings::default());
    assert_eq!(received.end, Command::Complete);
    assert!(received.config == guest.config() && received.state == guest.state);
    for gpa in guest.all() {
        let page = received.page(&guest, gpa);
        let zeros = content(gpa) == [0; PAGE as usize];
        assert!(page == (!zeros).then(|| content(gpa)), "{gpa:#x}");
    }
    let restored = daemon.join().unwrap();
    assert_eq!((restored.pages, restored.in_place), (48, 32));
    assert!(restored.is_running && restored.faults == 0);
}

/// The memory in several tables: a page that is sent again replaces the old one, also with zeros.
fn save_by_bytes() -> (Guest, tempfile::TempDir) {
    let guest = Guest::new();
    let (daemon, mut peer) = SaveDaemon::start(Settings::default());
    peer.ok(Command::Start, &[]);
    peer.ok(Command::Config, &guest.config());
    let slots: Vec<_> = guest
        .slots
        .iter()
        .map(|slot: &GuestSlot| (slot.gpa, slot.pages * PAGE))
        .collect();
    let other = |_| -> Page { [0xee; PAGE as usize] };
    let all = memory(&slots, other);
    peer.send(Command::Memory, 32, &all);
    assert_eq!(peer.response(), Some(true));
    for (gpa, length) in slots {
        peer.send(Command::Memory, 16, &memory(&[(gpa, length)], content));
        assert_eq!(peer.response(), Some(true));
    }
    peer.ok(Command::State, &guest.state);
    peer.ok(Command::CompletePaused, &[]);
    assert!(!daemon.thread.join().unwrap().unwrap().was_running);
    (guest, daemon.folder)
}

#[test]
fn by_bytes_before_the_vm_resumes() {
    let (guest, folder) = save_by_bytes();
    let (daemon, received) = restored(folder.path(), When::Before, Settings::default());
    assert_eq!(received.end, Command::CompletePaused);
    for gpa in guest.all() {
        let page = received.page(&guest, gpa).unwrap_or([0; PAGE as usize]);
        assert!(page == content(gpa), "{gpa:#x}");
    }
    assert!(!daemon.join().unwrap().is_running);
}

#[test]
fn by_bytes_on_demand_with_pages_in_responses() {
    let (guest, folder) = save_by_bytes();
    let when = When::OnDemand { fill: None };
    let (daemon, mut received) = restored(folder.path(), when, impatient());
    assert!(received.files.is_empty());
    let mut faults = received.faults.take().unwrap();
    // Again too: the VMM may have failed to place a page.
    for gpa in guest.all().chain(guest.all()) {
        assert!(faults.fault(gpa, PAGE) == (true, content(gpa).to_vec()));
    }
    let three: Vec<u8> = (1..4).flat_map(|page| content(page * PAGE)).collect();
    assert!(faults.fault(PAGE, 3 * PAGE) == (true, three));
    drop(faults);
    assert_eq!(daemon.join().unwrap().faults, 97);
}
