//! Simulated VMs, their memory, and what fills it.

use super::simple;
use crate::experiment::{LabError, LabResult};
use fastrand::Rng;
use lacuna::{PAGE_SIZE, PageCount};
use lacuna_addr::Level;
use lacuna_pager::{Config, Fill, Image, Pager, Record};
use lacuna_source::{
    HandlerRegion, MemoryFile, PageSource, Policy, SourcePage, Touches, send_regions,
};
use lacuna_sys::{FileArea, MissingArea};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How often a state of the pager is polled between slices.
const POLL: Duration = Duration::from_micros(200);

/// Whether this process gets a userfaultfd.
pub fn available() -> Result<(), String> {
    let area = MissingArea::new(1).map(drop);
    area.map_err(|errno| format!("this process gets no userfaultfd ({errno})"))
}

/// A raw memory file, in the page cache.
pub struct MemoryImage {
    file: File,
    pages: u64,
    folder: TempDir,
}

impl MemoryImage {
    /// A file of `pages` pages in `folder`, none of them zeros.
    pub fn make(folder: &Path, pages: u64) -> LabResult<Self> {
        let at = folder.display().to_string();
        let io = |what| LabError::io(format!("{what} a memory file in {at}"));
        let folder = tempfile::tempdir_in(folder).map_err(io("make"))?;
        let path = folder.path().join("memory");
        let mut file = BufWriter::new(File::create(&path).map_err(io("make"))?);
        for page in 0..pages {
            let mut content = [1; PAGE_SIZE];
            content[..8].copy_from_slice(&page.to_le_bytes());
            file.write_all(&content).map_err(io("write"))?;
        }
        file.flush().map_err(io("write"))?;
        let file = File::open(path).map_err(io("open"))?;
        Ok(Self {
            file,
            pages,
            folder,
        })
    }

    /// Its size.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// A folder that lives as long as the file.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// `count` different pages in a random order, without page 0.
    pub fn list(&self, count: usize, seed: u64) -> Vec<u64> {
        let mut list: Vec<u64> = (1..self.pages).collect();
        Rng::with_seed(seed).shuffle(&mut list);
        list.truncate(count);
        list
    }

    fn source(&self) -> LabResult<Arc<dyn PageSource>> {
        let path = self.folder().join("memory");
        let file = MemoryFile::open(&path, PageCount::new(self.pages), Policy::default());
        let file = file.map_err(|error| LabError::Other(error.into()))?;
        // As `lacuna pager` opens it.
        Ok(Arc::new(file.answering_at_once()))
    }

    fn mapping(&self) -> LabResult<FileArea> {
        FileArea::new(&self.file, self.pages).map_err(LabError::io("map a memory file"))
    }
}

/// A pager of one image.
pub struct Served {
    pager: Pager,
    socket: PathBuf,
    _folder: TempDir,
}

impl Served {
    /// A pager of `image`. A fill brings the pages of `set`, from a source of its own.
    pub fn new(
        image: &MemoryImage,
        set: Option<Touches>,
        record: Option<Arc<Record>>,
    ) -> LabResult<Self> {
        let folder = tempfile::tempdir().map_err(LabError::io("make a folder"))?;
        let socket = folder.path().join("pager");
        let listener =
            UnixListener::bind(&socket).map_err(LabError::io("make the pager's socket"))?;
        let pager = Pager::new(Config::default()).map_err(LabError::io("make a pager"))?;
        let fill = set.map(|set| {
            Ok::<_, LabError>(Fill {
                source: image.source()?,
                working_set: Some(set),
                is_whole: false,
                rate: None,
            })
        });
        let image = Image {
            fill: fill.transpose()?,
            record,
            ..Image::new(image.source()?, PageCount::new(image.pages))
        };
        let served = pager.serve(listener, image);
        served.map_err(LabError::io("start the pager's thread"))?;
        Ok(Self {
            pager,
            socket,
            _folder: folder,
        })
    }

    /// Waits until the VMs of the slice are gone.
    pub fn wait_until_idle(&self) {
        while self.pager.connections() > 0 {
            thread::sleep(POLL);
        }
    }

    /// Waits until the fill of the only VM has ended.
    pub fn wait_until_filled(&self) {
        while !self.is_filled() {
            thread::sleep(POLL);
        }
    }

    /// Whether the fill of the only VM has ended.
    pub fn is_filled(&self) -> bool {
        self.pager.vms().first().is_some_and(|vm| vm.is_filled)
    }

