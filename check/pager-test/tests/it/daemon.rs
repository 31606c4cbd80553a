//! Small daemons that save and restore a VM, and their mistakes. Each is a process.

use lacuna_skip::test;
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::exit;
use std::time::Duration;
use std::{env, fs, thread};
use tempfile::TempDir;

/// The environment's variable with a daemon's job: which one, its mistake, its folder, its socket.
const JOB: &str = "LACUNA_PAGER_TEST_DAEMON";
const PAGE: u64 = 4096;

/// One mistake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    None,
    /// No mistake: as Cloud Hypervisor's daemon does.
    ServesOneVm,
    // A daemon that saves.
    AnswersWithALength,
    KnowsNoComplete,
    NeedsSlotsInOrder,
    ReadsOnce,
    ReadsTheVersionFromAllBytes,
    IgnoresTheOffset,
    AnswersBeforeItReads,
    KeepsTheFirstVm,
    IgnoresTheVersion,
    AcknowledgesUnknownCommands,
    KeepsNoOrder,
    AcceptsNoDescriptor,
    TakesTheFirstDescriptor,
    BelievesInFiles,
    TakesTheFirstOfASlot,
    AcceptsMissingSlots,
    IgnoresUnknownSlots,
    FillsShortMemoryWithZeros,
    AllocatesAnyLength,
    IgnoresTheLengthOfMemoryFd,
    TakesAnyConfig,
    DiesOfHalfARequest,
    DiesOfADeadVmm,
    IgnoresAbandon,
    // One that restores.
    SendsStateBeforeConfig,
    SendsASlotTwice,
    SendsVersion1,
    SendsTwoDescriptors,
    SendsTheDescriptorWithTheHeader,
    SendsWithoutWaiting,
    ReadsAnAnswerOnce,
    FillsAfterState,
    RestoresWithoutOffset,
    ChangesTheConfig,
    CutsTheState,
    SendsTheSnapshotFile,
    SendsReadOnlyMemory,
    NeverEnds,
    IgnoresTheStatus,
    KnowsStatus2Alone,
    EndsWellWithoutTheVmm,
    // One that restores on demand.
    ConnectsAfterState,
    AnnouncesRole1,
    ServesAfterComplete,
    AnswersInline,
    SkipsAPage,
    RefusesTheLastPage,
    ReadsOneOfABatch,
    FillsOnePage,
    ReadsARequestOnce,
    FillsAgain,
    FillsAllAtTheEnd,
    AcknowledgesAnyRange,
    DiesOfARange,
    TakesAnyRequest,
}

/// A folder in memory: a daemon replaces its files for each VM, and a disk would sync them.
pub fn folder() -> TempDir {
    TempDir::new_in("/dev/shm")
        .or_else(|_| TempDir::new())
        .unwrap()
}

/// The shell command of a daemon: `save`, `restore` or `demand`.
pub fn command(kind: &str, mistake: Mistake, folder: &Path) -> String {
    let number = mistake as u32;
    let program = env::current_exe().unwrap();
    format!(
        "{JOB}='{kind} {number} {} {{socket}}' exec {} --exact daemon::daemon_process --nocapture \
         > /dev/null 2>&1",
        folder.display(),
        program.display()
    )
}

/// The process of a daemon; without its variable this is no test.
#[test]
fn daemon_process() {
    let Ok(job) = env::var(JOB) else { return };
    let words: Vec<&str> = job.split(' ').collect();
    let [kind, number, folder, socket] = words[..] else {
        panic!("{job}")
    };
    let daemon = Daemon {
        mistake: number.parse().unwrap(),
        folder: folder.into(),
        socket: socket.into(),
    };
    let done = match kind {
        "save" => daemon.save_all(),
        _ => daemon.restore(kind == "demand"),
    };
    exit(i32::from(done.is_err()));
}

struct Daemon {
    mistake: u32,
    folder: PathBuf,
    socket: PathBuf,
}

