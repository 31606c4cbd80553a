//! The snapshot daemon: the receiver of a migration, which writes a snapshot.

use crate::connection::{Connection, LOOK, is_readable};
use crate::error::OffloadError;
use crate::frame::{Command, MemoryRange, Phase, Request};
use crate::settings::Settings;
use crate::slots::{SLOTS_MAX, Slots};
use crate::snapshot::{CONFIG, Draft, MEMORY, STATE};
use crate::sparse::{CHUNK, copy, write_pages};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::Ordering;

/// A saved VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Saved {
    /// Its memory slots.
    pub slots: usize,
    /// Bytes of its memory.
    pub bytes: u64,
    /// Bytes that its memory takes on the disk. Zeros take none.
    pub disk: u64,
    /// Whether it was running.
    pub was_running: bool,
}

/// Waits at `listener` for one VM, and saves it in the folder `to`, which must not exist. Memory,
/// configuration and state are on the disk before the VMM gets the last response: it may end then.
///
/// # Errors
/// The VMM breaks the protocol, abandons the migration or ends; the disk is full; the caller asks
/// for the end. There is no folder `to` then, and the VMM keeps its VM.
pub fn save(
    listener: &UnixListener,
    to: &Path,
    settings: &Settings,
) -> Result<Saved, OffloadError> {
    let mut draft = Draft::new(to)?;
    loop {
        if settings.stop.load(Ordering::Relaxed) {
            return Err(OffloadError::Interrupted);
        }
        if !is_readable(listener, LOOK)? {
            continue;
        }
        let accepted = listener.accept();
        let (socket, _) = accepted.map_err(|error| OffloadError::File {
            path: "the socket".into(),
            error,
        })?;
        let connection = match Connection::new(socket, Some(settings.patience), &settings.stop) {
            Ok(connection) => connection,
            Err(refused) => {
                settings.say(&format!("refused a connection: {refused}"));
                continue;
            }
        };
        // A connection that ends before its first message is a look at whether the daemon listens.
        // No VM depends on one without a whole first message.
        let first = match connection.frame() {
            Ok(Some(first)) => first,
            Ok(None) => continue,
            Err(OffloadError::Interrupted) => return Err(OffloadError::Interrupted),
            Err(refused) => {
                settings.say(&format!("refused a connection: {refused}"));
                continue;
            }
        };
        let receiver = Receiver {
            connection: &connection,
            draft: &mut draft,
            settings,
            descriptors: BTreeMap::new(),
            memory: None,
            received: Ranges::default(),
        };
        let saved = receiver.receive(first);
        if saved.is_err() {
            // The VMM resumes the VM now rather than at the end of the connection, if it still
            // reads at all.
            let _ = connection.respond(false, 0);
        }
        let saved = saved?;
        draft.keep();
        return Ok(saved);
    }
}

/// One migration.
struct Receiver<'a> {
    connection: &'a Connection,
    draft: &'a mut Draft,
    settings: &'a Settings,
    descriptors: BTreeMap<u32, File>,
    /// The slots and the memory file, which the configuration describes.
    memory: Option<(Slots, File)>,
    received: Ranges,
}

