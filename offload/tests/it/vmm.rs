//! A simulated Cloud Hypervisor: a guest, and both sides of the protocol.

use lacuna_offload::wire::{Command, FRAME_BYTES, MemoryRange, ROLE_FAULT, Request, Response};
use lacuna_offload::{OffloadError, Saved, Settings, save};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;

pub const PAGE: u64 = 4096;
pub type Page = [u8; PAGE as usize];

pub struct GuestSlot {
    pub number: u32,
    pub gpa: u64,
    pub pages: u64,
    pub fd_offset: u64,
    pub file: File,
}

/// A guest with two slots of one memory file, as one zone below and above 4 GiB.
pub struct Guest {
    pub slots: Vec<GuestSlot>,
    pub state: Vec<u8>,
}

/// The content of a page: every third one is zeros, never written or written.
pub fn content(gpa: u64) -> Page {
    match (gpa / PAGE) % 3 {
        0 => [0; PAGE as usize],
        _ => [(gpa / PAGE) as u8 | 1; PAGE as usize],
    }
}

pub fn memfd(bytes: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}

impl Guest {
    pub fn new() -> Self {
        let file = memfd(48 * PAGE);
        let slot = |number, gpa, pages, fd_offset| GuestSlot {
            number,
            gpa,
            pages,
            fd_offset,
            file: file.try_clone().unwrap(),
        };
        let slots = vec![slot(3, 4 << 30, 16, 32 * PAGE), slot(5, 0, 32, 0)];
        for slot in &slots {
            for gpa in slot.all().filter(|gpa| !(gpa / PAGE).is_multiple_of(6)) {
                let at = slot.fd_offset + (gpa - slot.gpa);
                slot.file.write_all_at(&content(gpa), at).unwrap();
            }
        }
        let state = (0..300_000u32).map(|n| (n % 251) as u8).collect();
        Self { slots, state }
    }

    pub fn config(&self) -> Vec<u8> {
        let slots: Vec<_> = self.slots.iter().map(GuestSlot::json).collect();
        config(&slots.join(","))
    }

    /// Every page of the guest.
    pub fn all(&self) -> impl Iterator<Item = u64> {
        self.slots.iter().flat_map(GuestSlot::all)
    }

    /// Sends the migration until the end, with the memory files.
    pub fn send_by_descriptors(&self, to: &mut Peer) {
        to.ok(Command::Start, &[]);
        for slot in &self.slots {
            to.descriptors(slot.number, &[slot.file.as_fd()]);
            assert_eq!(to.response(), Some(true));
        }
        to.ok(Command::Config, &self.config());
        to.ok(Command::State, &self.state);
    }
}

impl GuestSlot {
    pub fn all(&self) -> impl Iterator<Item = u64> + use<> {
        let gpa = self.gpa;
        (0..self.pages).map(move |page| gpa + page * PAGE)
    }

    fn json(&self) -> String {
        let Self {
            number,
            gpa,
            pages,
            fd_offset,
            ..
        } = self;
        let size = pages * PAGE;
        format!(
            r#"{{"slot": {number}, "gpa": {gpa}, "size": {size}, "zone_id": "mem0",
            "virtio_mem": false, "file_offset": {fd_offset}}}"#
        )
    }
}

pub fn config(slots: &str) -> Vec<u8> {
    format!(
        r#"{{"vm_config": {{"memory": {{"shared": true}}}}, "common_cpuid": [],
        "memory_manager_data": {{"guest_ram_mappings": [{slots}], "next_memory_slot": 9}}}}"#
    )
    .into_bytes()
}

/// A table of whole ranges, and their content.
pub fn memory(ranges: &[(u64, u64)], content: impl Fn(u64) -> Page) -> Vec<u8> {
    let table = ranges.iter().flat_map(|(gpa, length)| {
        let (gpa, length) = (*gpa, *length);
        MemoryRange { gpa, length }.bytes()
    });
    let pages = ranges.iter().flat_map(|(gpa, length)| {
        let pages = (0..length / PAGE).map(|page| content(gpa + page * PAGE));
        pages.collect::<Vec<_>>().into_flattened()
    });
    table.chain(pages).collect()
}

/// A connection to a daemon.
pub struct Peer(pub UnixStream);

impl Peer {
    /// Sends a request, whose length is its payload's, or its table's for Memory.
    pub fn send(&mut self, command: Command, length: u64, payload: &[u8]) {
        self.raw(&Request { command, length }.bytes());
        self.raw(payload);
    }

