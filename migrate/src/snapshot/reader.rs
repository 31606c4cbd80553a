//! Reads a snapshot.

use super::files::{
    CHECKSUMS, DIFF, Document, MEMORY, PACKED, PAGES, STATE, Version, WHOLE, entry_of,
};
use super::places::{Entries, Layer, Places};
use crate::copy::OnPages;
use crate::state::{check_devices, restore_state};
use crate::{MachineConfig, MachineState, MigrateError};
use lacuna_addr::{Gpa, PAGE_SIZE, room_for};
use lacuna_machine::{PlatformDevices, SourcePage, Vm};
use lacuna_source::{Folder, LocalFolder, TouchedMemory};
use std::collections::BTreeMap;
use std::io;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::num::NonZeroU32;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A snapshot on disk, and its bases, which have its unchanged pages.
pub struct Snapshot {
    document: Document,
    places: Arc<Places>,
    /// The memory file of this snapshot, of its base, and so on.
    layers: Vec<Layer>,
    touched: TouchedMemory,
}

/// Takes whole pages at an address, and returns how many it has used.
pub(super) type Put<'a> = &'a mut dyn FnMut(Gpa, &[u8]) -> Result<u64, MigrateError>;

/// Pages read at once.
const CHUNK: usize = 256;

/// Room for [`CHUNK`] pages.
pub(super) struct Buffer(Vec<u8>);

impl Default for Buffer {
    fn default() -> Self {
        Self(vec![0; CHUNK * PAGE_SIZE])
    }
}

/// The files of one folder.
struct Opened {
    document: Document,
    entries: Entries,
    memory: Layer,
    checksums: u32,
}

impl Snapshot {
    /// The most layers of a snapshot: itself, its base, the base's base, and so on.
    pub const LAYERS_MAX: usize = 32;

    /// Opens the snapshot at `path`, and checks everything but the pages. A read checks its pages.
    ///
    /// # Errors
    /// A file is missing or damaged, or has another format.
    pub fn open(path: &Path) -> Result<Self, MigrateError> {
        Self::open_in(Arc::new(LocalFolder::new(path)))
    }

