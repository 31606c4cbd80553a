//! Regions of Linux memory in shared memory files, which other code writes to and makes shorter.

use crate::common;

use common::linux::{BLOCK, host, read};
use common::source::{TestSource, page_of, page_with};
use common::{FakeMmu, Use, Vm};
use lacuna_addr::{Access, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    Answer, Host, HostError, LinuxBacking, LinuxError, Resolution, SharedFill, SharedMemory,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const PAGES: u64 = 64;
const FILLS: [SharedFill; 2] = [SharedFill::CopiedIn, SharedFill::InFile];

/// A VM of `PAGES` pages in `memory`.
fn vm(host: &Arc<Host>, memory: &SharedMemory, source: Option<&Arc<TestSource>>) -> Vm {
    common::linux::vm(host, LinuxBacking::Shared(memory.clone()), PAGES, source)
}

fn memory(fill: SharedFill) -> SharedMemory {
    SharedMemory::new(PageCount::new(PAGES), fill).unwrap()
}

fn write(memory: &SharedMemory, page: u64, content: u64) {
    let bytes = page_with(content).0;
    let written = pwrite(memory.file(), &bytes, page * PAGE_SIZE as u64);
    assert_eq!(written, Ok(PAGE_SIZE));
}

fn in_file(memory: &SharedMemory, page: u64) -> u64 {
    let mut word = [0; 8];
    pread(memory.file(), &mut word, page * PAGE_SIZE as u64).unwrap();
    u64::from_le_bytes(word)
}

fn part(vm: &Vm, page: u64, pages: u64) -> BackingRange {
    BackingRange::new(vm.addr(page), pages).unwrap()
}

/// The guest's writes appear in the file, and writes to the file appear in the guest. Discarded
/// pages are removed from the file.
#[lacuna_skip::test]
fn guest_and_file_share_pages() {
    for fill in FILLS {
        let (host, memory, source) = (host(BLOCK), memory(fill), TestSource::new());
        let mut vm = vm(&host, &memory, Some(&source));
        vm.check_all();
        (0..PAGES).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
        (0..PAGES).for_each(|page| assert_eq!(in_file(&memory, page), page + 1));
        write(&memory, 7, 99);
        assert_eq!(read(&host, vm.addr(7)), Ok(99));
        host.discard(part(&vm, 5, 10)).unwrap();
        for page in 0..PAGES {
            let is_left = !(5..15).contains(&page);
            let expected = u64::from(is_left) * (page + 1);
            assert_eq!(in_file(&memory, page), expected, "{fill:?}");
            assert_eq!(read(&host, vm.addr(page)), Ok(expected), "{fill:?}");
        }
        vm.model.remove(&vm.addr(9).get());
        vm.touch(9, Use::Write(4)).unwrap();
        assert_eq!(in_file(&memory, 9), 4);
        host.verify();
        host.remove_region(vm.range).unwrap();
        host.verify();
        assert_eq!(in_file(&memory, 9), 4, "the file keeps its content");
    }
}

/// Without a source the file's content is the guest's.
#[test]
fn a_file_with_content() {
    let (host, memory) = (host(BLOCK), memory(SharedFill::CopiedIn));
    write(&memory, 3, 33);
    let mut vm = vm(&host, &memory, None);
    assert_eq!(read(&host, vm.addr(3)), Ok(33), "before any fault");
    vm.model.insert(vm.addr(3).get(), 33);
    vm.check_all();
    host.discard(part(&vm, 0, PAGES)).unwrap();
    vm.model.clear();
    vm.check_all();
    host.verify();
}

/// The file already has a requested page: the file's content counts.
#[lacuna_skip::test]
fn a_page_that_is_in_the_file_counts() {
    for fill in FILLS {
        let (host, memory, source) = (host(BLOCK), memory(fill), TestSource::new());
        let mut vm = vm(&host, &memory, Some(&source));
        for page in [4, 5, 6] {
            write(&memory, page, page);
        }
        assert_eq!(host.provide(vm.addr(4), &page_with(9).0), Ok(Answer::Late));
        vm.fault(5, Access::Read).unwrap();
        let run: Vec<_> = (0..4).map(|word| page_with(word + 80).0).collect();
        let taken = host.provide_pages(vm.addr(6), &run);
        assert_eq!(taken, Ok(3), "all but the one that is in the file");
        for page in [4, 5, 6] {
            assert_eq!(read(&host, vm.addr(page)), Ok(page), "{fill:?}");
        }
        assert_eq!(read(&host, vm.addr(7)), Ok(81));
        assert_eq!(host.linux_pages(), PageCount::new(6));
        host.verify();
    }
}

/// A source fills the file and reports it: before a fault, after one, twice, and without the page.
#[lacuna_skip::test]
fn a_source_fills_the_file() {
    let (host, memory, source) = (host(BLOCK), memory(SharedFill::InFile), TestSource::new());
    let mut vm = vm(&host, &memory, Some(&source));
    (0..10).for_each(|page| write(&memory, page, page + 1));
    let found = host.resolve(vm.addr(2), Access::Read, Level::L4K, &mut vm.cache);
    let Resolution::Missing(ticket) = found else {
        panic!("{found:?}");
    };
    host.start(&ticket);
    assert_eq!(host.provide_from_file(part(&vm, 0, 8)), Ok(8));
    assert!(ticket.is_done());
    assert_eq!(host.provide_from_file(part(&vm, 6, 4)), Ok(2));
    let refused = host.provide_from_file(part(&vm, 9, 3)).unwrap_err();
    assert!(
        refused.to_string().contains("does not have page"),
        "{refused}"
    );
    assert_eq!(source.answer(vm.addr(2)), Answer::Late);
    for page in 0..10 {
        assert_eq!(read(&host, vm.addr(page)), Ok(page + 1));
    }
    assert_eq!(source.asked(), 1);
    host.verify();
    host.remove_region(vm.range).unwrap();
    assert!(host.provide_from_file(vm.range).is_err());

    let other = self::memory(SharedFill::CopiedIn);
    let copied = self::vm(&host, &other, Some(&TestSource::new()));
    let refused = host.provide_from_file(copied.range).unwrap_err();
    assert!(refused.to_string().contains("in the file"), "{refused}");
}

/// Threads fill, answer, report pages in the file, and read. Each page has one content.
#[lacuna_skip::test]
fn many_threads_fill_one_file() {
    for _ in 0..20 {
        let (host, memory, source) = (host(BLOCK), memory(SharedFill::InFile), TestSource::new());
        let range = vm(&host, &memory, Some(&source)).range;
        let at = |page: u64| range.start().checked_add_pages(page).unwrap();
        let taken = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for page in 0..PAGES {
                    let answer = host.provide(at(page), &page_of(at(page)).0).unwrap();
                    taken.fetch_add(usize::from(answer == Answer::Taken), Ordering::Relaxed);
                }
            });
            scope.spawn(|| {
                for page in (0..PAGES).rev() {
                    write(
                        &memory,
                        page,
                        u64::from_le_bytes(*first(&page_of(at(page)).0)),
                    );
                    let range = BackingRange::new(at(page), 1).unwrap();
                    let filled = host.provide_from_file(range).unwrap();
                    taken.fetch_add(filled, Ordering::Relaxed);
                }
            });
            scope.spawn(|| {
                for page in 0..PAGES {
                    let _ = host.fetch(at(page)).unwrap();
                    source.answer_one(page);
                }
                while source.answer_one(0) {}
            });
            for page in 0..PAGES {
                let mut bytes = [0; PAGE_SIZE];
                host.copy_out(at(page), &mut bytes).unwrap();
                assert_eq!(bytes, page_of(at(page)).0);
            }
        });
        assert!(taken.into_inner() as u64 <= 2 * PAGES);
        assert_eq!(host.linux_pages(), PageCount::new(PAGES));
        host.verify();
    }
}

