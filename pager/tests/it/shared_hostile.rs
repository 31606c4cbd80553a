//! VMMs that misuse the shared pages, and a kernel that unmaps them.

use crate::shared::{Sparse, clone_of, smaps, wait_for_requests, whole};
use crate::vmm::{Bed, Manual, Memory, Words, content, or_skip, removals, word};
use lacuna_addr::{HvaRange, Level, PAGE_SIZE};
use lacuna_pager::WhenLost;
use lacuna_pager_client::Accesses;
use lacuna_skip::test;
use lacuna_source::{HandlerRegion, SourcePage, send_regions, send_text};
use lacuna_sys::{Errno, Minor, MissingArea, Userfaultfd, VmmMemory};
use rustix::fs::{
    FallocateFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, open,
};
use rustix::io::pwrite;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;

const REQUEST: &str = r#"{"version":1,"memory":"shared"}"#;

/// Asks for the file, as any program can.
fn file_of(bed: &Bed) -> (UnixStream, OwnedFd) {
    drop(clone_of(bed));
    file_at(&bed.path)
}

/// As [`file_of`], of the pager that listens at `path`.
pub fn file_at(path: &Path) -> (UnixStream, OwnedFd) {
    let socket = UnixStream::connect(path).unwrap();
    send_text(&socket, REQUEST.as_bytes(), None).unwrap();
    let mut text = [0; 64];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let buffers = &mut [IoSliceMut::new(&mut text)];
    let received = recvmsg(&socket, buffers, &mut rights, RecvFlags::CMSG_CLOEXEC).unwrap();
    let file = rights.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    assert_eq!(&text[..received.bytes], br#"{"version":1}"#);
    (socket, file.unwrap())
}

pub fn descriptor(memory: VmmMemory) -> Userfaultfd {
    or_skip(Userfaultfd::open_for_pager(Accesses::User, memory))
}

pub fn announce(socket: &UnixStream, uffd: &Userfaultfd, memory: HvaRange, page: Level) {
    let first = SourcePage(0);
    let region = HandlerRegion {
        memory,
        first,
        page,
    };
    send_regions(socket, &[region], uffd.as_fd()).unwrap();
}

/// The file, opened again for writing. Its mode stops other users, but not its owner and root.
fn writable(file: &OwnedFd) -> OwnedFd {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::fchmod(file, Mode::from_raw_mode(0o666)).unwrap();
    open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// A shared mapping at a multiple of 2 MiB, which stays for ever.
fn map_shared(file: &OwnedFd, pages: u64, prot: ProtFlags) -> Result<Memory, Errno> {
    let room = Memory::anonymous(pages, 2 << 20);
    let (bytes, flags) = (
        pages as usize * PAGE_SIZE,
        MapFlags::SHARED | MapFlags::FIXED,
    );
    // SAFETY: 1. it replaces a part of this test's own mapping.
    unsafe { mmap(room.at(0), bytes, prot, flags, file, 0) }.map(|_| room)
}

/// A VMM of the pager's own user can change no page, and not the size of the file.
#[test]
fn no_vmm_changes_the_file() {
    let bed = Bed::new(Arc::new(Words), 8);
    let (_socket, file) = file_of(&bed);
    assert_eq!(pwrite(&file, b"x", 0), Err(Errno::BADF));
    let memory = clone_of(&bed);
    assert_eq!(whole(&memory, 0), word(0));
    let file = writable(&file);
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(pwrite(&file, b"x", 0), Err(Errno::PERM));
    assert_eq!(fallocate(&file, hole, 0, 4096), Err(Errno::PERM));
    assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
    assert_eq!(ftruncate(&file, 1 << 20), Err(Errno::PERM));
    assert_eq!(fcntl_add_seals(&file, SealFlags::WRITE), Err(Errno::PERM));
    let both = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map_shared(&file, 8, both).map(drop), Err(Errno::PERM));
    // A userfaultfd could fill a shared mapping.
    let mapped = map_shared(&file, 8, ProtFlags::READ).unwrap();
    let uffd = or_skip(Userfaultfd::open_user_shared(Minor::Mapped));
    // SAFETY: 1. a shared mapping that stays, and is not accessed.
    let registered = unsafe { uffd.register(mapped.range()) };
    assert_eq!(registered, Err(Errno::PERM));
    let later = clone_of(&bed);
    assert_eq!((whole(&memory, 0), whole(&later, 0)), (word(0), word(0)));
}

/// Pages of zeros that another process has made appear in the file are filled before a clone gets
/// them, and are shared.
#[test]
fn pages_that_appear_in_the_file_are_filled() {
    const PAGES: u64 = 16;
    let source = Arc::new(Sparse::default());
    let bed = Bed::new(source, PAGES);
    let (_socket, file) = file_of(&bed);
    let mapped = map_shared(&file, PAGES, ProtFlags::READ).unwrap();
    for page in 0..PAGES / 2 {
        assert_eq!(mapped.read(page), 0);
    }
    fallocate(writable(&file), FallocateFlags::empty(), 0, PAGES * 4096).unwrap();
    let clones = [(); 2].map(|()| clone_of(&bed));
    for page in 0..PAGES {
        for memory in &clones {
            assert_eq!(whole(memory, page), Sparse::word(page), "page {page}");
        }
    }
    bed.wait("the count", |pager| {
        pager.stats().counts.shared == 2 * PAGES * 3 / 4
    });
    assert_eq!(smaps(&clones[0], "Anonymous:"), 0);
}

/// The kernel collapses the file's pages, and unmaps them from all clones without an event. They
/// come back, but not where a clone has written or taken away.
#[test]
fn pages_that_the_kernel_unmaps_come_back() {
    const PAGES: u64 = 512;
    let bed = Bed::new(Arc::new(Words), PAGES);
    let memory = clone_of(&bed);
    for page in 0..PAGES {
        assert_eq!(whole(&memory, page), word(page));
    }
    memory.write(4096, &[7; PAGE_SIZE]);
    memory.discard(2, 1).unwrap();
    let (_socket, file) = file_of(&bed);
    let mapped = map_shared(&file, PAGES, ProtFlags::READ).unwrap();
    let collapse = |at: u64| {
        let at = std::ptr::with_exposed_provenance_mut(at as usize);
        let bytes = PAGES as usize * PAGE_SIZE;
        // SAFETY: 1. the range is this test's own. 2. The advice changes no byte.
        match unsafe { libc::madvise(at, bytes, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    if let Err(error) = collapse(mapped.start) {
        return lacuna_skip::skip(error);
    }
    // A huge page in the clone's own mapping would bring back the page that was taken away.
    let own = collapse(memory.range().start().get());
    assert_eq!(own.map_err(|error| error.raw_os_error()), Err(Some(22)));
    let faults = bed.pager.stats().counts.faults;
    assert!(smaps(&memory, "Rss:") < 64, "the pages are unmapped");
    assert_eq!(whole(&memory, 0), word(0));
    assert_eq!(whole(&memory, 1), u64::from_ne_bytes([7; 8]));
    assert_eq!(whole(&memory, 2), 0);
    assert_eq!(whole(&memory, 3), word(3));
    assert_eq!(bed.pager.stats().counts.faults, faults + 3);
    assert_eq!(smaps(&memory, "ShmemPmdMapped:"), 0);
}

/// Memory that is no mapping of the file: its pages are lost, and other VMs are served.
#[test]
fn other_memory_than_the_files_is_lost() {
    let bed = Bed::losing(Arc::new(Words), 4, WhenLost::Hold);
    let (socket, _file) = file_of(&bed);
    let uffd = descriptor(VmmMemory::Anonymous);
    let area = Arc::new(MissingArea::anonymous(4, uffd).unwrap());
    announce(&socket, area.userfaultfd(), area.range(), Level::L4K);
    let waits = Arc::clone(&area);
    let _waits = thread::spawn(move || waits.touch(1));
    bed.wait("the message", |_| !bed.said().is_empty());
    assert!(bed.said()[0].contains("the kernel refuses a page"));
    assert_eq!(whole(&clone_of(&bed), 1), word(1));
}

/// Handshakes that the pager refuses.
#[test]
fn wrong_requests_are_refused() {
    let bed = Bed::new(Arc::new(Words), 1024);
    drop(file_of(&bed));
    let refused = |text: &str| {
        let mut socket = UnixStream::connect(&bed.path).unwrap();
        send_text(&socket, text.as_bytes(), None).unwrap();
        assert_eq!(socket.read(&mut [0; 8]).unwrap(), 0);
        bed.said().pop().unwrap()
    };
    assert!(refused(r#"{"version":2,"memory":"shared"}"#).contains("use version 1"));
    assert!(refused(r#"{"version":1,"memory":"new"}"#).contains("unknown variant `new`"));
    let asked_twice = {
        let (mut socket, _file) = file_of(&bed);
        send_text(&socket, REQUEST.as_bytes(), None).unwrap();
        assert_eq!(socket.read(&mut [0; 8]).unwrap(), 0);
        bed.said().pop().unwrap()
    };
    assert!(asked_twice.contains("has no region"), "{asked_twice}");
    let announced = |uffd: Userfaultfd, page: Level| {
        let (mut socket, _file) = file_of(&bed);
        announce(
            &socket,
            &uffd,
            Memory::anonymous(512, 2 << 20).range(),
            page,
        );
        assert_eq!(socket.read(&mut [0; 8]).unwrap(), 0);
        bed.said().pop().unwrap()
    };
    let said = announced(removals(), Level::L2M);
    assert!(said.contains("announce page_size 4096"), "{said}");
    let silent = or_skip(Userfaultfd::open_user());
    let said = announced(silent, Level::L4K);
    assert!(said.contains("enable UFFD_FEATURE_EVENT_REMOVE"), "{said}");
}

/// A VM that ends does not end the request that others wait for.
#[test]
fn the_first_clone_may_end() {
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 1);
    let (socket, file) = file_of(&bed);
    let area = MissingArea::of_file(file.as_fd(), 1, descriptor(VmmMemory::File)).unwrap();
    let area = Arc::new(area);
    announce(&socket, area.userfaultfd(), area.range(), Level::L4K);
    let asks = Arc::clone(&area);
    // Its thread waits for ever.
    let _asks = thread::spawn(move || asks.touch(0));
    let request = source.next();
    drop(socket);
    bed.wait("the end", |pager| pager.stats().vms == 0);
    let memory = clone_of(&bed);
    thread::scope(|scope| {
        let reader = scope.spawn(|| whole(&memory, 0));
        wait_for_requests(&bed, 1);
        // Late, if the second clone's request is not in the queue yet.
        let _ = request.provide(&content(0));
        assert_eq!(reader.join().unwrap(), word(0));
    });
    assert!(source.is_empty());
}
