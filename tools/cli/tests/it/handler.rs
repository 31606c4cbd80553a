//! `lacuna run --pages-from handler:SOCKET`: another process has the userfaultfd and fills the
//! guest's memory, as Firecracker's handlers do. The process is this test's program, started again
//! for the test `handler_process`.

use lacuna::PAGE_SIZE;
use lacuna_addr::Hva;
use lacuna_skip::test;
use lacuna_sys::{Errno, Userfaultfd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{BufRead as _, BufReader, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, thread};
use tempfile::TempDir;

/// Where the handler listens.
const SOCKET: &str = "LACUNA_TEST_HANDLER";
/// The number of pages after which it ends itself.
const DIES_AFTER: &str = "LACUNA_TEST_HANDLER_DIES_AFTER";

/// A handler process; it ends with the test.
pub(crate) struct Handler(Child);

impl Handler {
    /// Starts a handler, and waits until it listens.
    pub(crate) fn start(socket: &Path, dies_after: Option<u64>) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "handler::handler_process", "--nocapture"]);
        command.env(SOCKET, socket).stdout(Stdio::null());
        if let Some(pages) = dies_after {
            command.env(DIES_AFTER, pages.to_string());
        }
        let handler = Self(command.spawn().unwrap());
        while !socket.exists() {
            thread::sleep(Duration::from_millis(1));
        }
        handler
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A region, as the message has it.
struct Region {
    base: u64,
    size: u64,
}

/// The handler's process; without its variable this is no test.
#[test]
fn handler_process() {
    let Some(socket) = env::var_os(SOCKET) else {
        return;
    };
    let dies_after = env::var(DIES_AFTER).ok().map(|text| text.parse().unwrap());
    let listener = UnixListener::bind(socket).unwrap();
    let (mut vmm, _) = listener.accept().unwrap();
    let (regions, uffd) = receive(&vmm);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| fill(&uffd, &regions, dies_after, &over));
        // The VMM sends no other byte, and closes the connection when the guest ends.
        let _ = vmm.read(&mut [0]);
        over.store(true, Ordering::Relaxed);
    });
}

fn receive(vmm: &UnixStream) -> (Vec<Region>, Userfaultfd) {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut body = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(vmm, &mut body, &mut rights, RecvFlags::CMSG_CLOEXEC).unwrap();
    let fds: Vec<OwnedFd> = rights
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    let [uffd]: [OwnedFd; 1] = fds.try_into().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&bytes[..received.bytes]).unwrap();
    let regions = json.as_array().unwrap().iter().map(|region| Region {
        base: region["base_host_virt_addr"].as_u64().unwrap(),
        size: region["size"].as_u64().unwrap(),
    });
    (regions.collect(), Userfaultfd::try_from(uffd).unwrap())
}

/// Fills pages with zeros: each twice, and the last fault of a read first.
fn fill(uffd: &Userfaultfd, regions: &[Region], dies_after: Option<u64>, over: &AtomicBool) {
    let (mut faults, mut filled) = (Vec::new(), 0);
    while !over.load(Ordering::Relaxed) {
        uffd.faults(&mut faults).unwrap();
        for fault in faults.drain(..).rev() {
            let page = fault.page.get();
            let known = regions
                .iter()
                .any(|at| page.wrapping_sub(at.base) < at.size);
            assert!(known, "{page:#x}");
            copy(uffd, fault.page);
            copy(uffd, fault.page);
            filled += 1;
            if dies_after == Some(filled) {
                std::process::abort();
            }
        }
        thread::sleep(Duration::from_micros(20));
    }
}

fn copy(uffd: &Userfaultfd, page: Hva) {
    match uffd.copy(&[0; PAGE_SIZE], page) {
        Ok(()) => {}
        // The page is there: this is the second answer, or the second fault on it.
        Err(Errno::EXIST) => uffd.wake(page).unwrap(),
        // The VMM has ended.
        Err(Errno::NOENT | Errno::SRCH | Errno::AGAIN) => {}
        Err(errno) => panic!("{errno}"),
    }
}