fn first(page: &[u8; PAGE_SIZE]) -> &[u8; 8] {
    page.first_chunk().unwrap()
}

/// The file becomes shorter while it is in use. Its removed pages are lost; others stay.
#[lacuna_skip::test]
fn a_file_that_becomes_shorter() {
    for fill in FILLS {
        let (host, memory, source) = (host(BLOCK), memory(fill), TestSource::new());
        let mut vm = vm(&host, &memory, Some(&source));
        vm.check_all();
        let mut seen = host.seen_losses();
        ftruncate(memory.file(), 32 * PAGE_SIZE as u64).unwrap();
        for page in 32..PAGES {
            let error = read(&host, vm.addr(page)).unwrap_err();
            assert!(matches!(error, HostError::Lost(_)), "{error}");
        }
        assert_eq!(host.losses(), PAGES - 32);
        let lost = host.lost_since(&mut seen, &*vm.mmu).unwrap();
        assert_eq!(lost.page, vm.addr(32));
        (0..32).for_each(|page| vm.touch(page, Use::Read).unwrap());
        host.verify();
        host.discard(vm.range).unwrap();
        assert_eq!(read(&host, vm.addr(0)), Ok(0));
        assert!(read(&host, vm.addr(40)).is_err());
        host.verify();
        host.remove_region(vm.range).unwrap();
    }
}

