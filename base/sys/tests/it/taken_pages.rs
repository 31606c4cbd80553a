//! Pages that the kernel takes away do not end the process, and each is recorded.

use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use lacuna_sys::{Errno, TakenPages, Userfaultfd, Waiters};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Output};
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const PAGES: u64 = 200;
const BYTES: usize = PAGES as usize * PAGE_SIZE;
const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Memory that stays mapped for ever.
struct Memory(u64);

impl Memory {
    fn anonymous() -> Self {
        // SAFETY: 1. a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), BYTES, READ_WRITE, MapFlags::PRIVATE) };
        Self(at.unwrap().expose_provenance() as u64)
    }

    /// A memory file of `PAGES` pages.
    fn file() -> (Self, OwnedFd) {
        let file = memfd_create("taken", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, BYTES as u64).unwrap();
        let null = ptr::null_mut();
        // SAFETY: 1. a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(null, BYTES, READ_WRITE, MapFlags::SHARED, &file, 0) };
        (Self(at.unwrap().expose_provenance() as u64), file)
    }

    fn range(&self) -> HvaRange {
        HvaRange::new(Hva::new(self.0), PAGES).unwrap()
    }

    fn watch(&self) -> TakenPages {
        // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
        unsafe { TakenPages::watch(self.range()) }.unwrap()
    }

    fn word(&self, page: u64) -> &'static AtomicU64 {
        let at = self.0 as usize + page as usize * PAGE_SIZE;
        // SAFETY: 1. in the memory, which stays mapped.
        unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(at)) }
    }

    fn read(&self, page: u64) -> u64 {
        self.word(page).load(Ordering::SeqCst)
    }

    fn write(&self, page: u64, value: u64) {
        self.word(page).store(value, Ordering::SeqCst);
    }
}

fn taken(pages: &TakenPages) -> Vec<u64> {
    let mut list = Vec::new();
    pages.take(|page| list.push(page));
    list
}

/// Accesses to a shortened file find zeros. Other pages keep their content.
#[test]
fn a_file_that_is_cut_short() {
    let (memory, file) = Memory::file();
    let pages = memory.watch();
    (0..PAGES).for_each(|page| memory.write(page, page + 1));
    assert_eq!((pages.count(), taken(&pages)), (0, vec![]));
    ftruncate(&file, 100 * PAGE_SIZE as u64).unwrap();
    assert_eq!(memory.read(150), 0);
    assert_eq!(pages.count(), 1);
    memory.write(199, 7);
    assert_eq!(
        (memory.read(199), pages.count()),
        (7, 2),
        "one signal a page"
    );
    assert_eq!(taken(&pages), [150, 199]);
    assert_eq!(taken(&pages), []);
    (0..100).for_each(|page| assert_eq!(memory.read(page), page + 1));
    assert_eq!(pages.count(), 2);
}

/// A poisoned page counts as taken away.
#[test]
fn a_poisoned_page() {
    let uffd = match Userfaultfd::open_user() {
        Ok(uffd) => uffd,
        Err(errno) => return lacuna_skip::skip(format!("no userfaultfd: {errno}")),
    };
    let memory = Memory::anonymous();
    let pages = memory.watch();
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { uffd.register(memory.range()) }.unwrap();
    uffd.copy(&[7; PAGE_SIZE], Hva::new(memory.0)).unwrap();
    let one = |page: u64| {
        let at = Hva::new(memory.0 + page * PAGE_SIZE as u64);
        HvaRange::new(at, 1).unwrap()
    };
    assert_eq!(uffd.poison(one(0)), Err(Errno::EXIST), "it is not missing");
    match uffd.poison(one(3)) {
        Err(Errno::INVAL) => return lacuna_skip::skip("the kernel cannot poison pages"),
        poisoned => poisoned.unwrap(),
    }
    assert_eq!(uffd.poison(one(3)), Err(Errno::EXIST), "it is poisoned");
    uffd.poison(one(4)).unwrap();
    uffd.copy(&[4; PAGE_SIZE], one(4).start()).unwrap();
    assert_eq!(
        memory.read(4),
        0x0404_0404_0404_0404,
        "a copy ends a poison"
    );
    assert_eq!((memory.read(3), taken(&pages)), (0, vec![3]));
    // A thread waits for a missing page, and continues when another thread poisons it.
    thread::scope(|scope| {
        let reader = scope.spawn(|| memory.read(9));
        let mut faults = Vec::new();
        while faults.is_empty() {
            thread::yield_now();
            uffd.faults(&mut faults).unwrap();
        }
        uffd.poison(one(9)).unwrap();
        assert_eq!(reader.join().unwrap(), 0);
    });
    assert_eq!((pages.count(), taken(&pages)), (2, vec![9]));
    assert_eq!(memory.read(0), 0x0707_0707_0707_0707);
}