    /// As [`Snapshot::open`], in any folder.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn open_in(mut at: Arc<dyn Folder>) -> Result<Self, MigrateError> {
        let path = &at.path().to_owned();
        let top = Opened::open(&*at)?;
        let mut places = Places::of(top.entries);
        let mut layers = vec![top.memory];
        let mut next = top.document.base.clone();
        while let Some(base) = next {
            at = beside(&*at, &base.name)?;
            let below = Opened::open(&*at)?;
            let is_it = below.checksums == base.checksums;
            if !is_it || below.document.machine.layout != top.document.machine.layout {
                let wrong = format!("it is not the one that {} has changed", path.display());
                return Err(MigrateError::damaged(at.path(), wrong));
            }
            if layers.len() == Self::LAYERS_MAX {
                let wrong = format!("it is made of more than {} snapshots", Self::LAYERS_MAX);
                return Err(MigrateError::damaged(path, wrong));
            }
            places.put_below(&below.entries, layers.len() as u8);
            layers.push(below.memory);
            next = below.document.base;
        }
        if places.lacks_pages() {
            let wrong = "a page has neither content nor a base";
            return Err(MigrateError::damaged(&at.path().join(PAGES), wrong));
        }
        Ok(Self {
            touched: TouchedMemory {
                checksum: NonZeroU32::new(top.checksums),
                pages: places.pages(),
            },
            document: top.document,
            places: Arc::new(places),
            layers,
        })
    }

    /// The saved machine: make a VM of this configuration for [`Snapshot::restore`].
    pub fn machine(&self) -> &MachineConfig {
        &self.document.machine
    }

    /// The names of the VMM's devices, and the versions of their states. The devices for a
    /// restore must be the same, and accept these versions.
    pub fn devices(&self) -> BTreeMap<String, u32> {
        self.document.state.devices.versions()
    }

    /// Pages with content.
    pub fn pages(&self) -> u64 {
        self.places.with_content()
    }

    /// Puts memory and state into `vm`, a new VM without an image, and `devices`, new ones. Returns
    /// the vCPUs, which continue where the saved ones were. The VMM's devices stay paused
    /// until the guest runs ([`PlatformDevices::resume`]). Calls `each` with the number of pages
    /// since the last call.
    ///
    /// # Errors
    /// The VM is another machine, has other devices or a page source, a page is damaged, a value of
    /// the state is refused, or `each` says `Break`.
    pub fn restore<V: Vm>(
        &self,
        vm: &Arc<V>,
        devices: &PlatformDevices,
        each: OnPages<'_>,
    ) -> Result<Vec<V::Vcpu>, MigrateError> {
        self.check(&**vm, devices)?;
        if vm.missing_memory().is_some() {
            return Err(MigrateError::HasSource);
        }
        self.document.machine.layout.apply(&**vm)?;
        self.read_pages(each, &mut |gpa, bytes| {
            vm.write(gpa, bytes)?;
            Ok((bytes.len() / PAGE_SIZE) as u64)
        })?;
        let bare = vm.bare_vcpus();
        let mut vcpus = bare.map_err(|error| MigrateError::Vcpus(error.to_string()))?;
        restore_state(&**vm, &mut vcpus, devices, &self.document.state)?;
        Ok(vcpus)
    }

    /// Checks that the VM and its devices match the snapshot, before anything is loaded.
    pub(super) fn check(
        &self,
        vm: &impl Vm,
        devices: &PlatformDevices,
    ) -> Result<(), MigrateError> {
        self.document.machine.check(vm)?;
        check_devices(devices, &self.devices())
    }

    pub(super) fn format(&self) -> u32 {
        self.document.format
    }

    /// Its memory, as records of first touches name it: [`Touches::load`] compares it.
    ///
    /// [`Touches::load`]: crate::Touches::load
    pub fn touched_memory(&self) -> TouchedMemory {
        self.touched
    }

    pub(super) fn places(&self) -> &Arc<Places> {
        &self.places
    }

    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    pub(super) fn state(&self) -> &MachineState {
        &self.document.state
    }

    /// Reads all pages with content, and gives them to `put`.
    pub(super) fn read_pages(&self, each: OnPages<'_>, put: Put<'_>) -> Result<(), MigrateError> {
        self.read_range(0..self.places.pages(), &mut Buffer::default(), each, put)
    }

    /// As [`Snapshot::read_pages`], for the pages of `range`.
    pub(super) fn read_range(
        &self,
        range: Range<u64>,
        buffer: &mut Buffer,
        each: OnPages<'_>,
        put: Put<'_>,
    ) -> Result<(), MigrateError> {
        let mut at = range.start;
        while at < range.end {
            let max = CHUNK.min((range.end - at) as usize);
            let pages = self.places.run(at, max);
            if pages == 0 {
                // A page of zeros.
                at += 1;
                continue;
            }
            let bytes = &mut buffer.0[..pages * PAGE_SIZE];
            self.read(SourcePage(at), bytes)?;
            let taken = self.put(at, bytes, put)?;
            at += pages as u64;
            if each(taken).is_break() {
                return Err(MigrateError::Cancelled);
            }
        }
        Ok(())
    }

    /// Reads and checks pages with content, all in one layer.
    fn read(&self, first: SourcePage, bytes: &mut [u8]) -> Result<(), MigrateError> {
        let Some(place) = self.places.get(first.0) else {
            return Ok(());
        };
        let Layer { file, path, .. } = &self.layers[place.layer];
        let read = file.read_exact_at(bytes, place.at.0 * PAGE_SIZE as u64);
        read.map_err(MigrateError::io(path, "read the file"))?;
        let places = (first.0..).map_while(|page| self.places.get(page));
        let mut pages = places.zip(bytes.chunks_exact(PAGE_SIZE)).enumerate();
        match pages.find(|(_, (place, page))| entry_of(page) != place.entry) {
            None => Ok(()),
            Some((index, _)) => {
                let wrong = format!("the checksum of page {} differs", first.0 + index as u64);
                Err(MigrateError::damaged(path, wrong))
            }
        }
    }

    /// Gives whole pages to `put`, slot by slot.
    pub(super) fn put(
        &self,
        first: u64,
        mut bytes: &[u8],
        put: Put<'_>,
    ) -> Result<u64, MigrateError> {
        let (mut at, mut taken) = (first, 0);
        while !bytes.is_empty() {
            let pages = (bytes.len() / PAGE_SIZE) as u64;
            let place = self.document.machine.layout.place(SourcePage(at), pages);
            let (gpa, pages) = place.expect("there is an entry for each page of the layout");
            let (now, rest) = bytes.split_at(pages as usize * PAGE_SIZE);
            taken += put(gpa, now)?;
            (at, bytes) = (at + pages, rest);
        }
        Ok(taken)
    }
}

/// The CRC-32 of [`CHECKSUMS`] of the snapshot in `folder`.
pub(super) fn checksums_of(folder: &dyn Folder) -> Result<u32, MigrateError> {
    let (_, sums) = read(folder, CHECKSUMS, CHECKSUMS_MAX)?;
    Ok(crc32fast::hash(&sums))
}