struct Request {
    kind: u16,
    middle: [u8; 6],
    payload: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// (slot, gpa, size, file_offset)
type Mapping = (u32, u64, u64, u64);

fn wait(serving: Option<thread::JoinHandle<io::Result<()>>>) -> io::Result<()> {
    match serving {
        Some(serving) => serving.join().unwrap(),
        None => Ok(()),
    }
}

fn wrong<T>(what: &str) -> io::Result<T> {
    Err(io::Error::other(what))
}

fn mappings(config: &[u8]) -> io::Result<Vec<Mapping>> {
    let config: serde_json::Value = serde_json::from_slice(config)?;
    let mappings = config["memory_manager_data"]["guest_ram_mappings"].as_array();
    let mappings = mappings.ok_or(io::Error::other("no mappings"))?;
    let read = |mapping: &serde_json::Value| {
        let number = |name: &str| mapping[name].as_u64().ok_or(io::Error::other("a number"));
        let slot = number("slot")? as u32;
        Ok((
            slot,
            number("gpa")?,
            number("size")?,
            number("file_offset")?,
        ))
    };
    mappings.iter().map(read).collect()
}

/// Copies `size` bytes from `begin` of `from` to `offset` of `to`, and leaves holes. Duplicates of
/// a file share its position: reads do not use it.
fn copy(from: &File, begin: u64, to: &File, offset: u64, size: u64) -> io::Result<()> {
    let mut at = begin;
    while let Ok(data) = seek(from, SeekFrom::Data(at)) {
        let end = seek(from, SeekFrom::Hole(data))?.min(begin + size);
        if data >= end {
            break;
        }
        let mut bytes = vec![0; (end - data) as usize];
        from.read_exact_at(&mut bytes, data)?;
        to.write_all_at(&bytes, offset + data - begin)?;
        at = end;
    }
    Ok(())
}

fn frame(kind: u16, middle: [u8; 6], length: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&kind.to_le_bytes());
    bytes[2..8].copy_from_slice(&middle);
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

fn read_with_fds(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let (mut read, mut fds) = (0, Vec::new());
    while read < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut text = [IoSliceMut::new(&mut bytes[read..])];
        let got = recvmsg(socket, &mut text, &mut control, RecvFlags::empty())?;
        if got.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        read += got.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
    }
    Ok(fds)
}

impl Daemon {
    fn has(&self, mistake: Mistake) -> bool {
        self.mistake == mistake as u32
    }

    fn file(&self, name: impl std::fmt::Display) -> PathBuf {
        self.folder.join(name.to_string())
    }

    // Save.

    fn save_all(&self) -> io::Result<()> {
        let listener = UnixListener::bind(&self.socket)?;
        loop {
            let (mut socket, _) = listener.accept()?;
            if self.save(&mut socket).is_err() {
                // The VMM may be dead.
                let _ = socket.write_all(&frame(2, [0; 6], 0));
            }
            if self.has(Mistake::ServesOneVm) {
                return Ok(());
            }
        }
    }

    /// Reads a request: none if the VMM has closed the connection before it.
    fn request(&self, socket: &mut UnixStream) -> io::Result<Option<Request>> {
        let mut bytes = [0; 16];
        let first = socket.read(&mut bytes)?;
        if first == 0 {
            return Ok(None);
        }
        if !self.has(Mistake::ReadsOnce) {
            socket.read_exact(&mut bytes[first..])?;
        }
        let kind = u16::from_le_bytes([bytes[0], bytes[1]]);
        let length = u64::from_le_bytes(bytes[8..].try_into().unwrap());
        let is_right = match kind {
            7 => length == 4 || self.has(Mistake::IgnoresTheLengthOfMemoryFd),
            2 | 3 => length <= 1 << 24 || self.has(Mistake::AllocatesAnyLength),
            _ => length == 0 || self.has(Mistake::AcknowledgesUnknownCommands),
        };
        if !is_right {
            return wrong("a length");
        }
        let mut payload = vec![0; length as usize];
        let fds = read_with_fds(socket, &mut payload)?;
        let middle = bytes[2..8].try_into().unwrap();
        Ok(Some(Request {
            kind,
            middle,
            payload,
            fds,
        }))
    }

