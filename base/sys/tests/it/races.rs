//! Races of userfaultfd, each provoked against the kernel: the results of its calls, and the right
//! reaction to each result.

use crate::userfaultfd::event_buffer;
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use lacuna_skip::test;
use lacuna_sys::{Errno, Event, Minor, Partial, TakenPages, Userfaultfd, Waiters};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
const SEVENS: u64 = 0x0707_0707_0707_0707;

/// Memory that stays mapped for ever: a test may leave threads behind.
struct Memory {
    start: u64,
    pages: u64,
}

impl Memory {
    fn anonymous(pages: u64) -> Self {
        let bytes = pages as usize * PAGE_SIZE;
        // SAFETY: 1. a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, READ_WRITE, MapFlags::PRIVATE) };
        let start = at.unwrap().expose_provenance() as u64;
        Self { start, pages }
    }

    fn file(pages: u64) -> (Self, OwnedFd) {
        let file = memfd_create("races", MemfdFlags::CLOEXEC).unwrap();
        let bytes = pages as usize * PAGE_SIZE;
        ftruncate(&file, bytes as u64).unwrap();
        let null = ptr::null_mut();
        // SAFETY: 1. a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(null, bytes, READ_WRITE, MapFlags::SHARED, &file, 0) };
        let start = at.unwrap().expose_provenance() as u64;
        (Self { start, pages }, file)
    }

    fn range(&self) -> HvaRange {
        HvaRange::new(Hva::new(self.start), self.pages).unwrap()
    }

    fn page(&self, page: u64) -> Hva {
        Hva::new(self.start + page * PAGE_SIZE as u64)
    }

    fn one(&self, page: u64) -> HvaRange {
        HvaRange::new(self.page(page), 1).unwrap()
    }

    fn word(&self, page: u64) -> &'static AtomicU64 {
        let at = ptr::with_exposed_provenance_mut(self.page(page).get() as usize);
        // SAFETY: 1. in the memory, which stays mapped.
        unsafe { AtomicU64::from_ptr(at) }
    }

    fn read(&self, page: u64) -> u64 {
        self.word(page).load(Ordering::SeqCst)
    }

    fn drop_page(&self, page: u64) {
        let at = ptr::with_exposed_provenance_mut(self.page(page).get() as usize);
        // SAFETY: 1. in the memory, whose bytes are accessed by atomics alone.
        unsafe { madvise(at, PAGE_SIZE, Advice::LinuxDontNeed) }.unwrap();
    }

    fn registered(self, uffd: &Userfaultfd) -> Self {
        // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
        unsafe { uffd.register(self.range()) }.unwrap();
        self
    }
}

/// Returns the descriptor. Skips the test if this process gets none, or the kernel is too old.
fn or_skip(uffd: Result<Userfaultfd, Errno>) -> Userfaultfd {
    uffd.unwrap_or_else(|errno| match errno {
        Errno::PERM | Errno::NOSYS | Errno::INVAL => lacuna_skip::skip_test(errno),
        errno => panic!("{errno}"),
    })
}

fn open() -> Userfaultfd {
    or_skip(Userfaultfd::open_user())
}

/// The next faults, at least one.
fn wait_for_fault(uffd: &Userfaultfd) -> Vec<Hva> {
    let mut faults = Vec::new();
    while faults.is_empty() {
        uffd.faults(&mut faults).unwrap();
        thread::yield_now();
    }
    faults.iter().map(|fault| fault.page).collect()
}

