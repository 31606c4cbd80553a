//! `lacuna offload`, with a Cloud Hypervisor of one page in this process.

use crate::signals::Running;
use lacuna_offload::wire::{Command, FRAME_BYTES, MemoryRange, Request, Response};
use rustix::process::Signal;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tempfile::TempDir;

fn daemon(line: &str) -> Running {
    Running::with_errors_to(line, Stdio::piped(), Stdio::piped())
}

fn save_daemon(folder: &Path) -> (Running, UnixStream) {
    let (socket, to) = (folder.join("socket"), folder.join("vm"));
    let line = format!(
        "offload save --socket {} --to {}",
        socket.display(),
        to.display()
    );
    let daemon = daemon(&line);
    loop {
        if let Ok(peer) = UnixStream::connect(&socket) {
            return (daemon, peer);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn ok(peer: &mut UnixStream, command: Command, length: usize, payload: &[u8]) {
    let length = length as u64;
    peer.write_all(&Request { command, length }.bytes())
        .unwrap();
    peer.write_all(payload).unwrap();
    let mut frame = [0; FRAME_BYTES];
    peer.read_exact(&mut frame).unwrap();
    assert!(Response::parse(&frame).unwrap().is_ok);
}

/// Sends a VM with one page of memory until its state.
fn send(peer: &mut UnixStream) {
    let config = br#"{"memory_manager_data": {"guest_ram_mappings":
        [{"slot": 0, "gpa": 0, "size": 4096, "file_offset": 0}]}}"#;
    let (gpa, length) = (0, 4096);
    let table = MemoryRange { gpa, length }.bytes();
    ok(peer, Command::Start, 0, &[]);
    ok(peer, Command::Config, config.len(), config);
    ok(
        peer,
        Command::Memory,
        16,
        &[&table[..], &[7; 4096]].concat(),
    );
    ok(peer, Command::State, 5, b"state");
}

/// A killed daemon leaves no folder, and the next one saves the VM.
#[test]
fn a_vm_is_saved_and_restored() {
    let folder = TempDir::new().unwrap();
    let at = folder.path();
    let (mut daemon, mut peer) = save_daemon(at);
    send(&mut peer);
    daemon.send(Signal::KILL);
    daemon.wait();
    assert_eq!(peer.read(&mut [0]).unwrap_or(0), 0);
    assert!(!at.join("vm").exists());
    std::fs::remove_file(at.join("socket")).unwrap();
    let (mut daemon, mut peer) = save_daemon(at);
    send(&mut peer);
    ok(&mut peer, Command::CompletePaused, 0, &[]);
    assert_eq!(daemon.wait().code(), Some(0));
    assert_eq!(std::fs::read(at.join("vm/memory")).unwrap(), [7; 4096]);

    let socket = at.join("restore");
    let listener = UnixListener::bind(&socket).unwrap();
    let (from, to) = (at.join("vm"), socket.display());
    let line = format!(
        "offload restore --from {} --to {to} --on-demand",
        from.display()
    );
    let mut daemon = self::daemon(&line);
    let (mut peer, _) = listener.accept().unwrap();
    peer.read_exact(&mut [0; FRAME_BYTES]).unwrap();
    let (is_ok, length) = (false, 0);
    peer.write_all(&Response { is_ok, length }.bytes()).unwrap();
    // The other side has refused.
    assert_eq!(daemon.wait().code(), Some(5));
}

#[test]
fn a_signal_ends_the_wait_for_a_vm() {
    let folder = TempDir::new().unwrap();
    let (mut daemon, _peer) = save_daemon(folder.path());
    daemon.send(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(143));
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}
