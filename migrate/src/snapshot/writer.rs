//! Writes a snapshot.

use super::files::{
    Base, CHECKSUMS, DIFF, Document, MEMORY, PACKED, PAGES, STATE, UNCHANGED, WHOLE, ZEROS,
    entry_of, has_content,
};
use super::target::Target;
use crate::changes::Changes;
use crate::copy::PageSink;
use crate::guest::PausedGuest;
use crate::rounds::{Budget, OnProgress, Pace, Round, Throttle, copy_all, copy_live, copy_paused};
use crate::{MachineConfig, MachineState, MemoryLayout, MigrateError, Snapshot};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{Running, SourcePage, Vm};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::Duration;

/// How a snapshot was made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Saved {
    /// The rounds. The guest was paused during the last one.
    pub rounds: Vec<Round>,
    /// How long the guest was paused for it: zero if it was paused before.
    pub downtime: Duration,
    /// Pages with content.
    pub pages: u64,
}

/// Saves `guest` as a new snapshot at `to`. The guest runs meanwhile, except for `downtime` of
/// the result at the end, and resumes afterwards. If it fails, nothing is left at `to`.
///
/// Writes are logged meanwhile ([`LogReader`](lacuna_machine::LogReader)). A VMM that uses the log
/// itself leaves it on and does not harvest it meanwhile. Afterwards it finds there all written
/// pages, unless its VM delivers by rings alone.
///
/// A missing page is requested. If its source cannot provide it, the page is lost, as after a
/// vCPU's access.
///
/// # Errors
/// [`MigrateError`].
pub fn save<'t, V: Vm>(
    guest: &Running<V>,
    to: impl Into<Target<'t>>,
    budget: &Budget,
    progress: OnProgress<'_>,
) -> Result<Saved, MigrateError> {
    let mut changes = Changes::log(&**guest.vm())?;
    let saved = save_changes(
        guest,
        &mut changes,
        When::Runs(budget),
        (to.into(), None),
        progress,
    )?;
    Ok(saved.0)
}

/// Saves the paused `guest` with its state `still` as a new snapshot at `to`. If it fails, nothing
/// is left at `to`.
///
/// # Errors
/// [`MigrateError`].
pub fn save_paused<'t, V: Vm>(
    guest: &Running<V>,
    paused: &PausedGuest<'_, V>,
    to: impl Into<Target<'t>>,
    progress: OnProgress<'_>,
) -> Result<Saved, MigrateError> {
    let layout = MemoryLayout::of(&**guest.vm());
    let mut writer = Writer::create(to.into(), layout.pages(), None)?;
    let round = copy_all(
        &**guest.vm(),
        &layout,
        slice::from_mut(&mut writer),
        progress,
    )?;
    let machine = MachineConfig::saved(&**guest.vm(), layout, &paused.state().vcpus);
    let (pages, _) = writer.finish(machine, paused.state().clone())?;
    Ok(Saved {
        rounds: vec![round],
        downtime: Duration::ZERO,
        pages,
    })
}

/// Whether a guest runs when it is saved.
pub enum When<'b, 'a, V: Vm> {
    /// It runs, and is paused for the last pages, as the budget says.
    Runs(&'b Budget),
    /// It is paused.
    Paused(&'b PausedGuest<'a, V>),
}

/// A guest whose writes are logged since its last snapshot, so that the next one has only the
/// changed pages. Drop this to end the log.
pub struct Tracked<'a, V: Vm> {
    changes: Changes<'a, V>,
    last: PathBuf,
    checksums: u32,
    /// The last snapshot's number of layers.
    layers: usize,
}