/// Many threads fill one page: one fill succeeds, the others get EEXIST.
#[test]
fn one_of_many_fills_succeeds() {
    let uffd = open();
    let memory = Memory::anonymous(200).registered(&uffd);
    let done = AtomicUsize::new(0);
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for filler in 1..=4_u8 {
            let (uffd, memory, done, start) = (&uffd, &memory, &done, &start);
            scope.spawn(move || {
                start.wait();
                for page in 0..memory.pages {
                    let content = [[filler; PAGE_SIZE]];
                    match uffd.place(&content, memory.page(page), Waiters::LeaveAsleep) {
                        Ok(()) => {
                            done.fetch_add(1, Ordering::SeqCst);
                            assert_eq!(memory.read(page), u64::from_ne_bytes([filler; 8]));
                        }
                        Err(Partial { done: 0, errno }) => assert_eq!(errno, Errno::EXIST),
                        Err(partial) => panic!("{partial:?}"),
                    }
                }
            });
        }
    });
    assert_eq!(done.into_inner() as u64, memory.pages);
}

/// A fill without a wake-up, then a fill that finds the page: neither wakes the waiting thread. An
/// explicit wake-up does.
#[test]
fn a_fill_that_finds_a_page_wakes_no_thread() {
    let uffd = open();
    let memory = Memory::anonymous(50).registered(&uffd);
    let stays_asleep = |page| {
        thread::scope(|scope| {
            let reader = scope.spawn(|| memory.read(page));
            assert_eq!(wait_for_fault(&uffd), [memory.page(page)]);
            let place = |waiters| uffd.place(&[[7; PAGE_SIZE]], memory.page(page), waiters);
            assert_eq!(place(Waiters::LeaveAsleep), Ok(()));
            let errno = Errno::EXIST;
            assert_eq!(place(Waiters::Wake), Err(Partial { done: 0, errno }));
            // The reader would continue within microseconds if it were awake.
            thread::sleep(std::time::Duration::from_millis(20));
            let is_asleep = !reader.is_finished();
            uffd.wake(memory.page(page)).unwrap();
            assert_eq!(reader.join().unwrap(), SEVENS);
            is_asleep
        })
    };
    // The kernel reports a fault before the reader sleeps. If the page arrives between the two, the
    // reader does not sleep at all, and the next page is tried.
    let one_slept = (0..memory.pages).any(stays_asleep);
    assert!(one_slept, "EEXIST wakes no thread");
}

/// Two threads wait for one page: one fill serves both.
#[test]
fn one_fill_serves_all_that_wait() {
    let uffd = open();
    let memory = Memory::anonymous(50).registered(&uffd);
    for page in 0..memory.pages {
        thread::scope(|scope| {
            let readers = [(); 3].map(|()| scope.spawn(|| memory.read(page)));
            let mut waiting = 0;
            while waiting < readers.len() {
                waiting += wait_for_fault(&uffd).len();
            }
            uffd.copy(&[7; PAGE_SIZE], memory.page(page)).unwrap();
            for reader in readers {
                assert_eq!(reader.join().unwrap(), SEVENS);
            }
        });
    }
}

/// Fills race with a thread that discards the page. Each fill succeeds or finds a page.
#[test]
fn fills_beside_discards() {
    let uffd = open();
    let memory = Memory::anonymous(1).registered(&uffd);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                memory.drop_page(0);
            }
        });
        let mut placed = 0;
        // Many fills succeed: a discarded page is missing again.
        while placed < 500 {
            match uffd.place(&[[7; PAGE_SIZE]], memory.page(0), Waiters::Wake) {
                Ok(()) => placed += 1,
                Err(partial) => assert_eq!(partial.errno, Errno::EXIST),
            }
        }
        over.store(true, Ordering::SeqCst);
    });
    let _ = uffd.copy(&[7; PAGE_SIZE], memory.page(0));
    assert_eq!(memory.read(0), SEVENS);
}