impl Opened {
    fn open(folder: &dyn Folder) -> Result<Self, MigrateError> {
        let (sums_path, sums) = match read(folder, CHECKSUMS, CHECKSUMS_MAX) {
            Err(MigrateError::Io { error, .. })
                if matches!(error.kind(), NotFound | NotADirectory)
                    && open(folder, STATE).is_err() =>
            {
                let what = "find a snapshot there, a folder with snapshot.json and checksums";
                return Err(MigrateError::io(folder.path(), what)(error));
            }
            read => read?,
        };
        let checksums = crc32fast::hash(&sums);
        let sums = String::from_utf8(sums)
            .map_err(|_| MigrateError::damaged(&sums_path, "it is no text"))?;
        let (state_path, state) = read(folder, STATE, STATE_MAX)?;
        check(&sums, STATE, &state_path, &state)?;
        let document = parse(&state_path, &state)?;
        let pages = document.machine.layout.pages();
        if document.format == PACKED && u32::try_from(pages).is_err() {
            let wrong = format!("a packed memory has {pages} pages, which are too many");
            return Err(MigrateError::damaged(&state_path, wrong));
        }
        // Its size is checked before room is made for it.
        let entry = size_of::<u32>() as u64;
        drop(open_sized(folder, PAGES, pages * entry)?);
        let (pages_path, entries) = read(folder, PAGES, pages * entry)?;
        check(&sums, PAGES, &pages_path, &entries)?;
        let entries = entries
            .chunks_exact(size_of::<u32>())
            .map(|entry| u32::from_le_bytes(entry.try_into().expect("four bytes")));
        let entries = Entries {
            entries: entries.collect(),
            packed: document.format == PACKED,
        };
        Ok(Self {
            memory: open_sized(folder, MEMORY, entries.stored() * PAGE_SIZE as u64)?,
            document,
            entries,
            checksums,
        })
    }
}

/// The snapshot `name` beside the one in `folder`.
fn beside(folder: &dyn Folder, name: &str) -> Result<Arc<dyn Folder>, MigrateError> {
    if Path::new(name).file_name() != Some(name.as_ref()) {
        let wrong = format!("{name:?} is no name of a snapshot beside it");
        return Err(MigrateError::damaged(&folder.path().join(STATE), wrong));
    }
    let found = folder.beside(name);
    found.map_err(MigrateError::io(folder.path(), "find the folder"))
}

/// The longest files that are read whole if no other file says how long they are.
pub(super) const CHECKSUMS_MAX: u64 = 4 << 10;
const STATE_MAX: u64 = crate::state::JSON_MAX as u64;

/// Opens a regular file.
fn open(folder: &dyn Folder, name: &str) -> Result<Layer, MigrateError> {
    let path = folder.path().join(name);
    match folder.open(name) {
        Ok(file) => Ok(Layer {
            pages: file.length() / PAGE_SIZE as u64,
            file,
            path,
        }),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Err(MigrateError::damaged(&path, error.to_string()))
        }
        Err(error) => Err(MigrateError::io(&path, "open the file")(error)),
    }
}

/// Opens a file of exactly this many bytes.
fn open_sized(folder: &dyn Folder, name: &str, bytes: u64) -> Result<Layer, MigrateError> {
    let opened = open(folder, name)?;
    match opened.file.length() {
        found if found == bytes => Ok(opened),
        found => {
            let wrong = format!("it has {found} bytes, and the saved machine needs {bytes}");
            Err(MigrateError::damaged(&opened.path, wrong))
        }
    }
}

/// Reads a whole file of at most `max` bytes.
fn read(folder: &dyn Folder, name: &str, max: u64) -> Result<(PathBuf, Vec<u8>), MigrateError> {
    let Layer { file, path, .. } = open(folder, name)?;
    let found = file.length();
    if found > max {
        let wrong = format!("it has {found} bytes, and at most {max} are possible");
        return Err(MigrateError::damaged(&path, wrong));
    }
    let no_room = |error| MigrateError::NoRoom {
        path: path.clone(),
        error,
    };
    room_for::<u8>(found).map_err(no_room)?;
    let mut bytes = vec![0; found as usize];
    let done = file.read_exact_at(&mut bytes, 0);
    done.map_err(MigrateError::io(&path, "read the file"))?;
    Ok((path, bytes))
}

/// Compares a file with its line of [`CHECKSUMS`].
fn check(sums: &str, name: &str, path: &Path, bytes: &[u8]) -> Result<(), MigrateError> {
    let line = format!("{:08x}  {name}", crc32fast::hash(bytes));
    match sums.lines().any(|sum| sum == line) {
        true => Ok(()),
        false => Err(MigrateError::damaged(path, "its checksum differs")),
    }
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Document, MigrateError> {
    let wrong = |error: serde_json::Error| MigrateError::damaged(path, error.to_string());
    let Version { format } = serde_json::from_slice(bytes).map_err(wrong)?;
    if ![WHOLE, DIFF, PACKED].contains(&format) {
        return Err(MigrateError::Version {
            path: path.to_owned(),
            found: format,
            known: PACKED,
        });
    }
    let document: Document = serde_json::from_slice(bytes).map_err(wrong)?;
    if format != PACKED && document.base.is_some() != (format == DIFF) {
        let wrong = format!("format {format} and the field base do not go together");
        return Err(MigrateError::damaged(path, wrong));
    }
    let checked = document.machine.layout.check();
    checked.map_err(|wrong| MigrateError::damaged(path, wrong.to_string()))?;
    Ok(document)
}
