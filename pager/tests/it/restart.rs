//! Pagers that are killed, and the next one with the same folder.

use crate::random::use_pages;
use crate::shared::{or_skip, whole};
use crate::shared_hostile::{announce, descriptor, file_at};
use crate::vmm::{Manual, Memory, Vmm, Words, content, removals, with_features, word};
use fastrand::Rng;
use lacuna_addr::{Hva, Level, PAGE_SIZE, PageCount};
use lacuna_pager::{Config, Image, Pager, StateFolder, Supervisor};
use lacuna_pager_client::Accesses::User;
use lacuna_pager_client::Client;
use lacuna_skip::test;
use lacuna_source::{Faults, Injected};
use lacuna_sys::{MissingArea, Userfaultfd, VmmMemory};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::mm::{MapFlags, MremapFlags, mremap_fixed};
use rustix::process::{PTracer, Pid, Signal, WaitOptions, kill_process, set_ptracer, waitpid};
use rustix::thread::gettid;
use std::any::Any;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The folder of a pager in a child process.
const FOLDER: &str = "LACUNA_PAGER_FOLDER";
/// The child kills itself when it reports this.
const DIES_AT: &str = "LACUNA_PAGER_DIES_AT";
/// How often the test of random kills kills a pager.
const KILLS: &str = "LACUNA_PAGER_KILLS";
/// Pages of each thread of a VM.
const PAGES: u64 = 48;
const THREADS: u64 = 2;

/// The child. Without its variable this is no test.
#[test]
fn pager_process() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let folder = PathBuf::from(folder);
    let socket = folder.join("socket");
    let state = StateFolder::open(&folder, Supervisor::from_environment().unwrap()).unwrap();
    // The folder's lock says that no other pager serves there.
    let _ = std::fs::remove_file(&socket);
    let dies_at = std::env::var(DIES_AT).ok();
    let report = move |text: &str| {
        if dies_at.as_ref().is_some_and(|at| text.contains(at)) {
            kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
        println!("{text}");
    };
    let config = Config {
        state: Some(Arc::new(state)),
        report: Arc::new(report),
        ..Config::default()
    };
    let pager = Pager::new(config).unwrap();
    let faults = Faults {
        reordering: 0.3,
        ..Faults::latency(Duration::from_micros(50))
    };
    let source = Arc::new(Injected::new(Words, faults).unwrap());
    let image = Image::new(source, PageCount::new(PAGES * THREADS));
    pager
        .serve(UnixListener::bind(&socket).unwrap(), image)
        .unwrap();
    loop {
        thread::park();
    }
}

/// A folder, and the pager that has it.
struct Killed {
    folder: TempDir,
    pager: Option<Child>,
}

impl Killed {
    fn new() -> Self {
        drop(removals());
        // Where Yama is, a process may otherwise take descriptors only from its children. The call
        // fails without Yama.
        let _ = set_ptracer(PTracer::Any);
        let folder = TempDir::new_in("/dev/shm");
        let folder = folder.unwrap_or_else(|error| lacuna_skip::skip_test(error));
        let pager = None;
        let mut this = Self { folder, pager };
        this.start("");
        this
    }

    /// Starts a pager, which kills itself when it reports `dies_at`.
    fn start(&mut self, dies_at: &str) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "restart::pager_process"]);
        command.env(FOLDER, self.folder.path());
        if !dies_at.is_empty() {
            command.env(DIES_AT, dies_at);
        }
        self.pager = Some(command.spawn().unwrap());
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(self.pager.as_ref().unwrap()), signal).unwrap();
    }

    /// Stops all of its threads.
    fn stop(&self) {
        self.send(Signal::STOP);
        let pid = Pid::from_child(self.pager.as_ref().unwrap());
        let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
        assert!(stopped.unwrap().1.stopped());
    }

    /// Kills the pager, and waits until it is dead.
    fn kill(&mut self) {
        let mut pager = self.pager.take().unwrap();
        pager.kill().unwrap();
        pager.wait().unwrap();
    }

    /// Starts the next pager before the killed one is dead. Returns when it is dead: a VMM that
    /// connects to it waits for ever.
    fn restart(&mut self) {
        let mut dead = self.pager.take().unwrap();
        dead.kill().unwrap();
        self.start("");
        dead.wait().unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// The files of VMs.
    fn files(&self) -> usize {
        let all = std::fs::read_dir(self.folder.path()).unwrap();
        let names = all.map(|entry| entry.unwrap().file_name());
        names
            .filter(|name| name.to_string_lossy().starts_with("vm-"))
            .count()
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        if let Some(mut pager) = self.pager.take() {
            let _ = pager.kill();
            let _ = pager.wait();
        }
    }
}