/// While a removal is unread, every fill gets EAGAIN, and the removing thread waits. After the
/// event is read, both continue, and the page is missing again.
#[test]
fn fills_wait_until_a_removal_is_read() {
    let uffd = or_skip(Userfaultfd::open_user_with_removals());
    let memory = Memory::anonymous(4).registered(&uffd);
    uffd.copy(&[7; PAGE_SIZE], memory.page(1)).unwrap();
    thread::scope(|scope| {
        let remover = scope.spawn(|| memory.drop_page(1));
        let place = |page| uffd.place(&[[8; PAGE_SIZE]], memory.page(page), Waiters::Wake);
        // The other pages are missing, so only the removal can refuse a fill.
        let mut tries = 0;
        while place(2).is_ok() {
            tries += 1;
            assert!(tries < 1_000_000, "no removal came");
            memory_without_event(&uffd, &memory, 2);
        }
        let errno = Errno::AGAIN;
        for page in [0, 3] {
            assert_eq!(place(page), Err(Partial { done: 0, errno }));
        }
        let poisoned = uffd.poison(memory.one(0));
        assert!(
            matches!(poisoned, Err(Errno::AGAIN | Errno::INVAL)),
            "{poisoned:?}"
        );
        assert!(!remover.is_finished());
        let (buffer, mut events) = (event_buffer(), Vec::new());
        while events.is_empty() {
            uffd.events(&buffer, &mut events).unwrap();
        }
        // As a later process finds it.
        let mut changes = Event::changes(&buffer);
        let change = changes.next();
        assert!(matches!(change, Some(Event::Removed(range)) if range == memory.one(1)));
        assert!(changes.next().is_none());
        assert!(
            matches!(events[..], [Event::Removed(range)] if range == memory.one(1)),
            "{events:?}"
        );
        remover.join().unwrap();
        // The kernel counts the removal as over a moment after its thread continues.
        while place(0).is_err() {
            thread::yield_now();
        }
        assert_eq!(place(1), Ok(()), "the page was taken away");
    });
}

/// Makes page `page` missing again by a new registration, which sends no event.
fn memory_without_event(uffd: &Userfaultfd, memory: &Memory, page: u64) {
    uffd.unregister(memory.one(page)).unwrap();
    memory.drop_page(page);
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { uffd.register(memory.one(page)) }.unwrap();
}

/// A fault may be read before the removal that caused it: the reader of the events sees the
/// removal later, and answers the fault with zeros then.
#[test]
fn removals_and_faults_are_answered_in_order() {
    let uffd = or_skip(Userfaultfd::open_user_with_removals());
    let memory = Memory::anonymous(1).registered(&uffd);
    let rounds = 300;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let handler = scope.spawn(|| {
            let (mut removed, mut waiting, mut events) = (0, Vec::new(), Vec::new());
            let buffer = event_buffer();
            while !over.load(Ordering::SeqCst) {
                uffd.events(&buffer, &mut events).unwrap();
                for event in events.drain(..) {
                    match event {
                        Event::Removed(range) => {
                            assert_eq!(range, memory.range());
                            removed += 1;
                        }
                        Event::Fault(fault) => waiting.push(fault.page),
                        other => panic!("{other:?}"),
                    }
                }
                // Before the first removal the page has content, afterwards zeros.
                let content = if removed == 0 {
                    [7; PAGE_SIZE]
                } else {
                    [0; PAGE_SIZE]
                };
                waiting.retain(|&page| match uffd.copy(&content, page) {
                    Ok(()) => false,
                    Err(Errno::EXIST) => {
                        uffd.wake(page).unwrap();
                        false
                    }
                    // A removal is unread: read it, then try again.
                    Err(Errno::AGAIN) => true,
                    Err(errno) => panic!("{errno}"),
                });
            }
            removed
        });
        assert_eq!(memory.read(0), SEVENS);
        for round in 1..=rounds {
            memory.word(0).store(round, Ordering::SeqCst);
            memory.drop_page(0);
            assert_eq!(memory.read(0), 0, "round {round}: the old content is gone");
        }
        over.store(true, Ordering::SeqCst);
        assert_eq!(handler.join().unwrap(), rounds);
    });
}