/// A page was taken away, replaced and then discarded: the next access finds zeros and is not
/// recorded.
#[test]
fn the_kernel_gives_memory_again() {
    let (memory, file) = Memory::file();
    let pages = memory.watch();
    ftruncate(&file, 0).unwrap();
    memory.write(5, 9);
    let at = ptr::with_exposed_provenance_mut(memory.0 as usize);
    // SAFETY: 1. the mapping is the test's own, and accessed only by atomics.
    unsafe { madvise(at, BYTES, Advice::LinuxDontNeed) }.unwrap();
    assert_eq!(memory.read(5), 0);
    assert_eq!(pages.count(), 1, "there is private memory now");
}

/// No huge page is left for a touch of hugetlbfs memory. The whole huge page is recorded and
/// replaced, and its neighbour stays as it is.
#[test]
fn huge_pages_run_out() {
    const HUGE: usize = 2 << 20;
    const UNIT: u64 = (HUGE / PAGE_SIZE) as u64;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = match memfd_create("taken-huge", flags) {
        Ok(file) => file,
        Err(errno) => return lacuna_skip::skip(format!("no memory file of huge pages: {errno}")),
    };
    // The file has more huge pages than the machine has reserved, so they run out.
    let reserved = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap();
    let units = reserved.trim().parse::<usize>().unwrap() + 2;
    ftruncate(&file, (units * HUGE) as u64).unwrap();
    let null = ptr::null_mut();
    // SAFETY: 1. new mappings at addresses of the kernel's choice. 2. The second one replaces a
    // part of the first, which no code uses.
    let at = unsafe {
        let room = mmap_anonymous(null, (units + 1) * HUGE, READ_WRITE, MapFlags::PRIVATE);
        let room = room.unwrap();
        let start = room.wrapping_byte_add(room.addr().wrapping_neg() % HUGE);
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        match mmap(start, units * HUGE, READ_WRITE, flags, &file, 0) {
            Ok(at) => at,
            Err(errno) => return lacuna_skip::skip(format!("no memory of huge pages: {errno}")),
        }
    };
    let memory = Memory(at.expose_provenance() as u64);
    let range = HvaRange::new(Hva::new(memory.0), units as u64 * UNIT).unwrap();
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    let pages = unsafe { TakenPages::watch(range) }.unwrap();
    let mut last = 0;
    for unit in 0..units as u64 {
        memory.write(unit * UNIT + 3, unit + 1);
        last = pages.count();
    }
    assert!(last > 0, "at least one huge page was not to be had");
    let lost = taken(&pages);
    assert_eq!(lost.len() % UNIT as usize, 0);
    assert!(
        lost.chunks(UNIT as usize).all(|unit| {
            unit[0] % UNIT == 0 && unit.windows(2).all(|pair| pair[1] == pair[0] + 1)
        })
    );
    for unit in 0..units as u64 {
        assert_eq!(memory.read(unit * UNIT + 3), unit + 1, "it can be written");
    }
}