    /// Pages that the fill has brought to the VMs of now.
    pub fn filled(&self) -> u64 {
        self.pager.vms().iter().map(|vm| vm.counts.filled).sum()
    }

    /// Faults of all VMs so far.
    pub fn faults(&self) -> u64 {
        self.pager.stats().counts.faults
    }
}

/// The memory of one VM. It ends with its VM.
enum VmMemory {
    Missing(Arc<MissingArea>),
    Mapped(FileArea),
}

impl VmMemory {
    fn read(&self, page: u64) -> u8 {
        match self {
            Self::Missing(area) => area.first_byte(page),
            Self::Mapped(area) => area.first_byte(page),
        }
    }
}

/// The VMs of one slice.
pub struct Vms {
    /// The first field: handlers end at the end of their connections.
    connections: Vec<UnixStream>,
    handlers: Vec<JoinHandle<()>>,
    memories: Vec<VmMemory>,
}

impl Vms {
    fn none() -> Self {
        Self {
            connections: Vec::new(),
            handlers: Vec::new(),
            memories: Vec::new(),
        }
    }

    /// VMs whose memory is a private mapping of the file.
    pub fn mapped(image: &MemoryImage, count: usize) -> LabResult<Self> {
        let mut vms = Self::none();
        for _ in 0..count {
            vms.memories.push(VmMemory::Mapped(image.mapping()?));
        }
        Ok(vms)
    }

    /// VMs with a simple handler each.
    pub fn simple(image: &MemoryImage, count: usize) -> LabResult<Self> {
        let mut vms = Self::none();
        for _ in 0..count {
            let (area, mapping) = (missing(image)?, image.mapping()?);
            let (vm, handler) = UnixStream::pair().map_err(LabError::io("make a socket"))?;
            let memory = Arc::clone(&area);
            vms.handlers.push(thread::spawn(move || {
                // A handler that has failed leaves its VM waiting, so the lab ends here.
                simple::serve(&memory, &mapping, &handler).expect("the simple handler");
            }));
            vms.connections.push(vm);
            vms.memories.push(VmMemory::Missing(area));
        }
        Ok(vms)
    }

    /// VMs of a pager.
    pub fn paged(served: &Served, image: &MemoryImage, count: usize) -> LabResult<Self> {
        let mut vms = Self::none();
        for _ in 0..count {
            let area = missing(image)?;
            let socket = UnixStream::connect(&served.socket);
            let socket = socket.map_err(LabError::io("connect to the pager"))?;
            let region = HandlerRegion {
                memory: area.range(),
                first: SourcePage(0),
                page: Level::L4K,
            };
            send_regions(&socket, &[region], area.userfaultfd().as_fd())
                .map_err(LabError::io("send the regions to the pager"))?;
            vms.connections.push(socket);
            vms.memories.push(VmMemory::Missing(area));
        }
        Ok(vms)
    }

    /// Each VM reads the pages of its list, after all have their page 0. Returns the nanoseconds of
    /// each read, and the time until the last one.
    pub fn touch(&self, lists: &[Vec<u64>]) -> (Vec<f64>, Duration) {
        let ready = Barrier::new(lists.len() + 1);
        let run = |memory: &VmMemory, list: &[u64]| {
            memory.read(0);
            ready.wait();
            let mut touches = Vec::with_capacity(list.len());
            for page in list {
                let began = Instant::now();
                memory.read(*page);
                touches.push(began.elapsed().as_nanos() as f64);
            }
            (touches, Instant::now())
        };
        thread::scope(|scope| {
            let vms = self.memories.iter().zip(lists);
            let threads: Vec<_> = vms
                .map(|(memory, list)| scope.spawn(|| run(memory, list)))
                .collect();
            ready.wait();
            let began = Instant::now();
            let (mut touches, mut length) = (Vec::new(), Duration::ZERO);
            for thread in threads {
                let (of_vm, end) = thread.join().expect("a VM's thread");
                touches.extend(of_vm);
                length = length.max(end.saturating_duration_since(began));
            }
            (touches, length)
        })
    }
}

impl Drop for Vms {
    fn drop(&mut self) {
        self.connections.clear();
        for handler in self.handlers.drain(..) {
            // Its panic was printed.
            let _ = handler.join();
        }
    }
}

fn missing(image: &MemoryImage) -> LabResult<Arc<MissingArea>> {
    let area = MissingArea::new(image.pages).map_err(LabError::io("make missing memory"))?;
    Ok(Arc::new(area))
}