/// A run stops at a present page and returns how far it came. Further runs place the rest.
#[test]
fn a_batch_is_continued_behind_a_page_that_is_there() {
    let uffd = open();
    let memory = Memory::anonymous(512).registered(&uffd);
    let there = [3, 4, 100, 511];
    for page in there {
        uffd.copy(&[7; PAGE_SIZE], memory.page(page)).unwrap();
    }
    let run = vec![[8; PAGE_SIZE]; 512];
    let (mut at, mut stops) = (0, Vec::new());
    while at < run.len() {
        match uffd.place(&run[at..], memory.page(at as u64), Waiters::LeaveAsleep) {
            Ok(()) => break,
            Err(Partial { done, errno }) => {
                assert_eq!(errno, Errno::EXIST);
                stops.push((at + done) as u64);
                at += done + 1;
            }
        }
    }
    assert_eq!(stops, there);
    for page in 0..512 {
        let expected = if there.contains(&page) { 7 } else { 8 };
        assert_eq!(memory.read(page), u64::from_ne_bytes([expected; 8]));
    }
}

/// A fill of an unregistered range gets ENOENT, also in the middle of a run.
#[test]
fn a_run_ends_where_the_registration_does() {
    let uffd = open();
    let memory = Memory::anonymous(8).registered(&uffd);
    uffd.unregister(HvaRange::new(memory.page(4), 4).unwrap())
        .unwrap();
    let placed = uffd.place(&[[7; PAGE_SIZE]; 8], memory.page(0), Waiters::Wake);
    let errno = Errno::NOENT;
    assert!(
        matches!(placed, Err(Partial { done: 0 | 4, errno: at }) if at == errno),
        "{placed:?}"
    );
    assert_eq!(memory.read(6), 0);
}

/// A fill for an ended process gets ESRCH.
#[test]
fn the_process_has_ended() {
    if std::env::var_os(CHILD).is_some() {
        return be_a_child();
    }
    let (uffd, page) = match descriptor_of_an_ended_process() {
        Ok(found) => found,
        Err(why) => return lacuna_skip::skip(why),
    };
    let late = uffd.place(&[[7; PAGE_SIZE]], page, Waiters::Wake);
    let errno = Errno::SRCH;
    assert_eq!(late, Err(Partial { done: 0, errno }));
    let mut faults = Vec::new();
    assert_eq!(uffd.faults(&mut faults), Ok(()), "no event says so");
    assert_eq!(faults, []);
}

/// A thread touches a page while another thread poisons it, and continues after wake-ups. One
/// wake-up may precede the thread's sleep.
#[test]
fn poison_beside_faults() {
    let uffd = open();
    let memory = Memory::anonymous(1).registered(&uffd);
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    let taken = unsafe { TakenPages::watch(memory.range()) }.unwrap();
    match uffd.poison(memory.one(0)) {
        Err(Errno::INVAL) => return lacuna_skip::skip("UFFDIO_POISON needs Linux 6.6"),
        poisoned => poisoned.unwrap(),
    }
    for round in 0..300 {
        // A signal has replaced the page by an unregistered one.
        let _ = memory.read(0);
        assert!(taken.count() > round);
        memory.drop_page(0);
        // SAFETY: 1. as above.
        unsafe { uffd.register(memory.range()) }.unwrap();
        thread::scope(|scope| {
            let reader = scope.spawn(|| memory.read(0));
            while uffd.poison(memory.one(0)).is_err() {
                thread::yield_now();
            }
            while !reader.is_finished() {
                // The wake-up can fail only for a wrong address.
                uffd.wake(memory.page(0)).unwrap();
                thread::yield_now();
            }
        });
    }
}