    fn save(&self, socket: &mut UnixStream) -> io::Result<()> {
        let mut memory: Vec<(u32, Option<File>)> = Vec::new();
        let (mut config, mut state) = (None, None);
        let mut is_started = false;
        loop {
            let request = self.request(socket);
            if matches!(request, Ok(None)) && self.has(Mistake::DiesOfADeadVmm) {
                exit(1);
            }
            if let Err(error) = &request
                && error.kind() == io::ErrorKind::UnexpectedEof
                && self.has(Mistake::DiesOfHalfARequest)
            {
                exit(1);
            }
            let Some(request) = request? else {
                return wrong("a dead VMM");
            };
            let is_next = match request.kind {
                1 => !is_started,
                7 => is_started && config.is_none(),
                2 => is_started && config.is_none() && !memory.is_empty(),
                3 => config.is_some() && state.is_none(),
                5 | 8 => state.is_some(),
                _ => true,
            };
            if !is_next && !self.has(Mistake::KeepsNoOrder) {
                return wrong("the order");
            }
            match request.kind {
                1 => {
                    is_started = true;
                    self.check_version(request.middle)?;
                }
                7 => self.take_memory(request, &mut memory)?,
                2 => {
                    self.check_slots(&request.payload, &memory)?;
                    config = Some(request.payload);
                }
                3 => state = Some(request.payload),
                5 | 8 if request.kind == 8 || !self.has(Mistake::KnowsNoComplete) => {
                    if self.has(Mistake::AnswersBeforeItReads) {
                        socket.write_all(&frame(1, [0; 6], 0))?;
                        // Until the VMM closes the connection.
                        let _ = socket.read(&mut [0; 1]);
                    }
                    self.store(config.as_deref(), state.as_deref(), &memory)?;
                    return socket.write_all(&self.ok());
                }
                6 if self.has(Mistake::IgnoresAbandon) => continue,
                6 => return socket.write_all(&self.ok()),
                _ if self.has(Mistake::AcknowledgesUnknownCommands) => {}
                _ => return wrong("the command"),
            }
            socket.write_all(&self.ok())?;
        }
    }

    fn ok(&self) -> [u8; 16] {
        let length = if self.has(Mistake::AnswersWithALength) {
            4
        } else {
            0
        };
        frame(1, [0; 6], length)
    }

    fn check_version(&self, middle: [u8; 6]) -> io::Result<()> {
        let version = match self.has(Mistake::ReadsTheVersionFromAllBytes) {
            true => &middle[..],
            false => &middle[..2],
        };
        match version.iter().all(|byte| *byte == 0) || self.has(Mistake::IgnoresTheVersion) {
            true => Ok(()),
            false => wrong("the version"),
        }
    }

    fn take_memory(
        &self,
        mut request: Request,
        memory: &mut Vec<(u32, Option<File>)>,
    ) -> io::Result<()> {
        let slot = u32::from_le_bytes(request.payload[..4].try_into().unwrap());
        let fds = request.fds.len();
        if fds > 1 && !self.has(Mistake::TakesTheFirstDescriptor) {
            return wrong("two descriptors");
        }
        if fds == 0 && !self.has(Mistake::AcceptsNoDescriptor) {
            return wrong("no descriptor");
        }
        if self.has(Mistake::NeedsSlotsInOrder) && memory.iter().any(|(known, _)| *known > slot) {
            return wrong("the order of slots");
        }
        if memory.iter().any(|(known, _)| *known == slot) {
            return match self.has(Mistake::TakesTheFirstOfASlot) {
                true => Ok(()),
                false => wrong("a slot twice"),
            };
        }
        let file = request.fds.drain(..).next().map(File::from);
        if let Some(file) = &file
            && !file.metadata()?.is_file()
            && !self.has(Mistake::BelievesInFiles)
        {
            return wrong("no file");
        }
        memory.push((slot, file));
        Ok(())
    }

