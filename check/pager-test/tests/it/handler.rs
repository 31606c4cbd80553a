//! A small handler, and its mistakes. One thread serves all VMs, and reads one event at a time.

use lacuna_addr::{Hva, PAGE_SIZE};
use lacuna_sys::{Errno, Partial, Userfaultfd, Waiters};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::Deserialize;
use std::collections::HashSet;
use std::io::IoSliceMut;
use std::mem::{MaybeUninit, take};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// One mistake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    // Content.
    TakesTheFirstRegion,
    IgnoresTheOffset,
    AnswersOnePageWrongly,
    ReadsAheadAndEndsAtAPresentPage,
    AnswersTheFirstEventOfABatch,
    AnswersAWriteWithZeros,
    // Waiting threads.
    WakesNoThreadAtEexist,
    EndsAtTheSecondFaultOfAPage,
    // Removals.
    IgnoresRemovals,
    RemovesAPageOnce,
    RemovesFilledPagesAlone,
    RemovesTheEndToo,
    RemovesTheFirstPageAlone,
    RemovesWholeBlocks,
    ForgetsARemovedRegion,
    RemovesWithinOneRegion,
    StopsWhenAllIsFilled,
    ReadsNothingAtEagain,
    TriesAgainAfterAnEvent,
    TriesThreeTimes,
    ChoosesContentBeforeEagain,
    // Huge pages.
    FillsSmallPages,
    ZeropageOfAHugePage,
    EndsWithoutMemory,
    IgnoresAPageAfterEexist,
    // Messages.
    NeedsPageSizeKib,
    NeedsPageSize,
    ReadsOnce,
    KeepsGarbage,
    KeepsAMessageWithoutDescriptor,
    KeepsAWrongDescriptor,
    BelievesTheLength,
    BelievesInDisjointRegions,
    BelievesInAlignment,
    SumsWrap,
    BelievesThePageSize,
    // Several VMs.
    DiesOfAnEmptyConnection,
    DiesOfHalfAMessage,
    DiesOfASecondMessage,
    ServesOneVmAtATime,
    WaitsForEachMessage,
    SharesRemovals,
    DiesOfADeadVm,
}

/// The pages of the memory file.
pub type Memory = Arc<Vec<[u8; PAGE_SIZE]>>;

