//! Guests whose memory is a file of the VMM's own.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use lacuna_addr::{GfnRange, Level, PAGE_SIZE, PageCount};
use lacuna_machine::{
    Arch, Ending, GuestMemory as _, Machine, PlatformDevices, SharedFile, Vm as _, Width,
};
use lacuna_skip::HugePages;
use lacuna_soft::{LinuxBacking, PrivateFile, SharedFill, SharedMemory};

use super::Outcome;
use crate::backend::{Backend, Lacks, Made, Request, harvest, start_tracking, stop_tracking};
use crate::program::{Code, Reg, assemble, gpa, image, ram};
use crate::running::within;

/// The VM's MiB.
const MIB: u64 = 16;
/// The file's first page of guest memory.
const FIRST: u64 = 3;
/// The offset of the word that the guest reads. Its double goes to the next page.
const DATA: u64 = 4 << 20;
const PAGE: u64 = PAGE_SIZE as u64;

/// Doubles a word, and ends.
fn doubled(arch: Arch) -> Code {
    assemble(arch, |a| {
        a.set(Reg::A, ram(arch, DATA));
        a.load(Width::Quad, Reg::C, Reg::A, 0);
        a.add(Reg::C, Reg::C);
        a.store(Width::Quad, Reg::A, PAGE_SIZE as u32, Reg::C);
        a.set(Reg::C, 0);
        a.exit(Reg::C);
    })
}

/// Runs [`doubled`] in a VM with this memory, after `before`.
fn run<B: Backend>(
    backend: &B,
    backing: LinuxBacking,
    before: impl FnOnce(),
) -> Result<(Made<B>, Ending), Lacks> {
    let request = Request {
        backing: Some(backing),
        ..Request::new(MIB, MIB, 1, "")
    };
    let mut made = backend.make(&request, &image(&doubled(backend.arch())))?;
    let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
    before();
    let vcpus = std::mem::take(&mut made.vcpus);
    let machine = Machine::new(Arc::clone(&made.vm), devices).expect("threads");
    let ending = machine.start(vcpus).wait().ending;
    Ok((made, ending))
}

/// As [`run`], of a guest that ends well.
fn pass<B: Backend>(backend: &B, backing: LinuxBacking) -> Result<Made<B>, Lacks> {
    let (made, ending) = run(backend, backing, || ())?;
    assert_eq!(ending, Ending::Exited(0));
    Ok(made)
}

fn in_guest<B: Backend>(made: &Made<B>, arch: Arch, at: u64) -> u64 {
    let mut word = [0; 8];
    let read = made.vm.read(gpa(arch, at), &mut word);
    read.expect("guest memory");
    u64::from_le_bytes(word)
}

fn in_file(file: &File, at: u64) -> u64 {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, FIRST * PAGE + at)
        .expect("the file is longer");
    u64::from_le_bytes(word)
}

fn write_file(file: &File, at: u64, word: u64) {
    let written = file.write_all_at(&word.to_le_bytes(), FIRST * PAGE + at);
    written.expect("a file");
}

/// The VMM makes a memory file and writes to it, the guest reads that and writes, and the VMM reads
/// the guest's word from the file, whose descriptor the VM gives out.
pub fn a_shared_file_is_the_guests_memory<B: Backend>(backend: &B) -> Outcome {
    let (arch, backend) = (backend.arch(), backend.clone());
    within(move || {
        let pages = PageCount::new((MIB << 20) / PAGE + FIRST);
        let memory = SharedMemory::new(pages, SharedFill::CopiedIn).expect("a memory file");
        let own = || memory.file().try_clone_to_owned().expect("a descriptor");
        let file = File::from(own());
        write_file(&file, DATA, 21);
        let shared = SharedMemory::of_file(own(), FIRST, SharedFill::CopiedIn);
        let made = pass(&backend, LinuxBacking::Shared(shared.expect("a file")))?;
        assert_eq!(in_file(&file, DATA + PAGE), 42, "the guest's word");
        // The VM has not touched this page.
        write_file(&file, 2 * DATA, 7);
        assert_eq!(in_guest(&made, arch, 2 * DATA), 7);
        let written = made.vm.write(gpa(arch, 3 * DATA - 8), &[8; 8]);
        written.expect("guest memory");
        assert_eq!(in_file(&file, 3 * DATA - 8), u64::from_le_bytes([8; 8]));
        let SharedFile { file, offset } = made.vm.shared_file().expect("the file");
        assert_eq!(offset, FIRST * PAGE);
        let given = File::from(file.try_clone_to_owned().expect("a descriptor"));
        assert_eq!(in_file(&given, DATA + PAGE), 42);
        Ok(())
    })
}