/// Threads touch the same pages at the same time. Each page is recorded, and no thread is stuck.
#[test]
fn threads_that_touch_one_page() {
    for _ in 0..20 {
        let (memory, file) = Memory::file();
        let pages = memory.watch();
        (0..PAGES).for_each(|page| memory.write(page, 1));
        ftruncate(&file, 0).unwrap();
        let start = Barrier::new(4);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    for page in 0..PAGES {
                        assert_eq!(memory.read(page), 0, "what was there is gone");
                        assert!(pages.count() > page, "it was counted before");
                    }
                });
            }
        });
        assert!(pages.count() >= PAGES);
        assert_eq!(taken(&pages), Vec::from_iter(0..PAGES));
    }
}

/// After a range is no longer watched, its accesses are not recorded. Another range keeps its
/// record.
#[test]
fn ranges_come_and_go() {
    let (kept, file) = Memory::file();
    let kept_pages = kept.watch();
    thread::scope(|scope| {
        let changes = scope.spawn(|| {
            for _ in 0..2000 {
                drop(Memory(kept.0 + BYTES as u64).watch());
            }
        });
        ftruncate(&file, 0).unwrap();
        let mut page = 0;
        while !changes.is_finished() {
            assert_eq!(kept.read(page % PAGES), 0);
            page += 1;
        }
        (0..PAGES).for_each(|page| assert_eq!(kept.read(page), 0));
    });
    assert_eq!(taken(&kept_pages), Vec::from_iter(0..PAGES));
}

/// Set in the child process that runs a test again.
const CHILD: &str = "LACUNA_SIGBUS_CHILD";

/// Runs `test` again in a process of its own.
fn in_child(test: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    Command::new(program)
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap()
}

/// Runs `test` again in a process of its own, which has to end by `SIGBUS`.
fn ends_by_sigbus(test: &str) {
    let child = in_child(test);
    assert_eq!(child.status.signal(), Some(libc_sigbus()), "{child:?}");
}

fn libc_sigbus() -> i32 {
    rustix::process::Signal::BUS.as_raw()
}

/// A `SIGBUS` of other memory ends the process, as it would without the handler.
#[test]
fn other_memory_ends_the_process() {
    if std::env::var_os(CHILD).is_none() {
        return ends_by_sigbus("taken_pages::other_memory_ends_the_process");
    }
    let (watched, _file) = Memory::file();
    let _pages = watched.watch();
    let (other, file) = Memory::file();
    ftruncate(&file, 0).unwrap();
    println!("read {}", other.read(0));
}

/// A `SIGBUS` of a range that is no longer watched ends the process, too.
#[test]
fn a_range_that_was_watched_ends_the_process() {
    if std::env::var_os(CHILD).is_none() {
        return ends_by_sigbus("taken_pages::a_range_that_was_watched_ends_the_process");
    }
    let (memory, file) = Memory::file();
    drop(memory.watch());
    ftruncate(&file, 0).unwrap();
    println!("read {}", memory.read(0));
}

/// A descriptor without events: a missing page gets `SIGBUS`, a page of the file is mapped by the
/// kernel, and it can be continued without a registration for minor faults.
#[test]
fn no_thread_sleeps_without_events() {
    let uffd = match Userfaultfd::open_without_events() {
        Ok(uffd) => uffd,
        Err(errno) => return lacuna_skip::skip(format!("no userfaultfd: {errno}")),
    };
    let (file_memory, file) = Memory::file();
    pwrite(&file, &[9; PAGE_SIZE], 5 * PAGE_SIZE as u64).unwrap();
    pwrite(&file, &[9; PAGE_SIZE], 6 * PAGE_SIZE as u64).unwrap();
    let file_at = file_memory.0;
    for memory in [Memory::anonymous(), file_memory] {
        let pages = memory.watch();
        // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
        unsafe { uffd.register(memory.range()) }.unwrap();
        let at = |page: u64| Hva::new(memory.0 + page * PAGE_SIZE as u64);
        if memory.0 == file_at {
            // Do this before any access: a read maps the file's neighbouring pages, too.
            assert_eq!(
                uffd.resume(HvaRange::new(at(5), 1).unwrap(), Waiters::LeaveAsleep),
                Ok(1)
            );
        }
        uffd.copy(&[7; PAGE_SIZE], at(0)).unwrap();
        assert_eq!((memory.read(0), pages.count()), (0x0707_0707_0707_0707, 0));
        assert_eq!((memory.read(2), taken(&pages)), (0, vec![2]));
        if memory.0 == file_at {
            assert_eq!(memory.read(5), 0x0909_0909_0909_0909);
            assert_eq!(memory.read(6), 0x0909_0909_0909_0909);
            assert_eq!(pages.count(), 1);
        }
    }
}