/// A handler on a thread of its own. Dropping it ends it.
pub struct Handler {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Handler {
    /// Starts a handler that listens at `socket`, for VMs with the content `memory`.
    pub fn start(socket: &Path, memory: &Memory, fault: Fault) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let mut server = Server {
            listener,
            stopped,
            clients: Vec::new(),
            memory: Arc::clone(memory),
            fault,
        };
        let thread = thread::spawn(move || while server.turn().is_ok() {});
        Self {
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap();
    }
}

/// What ends.
#[derive(Debug)]
enum End {
    /// A VM's service: the connection is closed.
    Vm,
    /// The handler.
    Handler,
}

struct Server {
    listener: UnixListener,
    stopped: UnixStream,
    clients: Vec<Client>,
    memory: Memory,
    fault: Fault,
}

impl Server {
    /// Waits for an event, and answers it.
    fn turn(&mut self) -> Result<(), End> {
        self.wait()?;
        if let Ok((socket, _)) = self.listener.accept() {
            let is_blocking = self.fault == Fault::WaitsForEachMessage;
            socket.set_nonblocking(!is_blocking).unwrap();
            self.clients.push(Client {
                socket,
                text: Vec::new(),
                fd: None,
                vm: None,
            });
        }
        let mut kept: Vec<Client> = Vec::new();
        for mut client in take(&mut self.clients) {
            if self.fault == Fault::ServesOneVmAtATime && !kept.is_empty() {
                kept.push(client);
                continue;
            }
            match self.serve(&mut client) {
                Ok(()) => kept.push(client),
                Err(End::Vm) => {}
                Err(End::Handler) => return Err(End::Handler),
            }
        }
        self.clients = kept;
        if self.fault == Fault::SharesRemovals {
            self.share_removals();
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), End> {
        let mut fds = vec![
            PollFd::new(&self.stopped, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        for client in &self.clients {
            fds.push(PollFd::new(&client.socket, PollFlags::IN));
            if let Some(vm) = &client.vm {
                fds.push(PollFd::from_borrowed_fd(vm.uffd.as_fd(), PollFlags::IN));
            }
        }
        let waits = |client: &Client| client.vm.iter().any(|vm| !vm.waiting.is_empty());
        let is_idle = self.fault == Fault::TriesAgainAfterAnEvent;
        let soon = Timespec {
            tv_sec: 0,
            tv_nsec: 20_000,
        };
        let limit = (!is_idle && self.clients.iter().any(waits)).then_some(&soon);
        poll(&mut fds, limit).unwrap();
        match fds[0].revents().is_empty() {
            true => Ok(()),
            false => Err(End::Handler),
        }
    }

    fn serve(&self, client: &mut Client) -> Result<(), End> {
        // This mistake blocks here until the message has arrived.
        let is_waiting = self.fault != Fault::WaitsForEachMessage || client.vm.is_none();
        if is_waiting && client.receive(self.fault)? && client.vm.is_none() {
            client.vm = client.parse(&self.memory, self.fault)?;
        }
        match &mut client.vm {
            Some(vm) => vm.turn(&self.memory, self.fault),
            None => Ok(()),
        }
    }

    /// The mistake: pages are removed by their number in the file, for all VMs.
    fn share_removals(&mut self) {
        let vms = || self.clients.iter().filter_map(|client| client.vm.as_ref());
        let pages = |vm: &Vm| {
            let base = vm.regions[0].base_host_virt_addr;
            let offsets = vm.removed.iter().map(|page| page.wrapping_sub(base));
            offsets.collect::<Vec<_>>()
        };
        let all: HashSet<u64> = vms().flat_map(pages).collect();
        for vm in self
            .clients
            .iter_mut()
            .filter_map(|client| client.vm.as_mut())
        {
            let base = vm.regions[0].base_host_virt_addr;
            vm.removed = all
                .iter()
                .map(|offset| base.wrapping_add(*offset))
                .collect();
        }
    }
}

/// A connection; with a whole message also a VM.
struct Client {
    socket: UnixStream,
    text: Vec<u8>,
    fd: Option<OwnedFd>,
    vm: Option<Vm>,
}

impl Client {
    /// Reads what has arrived; true if that is something.
    fn receive(&mut self, fault: Fault) -> Result<bool, End> {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let mut body = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(
            &self.socket,
            &mut body,
            &mut rights,
            RecvFlags::CMSG_CLOEXEC,
        );
        let count = match received {
            Ok(received) => received.bytes,
            Err(Errno::AGAIN) => return Ok(false),
            Err(_) => return Err(End::Vm),
        };
        if count == 0 {
            let is_empty = self.text.is_empty();
            return Err(match fault {
                Fault::DiesOfAnEmptyConnection if is_empty => End::Handler,
                Fault::DiesOfHalfAMessage if !is_empty && self.vm.is_none() => End::Handler,
                _ => End::Vm,
            });
        }
        if self.vm.is_some() && fault == Fault::DiesOfASecondMessage {
            return Err(End::Handler);
        }
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fd = self.fd.take().or(fds.last());
            }
        }
        self.text.extend(&bytes[..count]);
        Ok(true)
    }

    /// The VM of a whole message; `None` if the rest has not arrived.
    fn parse(&mut self, memory: &Memory, fault: Fault) -> Result<Option<Vm>, End> {
        let mut regions: Vec<Region> = match serde_json::from_slice(&self.text) {
            Ok(regions) => regions,
            Err(error) if error.is_eof() && fault != Fault::ReadsOnce => return Ok(None),
            Err(_) if fault == Fault::KeepsGarbage => return Ok(None),
            Err(_) => return Err(End::Vm),
        };
        for region in &mut regions {
            region.settle(fault)?;
        }
        check(&regions, memory.len() as u64 * SMALL, fault)?;
        let Some(fd) = self.fd.take() else {
            return match fault {
                Fault::KeepsAMessageWithoutDescriptor => Ok(None),
                _ => Err(End::Vm),
            };
        };
        let uffd = match Userfaultfd::try_from(fd) {
            Ok(uffd) => uffd,
            Err(_) if fault == Fault::KeepsAWrongDescriptor => return Ok(None),
            Err(_) => return Err(End::Vm),
        };
        Ok(Some(Vm {
            uffd,
            regions,
            removed: HashSet::new(),
            once: HashSet::new(),
            filled: HashSet::new(),
            present: HashSet::new(),
            waiting: Vec::new(),
        }))
    }
}

const SMALL: u64 = PAGE_SIZE as u64;
const HUGE: u64 = 512 * SMALL;

#[derive(Clone, Copy, Deserialize)]
struct Region {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    page_size_kib: Option<u64>,
    #[serde(skip)]
    page: u64,
}

impl Region {
    /// Settles the page size.
    fn settle(&mut self, fault: Fault) -> Result<(), End> {
        let size = match fault {
            Fault::NeedsPageSizeKib => self.page_size_kib,
            Fault::NeedsPageSize => self.page_size,
            _ => self.page_size.or(self.page_size_kib),
        };
        self.page = size.ok_or(End::Vm)?;
        let is_right = [SMALL, HUGE].contains(&self.page);
        match is_right || fault == Fault::BelievesThePageSize {
            true => Ok(()),
            false => Err(End::Vm),
        }
    }