/// A page beyond the file's new end cannot be filled: it is lost, and its vCPU resumes to find out.
#[lacuna_skip::test]
fn a_page_beyond_the_end_cannot_be_filled() {
    let (host, memory, source) = (host(BLOCK), memory(SharedFill::CopiedIn), TestSource::new());
    let mut vm = vm(&host, &memory, Some(&source));
    ftruncate(memory.file(), 32 * PAGE_SIZE as u64).unwrap();
    assert!(matches!(
        vm.fault(40, Access::Read),
        Err(HostError::Lost(_))
    ));
    let refused = host.provide(vm.addr(41), &page_with(1).0);
    assert!(matches!(refused, Err(HostError::Lost(_))), "{refused:?}");
    vm.touch(3, Use::Read).unwrap();
    host.verify();
}

fn file(bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("test", flags).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

/// A part of a file that another process has made, and files that cannot be guest memory.
#[lacuna_skip::test]
fn files_of_the_vmm() {
    let host = host(2 * BLOCK);
    let bytes = (PAGES + 3) * PAGE_SIZE as u64;
    let of_file = |file: OwnedFd, first| SharedMemory::of_file(file, first, SharedFill::CopiedIn);
    let add = |memory: &SharedMemory| {
        let backing = LinuxBacking::Shared(memory.clone());
        common::linux::add(&host, backing, PAGES, None).map(|vm| vm.range)
    };
    let shared = of_file(file(bytes), 3).unwrap();
    write(&shared, 4, 44);
    let range = add(&shared).unwrap();
    let second = range.start().checked_add_pages(1).unwrap();
    assert_eq!(read(&host, second), Ok(44));
    let refused = add(&of_file(file(bytes), 4).unwrap())
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("has 67 pages") && refused.contains("longer"),
        "{refused}"
    );
    let refused = add(&of_file(file(bytes), u64::MAX).unwrap()).unwrap_err();
    assert!(
        matches!(refused, HostError::Linux(LinuxError::SharedMemory { .. })),
        "{refused}"
    );
    let sealed = file(bytes);
    fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    let for_reads = File::open(format!("/proc/self/fd/{}", sealed.as_raw_fd())).unwrap();
    for (file, expected) in [
        (sealed, "sealed against writes"),
        (OwnedFd::from(for_reads), "for reads only"),
    ] {
        let refused = add(&of_file(file, 0).unwrap()).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let ordinary = OwnedFd::from(tempfile::tempfile_in("/var/tmp").unwrap());
    // It may be a tmpfs. Other file systems have no seals.
    if rustix::fs::fcntl_get_seals(&ordinary).is_err() {
        let refused = of_file(ordinary, 0).unwrap_err().to_string();
        assert!(refused.contains("no memory file"), "{refused}");
    }
    host.remove_region(range).unwrap();
    // The refused calls have taken no addresses.
    let all = host.add_linux_region(
        None,
        PageCount::new(2 * BLOCK),
        Arc::new(FakeMmu::default()),
    );
    assert!(all.is_ok());
    host.verify();
}

/// A file system, mounted until the value is dropped.
struct Mounted(tempfile::TempDir);

impl Mounted {
    /// Ends the test if this process may not mount.
    fn new(kind: &str, options: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", kind, "-o", options, "none"]);
        match mount.arg(folder.path()).output() {
            Ok(output) if output.status.success() => Self(folder),
            other => lacuna_skip::skip_test(format!("mount {kind}: {other:?}")),
        }
    }

    fn file(&self, bytes: u64) -> OwnedFd {
        let file = std::fs::File::create_new(self.0.path().join("memory")).unwrap();
        file.set_len(bytes).unwrap();
        std::fs::File::options()
            .read(true)
            .write(true)
            .open(self.0.path().join("memory"))
            .unwrap()
            .into()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// A tmpfs that makes huge pages also has memory files. A page source cannot fill them: a write by
/// other code to one page would put zeros in place of its neighbours.
#[lacuna_skip::test]
fn files_of_a_tmpfs_with_huge_pages() {
    let tmpfs = Mounted::new("tmpfs", "huge=always");
    let file = tmpfs.file(2 * BLOCK * PAGE_SIZE as u64);
    if rustix::fs::fstat(&file).unwrap().st_blksize == PAGE_SIZE as _ {
        lacuna_skip::skip_test("this kernel makes no huge pages in a tmpfs");
    }
    let memory = SharedMemory::of_file(file, 0, SharedFill::InFile).unwrap();
    let host = host(2 * BLOCK);
    let backing = LinuxBacking::Shared(memory.clone());
    let refused = common::linux::add(&host, backing, PAGES, Some(&TestSource::new()));
    let refused = refused.map(drop).unwrap_err().to_string();
    assert!(refused.contains("huge=never"), "{refused}");
    write(&memory, 4, 44);
    let mut vm = vm(&host, &memory, None);
    assert_eq!(read(&host, vm.addr(4)), Ok(44));
    vm.touch(5, Use::Write(55)).unwrap();
    assert_eq!(in_file(&memory, 5), 55);
    host.remove_region(vm.range).unwrap();
    host.verify();
}

/// A file of hugetlbfs is refused by its name.
#[lacuna_skip::test]
fn files_of_hugetlbfs() {
    let system = Mounted::new("hugetlbfs", "pagesize=2M");
    let file = system.file(BLOCK * PAGE_SIZE as u64);
    let refused = SharedMemory::of_file(file, 0, SharedFill::CopiedIn).unwrap_err();
    assert!(
        refused.to_string().contains("SharedMemory::huge"),
        "{refused}"
    );
}

/// Memory in huge pages of hugetlbfs is zeros at first and keeps what is written.
#[lacuna_skip::test]
fn memory_in_huge_pages() {
    let pages = PageCount::new(2 * BLOCK);
    let refused = SharedMemory::huge(PageCount::new(100), Level::L2M)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("do not fill huge pages"), "{refused}");
    let _reserved = lacuna_skip::HugePages::reserve(2);
    let memory = SharedMemory::huge(pages, Level::L2M).unwrap();
    let host = host(3 * BLOCK);
    let add = |pages: PageCount| {
        let backing = LinuxBacking::Shared(memory.clone());
        common::linux::add(&host, backing, pages.get(), None)
    };
    let refused = add(PageCount::new(100)).map(drop).unwrap_err().to_string();
    assert!(refused.contains("do not fill huge pages"), "{refused}");
    let mut vm = add(pages).unwrap();
    (0..pages.get())
        .step_by(7)
        .for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    vm.check_all();
    assert!(
        host.discard(part(&vm, 3, 5)).is_err(),
        "a part of a huge page"
    );
    assert_eq!(read(&host, vm.addr(7)), Ok(8));
    host.discard(part(&vm, 0, BLOCK)).unwrap();
    assert_eq!(read(&host, vm.addr(7)), Ok(0));
    assert_eq!(host.losses(), 0);
    host.verify();
    host.remove_region(vm.range).unwrap();
    host.verify();
}