    fn check_slots(&self, config: &[u8], memory: &[(u32, Option<File>)]) -> io::Result<()> {
        let mappings = match mappings(config) {
            Err(_) if self.has(Mistake::TakesAnyConfig) => return Ok(()),
            mappings => mappings?,
        };
        let known: BTreeSet<u32> = memory.iter().map(|(slot, _)| *slot).collect();
        let wanted: BTreeSet<u32> = mappings.iter().map(|mapping| mapping.0).collect();
        if !wanted.is_subset(&known) && !self.has(Mistake::AcceptsMissingSlots) {
            return wrong("a slot is missing");
        }
        match known.is_subset(&wanted) || self.has(Mistake::IgnoresUnknownSlots) {
            true => Ok(()),
            false => wrong("an unknown slot"),
        }
    }

    fn store(
        &self,
        config: Option<&[u8]>,
        state: Option<&[u8]>,
        memory: &[(u32, Option<File>)],
    ) -> io::Result<()> {
        if self.has(Mistake::KeepsTheFirstVm) && self.file("config").exists() {
            return Ok(());
        }
        let mappings = config
            .and_then(|config| mappings(config).ok())
            .unwrap_or_default();
        for (slot, file) in memory {
            let found = mappings.iter().find(|mapping| mapping.0 == *slot);
            let (Some((_, _, size, offset)), Some(file)) = (found, file) else {
                continue;
            };
            let offset = if self.has(Mistake::IgnoresTheOffset) {
                0
            } else {
                *offset
            };
            let stored = File::create(self.file(slot))?;
            stored.set_len(*size)?;
            if self.has(Mistake::BelievesInFiles) && !file.metadata()?.is_file() {
                (&*file).read_exact(&mut [0])?;
            }
            if file.metadata()?.len() < offset + size
                && !self.has(Mistake::FillsShortMemoryWithZeros)
            {
                return wrong("short memory");
            }
            copy(file, offset, &stored, 0, *size)?;
        }
        fs::write(self.file("state"), state.unwrap_or_default())?;
        fs::write(self.file("config"), config.unwrap_or_default())
    }

    // Restore.

    fn restore(&self, is_on_demand: bool) -> io::Result<()> {
        let restored = self.try_restore(is_on_demand);
        if let Err(error) = &restored
            && error.kind() == io::ErrorKind::UnexpectedEof
            && self.has(Mistake::EndsWellWithoutTheVmm)
        {
            return Ok(());
        }
        if restored.is_ok() && self.has(Mistake::NeverEnds) {
            thread::sleep(Duration::MAX);
        }
        restored
    }

    fn try_restore(&self, is_on_demand: bool) -> io::Result<()> {
        let mut config = fs::read(self.file("config"))?;
        let mappings = mappings(&config)?;
        let mut state = fs::read(self.file("state"))?;
        if self.has(Mistake::ChangesTheConfig) {
            config = String::from_utf8(config)
                .unwrap()
                .replace("mem0", "mem1")
                .into();
        }
        if self.has(Mistake::CutsTheState) {
            state.pop();
        }
        let mut main = UnixStream::connect(&self.socket)?;
        let version = [u8::from(self.has(Mistake::SendsVersion1)), 0, 0, 0, 0, 0];
        self.send(&mut main, &frame(1, version, 0))?;
        let memory = self.send_memory(&mut main, &mappings, is_on_demand)?;
        let config = [&frame(2, [0; 6], config.len() as u64)[..], &config].concat();
        let state = [&frame(3, [0; 6], state.len() as u64)[..], &state].concat();
        let complete = frame(8, [0; 6], 0);
        let faults = || self.fault_connection();
        let mut serving = None;
        let start = |faults: UnixStream| thread::scope(|_| self.spawn(faults, &mappings, &memory));
        if self.has(Mistake::SendsStateBeforeConfig) {
            let connection = is_on_demand.then(faults).transpose()?;
            serving = connection.map(start).transpose()?;
            self.send(&mut main, &state)?;
            self.send(&mut main, &config)?;
        } else if self.has(Mistake::SendsWithoutWaiting) {
            main.write_all(&[config, state].concat())?;
            self.answer(&mut main)?;
            self.answer(&mut main)?;
        } else {
            self.send(&mut main, &config)?;
            let mut connection = None;
            if is_on_demand && !self.has(Mistake::ConnectsAfterState) {
                connection = Some(faults()?);
            }
            if !self.has(Mistake::ServesAfterComplete) {
                serving = connection.take().map(start).transpose()?;
            }
            self.send(&mut main, &state)?;
            if is_on_demand && self.has(Mistake::ConnectsAfterState) {
                connection = Some(faults()?);
            }
            if self.has(Mistake::FillsAfterState) {
                for ((_, _, _, offset), (slot, file)) in mappings.iter().zip(&memory) {
                    file.write_all_at(&fs::read(self.file(slot))?, *offset)?;
                }
            }
            self.send(&mut main, &complete)?;
            if let Some(connection) = connection {
                serving = Some(start(connection)?);
            }
            return wait(serving);
        }
        self.send(&mut main, &complete)?;
        wait(serving)
    }