/// A run of a guest whose memory the handler fills.
fn run(socket: &Path, options: &str) -> Command {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    if let Err(errno) = Userfaultfd::open_user() {
        lacuna_skip::skip_test(errno);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    let line = format!("run verify --memory 32M --append rounds=1 --json - {options}");
    command.args(line.split_whitespace());
    let from = format!("handler:{}", socket.display());
    command.args(["--pages-from", &from]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn another_process_fills_a_guests_memory() {
    let folder = TempDir::new().unwrap();
    for options in ["", "--exit-on-missing", "--exit-on-missing --apf off"] {
        let socket = folder.path().join(format!("handler{}", options.len()));
        let _handler = Handler::start(&socket, None);
        let ran = run(&socket, options).output().unwrap();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(0), "{options}: {errors}");
        let json: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
        let pages = &json["last"]["pages"];
        assert!(pages["present"].as_u64().unwrap() > 2048, "{pages}");
        assert_eq!(pages["lost"], 0, "{pages}");
    }
}

/// The guest never reads zeros in place of the pages that the dead handler has not filled.
#[test]
fn a_handler_that_dies_ends_the_run() {
    let folder = TempDir::new().unwrap();
    for dies_after in [1, 700, 2000] {
        let socket = folder.path().join(format!("handler{dies_after}"));
        let _handler = Handler::start(&socket, Some(dies_after));
        let ran = run(&socket, "").output().unwrap();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(
            ran.status.code(),
            Some(3),
            "after {dies_after} pages: {errors}"
        );
        let told = format!("{}{errors}", String::from_utf8_lossy(&ran.stdout));
        let reason = "has closed its connection or died";
        assert!(told.contains(reason), "after {dies_after} pages: {told}");
    }
}

/// With patience, the pages stay missing, and the run can be ended all the same.
#[test]
fn a_run_that_waits_for_a_dead_handler_can_be_ended() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("handler");
    let mut handler = Handler::start(&socket, Some(700));
    let mut waits = run(&socket, "--patience forever").spawn().unwrap();
    handler.0.wait().unwrap();
    // The run says why the guest waits, and keeps waiting.
    let mut errors = BufReader::new(waits.stderr.take().unwrap()).lines();
    let told = errors.find(|line| line.as_ref().unwrap().contains("end the run"));
    let told = told.expect("the run ends, and does not wait").unwrap();
    let reason = "has closed its connection or died; no other process can fill";
    assert!(told.contains(reason), "{told}");
    assert!(waits.try_wait().unwrap().is_none(), "it waits");
    let pid = rustix::process::Pid::from_child(&waits);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(waits.wait().unwrap().code(), Some(130));
}

#[test]
fn a_handler_that_is_not_there_is_refused() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("nothing");
    let ran = run(&socket, "").output().unwrap();
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(3), "{errors}");
    assert!(errors.contains("start it first"), "{errors}");
}

/// The guest's vCPUs wait in the kernel for the other process, and the run ends with it.
#[test]
fn another_process_fills_a_guests_memory_on_kvm() {
    if let Err(reason) = lacuna::kvm::available() {
        lacuna_skip::skip_test(reason);
    }
    let folder = TempDir::new().unwrap();
    for (dies_after, code) in [(None, 0), (Some(1), 3), (Some(700), 3)] {
        let socket = folder.path().join(format!("handler{dies_after:?}"));
        let _handler = Handler::start(&socket, dies_after);
        let ran = run(&socket, "--backend kvm").output().unwrap();
        let told = [&*ran.stdout, &*ran.stderr]
            .map(String::from_utf8_lossy)
            .concat();
        assert_eq!(ran.status.code(), Some(code), "{dies_after:?}: {told}");
        let reason = "has closed its connection or died";
        assert_eq!(told.contains(reason), dies_after.is_some(), "{told}");
    }
}