/// All of the guest's memory is one huge page of 1 GiB. The guest runs in it, its writes are logged
/// page by page, and the VMM takes the whole page back.
pub fn a_huge_page_of_1_gib_is_the_guests_memory<B: Backend>(backend: &B) -> Outcome {
    let _reserved = HugePages::reserve_1g(1);
    let (arch, backend) = (backend.arch(), backend.clone());
    within(move || {
        let pages = PageCount::new(Level::L1G.pages());
        let memory = SharedMemory::huge(pages, Level::L1G).map_err(Lacks::because)?;
        let request = Request {
            backing: Some(LinuxBacking::Shared(memory)),
            ..Request::new(1024, 1024, 1, "")
        };
        let mut made = backend.make(&request, &image(&doubled(arch)))?;
        let written = made.vm.write(gpa(arch, DATA), &21u64.to_le_bytes());
        written.expect("guest memory");
        start_tracking(&*made.vm);
        let devices = PlatformDevices::of(arch, |_: &str| ());
        let vcpus = std::mem::take(&mut made.vcpus);
        let machine = Machine::new(Arc::clone(&made.vm), devices).expect("threads");
        assert_eq!(machine.start(vcpus).wait().ending, Ending::Exited(0));
        let logged: Vec<_> = harvest(&*made.vm)
            .into_iter()
            .map(|(_, page)| page)
            .collect();
        assert!(logged.contains(&((DATA / PAGE) as usize + 1)), "{logged:?}");
        assert!(logged.len() < 64, "{} pages of 1 GiB", logged.len());
        stop_tracking(&*made.vm);
        assert_eq!(in_guest(&made, arch, DATA + PAGE), 42);
        let all = GfnRange::new(gpa(arch, 0).gfn(), pages.get()).expect("pages");
        let part = GfnRange::new(gpa(arch, DATA).gfn(), 512).expect("pages");
        let balloon = made.vm.balloon().expect("Linux memory");
        balloon.discard(part).expect_err("a part of a huge page");
        assert_eq!(in_guest(&made, arch, DATA + PAGE), 42);
        balloon.discard(all).expect("a whole huge page");
        assert_eq!(in_guest(&made, arch, DATA + PAGE), 0);
        Ok(())
    })
}

/// Two VMs have one file, which is open for reads only. Each sees its content and its own writes,
/// and the file does not change. A discarded page is zeros, not the file's content.
pub fn vms_share_the_pages_of_a_private_file<B: Backend>(backend: &B) -> Outcome {
    let (arch, backend) = (backend.arch(), backend.clone());
    within(move || {
        let named = tempfile::NamedTempFile::new().expect("a file");
        let file = named.as_file();
        file.set_len((MIB << 20) + FIRST * PAGE).expect("a file");
        let words = [(DATA, 21), (DATA + PAGE, 5), (2 * DATA, 7)];
        words
            .iter()
            .for_each(|&(at, word)| write_file(file, at, word));
        let made = || {
            let file = File::open(named.path()).expect("a file");
            let private = PrivateFile::of_file(file.into(), FIRST).expect("a file");
            pass(&backend, LinuxBacking::Private(private))
        };
        let (one, other) = (made()?, made()?);
        for made in [&one, &other] {
            assert_eq!(in_guest(made, arch, DATA + PAGE), 42);
            assert_eq!(in_guest(made, arch, 2 * DATA), 7, "not touched before");
            assert!(made.vm.shared_file().is_none());
        }
        let written = one.vm.write(gpa(arch, 2 * DATA), &9u64.to_le_bytes());
        written.expect("guest memory");
        assert_eq!(in_guest(&other, arch, 2 * DATA), 7);
        let pages = GfnRange::new(gpa(arch, DATA).gfn(), 2).expect("pages");
        let balloon = one.vm.balloon().expect("Linux memory");
        for _ in 0..2 {
            balloon.discard(pages).expect("pages of a slot");
            let left = [DATA, DATA + PAGE, 2 * DATA].map(|at| in_guest(&one, arch, at));
            assert_eq!(left, [0, 0, 9]);
            let written = one.vm.write(gpa(arch, DATA), &[1]);
            written.expect("guest memory");
        }
        assert_eq!(in_guest(&other, arch, DATA), 21);
        words
            .iter()
            .for_each(|&(at, word)| assert_eq!(in_file(file, at), word));
        Ok(())
    })
}

/// The file becomes shorter before the guest reads a page behind its new end. The guest fails, and
/// does not continue with zeros.
pub fn a_page_behind_the_end_of_a_file_is_lost<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let file = tempfile::tempfile().expect("a file");
        file.set_len((MIB << 20) + FIRST * PAGE).expect("a file");
        let own = file.try_clone().expect("a descriptor");
        let private = PrivateFile::of_file(own.into(), FIRST).expect("a file");
        let shorten = || file.set_len(DATA + FIRST * PAGE).expect("a file");
        let (_, ending) = run(&backend, LinuxBacking::Private(private), shorten)?;
        assert!(matches!(ending, Ending::Failed(_)), "{ending:?}");
        Ok(())
    })
}