    fn send(&self, main: &mut UnixStream, bytes: &[u8]) -> io::Result<()> {
        main.write_all(bytes)?;
        self.answer(main)
    }

    fn answer(&self, main: &mut UnixStream) -> io::Result<()> {
        let mut bytes = [0; 16];
        match self.has(Mistake::ReadsAnAnswerOnce) {
            true if main.read(&mut bytes)? < 16 => return wrong("half an answer"),
            true => {}
            false => main.read_exact(&mut bytes)?,
        }
        match u16::from_le_bytes([bytes[0], bytes[1]]) {
            1 => Ok(()),
            _ if self.has(Mistake::IgnoresTheStatus) => Ok(()),
            0 | 3 if self.has(Mistake::KnowsStatus2Alone) => Ok(()),
            _ => wrong("the VMM has refused the request"),
        }
    }

    fn send_memory(
        &self,
        main: &mut UnixStream,
        mappings: &[Mapping],
        is_on_demand: bool,
    ) -> io::Result<Vec<(u32, File)>> {
        let mut memory = Vec::new();
        for (slot, _, size, offset) in mappings {
            let offset = if self.has(Mistake::RestoresWithoutOffset) {
                0
            } else {
                *offset
            };
            let mut file = File::from(memfd_create("memory", MemfdFlags::empty())?);
            file.set_len(offset + size)?;
            if !is_on_demand && !self.has(Mistake::FillsAfterState) {
                copy(&File::open(self.file(slot))?, 0, &file, offset, *size)?;
            }
            if self.has(Mistake::SendsTheSnapshotFile) && offset == 0 {
                file = File::options()
                    .read(true)
                    .write(true)
                    .open(self.file(slot))?;
            }
            if self.has(Mistake::SendsReadOnlyMemory) {
                file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
            }
            self.send_slot(main, *slot, &file)?;
            if self.has(Mistake::SendsASlotTwice) && *slot == 0 {
                self.send_slot(main, *slot, &file)?;
            }
            memory.push((*slot, file));
        }
        Ok(memory)
    }