    fn has(&self, address: u64) -> bool {
        address.wrapping_sub(self.base_host_virt_addr) < self.size
    }
}

/// Checks a list against the length of the file.
fn check(regions: &[Region], file: u64, fault: Fault) -> Result<(), End> {
    let refuse = |is_wrong, mistake| match is_wrong && fault != mistake {
        true => Err(End::Vm),
        false => Ok(()),
    };
    let sum = |a: u64, b: u64| match fault {
        Fault::SumsWrap => Ok(a.wrapping_add(b)),
        _ => a.checked_add(b).ok_or(End::Vm),
    };
    for region in regions {
        let Region { size, offset, .. } = *region;
        let base = region.base_host_virt_addr;
        // `settle` judges the page size.
        let page = if region.page == HUGE { HUGE } else { SMALL };
        let is_unaligned = [base, size, offset].iter().any(|value| value % page != 0);
        refuse(is_unaligned, Fault::BelievesInAlignment)?;
        sum(base, size)?;
        refuse(sum(offset, size)? > file, Fault::BelievesTheLength)?;
        let others = regions
            .iter()
            .filter(|other| other.base_host_virt_addr != base);
        let overlaps = others
            .clone()
            .any(|other| region.has(other.base_host_virt_addr));
        refuse(overlaps, Fault::BelievesInDisjointRegions)?;
    }
    Ok(())
}

/// A message of the descriptor.
enum Message {
    Fault { page: u64, is_write: bool },
    Removed { start: u64, end: u64 },
}

struct Vm {
    uffd: Userfaultfd,
    regions: Vec<Region>,
    /// Addresses of removed pages.
    removed: HashSet<u64>,
    /// Addresses of pages that were removed once and filled again.
    once: HashSet<u64>,
    filled: HashSet<u64>,
    /// Addresses of pages whose fill failed with EEXIST.
    present: HashSet<u64>,
    /// Faults without an answer.
    waiting: Vec<Waiting>,
}

#[derive(Clone, Copy)]
struct Waiting {
    page: u64,
    is_write: bool,
    tries: u32,
    /// It was not removed when the fault was read.
    was_there: bool,
}

impl Vm {
    fn turn(&mut self, memory: &Memory, fault: Fault) -> Result<(), End> {
        if fault == Fault::StopsWhenAllIsFilled && self.filled.len() == memory.len() {
            return Ok(());
        }
        if fault == Fault::TriesAgainAfterAnEvent {
            self.answer_all(memory, fault)?;
        }
        let limit = match fault {
            Fault::AnswersTheFirstEventOfABatch | Fault::EndsAtTheSecondFaultOfAPage => 64,
            Fault::DiesOfADeadVm => 16,
            _ => 1,
        };
        let (mut batch, before) = (Vec::new(), self.waiting.len());
        while batch.len() < limit
            && let Some(message) = self.read()
        {
            batch.push(message);
        }
        if fault == Fault::DiesOfADeadVm && batch.len() > 1 {
            // A slow source of pages: the VM may die meanwhile.
            thread::sleep(Duration::from_millis(4));
        }
        for message in batch {
            self.note(&message, fault)?;
        }
        if fault == Fault::AnswersTheFirstEventOfABatch {
            self.waiting.truncate(before + 1);
        }
        if fault != Fault::TriesAgainAfterAnEvent || self.waiting.len() > before {
            self.answer_all(memory, fault)?;
        }
        Ok(())
    }

    fn read(&self) -> Option<Message> {
        let mut bytes = [0; 32];
        let read = rustix::io::read(&self.uffd, &mut bytes).unwrap_or(0);
        let (words, _) = bytes.as_chunks::<8>();
        let word = |index: usize| u64::from_ne_bytes(words[index]);
        match bytes[0] {
            0x12 if read > 0 => Some(Message::Fault {
                page: word(2) & !(SMALL - 1),
                is_write: word(1) & 1 != 0,
            }),
            0x15 if read > 0 => Some(Message::Removed {
                start: word(1),
                end: word(2),
            }),
            _ => None,
        }
    }

    fn note(&mut self, message: &Message, fault: Fault) -> Result<(), End> {
        match *message {
            Message::Removed { start, end } => self.remove(start, end, fault),
            Message::Fault { page, is_write } => {
                let is_double = self.waiting.iter().any(|waiting| waiting.page == page);
                if is_double && fault == Fault::EndsAtTheSecondFaultOfAPage {
                    return Err(End::Vm);
                }
                if self.present.contains(&page) && fault == Fault::IgnoresAPageAfterEexist {
                    return Ok(());
                }
                self.waiting.push(Waiting {
                    page,
                    is_write,
                    tries: 0,
                    was_there: !self.removed.contains(&page),
                });
            }
        }
        Ok(())
    }