impl Receiver<'_> {
    fn receive(mut self, first: [u8; 16]) -> Result<Saved, OffloadError> {
        let (mut phase, mut frame) = (Phase::Connected, first);
        loop {
            let request = Request::parse(&frame)?;
            phase = phase.after(request.command)?;
            match request.command {
                Command::MemoryFd => self.descriptor()?,
                Command::Config => self.config(request.length)?,
                Command::Memory => self.ranges(request.length)?,
                Command::State => self.state(request.length)?,
                Command::Complete => return self.complete(true),
                Command::CompletePaused => return self.complete(false),
                Command::Abandon => {
                    self.connection.respond(true, 0)?;
                    return Err(OffloadError::Abandoned);
                }
                // `Phase` lets no PageFault pass.
                Command::Start | Command::PageFault => {}
            }
            self.connection.respond(true, 0)?;
            let next = self.connection.frame()?;
            frame = next.ok_or(OffloadError::Closed("before the migration was complete"))?;
        }
    }

    fn descriptor(&mut self) -> Result<(), OffloadError> {
        let (slot, file) = self.connection.descriptor()?;
        let found = file
            .metadata()
            .map_err(OffloadError::file(Path::new("a memory file")))?;
        if !found.is_file() {
            return Err(unusable(slot, "has a descriptor of no memory file"));
        }
        if self.descriptors.len() >= SLOTS_MAX {
            return Err(unusable(slot, "is one too many"));
        }
        match self.descriptors.insert(slot, file) {
            Some(_) => Err(unusable(slot, "has two descriptors")),
            None => Ok(()),
        }
    }

    fn config(&mut self, length: u64) -> Result<(), OffloadError> {
        let mut json = Vec::new();
        self.payload(length, |chunk| {
            json.extend_from_slice(chunk);
            Ok(())
        })?;
        let slots = Slots::of_config(&json)?;
        let all = &self.settings.progress.all;
        all.store(slots.bytes(), Ordering::Relaxed);
        if !self.descriptors.is_empty() {
            self.check_descriptors(&slots)?;
        }
        let path = self.draft.path(CONFIG);
        std::fs::write(&path, &json).map_err(OffloadError::file(&path))?;
        let memory = self.draft.create(MEMORY)?;
        let sized = memory.set_len(slots.bytes());
        sized.map_err(OffloadError::file(&self.draft.path(MEMORY)))?;
        self.memory = Some((slots, memory));
        Ok(())
    }

    /// Each slot has its descriptor, and each descriptor its slot.
    fn check_descriptors(&self, slots: &Slots) -> Result<(), OffloadError> {
        for slot in slots.all() {
            let file = self.descriptors.get(&slot.slot);
            let file = file.ok_or_else(|| unusable(slot.slot, "has no descriptor"))?;
            let found = file
                .metadata()
                .map_err(OffloadError::file(Path::new("a memory file")))?;
            if found.len() < slot.fd_offset + slot.length {
                return Err(unusable(slot.slot, "is larger than its memory file"));
            }
        }
        let known = |number: &u32| slots.all().iter().any(|slot| slot.slot == *number);
        match self.descriptors.keys().find(|number| !known(number)) {
            Some(number) => Err(unusable(*number, "is not in the configuration")),
            None => Ok(()),
        }
    }

    fn ranges(&mut self, length: u64) -> Result<(), OffloadError> {
        let mut table = Vec::new();
        self.payload(length, |chunk| {
            table.extend_from_slice(chunk);
            Ok(())
        })?;
        let (slots, memory) = self.memory.as_ref().expect("configured");
        for range in MemoryRange::parse_table(&table) {
            let start = slots.locate(range).map_err(OffloadError::Unusable)?;
            let is_hole = !self.received.touches(start, start + range.length);
            let mut at = start;
            self.payload(range.length, |chunk| {
                write_pages(memory, at, chunk, is_hole)?;
                at += chunk.len() as u64;
                let done = &self.settings.progress.done;
                done.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                Ok(())
            })?;
            self.received.insert(start, start + range.length);
        }
        Ok(())
    }

    /// The state is not read: it goes through to its file.
    fn state(&mut self, length: u64) -> Result<(), OffloadError> {
        let mut file = self.draft.create(STATE)?;
        self.payload(length, |chunk| file.write_all(chunk))
    }

    /// Passes `length` bytes to `each`, at most [`CHUNK`] at a time. A length is believed only as
    /// far as bytes arrive.
    fn payload(
        &self,
        length: u64,
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), OffloadError> {
        let mut chunk = vec![0; CHUNK.min(length as usize)];
        let mut left = length;
        while left > 0 {
            let now = &mut chunk[..CHUNK.min(left as usize)];
            self.connection.exact(now, "in the middle of a message")?;
            each(now).map_err(OffloadError::file(self.draft.path("").as_path()))?;
            left -= now.len() as u64;
        }
        Ok(())
    }

    /// Ends the migration. The VM is paused, and the VMM waits for the response.
    fn complete(mut self, was_running: bool) -> Result<Saved, OffloadError> {
        let (slots, memory) = self.memory.take().expect("configured");
        let has_memory_files = !self.descriptors.is_empty();
        if has_memory_files {
            self.copy_memory(&slots, &memory)?;
        } else if self.received.bytes() != slots.bytes() {
            let (came, of) = (self.received.bytes(), slots.bytes());
            return Err(OffloadError::Unusable(format!(
                "it sent {came} bytes of the guest's {of}: send each memory slot"
            )));
        }
        // A VMM that has ended the migration may have resumed its VM during the copy.
        if !self.connection.is_quiet() {
            return Err(OffloadError::NotWaiting);
        }
        self.draft.publish(&slots, was_running, has_memory_files)?;
        let found = memory.metadata();
        let found = found.map_err(OffloadError::file(&self.draft.path(MEMORY)))?;
        self.connection.respond(true, 0)?;
        Ok(Saved {
            slots: slots.all().len(),
            bytes: slots.bytes(),
            disk: found.blocks() * 512,
            was_running,
        })
    }

    /// Copies by `pread`: a memory file that was made shorter is an error then, and no SIGBUS as in
    /// mapped memory. So its seals do not matter.
    fn copy_memory(&self, slots: &Slots, memory: &File) -> Result<(), OffloadError> {
        for slot in slots.all() {
            let from = slot.fd_offset..slot.fd_offset + slot.length;
            let keep_on = |bytes| {
                let done = &self.settings.progress.done;
                done.store(slot.offset + bytes, Ordering::Relaxed);
                !self.settings.stop.load(Ordering::Relaxed)
            };
            let copied = copy(
                &self.descriptors[&slot.slot],
                from,
                memory,
                slot.offset,
                keep_on,
            );
            copied.map_err(|error| match error.kind() {
                io::ErrorKind::Interrupted => OffloadError::Interrupted,
                io::ErrorKind::UnexpectedEof => {
                    unusable(slot.slot, "has a memory file that was made shorter")
                }
                _ => OffloadError::file(&self.draft.path(MEMORY))(error),
            })?;
        }
        let done = &self.settings.progress.done;
        done.store(slots.bytes(), Ordering::Relaxed);
        Ok(())
    }
}

fn unusable(slot: u32, why: &str) -> OffloadError {
    OffloadError::Unusable(format!("memory slot {slot} {why}: correct the VMM"))
}

/// Parts of the memory file that have arrived, each with its end; no two touch.
#[derive(Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Whether a part of the range has arrived.
    fn touches(&self, start: u64, end: u64) -> bool {
        let before = self.0.range(..end).next_back();
        before.is_some_and(|(_, before_end)| *before_end > start)
    }

    fn insert(&mut self, mut start: u64, mut end: u64) {
        while let Some((&at, &its_end)) = self.0.range(..=end).next_back() {
            if its_end < start {
                break;
            }
            (start, end) = (start.min(at), end.max(its_end));
            self.0.remove(&at);
        }
        self.0.insert(start, end);
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_counted_once() {
        let mut ranges = Ranges::default();
        assert!(!ranges.touches(0, 10));
        for (start, end, bytes) in [
            (10, 20, 10),
            (30, 40, 20),
            (15, 30, 30),
            (0, 5, 35),
            (0, 50, 50),
        ] {
            ranges.insert(start, end);
            assert_eq!(ranges.bytes(), bytes);
        }
        assert!(ranges.touches(49, 60) && !ranges.touches(50, 60));
    }
}
