//! A simulated VMM, and page sources for it.

use lacuna_addr::{Hva, HvaRange, Level, PAGE_SIZE, PageCount};
use lacuna_pager::{Config, Image, Pager, WhenLost};
use lacuna_source::{HandlerRegion, PageRequest, PageSource, SourcePage, send_regions};
use lacuna_sys::{Errno, Userfaultfd};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::{
    Advice, MapFlags, ProtFlags, UserfaultfdFlags, madvise, mmap_anonymous, userfaultfd,
};
use std::ffi::c_void;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Words of a page.
pub const WORDS: usize = PAGE_SIZE / 8;

/// Memory that stays mapped for ever: a test may leave threads behind.
#[derive(Clone, Copy)]
pub struct Memory {
    pub start: u64,
    pub pages: u64,
}

impl Memory {
    /// Private memory at a multiple of `align` bytes.
    pub fn anonymous(pages: u64, align: u64) -> Self {
        let room = pages + align / PAGE_SIZE as u64;
        let start = Self::mapped(room, MapFlags::PRIVATE).start;
        Self {
            start: start.next_multiple_of(align),
            pages,
        }
    }

    /// A new mapping.
    pub fn mapped(pages: u64, flags: MapFlags) -> Self {
        let bytes = pages as usize * PAGE_SIZE;
        let (null, prot) = (ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: 1. a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(null, bytes, prot, flags) };
        let start = at.unwrap().expose_provenance() as u64;
        Self { start, pages }
    }

    /// Where page `page` is.
    pub fn at(self, page: u64) -> *mut c_void {
        let at = self.start as usize + page as usize * PAGE_SIZE;
        ptr::with_exposed_provenance_mut(at)
    }

    pub fn range(self) -> HvaRange {
        HvaRange::new(Hva::new(self.start), self.pages).unwrap()
    }

    fn word(self, page: u64, word: usize) -> &'static AtomicU64 {
        assert!(page < self.pages && word < WORDS);
        let at = self.start as usize + page as usize * PAGE_SIZE + word * 8;
        // SAFETY: 1. in the memory, which stays mapped.
        unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(at)) }
    }

    /// The first word of a page. Waits for the page.
    pub fn read(self, page: u64) -> u64 {
        self.word(page, 0).load(Ordering::SeqCst)
    }

    /// The word of all words of a page.
    pub fn read_whole(self, page: u64) -> u64 {
        let first = self.read(page);
        for word in 1..WORDS {
            let found = self.word(page, word).load(Ordering::SeqCst);
            assert_eq!(found, first, "word {word} of page {page}");
        }
        first
    }

    /// Writes all words of a page.
    pub fn write(self, page: u64, content: u64) {
        for word in 0..WORDS {
            self.word(page, word).store(content, Ordering::SeqCst);
        }
    }

    /// Takes pages away. Waits until the event is read, if the descriptor reports it.
    pub fn discard(self, page: u64, pages: u64) {
        assert!(page + pages <= self.pages);
        let (at, bytes) = (self.at(page), pages as usize * PAGE_SIZE);
        // SAFETY: 1. in the memory, whose bytes are accessed by atomics alone.
        unsafe { madvise(at, bytes, Advice::LinuxDontNeed) }.unwrap();
    }
}

/// Returns the descriptor. Skips the test if this process gets none, or the kernel is too old.
pub fn or_skip(uffd: Result<Userfaultfd, Errno>) -> Userfaultfd {
    uffd.unwrap_or_else(|errno| match errno {
        Errno::PERM | Errno::NOSYS | Errno::INVAL => lacuna_skip::skip_test(errno),
        errno => panic!("{errno}"),
    })
}

/// A descriptor that reports removals.
pub fn removals() -> Userfaultfd {
    or_skip(Userfaultfd::open_user_with_removals())
}

/// A descriptor with `features` of `linux/userfaultfd.h`.
pub fn with_features(features: u64) -> Userfaultfd {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: 1. it acts on no memory before `register`.
    let fd = unsafe { userfaultfd(flags) };
    let fd = fd.unwrap_or_else(|errno| lacuna_skip::skip_test(errno));
    let mut api = [0xaa, features, 0];
    // SAFETY: 1. UFFDIO_API takes a `struct uffdio_api`, which is three u64.
    let enabled = unsafe { ioctl(&fd, Updater::<API, [u64; 3]>::new(&mut api)) };
    enabled.unwrap_or_else(|errno| lacuna_skip::skip_test(errno));
    Userfaultfd::try_from(fd).unwrap()
}

const API: Opcode = opcode::read_write::<[u64; 3]>(0xaa, 0x3f);

/// A VMM with one region. Dropping it closes its connection.
pub struct Vmm {
    pub memory: Memory,
    pub uffd: Userfaultfd,
    _socket: UnixStream,
}