/// The kernel reports damage before any access (`BUS_MCEERR_AO`): the page is recorded, and the
/// process survives.
#[test]
fn damage_that_is_reported_early() {
    let memory = Memory::anonymous();
    let pages = memory.watch();
    memory.write(6, 5);
    let mut info = [0_u64; 16];
    // `siginfo_t`: the signal, no errno, the code; the address at byte 16.
    info[0] = libc::SIGBUS as u64;
    info[1] = libc::BUS_MCEERR_AO as u64;
    info[2] = memory.0 + 6 * PAGE_SIZE as u64;
    // SAFETY: 1. the kernel reads one `siginfo_t` of 128 bytes. A process may send any to itself.
    let sent = unsafe {
        let thread = libc::syscall(libc::SYS_gettid);
        let process = libc::syscall(libc::SYS_getpid);
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            process,
            thread,
            libc::SIGBUS,
            info.as_ptr(),
        )
    };
    assert_eq!(sent, 0);
    assert_eq!((taken(&pages), pages.count()), (vec![6], 1));
    assert_eq!(memory.read(6), 0);
    // The handler is still there.
    let (memory, file) = Memory::file();
    let pages = memory.watch();
    ftruncate(&file, 0).unwrap();
    assert_eq!((memory.read(1), taken(&pages)), (0, vec![1]));
}

/// No mapping is left for the page of zeros: the whole range is replaced, and the process survives.
/// The test runs in a child process, because other tests of this process need mappings meanwhile.
#[test]
fn no_mapping_is_left() {
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let most = most.trim().parse::<usize>().unwrap();
    if most > 1 << 20 {
        return lacuna_skip::skip("too many mappings are allowed to use all of them");
    }
    if std::env::var_os(CHILD).is_none() {
        let child = in_child("taken_pages::no_mapping_is_left");
        assert!(child.status.success(), "{child:?}");
        return;
    }
    let (memory, file) = Memory::file();
    let pages = memory.watch();
    memory.write(8, 1);
    ftruncate(&file, 0).unwrap();
    // Pages of two kinds alternate, so each is a mapping of its own.
    let null = ptr::null_mut();
    // SAFETY: 1. a new mapping at an address of the kernel's choice, which no code accesses.
    let room = unsafe {
        let room = mmap_anonymous(null, 2 * most * PAGE_SIZE, READ_WRITE, MapFlags::PRIVATE);
        let room = room.unwrap();
        for page in (0..2 * most).step_by(2) {
            let at = room.wrapping_byte_add(page * PAGE_SIZE);
            if madvise(at, PAGE_SIZE, Advice::LinuxDontDump).is_err() {
                break;
            }
        }
        room
    };
    let (word, count) = (memory.read(8), pages.count());
    // SAFETY: 1. the mapping from above.
    unsafe { rustix::mm::munmap(room, 2 * most * PAGE_SIZE) }.unwrap();
    assert_eq!(word, 0);
    assert!(count >= 1);
    let lost = taken(&pages);
    assert!(lost.contains(&8), "{lost:?}");
    (0..PAGES).for_each(|page| assert_eq!(memory.read(page), 0));
}