impl<'a, V: Vm> Tracked<'a, V> {
    /// Saves `guest` whole at `to`, as [`save`] and [`save_paused`] do, and keeps logging.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn save_first<'t>(
        guest: &'a Running<V>,
        when: When<'_, '_, V>,
        to: impl Into<Target<'t>>,
        progress: OnProgress<'_>,
    ) -> Result<(Saved, Self), MigrateError> {
        let to = to.into();
        let mut changes = Changes::log(&**guest.vm())?;
        let (saved, checksums) = save_changes(guest, &mut changes, when, (to, None), progress)?;
        let last = to.path().to_owned();
        let tracked = Self {
            changes,
            last,
            checksums,
            layers: 1,
        };
        Ok((saved, tracked))
    }

    /// Takes the pages written since the last snapshot out of the log; the next snapshot has them.
    /// On a VM whose log is in rings, a vCPU with a full ring stops until the next harvest or
    /// snapshot, so call this often between two snapshots.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn harvest(&mut self) -> Result<(), MigrateError> {
        self.changes.harvest().map(drop)
    }

    /// The last snapshot.
    pub fn last(&self) -> &Path {
        &self.last
    }

    /// Saves the changes since the last snapshot at `to`, which is in the same folder or at the
    /// same place of a store. After an error, the last snapshot is still the base of the next. A
    /// snapshot has at most [`Snapshot::LAYERS_MAX`] layers.
    ///
    /// # Errors
    /// [`MigrateError`]. [`MigrateError::NoBase`]: the last snapshot is gone. If it is removed
    /// during this save, no restore takes the new one.
    pub fn save_changes<'t>(
        &mut self,
        guest: &Running<V>,
        when: When<'_, '_, V>,
        to: impl Into<Target<'t>>,
        progress: OnProgress<'_>,
    ) -> Result<Saved, MigrateError> {
        let to = to.into();
        let name = self.last.file_name().and_then(|name| name.to_str());
        let name = name.filter(|_| to.path().parent() == self.last.parent());
        if self.layers == Snapshot::LAYERS_MAX {
            return Err(MigrateError::Layers(self.last.clone()));
        }
        let name = name.ok_or_else(|| MigrateError::Apart(self.last.clone()))?;
        let last = to.checksums_beside(name);
        if !last.is_ok_and(|found| found == self.checksums) {
            return Err(MigrateError::NoBase(self.last.clone()));
        }
        let base = Base {
            name: name.to_owned(),
            checksums: self.checksums,
        };
        let with_base = (to, Some(base));
        let (saved, checksums) = save_changes(guest, &mut self.changes, when, with_base, progress)?;
        (self.last, self.checksums) = (to.path().to_owned(), checksums);
        self.layers += 1;
        Ok(saved)
    }
}

/// Saves the changed pages and the state. Returns the CRC-32 of the new [`CHECKSUMS`] too.
fn save_changes<V: Vm>(
    guest: &Running<V>,
    changes: &mut Changes<'_, V>,
    when: When<'_, '_, V>,
    (to, base): (Target<'_>, Option<Base>),
    progress: OnProgress<'_>,
) -> Result<(Saved, u32), MigrateError> {
    let mut writer = Writer::create(to, changes.layout().pages(), base)?;
    let (rounds, downtime, machine, state) = match when {
        When::Runs(budget) => {
            let mut copied = copy_live(
                guest,
                changes,
                Pace {
                    budget,
                    throttle: Throttle::Never,
                    limit: None,
                },
                slice::from_mut(&mut writer),
                progress,
            )?;
            copied.copy_rest(
                &**guest.vm(),
                changes.layout(),
                slice::from_mut(&mut writer),
                progress,
            )?;
            let state = copied.paused.state().clone();
            let machine =
                MachineConfig::saved(&**guest.vm(), changes.layout().clone(), &state.vcpus);
            let downtime = copied.paused.since().elapsed();
            (copied.rounds, downtime, machine, state)
        }
        When::Paused(paused) => {
            let round = copy_paused(
                &**guest.vm(),
                changes,
                slice::from_mut(&mut writer),
                progress,
            )?;
            let state = paused.state().clone();
            let machine =
                MachineConfig::saved(&**guest.vm(), changes.layout().clone(), &state.vcpus);
            (vec![round], Duration::ZERO, machine, state)
        }
    };
    let (pages, checksums) = writer.finish(machine, state)?;
    changes.copied();
    let saved = Saved {
        rounds,
        downtime,
        pages,
    };
    Ok((saved, checksums))
}

/// A snapshot in the making. A drop before [`Writer::finish`] removes its files.
struct Writer<'t> {
    /// The place of the whole snapshot.
    to: Target<'t>,
    /// The folder of its files until then.
    partial: PathBuf,
    memory: File,
    /// [`PAGES`].
    entries: Vec<u32>,
    /// The snapshot that has the other pages.
    base: Option<Base>,
}

impl<'t> Writer<'t> {
    fn create(to: Target<'t>, pages: u64, base: Option<Base>) -> Result<Self, MigrateError> {
        to.check_new()?;
        let partial = to.begin()?;
        let memory = partial.join(MEMORY);
        let file = to.create(&partial, MEMORY).and_then(|file| {
            file.set_len(pages * PAGE_SIZE as u64)?;
            Ok(file)
        });
        let file = file.map_err(MigrateError::io(&memory, "make the file"));
        let file = file.inspect_err(|_| to.abandon(&partial))?;
        Ok(Self {
            to,
            partial,
            memory: file,
            entries: vec![if base.is_some() { UNCHANGED } else { ZEROS }; pages as usize],
            base,
        })
    }