    fn remove(&mut self, start: u64, end: u64, fault: Fault) {
        let whole =
            |region: &Region| region.base_host_virt_addr == start && region.size == end - start;
        if fault == Fault::ForgetsARemovedRegion {
            self.regions.retain(|region| !whole(region));
        }
        let (start, end) = match fault {
            Fault::IgnoresRemovals => return,
            Fault::RemovesTheEndToo => (start, end + SMALL),
            Fault::RemovesTheFirstPageAlone => (start, start + SMALL),
            Fault::RemovesWholeBlocks => (start / HUGE * HUGE, end.next_multiple_of(HUGE)),
            Fault::RemovesWithinOneRegion => {
                let region = self.regions.iter().find(|region| region.has(start));
                let last = region.map_or(end, |region| region.base_host_virt_addr + region.size);
                (start, end.min(last))
            }
            _ => (start, end),
        };
        let pages = (start..end).step_by(PAGE_SIZE);
        let pages = pages.filter(|page| match fault {
            Fault::RemovesAPageOnce => !self.once.contains(page),
            Fault::RemovesFilledPagesAlone => self.filled.contains(page),
            _ => true,
        });
        self.removed.extend(pages);
    }

    fn answer_all(&mut self, memory: &Memory, fault: Fault) -> Result<(), End> {
        for waiting in take(&mut self.waiting) {
            self.answer(waiting, memory, fault)?;
        }
        Ok(())
    }

    fn answer(&mut self, waiting: Waiting, memory: &Memory, fault: Fault) -> Result<(), End> {
        let mut regions = self.regions.iter();
        let region = match fault {
            Fault::TakesTheFirstRegion => self.regions[0],
            _ => *regions
                .find(|region| region.has(waiting.page))
                .ok_or(End::Vm)?,
        };
        let size = if fault == Fault::FillsSmallPages {
            SMALL
        } else {
            region.page
        };
        let page = waiting.page / size * size;
        let offset = if fault == Fault::IgnoresTheOffset {
            0
        } else {
            region.offset
        };
        let first = (offset.wrapping_add(page.wrapping_sub(region.base_host_virt_addr))) / SMALL;
        let is_removed = self.removed.contains(&page);
        if is_removed && size > SMALL && fault == Fault::ZeropageOfAHugePage {
            return Err(End::Vm);
        }
        let gets_zeros = match fault {
            Fault::ChoosesContentBeforeEagain => !waiting.was_there,
            Fault::AnswersAWriteWithZeros => is_removed || waiting.is_write,
            _ => is_removed,
        };
        let first = match fault {
            Fault::AnswersOnePageWrongly if first == 777 => 778,
            _ => first as usize,
        };
        let count = match fault {
            Fault::ReadsAheadAndEndsAtAPresentPage if !is_removed => 8,
            _ => (size / SMALL) as usize,
        };
        let zeros = vec![[0; PAGE_SIZE]; count];
        let content = match gets_zeros {
            true => &zeros[..],
            false => memory
                .get(first..(first + count).min(memory.len()))
                .ok_or(End::Vm)?,
        };
        let placed = self.uffd.place(content, Hva::new(page), Waiters::Wake);
        self.judge(placed, waiting, page, fault)
    }

    fn judge(
        &mut self,
        placed: Result<(), Partial>,
        waiting: Waiting,
        page: u64,
        fault: Fault,
    ) -> Result<(), End> {
        let again = Waiting {
            tries: waiting.tries + 1,
            ..waiting
        };
        match placed.map_err(|partial| partial.errno) {
            Ok(()) => {
                self.filled.insert(page);
                if fault == Fault::RemovesAPageOnce && self.removed.remove(&page) {
                    self.once.insert(page);
                }
                Ok(())
            }
            Err(Errno::EXIST) => match fault {
                Fault::WakesNoThreadAtEexist => Ok(()),
                Fault::ReadsAheadAndEndsAtAPresentPage => Err(End::Vm),
                _ => {
                    self.present.insert(page);
                    self.uffd.wake(Hva::new(page)).map_err(|_| End::Vm)
                }
            },
            Err(Errno::AGAIN) => match fault {
                // It reads nothing until it succeeds, so it never does.
                Fault::ReadsNothingAtEagain => Err(End::Vm),
                Fault::TriesThreeTimes if again.tries == 3 => Ok(()),
                _ => {
                    self.waiting.push(again);
                    Ok(())
                }
            },
            Err(Errno::NOMEM) if fault != Fault::EndsWithoutMemory => {
                self.waiting.push(again);
                Ok(())
            }
            Err(_) if fault == Fault::DiesOfADeadVm => Err(End::Handler),
            Err(_) => Err(End::Vm),
        }
    }
}
