//! The end of a VM, by its connection, by its process, and by the pager.

use crate::vmm::{Bed, Manual, Memory, Vmm, Words, content, removals, word};
use lacuna_addr::{Hva, HvaRange, Level, PAGE_SIZE};
use lacuna_pager::WhenLost;
use lacuna_skip::test;
use lacuna_source::{Answer, HandlerRegion, SourcePage, send_regions};
use lacuna_sys::Userfaultfd;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;

/// The pager's socket, for a child that is a VMM; or empty, for one that does not connect.
const CHILD: &str = "LACUNA_PAGER_CHILD";

/// A VMM in a child process. It ends with the test.
struct ChildVmm(Child, BufReader<ChildStdout>);

impl ChildVmm {
    fn start(socket: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "ends::child_process", "--nocapture"]);
        let command = command.env(CHILD, socket).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self(child, lines)
    }

    /// The numbers that it prints: its descriptor, and the address of its page.
    fn said(&mut self) -> (i32, u64) {
        let mut lines = (&mut self.1).lines().map_while(Result::ok);
        let numbers = lines.find_map(|line| {
            let (_, numbers) = line.split_once("child ")?;
            let (fd, start) = numbers.split_once(' ')?;
            Some((fd.parse().ok()?, start.trim().parse().ok()?))
        });
        numbers.expect("the child gets a userfaultfd, as this process does")
    }

    /// The signal that ends it.
    fn signal(&mut self) -> Option<i32> {
        self.0.wait().unwrap().signal()
    }
}

impl Drop for ChildVmm {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The child: it touches a page of its memory. Without its variable this is no test.
#[test]
fn child_process() {
    let Ok(socket) = std::env::var(CHILD) else {
        return;
    };
    let uffd = removals();
    let memory = Memory::anonymous(2, PAGE_SIZE as u64);
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { uffd.register(memory.range()) }.unwrap();
    let socket = (!socket.is_empty()).then(|| UnixStream::connect(socket).unwrap());
    if let Some(socket) = &socket {
        send_regions(socket, &[region(memory.range())], uffd.as_fd()).unwrap();
    }
    println!("child {} {}", uffd.as_fd().as_raw_fd(), memory.start);
    memory.read(1);
}

fn region(memory: HvaRange) -> HandlerRegion {
    HandlerRegion {
        memory,
        first: SourcePage(0),
        page: Level::L4K,
    }
}

/// The requests of a VM whose connection has ended are late, and the pager has forgotten it.
#[test]
fn a_hang_up_ends_a_vm() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 2);
    let vmm = Vmm::connect(&bed, uffd, 0, 2);
    let memory = vmm.memory;
    let waits = thread::spawn(move || memory.read_whole(0));
    let request = source.next();
    assert_eq!(bed.pager.stats().vms, 1);
    // Its memory is no longer registered, so the thread continues.
    vmm.uffd.unregister(memory.range()).unwrap();
    assert_eq!(waits.join().unwrap(), 0);
    drop(vmm);
    bed.wait("the end", |pager| pager.stats().vms == 0);
    // The unanswered request keeps nothing of the VM: the image and this test have the source.
    bed.wait("its memory", |_| Arc::strong_count(&source) == 2);
    assert_eq!(request.provide(&content(0)), Answer::Late);
    let stats = bed.pager.stats();
    assert_eq!((stats.counts.faults, stats.counts.lost), (1, 0));
    assert_eq!(bed.said(), [""; 0]);
}

/// The process has ended, and its connection is open in another one: the kernel's answer to a
/// placement ends the VM.
#[test]
fn an_ended_process_ends_its_vm() {
    drop(removals());
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 2);
    let mut child = ChildVmm::start("");
    let (fd, start) = child.said();
    let uffd = pidfd_open(Pid::from_child(&child.0), PidfdFlags::empty())
        .and_then(|pidfd| pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty()));
    let uffd = uffd.unwrap_or_else(|errno| lacuna_skip::skip_test(errno));
    let socket = UnixStream::connect(&bed.path).unwrap();
    let memory = HvaRange::new(Hva::new(start), 2).unwrap();
    send_regions(&socket, &[region(memory)], uffd.as_fd()).unwrap();
    assert!(Userfaultfd::try_from(uffd).is_ok());
    let request = source.next();
    drop(child);
    assert_eq!(bed.pager.stats().vms, 1);
    let _ = request.provide(&content(1));
    // The answered request ends while the VM may still be there: that is no loss.
    drop(request);
    bed.wait("the end", |pager| pager.stats().vms == 0);
    assert_eq!(bed.pager.stats().counts.lost, 0);
    assert_eq!(bed.said(), [""; 0]);
}

/// The policy ends the process whose page is lost, and no other.
#[test]
fn a_lost_page_kills_its_vmm() {
    drop(removals());
    let source = Arc::new(Manual::default());
    let bed = Bed::losing(source.clone(), 2, WhenLost::Kill);
    let mut child = ChildVmm::start(bed.path.to_str().unwrap());
    child.said();
    let lost = source.next();
    let mut other = ChildVmm::start(bed.path.to_str().unwrap());
    other.said();
    let kept = source.next();
    assert_eq!(bed.pager.vms()[0].pid, Some(child.0.id() as i32));
    assert_eq!(lost.fail("it burnt"), Answer::Taken);
    assert_eq!(child.signal(), Some(9));
    bed.wait("the end", |pager| pager.stats().vms == 1);
    assert_eq!(kept.provide(&content(1)), Answer::Taken);
    // Its page has come, so the child ends by itself.
    assert_eq!(other.signal(), None);
    bed.wait("the end", |pager| pager.stats().vms == 0);
}

/// A dropped pager serves its VMs to their end, and accepts no other.
#[test]
fn a_dropped_pager_serves_on() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), 2);
    let vmm = Vmm::connect(&bed, uffd, 0, 2);
    assert_eq!(vmm.memory.read_whole(0), word(0));
    let path = bed.path.clone();
    drop(bed);
    assert!(UnixStream::connect(&path).is_err());
    assert_eq!(vmm.memory.read_whole(1), word(1));
    vmm.memory.discard(0, 1);
    assert_eq!(vmm.memory.read_whole(0), 0);
}

/// A VMM that is accepted, and has not sent its message, needs the pager. The pager serves it also
/// after its acceptance of others has ended.
#[test]
fn an_accepted_vmm_is_served_after_the_end_of_acceptance() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), 2);
    let memory = Memory::anonymous(2, PAGE_SIZE as u64);
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { uffd.register(memory.range()) }.unwrap();
    let socket = UnixStream::connect(&bed.path).unwrap();
    bed.wait("the connection", |pager| pager.connections() == 1);
    bed.pager.stop_accepting();
    // A child of another test has the listening socket until it calls execve(2).
    bed.wait("a refused connection", |_| {
        UnixStream::connect(&bed.path).is_err()
    });
    assert_eq!((bed.pager.connections(), bed.pager.stats().vms), (1, 0));
    send_regions(&socket, &[region(memory.range())], uffd.as_fd()).unwrap();
    assert_eq!(memory.read_whole(1), word(1));
    drop(socket);
    bed.wait("the end", |pager| pager.connections() == 0);
}