    fn entries_from(&mut self, first: SourcePage, pages: usize) -> &mut [u32] {
        let first = first.0 as usize;
        &mut self.entries[first..first + pages]
    }

    /// Writes the other files, makes all durable, and gives the snapshot its name. Returns the
    /// number of its own pages with content, and the CRC-32 of [`CHECKSUMS`].
    fn finish(
        mut self,
        machine: MachineConfig,
        state: MachineState,
    ) -> Result<(u64, u32), MigrateError> {
        let base = self.base.take();
        // Holes cost nothing in a file. An object has none.
        let saves = base.is_some() || matches!(self.to, Target::Store(_));
        let packed = saves && u32::try_from(self.entries.len()).is_ok();
        if packed {
            let done = pack(&self.memory, &self.entries);
            done.map_err(MigrateError::io(
                &self.partial.join(MEMORY),
                "write the file",
            ))?;
        }
        let document = Document {
            format: match (packed, &base) {
                (true, _) => PACKED,
                (false, None) => WHOLE,
                (false, Some(_)) => DIFF,
            },
            base,
            machine,
            state,
        };
        let state = serde_json::to_vec_pretty(&document).expect("plain data has a JSON form");
        let entries = self.entries.iter().flat_map(|entry| entry.to_le_bytes());
        let entries: Vec<u8> = entries.collect();
        let line = |name, bytes: &[u8]| format!("{:08x}  {name}\n", crc32fast::hash(bytes));
        let checksums = line(STATE, &state) + &line(PAGES, &entries);
        for (name, bytes) in [
            (STATE, &*state),
            (PAGES, &*entries),
            (CHECKSUMS, checksums.as_bytes()),
        ] {
            let path = self.partial.join(name);
            let file = self.to.create(&self.partial, name);
            let written = file.and_then(|file| file.write_all_at(bytes, 0));
            written.map_err(MigrateError::io(&path, "write the file"))?;
        }
        self.to.finish(&self.partial)?;
        let own = self.entries.iter().filter(|entry| has_content(**entry));
        let pages = own.count() as u64;
        Ok((pages, crc32fast::hash(checksums.as_bytes())))
    }
}

/// The most bytes that [`pack`] moves at once: 1 MiB.
const MOVED: usize = 256 * PAGE_SIZE;

/// Moves the pages with content to the beginning of `memory`, in their order, and cuts the rest
/// off. Each page moves towards the beginning after the pages before it, so none is overwritten
/// before it has moved.
fn pack(memory: &File, entries: &[u32]) -> io::Result<()> {
    let (mut buffer, mut from, mut to) = (vec![0; MOVED], 0, 0);
    for run in entries.chunk_by(|a, b| has_content(*a) == has_content(*b)) {
        let bytes = run.len() * PAGE_SIZE;
        if has_content(run[0]) {
            for start in (0..bytes).step_by(MOVED).filter(|_| from != to) {
                let moved = &mut buffer[..MOVED.min(bytes - start)];
                memory.read_exact_at(moved, (from + start) as u64)?;
                memory.write_all_at(moved, (to + start) as u64)?;
            }
            to += bytes;
        }
        from += bytes;
    }
    memory.set_len(to as u64)
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        // After `finish` there is no such folder.
        self.to.abandon(&self.partial);
    }
}

impl PageSink for Writer<'_> {
    fn data(&mut self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        let pages = bytes.chunks_exact(PAGE_SIZE);
        let entries = self.entries_from(first, pages.len());
        for (entry, page) in entries.iter_mut().zip(pages) {
            *entry = entry_of(page);
        }
        let written = self.memory.write_all_at(bytes, first.0 * PAGE_SIZE as u64);
        written.map_err(MigrateError::io(
            &self.partial.join(MEMORY),
            "write the file",
        ))
    }

    fn zeros(&mut self, first: SourcePage, pages: u64) -> Result<(), MigrateError> {
        let entries = self.entries_from(first, pages as usize);
        // Holes at first.
        let are_holes = !entries.iter().any(|entry| has_content(*entry));
        entries.fill(ZEROS);
        if are_holes {
            return Ok(());
        }
        let (offset, bytes) = (first.0 * PAGE_SIZE as u64, pages * PAGE_SIZE as u64);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = fallocate(&self.memory, flags, offset, bytes).map_err(io::Error::from);
        // A file system without holes.
        let zeroed =
            punched.or_else(|_| self.memory.write_all_at(&vec![0; bytes as usize], offset));
        zeroed.map_err(MigrateError::io(
            &self.partial.join(MEMORY),
            "write the file",
        ))
    }
}