/// An unmapped page of the file waits for UFFDIO_CONTINUE. The call fails for a page that the file
/// lacks (a hole). For a mapped page its error is harmless.
#[test]
fn pages_of_a_file_are_continued() {
    let uffd = or_skip(Userfaultfd::open_user_shared(Minor::Waits));
    let (memory, file) = Memory::file(8);
    let memory = memory.registered(&uffd);
    pwrite(&file, &[7; 3 * PAGE_SIZE], 0).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| memory.read(1));
        assert_eq!(wait_for_fault(&uffd), [memory.page(1)]);
        assert_eq!(uffd.resume(memory.one(1), Waiters::LeaveAsleep), Ok(1));
        uffd.wake(memory.page(1)).unwrap();
        assert_eq!(reader.join().unwrap(), SEVENS);
    });
    assert_eq!(
        uffd.resume(memory.one(1), Waiters::LeaveAsleep),
        Err(Errno::EXIST)
    );
    assert_eq!(
        uffd.resume(memory.one(5), Waiters::LeaveAsleep),
        Err(Errno::FAULT)
    );
    // The run ends at the first page that is mapped or not in the file.
    assert_eq!(uffd.resume(memory.range(), Waiters::LeaveAsleep), Ok(1));
    let rest = HvaRange::new(memory.page(2), 6).unwrap();
    assert_eq!(uffd.resume(rest, Waiters::LeaveAsleep), Ok(1));
    assert_eq!(memory.read(2), SEVENS);
    assert_eq!(uffd.copy(&[8; PAGE_SIZE], memory.page(5)), Ok(()));
    assert_eq!(
        uffd.copy(&[8; PAGE_SIZE], memory.page(2)),
        Err(Errno::EXIST)
    );
}

/// Write-protected pages: a write waits and is reported; a read does not.
#[test]
fn writes_wait_for_a_protected_page() {
    let uffd = or_skip(Userfaultfd::open_protecting());
    let memory = Memory::anonymous(2).registered(&uffd);
    for page in 0..2 {
        uffd.copy(&[7; PAGE_SIZE], memory.page(page)).unwrap();
    }
    uffd.protect(memory.one(1)).unwrap();
    assert_eq!(memory.read(1), SEVENS);
    memory.word(0).store(1, Ordering::SeqCst);
    thread::scope(|scope| {
        let writer = scope.spawn(|| memory.word(1).store(9, Ordering::SeqCst));
        assert_eq!(wait_for_fault(&uffd), [memory.page(1)]);
        assert_eq!(memory.read(1), SEVENS, "the write waits");
        uffd.unprotect(memory.one(1)).unwrap();
        writer.join().unwrap();
    });
    assert_eq!(memory.read(1), 9);
}

/// Set in the child, whose descriptor outlives it.
const CHILD: &str = "LACUNA_RACES_CHILD";

/// The child registers memory, prints its address, and waits to be ended.
fn be_a_child() {
    let uffd = open();
    let memory = Memory::anonymous(1).registered(&uffd);
    println!("child {} {}", uffd.as_fd().as_raw_fd(), memory.start);
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

/// The descriptor of an ended child, and a page that the child had registered; or why there is
/// none.
fn descriptor_of_an_ended_process() -> Result<(Userfaultfd, Hva), String> {
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program)
        .args(["--exact", "races::the_process_has_ended", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let found = lines.map_while(Result::ok).find_map(|line| {
        let (_, numbers) = line.split_once("child ")?;
        let (fd, start) = numbers.split_once(' ')?;
        Some((fd.parse::<i32>().ok()?, start.trim().parse::<u64>().ok()?))
    });
    let end = |mut child: Child| {
        child.kill().unwrap();
        child.wait().unwrap();
    };
    let Some((fd, start)) = found else {
        end(child);
        return Err("the child gets no userfaultfd".into());
    };
    let pid = Pid::from_child(&child);
    let taken = pidfd_open(pid, PidfdFlags::empty())
        .and_then(|pidfd| pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty()));
    end(child);
    let taken = taken.map_err(|errno| format!("no descriptor of another process: {errno}"))?;
    let uffd = Userfaultfd::try_from(taken).expect("the child has made it");
    Ok((uffd, Hva::new(start)))
}