impl Vmm {
    /// Connects with new memory of `pages` pages, whose first page is page `first` of the source.
    pub fn connect(bed: &Bed, uffd: Userfaultfd, first: u64, pages: u64) -> Self {
        let memory = Memory::anonymous(pages, PAGE_SIZE as u64);
        Self::with(bed, uffd, (memory, first), Level::L4K)
    }

    pub fn with(bed: &Bed, uffd: Userfaultfd, (memory, first): (Memory, u64), page: Level) -> Self {
        let socket = UnixStream::connect(&bed.path).unwrap();
        Self::on(socket, uffd, (memory, first), page)
    }

    pub fn on(
        socket: UnixStream,
        uffd: Userfaultfd,
        (memory, first): (Memory, u64),
        page: Level,
    ) -> Self {
        // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
        unsafe { uffd.register(memory.range()) }.unwrap();
        let region = HandlerRegion {
            memory: memory.range(),
            first: SourcePage(first),
            page,
        };
        send_regions(&socket, &[region], uffd.as_fd()).unwrap();
        Self {
            memory,
            uffd,
            _socket: socket,
        }
    }
}

/// A pager, and its messages.
pub struct Bed {
    pub pager: Pager,
    pub path: PathBuf,
    said: Arc<Mutex<Vec<String>>>,
    _folder: TempDir,
}

impl Bed {
    pub fn new(source: Arc<dyn PageSource>, pages: u64) -> Self {
        Self::with(source, pages, Config::default())
    }

    pub fn losing(source: Arc<dyn PageSource>, pages: u64, when_lost: WhenLost) -> Self {
        let image = Image::new(source, PageCount::new(pages));
        Self::of(Image { when_lost, ..image }, Config::default())
    }

    pub fn with(source: Arc<dyn PageSource>, pages: u64, config: Config) -> Self {
        Self::of(Image::new(source, PageCount::new(pages)), config)
    }

    pub fn of(image: Image, config: Config) -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("pager");
        let said = Arc::<Mutex<Vec<String>>>::default();
        let says = Arc::clone(&said);
        let reports = Arc::clone(&config.report);
        let report = Arc::new(move |text: &str| {
            says.lock().unwrap().push(text.to_owned());
            reports(text);
        });
        let config = Config { report, ..config };
        let listener = UnixListener::bind(&path).unwrap();
        let pager = Pager::new(config).unwrap();
        pager.serve(listener, image).unwrap();
        Self {
            pager,
            path,
            said,
            _folder: folder,
        }
    }

    /// Waits for something that happens soon.
    pub fn wait(&self, what: &str, mut done: impl FnMut(&Pager) -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !done(&self.pager) {
            assert!(
                Instant::now() < until,
                "{what}: {:?} {:?}",
                self.pager.stats(),
                self.said()
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    pub fn said(&self) -> Vec<String> {
        self.said.lock().unwrap().clone()
    }
}

/// The words of page `page` of [`Words`].
pub fn word(page: u64) -> u64 {
    (page + 1) * 0x0101_0101_0101
}

/// Page n has the words `word(n)`. It answers at once, on the asking thread.
pub struct Words;

pub fn content(page: u64) -> [u8; PAGE_SIZE] {
    let mut content = [0; PAGE_SIZE];
    content.as_chunks_mut().0.fill(word(page).to_ne_bytes());
    content
}

impl PageSource for Words {
    fn describe(&self) -> String {
        "words".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = request.provide(&content(request.page().0));
    }
}

/// As [`Words`], when the test says so.
#[derive(Default)]
pub struct Manual(Mutex<Vec<PageRequest>>);

impl Manual {
    /// Waits for a request, and takes it.
    pub fn next(&self) -> PageRequest {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(request) = self.0.lock().unwrap().pop() {
                return request;
            }
            assert!(Instant::now() < until, "no request came");
            std::thread::yield_now();
        }
    }

    pub fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl PageSource for Manual {
    fn describe(&self) -> String {
        "a test".into()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.lock().unwrap().push(request);
    }
}

/// A pager that holds lost pages. Its report sends to the first channel, and then waits for the
/// second one.
pub fn gated(source: Arc<dyn PageSource>, pages: u64) -> (Bed, Receiver<()>, Sender<()>) {
    let (opened, gate) = channel::<()>();
    let (reported, reports) = channel();
    let gate = Mutex::new((reported, gate));
    let config = Config {
        report: Arc::new(move |_| {
            let (reported, gate) = &*gate.lock().unwrap();
            // At the end of a test there is no other side.
            let _ = reported.send(());
            let _ = gate.recv();
        }),
        ..Config::default()
    };
    let image = Image::new(source, PageCount::new(pages));
    let image = Image {
        when_lost: WhenLost::Hold,
        ..image
    };
    (Bed::of(image, config), reports, opened)
}