    /// Sends bytes. The daemon may have refused the connection already.
    pub fn raw(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    pub fn ok(&mut self, command: Command, payload: &[u8]) {
        self.send(command, payload.len() as u64, payload);
        assert_eq!(self.response(), Some(true), "{command}");
    }

    pub fn descriptors(&mut self, slot: u32, files: &[BorrowedFd<'_>]) {
        self.send(Command::MemoryFd, 4, &[]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(rights.push(SendAncillaryMessage::ScmRights(files)));
        }
        let bytes = slot.to_le_bytes();
        let flags = SendFlags::NOSIGNAL;
        assert_eq!(
            sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut rights, flags),
            Ok(4)
        );
    }

    /// Whether a response says yes; `None` at the end of the connection.
    pub fn response(&mut self) -> Option<bool> {
        self.whole_response().map(|response| response.is_ok)
    }

    pub fn whole_response(&mut self) -> Option<Response> {
        let mut frame = [0; FRAME_BYTES];
        self.0.read_exact(&mut frame).ok()?;
        Some(Response::parse(&frame).unwrap())
    }

    /// Asks for a range: whether it is given, and the content of the response.
    pub fn fault(&mut self, gpa: u64, length: u64) -> (bool, Vec<u8>) {
        self.send(Command::PageFault, 16, &MemoryRange { gpa, length }.bytes());
        let response = self.whole_response().expect("a response");
        let mut content = vec![0; response.length as usize];
        self.0.read_exact(&mut content).unwrap();
        (response.is_ok, content)
    }

    fn request(&mut self) -> Request {
        let mut frame = [0; FRAME_BYTES];
        self.0.read_exact(&mut frame).unwrap();
        Request::parse(&frame).unwrap()
    }

    fn receive_descriptor(&self) -> (u32, File) {
        let mut bytes = [0; 4];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(&self.0, &mut into, &mut rights, RecvFlags::CMSG_CLOEXEC);
        assert_eq!(received.unwrap().bytes, 4);
        let fd = rights.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        (u32::from_le_bytes(bytes), fd.expect("a descriptor").into())
    }

    pub fn answer(&mut self, is_ok: bool) {
        let length = 0;
        self.raw(&Response { is_ok, length }.bytes());
    }
}

/// A snapshot daemon.
pub struct SaveDaemon {
    pub folder: TempDir,
    pub thread: JoinHandle<Result<Saved, OffloadError>>,
}

impl SaveDaemon {
    pub fn start(settings: Settings) -> (Self, Peer) {
        let folder = TempDir::new().unwrap();
        let (socket, to) = (folder.path().join("socket"), folder.path().join("saved"));
        let listener = UnixListener::bind(&socket).unwrap();
        let thread = std::thread::spawn(move || save(&listener, &to, &settings));
        let peer = Peer(UnixStream::connect(socket).unwrap());
        (Self { folder, thread }, peer)
    }

    /// The error of a failed save, which has left nothing but the socket.
    pub fn fails(self) -> String {
        let error = self.thread.join().unwrap().unwrap_err();
        let left = self.folder.path().read_dir().unwrap();
        let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["socket"], "{error}");
        error.to_string()
    }
}

/// Saves a guest by its memory files.
pub fn saved(guest: &Guest, end: Command) -> (TempDir, Saved) {
    let (daemon, mut peer) = SaveDaemon::start(Settings::default());
    guest.send_by_descriptors(&mut peer);
    peer.ok(end, &[]);
    let saved = daemon.thread.join().unwrap().unwrap();
    (daemon.folder, saved)
}

/// What a VMM has received.
pub struct Received {
    pub main: Peer,
    pub files: BTreeMap<u32, File>,
    pub config: Vec<u8>,
    pub state: Vec<u8>,
    pub faults: Option<Peer>,
    pub end: Command,
}

impl Received {
    /// Receives a migration at `listener` until its end, which it does not answer. `is_on_demand`:
    /// with a connection for faults.
    pub fn receive(listener: &UnixListener, is_on_demand: bool) -> Self {
        let accept = || Peer(listener.accept().unwrap().0);
        let mut received = Self {
            main: accept(),
            files: BTreeMap::new(),
            config: Vec::new(),
            state: Vec::new(),
            faults: None,
            end: Command::Abandon,
        };
        loop {
            let Request { command, length } = received.main.request();
            match command {
                Command::MemoryFd => {
                    let (slot, file) = received.main.receive_descriptor();
                    received.files.insert(slot, file);
                }
                _ => {
                    let mut payload = vec![0; length as usize];
                    received.main.0.read_exact(&mut payload).unwrap();
                    match command {
                        Command::Config => received.config = payload,
                        Command::State => received.state = payload,
                        _ => received.end = command,
                    }
                }
            }
            if command == Command::State && is_on_demand {
                let mut faults = accept();
                let mut role = [0; 2];
                faults.0.read_exact(&mut role).unwrap();
                assert_eq!(u16::from_le_bytes(role), ROLE_FAULT);
                received.faults = Some(faults);
            }
            if matches!(command, Command::Complete | Command::CompletePaused) {
                return received;
            }
            received.main.answer(true);
        }
    }

    /// The page of the guest in the received memory files; `None` for a hole.
    pub fn page(&self, guest: &Guest, gpa: u64) -> Option<Page> {
        let holds = |slot: &&GuestSlot| slot.all().any(|page| page == gpa);
        let slot = guest.slots.iter().find(holds).unwrap();
        let (file, at) = (&self.files[&slot.number], slot.fd_offset + (gpa - slot.gpa));
        let mut page = [0; PAGE as usize];
        file.read_exact_at(&mut page, at).unwrap();
        let is_hole = lacuna_source::Holes::default().is_hole(file, at);
        (!is_hole).then_some(page)
    }
}

/// Ends the test as skipped on a host whose memory files may get huge pages.
pub fn skip_with_huge_pages() {
    let file = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let text = std::fs::read_to_string(file).unwrap_or_default();
    if ["[always]", "[within_size]", "[force]"]
        .iter()
        .any(|on| text.contains(on))
    {
        lacuna_skip::skip_test("shared memory gets huge pages");
    }
}

pub fn impatient() -> Settings {
    Settings {
        patience: Duration::from_millis(100),
        ..Settings::default()
    }
}