/// Connects as soon as a pager accepts VMs.
fn reach(socket: &Path) -> UnixStream {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match UnixStream::connect(socket) {
            Ok(connection) => return connection,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Connects, and waits until a pager serves this VM.
fn connect(socket: &Path, uffd: Userfaultfd) -> Vmm {
    let memory = Memory::anonymous(PAGES * THREADS, PAGE_SIZE as u64);
    let vmm = Vmm::on(reach(socket), uffd, (memory, 0), Level::L4K);
    assert_eq!(memory.read(0), word(0));
    vmm
}

/// As [`connect`], with the first `pages` pages of shared memory.
fn share(socket: &Path, pages: u64) -> (UnixStream, MissingArea) {
    drop(reach(socket));
    let (connection, file) = file_at(socket);
    let area = MissingArea::of_file(file.as_fd(), pages, descriptor(VmmMemory::File)).unwrap();
    announce(&connection, area.userfaultfd(), area.range(), Level::L4K);
    assert_eq!(area.first_byte(0), content(0)[0]);
    (connection, area)
}

/// Waits until the thread `tid` of this process sleeps.
fn wait_for_sleep(tid: i32) {
    let path = format!("/proc/self/task/{tid}/stat");
    let sleeps = || {
        let stat = std::fs::read_to_string(&path).unwrap();
        !stat.rsplit_once(')').unwrap().1.starts_with(" R")
    };
    while !sleeps() {
        thread::yield_now();
    }
}

/// The pager has read a removal, so its thread has continued. It is killed before it has settled
/// the removed page. The next pager gives zeros there.
#[test]
fn a_removal_that_was_read_is_not_forgotten() {
    const EVENT_REMAP: u64 = 1 << 2;
    const EVENT_REMOVE: u64 = 1 << 3;
    let mut killed = Killed::new();
    killed.kill();
    killed.start("mremap");
    let vmm = connect(&killed.socket(), with_features(EVENT_REMAP | EVENT_REMOVE));
    let memory = vmm.memory;
    killed.stop();
    thread::scope(|scope| {
        // The first event ends the pager, and both are in one read.
        let moves = scope.spawn(move || {
            let (last, to) = (
                memory.at(memory.pages - 1),
                Memory::mapped(1, MapFlags::PRIVATE),
            );
            let (bytes, flags) = (PAGE_SIZE, MremapFlags::MAYMOVE);
            // SAFETY: 1. no thread accesses the two pages.
            unsafe { mremap_fixed(last, bytes, bytes, flags, to.at(0)) }.unwrap();
        });
        poll(&mut [PollFd::new(&vmm.uffd.as_fd(), PollFlags::IN)], None).unwrap();
        let (said, tid) = channel();
        let removes = scope.spawn(move || {
            said.send(gettid().as_raw_nonzero().get()).unwrap();
            memory.discard(5, 1);
        });
        wait_for_sleep(tid.recv().unwrap());
        killed.send(Signal::CONT);
        removes.join().unwrap();
        moves.join().unwrap();
    });
    assert!(!killed.pager.take().unwrap().wait().unwrap().success());
    killed.start("");
    assert_eq!(memory.read_whole(5), 0);
    assert_eq!(memory.read_whole(6), word(6));
}

/// The pager has placed a page, and is killed before it has settled the page. The page is as the VM
/// leaves it: its content stays, and once it is taken away, it has zeros.
#[test]
fn a_placed_page_that_is_not_settled_can_be_taken_away() {
    let mut killed = Killed::new();
    let vmm = connect(&killed.socket(), removals());
    let memory = vmm.memory;
    killed.kill();
    for page in [3, 4] {
        let at = Hva::new(memory.start + page * PAGE_SIZE as u64);
        vmm.uffd.copy(&content(page), at).unwrap();
    }
    // No pager runs.
    let waits = thread::spawn(move || memory.read_whole(7));
    let removes = thread::spawn(move || memory.discard(4, 1));
    killed.start("");
    removes.join().unwrap();
    assert_eq!(waits.join().unwrap(), word(7));
    assert_eq!(
        [3, 4, 0].map(|page| memory.read_whole(page)),
        [word(3), 0, word(0)]
    );
    // The folder forgets the VM at the restart behind its end: its connection was lost.
    assert_eq!(killed.files(), 1);
    drop(vmm);
    killed.restart();
    let other = connect(&killed.socket(), removals());
    assert_eq!(killed.files(), 1);
    drop(other);
    while killed.files() > 0 {
        thread::yield_now();
    }
}

/// The mapped file outlives its pager. The next pager maps its pages again, copies the others, and
/// shares a new file with new clones.
#[test]
fn a_clone_of_shared_pages_is_taken_back() {
    let mut killed = Killed::new();
    let path = killed.socket();
    let clone = || or_skip(Client::connect(&path).unwrap().memory(User, |_| {}));
    let (_connection, area) = share(&path, 8);
    let other = clone();
    for page in 0..4 {
        assert_eq!(area.first_byte(page), content(page)[0]);
        // The next page is in the file, and this clone has not mapped it.
        assert_eq!(whole(&other, page + 1), word(page + 1));
    }
    area.discard(1, 1).unwrap();
    area.touch(2);
    killed.kill();
    // The kernel reclaims pages without an event too.
    area.userfaultfd().unregister(area.range()).unwrap();
    area.discard(3, 1).unwrap();
    // SAFETY: 1. as `MissingArea` has registered it.
    unsafe { area.userfaultfd().register(area.range()) }.unwrap();
    killed.start("");
    let of = |page| content(page)[0];
    let found = [0, 1, 2, 3, 4, 5].map(|page| area.first_byte(page));
    assert_eq!(found, [of(0), 0, 1, of(3), of(4), of(5)]);
    area.discard(3, 3).unwrap();
    let found = [3, 4, 5, 6].map(|page| area.first_byte(page));
    assert_eq!(found, [0, 0, 0, of(6)]);
    let later = clone();
    for page in 0..8 {
        assert_eq!(
            (whole(&other, page), whole(&later, page)),
            (word(page), word(page))
        );
    }
}

/// A pager with another image at the same socket leaves the VM alone: its pages would be wrong. The
/// pager with the VM's own image takes it back.
#[test]
fn a_vm_gets_the_pages_of_its_own_image() {
    let mut killed = Killed::new();
    let vmm = connect(&killed.socket(), removals());
    killed.kill();
    {
        let supervisor = Supervisor::from_environment().unwrap();
        let state = StateFolder::open(killed.folder.path(), supervisor).unwrap();
        std::fs::remove_file(killed.socket()).unwrap();
        let (says, said) = channel();
        let config = Config {
            state: Some(Arc::new(state)),
            report: Arc::new(move |text| says.send(text.to_owned()).unwrap()),
            ..Config::default()
        };
        let pager = Pager::new(config).unwrap();
        let listener = UnixListener::bind(killed.socket()).unwrap();
        let image = Image::new(Arc::new(Manual::default()), PageCount::new(PAGES * THREADS));
        pager.serve(listener, image).unwrap();
        let said = said.try_recv().unwrap();
        assert!(said.contains("are not those of a test"), "{said}");
        assert_eq!(pager.connections(), 0);
    }
    killed.start("");
    assert_eq!(vmm.memory.read_whole(6), word(6));
}

/// Pagers are killed at random moments, some while they start. Each byte of several VMs, one with
/// shared pages, is compared with a model. The longest wait of a VM is printed.
#[test]
fn every_byte_is_right_with_killed_pagers() {
    let kills = std::env::var(KILLS).map_or(8, |kills| kills.parse().unwrap());
    let mut killed = Killed::new();
    // A VMM that is not yet served waits for ever if its pager is killed.
    let (calm, over) = (RwLock::new(()), AtomicBool::new(false));
    let socket = killed.socket();
    let run = |seed: u64| {
        let (mut longest, mut vms) = (Duration::ZERO, 0);
        while !over.load(Ordering::Relaxed) {
            let connecting = calm.read().unwrap();
            let (memory, vmm): (_, Box<dyn Any>) = if seed == 0 {
                let vmm = share(&socket, PAGES * THREADS);
                let (start, pages) = (vmm.1.range().start().get(), vmm.1.range().pages());
                (Memory { start, pages }, Box::new(vmm))
            } else {
                let vmm = connect(&socket, removals());
                (vmm.memory, Box::new(vmm))
            };
            drop(connecting);
            vms += 1;
            thread::scope(|scope| {
                let threads = [0, 1].map(|thread| {
                    let seed = seed << 32 | vms << 1 | thread;
                    scope.spawn(move || use_pages(memory, (thread * PAGES, false), seed))
                });
                let waits = threads.map(|thread| thread.join().unwrap());
                longest = waits.into_iter().fold(longest, Duration::max);
            });
            drop(vmm);
        }
        (longest, vms)
    };
    let mut rng = Rng::with_seed(7);
    let (longest, vms) = thread::scope(|scope| {
        let vms = [0, 1, 2].map(|seed| scope.spawn(move || run(seed)));
        for kill in 0..kills {
            thread::sleep(Duration::from_micros(rng.u64(0..30_000)));
            let connecting = calm.write().unwrap();
            killed.restart();
            if kill % 4 == 3 {
                thread::sleep(Duration::from_micros(rng.u64(0..20_000)));
                killed.restart();
            }
            drop(connecting);
        }
        over.store(true, Ordering::Relaxed);
        let all = vms.map(|vms| vms.join().unwrap()).into_iter();
        all.fold((Duration::ZERO, 0), |sum, one| {
            (sum.0.max(one.0), sum.1 + one.1)
        })
    });
    println!("{kills} kills, {vms} VMs, longest wait {longest:?}");
}