    fn send_slot(&self, main: &mut UnixStream, slot: u32, file: &File) -> io::Result<()> {
        let header = frame(7, [0; 6], 4);
        let whole = [&header[..], &slot.to_le_bytes()].concat();
        let mut text = &whole[16..];
        match self.has(Mistake::SendsTheDescriptorWithTheHeader) {
            true => text = &whole,
            false => main.write_all(&header)?,
        }
        let fds = [file.as_fd(), file.as_fd()];
        let count = if self.has(Mistake::SendsTwoDescriptors) {
            2
        } else {
            1
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds[..count]));
        sendmsg(
            &*main,
            &[IoSlice::new(text)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?;
        self.answer(main)
    }

    // Page faults.

    fn fault_connection(&self) -> io::Result<UnixStream> {
        let role = if self.has(Mistake::AnnouncesRole1) {
            1_u16
        } else {
            2
        };
        let mut faults = UnixStream::connect(&self.socket)?;
        faults.write_all(&role.to_le_bytes())?;
        Ok(faults)
    }

    fn spawn(
        &self,
        faults: UnixStream,
        mappings: &[Mapping],
        memory: &[(u32, File)],
    ) -> io::Result<thread::JoinHandle<io::Result<()>>> {
        let mut server = Server {
            daemon: Self {
                mistake: self.mistake,
                folder: self.folder.clone(),
                socket: self.socket.clone(),
            },
            faults,
            slots: Vec::new(),
            present: BTreeSet::new(),
        };
        for (mapping, (_, file)) in mappings.iter().zip(memory) {
            server.slots.push((*mapping, file.try_clone()?));
        }
        Ok(thread::spawn(move || server.serve()))
    }
}

/// Serves the requests for pages.
struct Server {
    daemon: Daemon,
    faults: UnixStream,
    slots: Vec<(Mapping, File)>,
    /// The pages that are in place.
    present: BTreeSet<u64>,
}

impl Server {
    fn serve(&mut self) -> io::Result<()> {
        while let Some((gpa, length)) = self.request()? {
            if !self.fill(gpa, length)? {
                self.faults.write_all(&frame(2, [0; 6], 0))?;
                return wrong("the range");
            }
            if self.daemon.has(Mistake::AnswersInline) {
                self.faults.write_all(&frame(1, [0; 6], length))?;
                self.faults.write_all(&vec![0; length as usize])?;
            } else {
                self.faults.write_all(&frame(1, [0; 6], 0))?;
            }
        }
        if self.daemon.has(Mistake::FillsAllAtTheEnd) {
            self.present.clear();
            for (gpa, size) in self
                .slots
                .iter()
                .map(|slot| (slot.0.1, slot.0.2))
                .collect::<Vec<_>>()
            {
                self.fill(gpa, size)?;
            }
        }
        Ok(())
    }

    /// The range of the next request; none if the VMM has closed the connection.
    fn request(&mut self) -> io::Result<Option<(u64, u64)>> {
        let mut bytes = [0; 4096];
        let mut read = 0;
        while read < 32 {
            let space = match self.daemon.has(Mistake::ReadsOneOfABatch) {
                true => &mut bytes[read..],
                false => &mut bytes[read..32],
            };
            let more = self.faults.read(space)?;
            if more == 0 && read == 0 {
                return Ok(None);
            }
            if more == 0 || self.daemon.has(Mistake::ReadsARequestOnce) && more < 32 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            read += more;
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        if (bytes[..2] != [9, 0] || word(8) != 16) && !self.daemon.has(Mistake::TakesAnyRequest) {
            self.faults.write_all(&frame(2, [0; 6], 0))?;
            return wrong("the request");
        }
        Ok(Some((word(16), word(24))))
    }

    /// Fills a range: false if it is not in one slot.
    fn fill(&mut self, gpa: u64, length: u64) -> io::Result<bool> {
        let is_in = |slot: &&(Mapping, File)| {
            let (_, begin, size, _) = slot.0;
            let limit = match self.daemon.has(Mistake::RefusesTheLastPage) {
                true => size - 1,
                false => size,
            };
            gpa >= begin && length <= limit && gpa - begin <= limit - length
        };
        let Some(((slot, begin, _, offset), file)) = self.slots.iter().find(is_in) else {
            if self.daemon.has(Mistake::DiesOfARange) {
                std::process::abort();
            }
            return Ok(self.daemon.has(Mistake::AcknowledgesAnyRange));
        };
        let source = File::open(self.daemon.file(slot))?;
        let end = match self.daemon.has(Mistake::FillsOnePage) {
            true => gpa + PAGE,
            false => gpa + length,
        };
        for at in (gpa..end).step_by(PAGE as usize) {
            if !self.present.insert(at) && !self.daemon.has(Mistake::FillsAgain) {
                continue;
            }
            if self.daemon.has(Mistake::SkipsAPage) && at - begin == 5 * PAGE {
                continue;
            }
            let mut page = [0; PAGE as usize];
            source.read_exact_at(&mut page, at - begin)?;
            file.write_all_at(&page, offset + at - begin)?;
        }
        Ok(true)
    }
}
